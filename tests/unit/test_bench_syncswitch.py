"""The prediction of logged stragglers: how logs are read, that a fit finds what made the rates, and the bars."""

import json
import tarfile
from pathlib import Path

import pytest

import bench_syncswitch
from bench_syncswitch import LEARNT_FROM, SETS, Fit, fitted, judge, simulated
from contenders import syncswitch_logs
from contenders.syncswitch_logs import Log
from paceline.core.scenario.costs import Times


def row(part: str, error: float, learnt: float = 0.0, log: str = "some") -> dict[str, object]:
    return {"part": part, "error": error, "its error": learnt, "log": log}


def test_a_log_is_read_by_its_columns_and_lines_without_numbers_are_left_out() -> None:
    log = syncswitch_logs.parse("Wall time,Relative time (s),Step,Value\n10,0,1,2.5\n30,20,101,2.0\n,,,\n,,,998\n")
    assert (log.seconds, log.steps) == ([10.0, 30.0], [1.0, 101.0])
    assert log.rate == 5.0


def test_a_part_of_a_log_begins_at_a_step() -> None:
    log = Log([0.0, 100.0, 101.0, 102.0], [0.0, 10.0, 50.0, 90.0])
    assert log.after(10.0).rate == 40.0


def test_jitter_is_what_makes_the_logged_steps_uneven() -> None:
    push_s, sigma = 0.2, 0.3
    cluster = Fit(push_s, sigma, 0.0, True).cluster("asp", 8)
    drawn, ends = Times(cluster), []
    for worker in range(8):
        at = 0.0
        for attempt in range(2500):
            at += drawn.compute_s(worker, attempt, 1, at)
            ends.append(at)
    ends = sorted(end for end in ends if end < 400)
    log = Log(ends[::100], [float(number) for number in range(0, len(ends), 100)])
    assert syncswitch_logs.jitter_of([log]) == pytest.approx(sigma, rel=0.25)


def test_the_archive_is_read_by_folder_and_a_missing_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "loss.csv"
    file.write_text("Wall time,Step,Value\n1,1,1\n2,3,1\n")
    archive = tmp_path / "logs.tar.xz"
    with tarfile.open(archive, "w:xz") as tar:
        tar.add(file, "./one/run/loss.csv")
        tar.add(file, "./one/run/acc.csv")
    assert syncswitch_logs.read(archive, ["one/run"])["one/run"].rate == 2.0
    with pytest.raises(SystemExit, match="no loss.csv of two"):
        syncswitch_logs.read(archive, ["one/run", "two"])


def test_a_fit_finds_the_line_that_made_both_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_syncswitch, "UPDATES", {"asp": 800, "bsp": 100})
    true = Fit(0.2, 0.1, 0.01, True)
    asp, bsp = (simulated(true, strategy, 4) for strategy in ("asp", "bsp"))
    found = fitted(0.1, 4, asp, bsp)
    assert found.joint
    assert found.push_s == pytest.approx(true.push_s, rel=0.02)
    assert found.line_s == pytest.approx(true.line_s, rel=0.2)  # a fifth of it is 1 % of a round


def test_where_asp_could_not_pass_the_line_of_bsp_each_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_syncswitch, "UPDATES", {"asp": 800, "bsp": 100})
    found = fitted(0.1, 4, 20.0, 1.0)
    assert not found.joint
    assert found.line_s > 1 / 20
    assert [simulated(found, strategy, 4) for strategy in ("asp", "bsp")] == pytest.approx([20.0, 1.0], rel=0.02)
    assert found.cluster("asp", 4).network.bandwidth_mbps is None


def test_stragglers_are_latency_of_the_first_workers() -> None:
    cluster = Fit(0.2, 0.1, 0.01, True).cluster("asp", 4, slow=2, latency_ms=30.0)
    assert [worker.latency_ms for worker in cluster.workers] == [30.0, 30.0, None, None]


def test_no_log_with_a_straggler_is_fitted() -> None:
    fit = {log for each in SETS for log in (*each.asp, *each.bsp)}
    straggled = {each.log for known in SETS for each in known.straggled}
    assert len(straggled) == 10
    assert not fit & straggled
    assert not any("strag" in log.rpartition("/")[2] for log in fit)
    assert LEARNT_FROM in straggled


def test_bars_are_of_the_logs_that_nothing_was_fitted_to() -> None:
    rows = [row("fitted", 0.001), row("straggler", 0.05, -0.5, LEARNT_FROM), row("straggler", -0.08, 0.02),
            row("straggler", 0.4, 0.06), row("size", -0.2)]  # fmt: skip
    found = {bar.name: (bar.ratio, bar.passed) for bar in judge(rows)}
    assert found["stragglers_median"] == (0.08, True)
    assert found["stragglers_worst"] == (0.4, False)
    assert found["round_trips_worst"] == (0.06, True)  # without the log that the parameter is from
    assert found["sizes_worst"] == (0.2, False)


@pytest.mark.shared
@pytest.mark.skipif(not syncswitch_logs.ARCHIVE.is_file(), reason="needs ../shared/data/trace_syncswitch_ps")
def test_a_quick_run_prints_every_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_syncswitch, "UPDATES", {"asp": 400, "bsp": 50})
    monkeypatch.setattr(bench_syncswitch, "SEEDS", (0,))
    bench_syncswitch.main(["--quick", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["fitted"]["verdict"] == "met"
    assert sum(each["part"] == "straggler" for each in told["rows"]) == 8
