"""Where the trained model goes if the run's folder has no room for it."""

import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch

from paceline.engines.local import kept_result
from paceline.engines.local.kept_result import keep

DATA = safetensors.torch.save({"w": torch.ones(2)})
NODES = {0: {"w": torch.ones(2)}, 1: {"w": torch.zeros(2)}}


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A run's folder, a temporary folder and memory, all of them folders here."""
    found = {name: tmp_path / name for name in ("run", "temporary", "memory")}
    for each in found.values():
        each.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(found["temporary"]))
    monkeypatch.setattr(kept_result, "MEMORY", found["memory"])
    return found


def close(place: Path) -> None:
    """Let nothing be written there, also not by root."""
    place.rmdir()
    place.write_text("in the way")


def test_the_runs_folder_comes_first(places: dict[str, Path]) -> None:
    kept = keep(DATA, NODES, places["run"], "model")
    assert (kept.path, kept.complaint) == (places["run"] / "model.safetensors", None)
    names = ["0.safetensors", "1.safetensors", "model.safetensors", "nodes"]
    assert sorted(path.name for path in places["run"].rglob("*")) == names
    assert safetensors.torch.load_file(places["run"] / "nodes" / "1.safetensors")["w"].tolist() == [0, 0]


@pytest.mark.parametrize("closed", [["run"], ["run", "temporary"]])
def test_where_there_is_no_room_another_place_is_named(places: dict[str, Path], closed: list[str]) -> None:
    for name in closed:
        close(places[name])
    kept = keep(DATA, NODES, places["run"], "model")
    assert kept.path is not None
    assert kept.path.parent.parent == places["memory" if len(closed) == 2 else "temporary"]
    assert safetensors.torch.load_file(kept.path)["w"].tolist() == [1, 1]
    assert len(list((kept.path.parent / "nodes").iterdir())) == 2
    assert kept.path.parent.stat().st_mode & 0o77 == 0, "others do not read it"
    assert str(kept.complaint).startswith(
        f"cannot write {places['run'] / 'model.safetensors'}: Not a directory; it is in"
    )
    assert str(kept.path) in str(kept.complaint)


def test_nodes_without_room_take_the_model_with_them(places: dict[str, Path]) -> None:
    (places["run"] / "nodes").write_text("in the way")
    kept = keep(DATA, NODES, places["run"], "model")
    assert kept.path is not None
    assert kept.path.is_relative_to(places["temporary"])
    assert [path.name for path in places["run"].iterdir()] == ["nodes"], "nothing is left half written"


def test_a_model_without_any_place_is_said_to_be_lost(places: dict[str, Path]) -> None:
    for place in places.values():
        close(place)
    kept = keep(DATA, {}, places["run"], "tables")
    assert kept.path is None
    assert "tables.safetensors: Not a directory, nor anywhere else" in str(kept.complaint)
    assert str(kept.complaint).endswith("the trained model is lost")
