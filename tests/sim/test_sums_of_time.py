"""Seconds add up in every journal: waiting is attributed to the last, and a trace has the report's seconds."""

import json
from pathlib import Path

import pytest
from recorded_runs import RECORDED
from reference_runs import CENTRAL, PEERS, RUNS, ReferenceRun

import paceline
from paceline.cli import main
from paceline.records import journal, metrics, wait_attribution

KEPT = Path(__file__).parents[1] / "reference" / "recorded"
KINDS = ("compute", "transfer", "wait", "lost")
SIMULATED = [name for name in RUNS if name.removesuffix("-troubled") in (*CENTRAL, *PEERS)]


def require_sums(path: Path, folder: Path) -> None:
    """The time of each worker is all accounted for; waiting and a trace's slices add up to it."""
    lines = list(journal.read(path))
    fold = metrics.fold(lines)
    report = fold.report(None)
    for worker, (present, accounted) in fold.time_law().items():
        assert accounted == pytest.approx(present, abs=1e-6), worker
    waits: dict[int, float] = {}
    for row in wait_attribution.fold(lines).waited_for():
        waits[row.waiter] = waits.get(row.waiter, 0.0) + row.seconds
    assert waits == {w.worker: pytest.approx(w.wait_s, abs=1e-6) for w in report.per_worker if w.worker in waits}
    assert sum(waits.values()) == pytest.approx(sum(w.wait_s for w in report.per_worker), abs=1e-6)
    trace = folder / "trace.json"
    assert main(["export", str(path), "--format", "perfetto", "-o", str(trace)]) == 0
    slices: dict[tuple[str, int], float] = {}
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event["ph"] == "X" and event["name"] in KINDS:
            key = event["name"], event["tid"]
            slices[key] = slices.get(key, 0.0) + event["dur"] / 1e6
    for worker in report.per_worker:
        for kind in KINDS:
            seconds = getattr(worker, f"{kind}_s")
            assert slices.get((kind, worker.worker), 0.0) == pytest.approx(seconds, abs=1e-6), (kind, worker.worker)


@pytest.mark.parametrize("name", RECORDED)
def test_in_recorded_journals(name: str, tmp_path: Path) -> None:
    require_sums(KEPT / f"{name}.jsonl.gz", tmp_path)


@pytest.mark.parametrize("name", SIMULATED)
def test_in_simulated_runs_of_every_strategy(name: str, tmp_path: Path) -> None:
    run = RUNS[name]
    assert isinstance(run, ReferenceRun)
    settings = {"evaluate_every": "6v", "seed": 4, **run.settings, "journal": tmp_path / "journal.jsonl"}
    paceline.launch(run.script, engine="sim", scenario=run.scenario, strategy=run.strategy, **settings)
    require_sums(tmp_path / "journal.jsonl", tmp_path)


def test_every_strategy_is_simulated_with_and_without_faults() -> None:
    names = (*CENTRAL, *PEERS)
    assert {name.removesuffix("-troubled") for name in SIMULATED if name.endswith("-troubled")} == set(names)
    assert set(names) <= set(SIMULATED)
