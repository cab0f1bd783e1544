"""Journals of real runs that were resumed, respawned or lost their server lead to the same decisions when replayed.

`pytest --rewrite tests/sim/test_recorded_runs.py` records them anew, on real processes, which takes some minutes.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from digests import as_text, differences, from_text, lines_of
from recorded_runs import RECORDED, reported
from reference_runs import replayed

KEPT = Path(__file__).parents[1] / "reference" / "recorded"


def journal_of(name: str) -> Path:
    return KEPT / f"{name}.jsonl.gz"


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_run_replays(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path, report = journal_of(name), KEPT / f"{name}.report.txt"
    if request.config.getoption("--rewrite"):
        RECORDED[name].record(tmp_path, path)
        report.write_text(as_text(reported(path)))
    lines = lines_of(path)
    assert replayed(path) == (sum(line["type"] in ("decision", "peer_decision") for line in lines), None)
    restored = [line["restored"]["version"] for line in lines if line["type"] == "header" and line["restored"]]
    assert bool(restored) == ("respawned" not in name)
    told = differences(from_text(report.read_text()), reported(path))
    assert not told, f"{name}\n" + "\n".join(told)


def test_every_journal_belongs_to_a_run() -> None:
    assert {path.name for path in KEPT.iterdir()} == {
        name + ending for name in RECORDED for ending in (".jsonl.gz", ".report.txt")
    }


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    return path


def after_restore(lines: list[dict[str, Any]]) -> int:
    return next(place for place, line in enumerate(lines) if line["type"] == "header" and line["restored"])


@pytest.mark.parametrize("name", ["server-crash-ssp", "resumed-dasp", "tables-server-crash", "resumed-local_sgd"])
def test_a_number_that_differs_after_a_restore_is_noticed(name: str, tmp_path: Path) -> None:
    lines = lines_of(journal_of(name))
    kind, field = ("average", "round") if name == "resumed-local_sgd" else ("grant", "work")
    place, action = next(
        (place, action)
        for place, line in enumerate(lines)
        if place > after_restore(lines) and "actions" in line
        for action in line["actions"]
        if action["kind"] == kind
    )
    action[field] += 1
    _, difference = replayed(written(tmp_path / "altered.jsonl.gz", lines))
    assert difference is not None
    assert f"line {place + 1}, action" in difference


@pytest.mark.parametrize("name", ["server-crash-dssp", "server-crash-balanced", "resumed-ssp"])
def test_a_strategy_that_starts_afresh_instead_of_from_its_snapshot_is_noticed(name: str, tmp_path: Path) -> None:
    lines = lines_of(journal_of(name))
    lines[after_restore(lines)]["snapshot"] = None
    _, difference = replayed(written(tmp_path / "afresh.jsonl.gz", lines))
    assert difference is not None
