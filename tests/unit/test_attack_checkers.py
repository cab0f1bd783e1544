"""The judges of the attacks on files and disks find faults that are planted."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from attacks import disks, scenario_files
from attacks.harness import Ended, Target
from attacks.scenario_files import SECRET, Used

FINE = Used(2, "", "paceline: refused; do that\n", 40 << 20, 0.5)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"code": 0, "out": "done\n", "err": ""}, None),
        ({"memory": 239 << 20, "seconds": 2.4}, None),
        ({"code": 4}, "exit code 4"),
        ({"code": -9}, "exit code -9"),
        ({"err": "paceline: one\npaceline: two\n"}, "2 lines"),
        ({"err": "Traceback (most recent call last):"}, "a traceback"),
        ({"err": f"paceline: has no column x, only {SECRET}\n"}, "a secret"),
        ({"err": "paceline: \x1b[31m\n"}, "control characters"),
        ({"code": 0, "out": "x" * 30_000}, "characters are shown"),
        ({"memory": 241 << 20}, "MB more"),
        ({"seconds": 2.6}, "s more"),
    ],
)
def test_a_hostile_file_that_had_its_way_is_found(change: dict[str, object], fault: str | None) -> None:
    found = list(scenario_files.faults_of(FINE._replace(**change), FINE))  # type: ignore[arg-type]
    assert (fault in found[0]) if fault else not found


def test_what_a_hostile_file_wrote_is_found(tmp_path: Path) -> None:
    place = scenario_files._work(Target(tmp_path, tmp_path), lambda folder: scenario_files.HARMLESS)
    before = scenario_files._seen(place)
    (place / "runs").mkdir()
    (place / "runs" / "journal.jsonl").touch()
    assert scenario_files._seen(place) == before, "a run's own folder is no harm"
    (place / "precious.py").write_text("")
    (tmp_path / "elsewhere").touch()
    after = scenario_files._seen(place)
    assert {Path(path).name for path in {*before, *after} if before.get(path, 0) != after.get(path, 0)} == {
        "precious.py", "elsewhere",
    }  # fmt: skip


def test_there_are_fifty_hostile_files_and_more() -> None:
    assert len(scenario_files.FILES) >= 50


def ended(code: int = 2, out: str = "", err: str = "paceline: no room\n") -> Ended:
    return Ended(code, out, err, 1.0)


def test_a_run_that_ends_badly_on_a_full_disk_is_found() -> None:
    assert disks.faults_of(ended(), codes=(0, 2)) == []
    assert "a traceback" in disks.faults_of(ended(err="Traceback (most recent call last):\n x"), codes=(0, 2))[0]
    assert "a traceback" in disks.faults_of(ended(err="Exception ignored in: x"), codes=(0, 2))[0]
    assert "exit code 4" in disks.faults_of(ended(4), codes=(0, 2))[0]
    assert disks.report_of(ended()) is None
    assert disks.report_of(ended(out=json.dumps({"model": None}))) == {"model": None}


def test_a_model_that_is_not_where_the_report_says_is_found(tmp_path: Path) -> None:
    target, file = Target(tmp_path, tmp_path), tmp_path / "m.safetensors"
    tensors = {name: torch.ones(1) for name in ("0.weight", "0.bias", "2.weight", "2.bias")}
    safetensors.torch.save_file(tensors, file)
    assert disks.faults_of_model(target, {"model": "m.safetensors"}, ended()) == []
    file.write_bytes(file.read_bytes()[:-3])
    for place in ("m.safetensors", "nowhere"):
        assert "cannot be read" in disks.faults_of_model(target, {"model": place}, ended())[0]
    assert disks.faults_of_model(target, {"model": None}, ended()) == ["no model, and nobody says so"]
    assert disks.faults_of_model(target, {"model": None}, ended(err="the trained model is lost")) == []
    assert disks.faults_of_model(target, {"model": None}, ended(0, err="the trained model is lost")) != []
