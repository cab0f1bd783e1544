"""The simulator's benchmark measures two models that do the same, and says what it found."""

import json
import sys
from pathlib import Path

import pytest

from paceline.core.events import Pushed
from paceline.records.journal import Decision, Lines

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_simulator

    yield bench_simulator
    for name in ("bench_simulator", "simpy_ssp", "results"):
        sys.modules.pop(name, None)


def test_both_models_make_the_same_pushes_at_the_same_times(bench):
    workers, count = 30, 2_000

    class Recorded(bench.simpy_ssp.Cluster):
        def push(self, worker: int, read_version: int) -> int:
            staleness.append(self.version - read_version)
            pushes.append((self.env.now, worker))
            return super().push(worker, read_version)

    pushes: list[tuple[float, int]] = []
    staleness: list[int] = []
    theirs = bench.run_simpy(bench.make_scenario(workers), count, Recorded)
    lines = Lines()
    bench.run_paceline(bench.make_scenario(workers), count, lines)
    events = [line.event for line in lines if isinstance(line, Decision) and isinstance(line.event, Pushed)]

    assert [(event.at, event.worker) for event in events] == pushes
    assert [version - event.read_version for version, event in enumerate(events)] == staleness
    assert sum(event.wait_s for event in events) > 0, "nobody was ever parked: the bound was not at work"
    assert theirs.clocks == [max(e.clock for e in events if e.worker == worker) for worker in range(workers)]


def test_the_simpy_model_is_short_enough_to_be_fair():
    assert len((BENCHMARKS / "simpy_ssp.py").read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.slow
def test_a_quick_run_prints_json_and_writes_where_it_is_told(bench, tmp_path, capsys):
    bench.main(["--quick", "--json", "--out", str(tmp_path), "--unclean"])
    printed = json.loads(capsys.readouterr().out)
    assert {row["workers"] for row in printed["rows"]} == {size.workers for size in bench.QUICK}
    written = json.loads((tmp_path / "simulator.json").read_text(encoding="utf-8"))
    assert written["rows"] == printed["rows"]
    page = (tmp_path / "simulator.md").read_text(encoding="utf-8")
    assert page.count("| **missed** |") + page.count("| met |") == len(printed["verdicts"])


def test_a_missed_bar_is_said_to_be_missed(bench):
    rows = [bench.Row(10, 100, 0, 30.0, 70.0, 10.0), bench.Row(20, 100, 0, 60.0, 70.0, 15.0)]
    verdicts = {verdict.name: verdict for verdict in bench.judge(rows, {10: 5000.0})}
    missed = {name for name, verdict in verdicts.items() if not verdict.passed}
    assert missed == set(verdicts) - {"time with journal over time without at 20 workers"}
