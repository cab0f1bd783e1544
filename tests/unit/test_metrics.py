"""Metrics: numbers by hand on short journals, laws on long ones, from a bare driver and from the simulator."""

import json
import math
from pathlib import Path
from random import Random

import msgspec
import pytest
from journals import JournalledCluster, decision, header, joined, observed, pushed, two_workers

from paceline import scenario, strategies
from paceline.core.actions import Apply, Cancel, Discard, Grant, Mark
from paceline.core.events import Joined, Left, TimerFired
from paceline.engines.sim.light import simulate
from paceline.records import metrics
from paceline.records import wait_attribution as blame
from paceline.records.journal import Line, Lines, Observation
from paceline.records.metrics import Metrics, fold, to_json
from paceline.strategies.asp import Asp
from paceline.strategies.base import Strategy
from paceline.strategies.bsp import Bsp
from paceline.strategies.fastest_k import FastestK
from paceline.strategies.ssp import Ssp


def test_report_of_a_short_run_by_hand() -> None:
    report = fold(two_workers()).report("runs/1/journal.jsonl")
    assert (report.seconds, report.versions, report.pushes) == (6.0, 1, 3)
    assert (report.samples_used, report.samples_discarded) == (32, 16)
    assert report.samples_per_second == pytest.approx(32 / 6)
    assert (report.bytes_up, report.bytes_down, report.exchanges) == (300, 150, None)
    fast, slow = report.per_worker
    assert (fast.clock, fast.samples, fast.compute_s, fast.wait_s, fast.lost_s) == (2, 8, 2.0, 4.0, 0.0)
    assert (slow.clock, slow.samples, slow.compute_s, slow.transfer_s) == (1, 24, 3.0, 1.0)
    assert (slow.wait_s, slow.lost_s) == (0.0, 2.0)
    assert report.wait_fraction == pytest.approx(4 / 12)
    assert report.loss == pytest.approx((8 * 2.0 + 24 * 4.0) / 32)
    assert report.target == metrics.TargetReport("accuracy", 0.9, None)
    assert report.journal == "runs/1/journal.jsonl"


def test_report_has_the_documented_fields_in_order() -> None:
    data = json.loads(to_json(fold(two_workers()).report(None)))
    assert " ".join(data) == (
        "strategy engine workers seed seconds versions pushes samples_used samples_discarded samples_per_second "
        "wait_fraction staleness bytes_up bytes_down exchanges loss accuracy metrics target per_worker warnings "
        "journal table_reads peers batch reported folder model faults streams"
    )
    assert " ".join(data["per_worker"][0]) == "worker clock samples compute_s transfer_s wait_s lost_s score state"
    assert list(data["staleness"]) == ["mean", "p95", "max"]
    assert list(data["target"]) == ["metric", "value", "reached_at_seconds"]


def test_staleness_is_counted_from_the_version_before_the_apply() -> None:
    lines = [header(), joined(0.0, 0), joined(0.0, 1)]
    for push in range(1, 21):
        read = push - 1 if push < 20 else 0  # the last one read the first version
        lines.append(decision(pushed(float(push), 0, push, read_version=read), Apply((push,), (0.5,), "at once")))
    staleness = fold(lines).report(None).staleness
    assert (staleness.mean, staleness.p95, staleness.max) == (19 / 20, 0, 19)


def test_p95_is_the_smallest_value_that_covers_95_percent() -> None:
    lines = [header(), joined(0.0, 0)]
    for push, age in enumerate([0] * 94 + [3] * 5 + [7]):
        lines.append(decision(pushed(1.0, 0, push, read_version=push - age), Apply((push,), (1.0,), "at once")))
    staleness = fold(lines).report(None).staleness
    assert (staleness.p95, staleness.max) == (3, 7)


def test_an_apply_without_mass_makes_no_version_and_uses_nothing() -> None:
    lines = [header(), joined(0.0, 0), decision(pushed(1.0, 0, 1, samples=0), Apply((1,), (0.0,), "refused"))]
    report = fold(lines).report(None)
    assert (report.versions, report.pushes, report.samples_used, report.staleness.max) == (0, 1, 0, None)


def test_samples_of_an_apply_without_mass_are_used_as_the_coordinator_counts_them() -> None:
    lines = [header(), joined(0.0, 0), decision(pushed(1.0, 0, 1, loss=2.0), Apply((1,), (0.0,), "too old to count"))]
    report = fold(lines).report(None)
    assert (report.samples_used, report.per_worker[0].samples) == (8, 8)
    assert (report.versions, report.staleness.max, report.loss) == (0, None, None)


def test_a_push_of_weight_0_beside_others_has_no_staleness() -> None:
    lines = [header(), joined(0.0, 0), joined(0.0, 1)]
    lines += [decision(pushed(1.0, 0, 1, samples=0)), decision(pushed(1.0, 1, 2), Apply((1, 2), (0.0, 1.0), "all"))]
    metric = fold(lines)
    assert metric.versions == 1
    assert metric._staleness == {0: 1}


def test_an_extended_push_counts_once_with_its_latest_total() -> None:
    lines = [header(), joined(0.0, 0), decision(pushed(2.0, 0, 1, samples=4, compute_s=2.0), Grant(0, 4, 1, "more", 1))]
    lines.append(decision(pushed(5.0, 0, 1, samples=10, compute_s=3.0), Apply((1,), (1.0,), "round over")))
    metric = fold(lines)
    report = metric.report(None)
    assert (report.pushes, report.samples_used, report.per_worker[0].compute_s) == (1, 10, 5.0)
    assert report.bytes_up == 200
    # 0.5 s a sample in both pieces: the second is taken as 6 samples, not as 10.
    assert metric._monitor.time(0) == pytest.approx(4.0)


def test_discarded_work_is_counted_by_its_three_sources() -> None:
    lines = [header(), joined(0.0, 0), joined(0.0, 1), joined(0.0, 2)]
    lines.append(decision(pushed(1.0, 0, 1, samples=5), Discard(1, "late"), Cancel(1, "late"), Grant(1, 8, 2, "go")))
    lines.append(observed(1.0, "cancelled", 1, samples=7, seconds=1.0, cause="cancel"))
    lines.append(observed(1.0, "dropped", 1, samples=7, seconds=1.0))
    lines += [decision(pushed(2.0, 2, 2, samples=3)), observed(2.0, "discarded", 2, push=2, samples=3, reason="stop")]
    assert fold(lines).report(None).samples_discarded == 15


@pytest.mark.parametrize("observation_first", [True, False])
def test_wait_before_a_cancelled_grant_is_kept(observation_first: bool) -> None:
    """w1 pushes at 1, waits until 3, is cancelled at 4 and granted again at once, and pushes at 6."""
    lines = [header(), joined(0.0, 0), joined(0.0, 1), decision(pushed(1.0, 1, 1, compute_s=1.0))]
    lines.append(decision(pushed(3.0, 0, 2, compute_s=3.0), Grant(0, 8, 2, "go"), Grant(1, 8, 2, "go")))
    cancel = decision(pushed(4.0, 0, 3, compute_s=1.0), Cancel(1, "late"), Grant(0, 8, 3, "go"), Grant(1, 8, 3, "go"))
    lost = observed(4.0, "cancelled", 1, samples=8, seconds=1.0, cause="cancel")
    lines += [lost, cancel] if observation_first else [cancel, lost]
    lines.append(decision(pushed(6.0, 1, 4, compute_s=2.0)))
    lines.append(observed(6.0, "cancelled", 0, samples=8, seconds=2.0, cause="stop"))
    lines.append(observed(6.0, "end", cause="limit"))
    metric = fold(lines)
    worker = metric.report(None).per_worker[1]
    assert (worker.compute_s, worker.wait_s, worker.lost_s) == (3.0, 2.0, 1.0)
    assert metric.time_law() == {0: (6.0, 6.0), 1: (6.0, 6.0)}


def test_a_grant_taken_back_without_an_action_is_closed_too() -> None:
    """As at a change of strategy: everybody is met again and granted afresh."""
    lines = [header(), joined(0.0, 0), decision(pushed(1.0, 0, 1, compute_s=1.0))]
    lines.append(decision(TimerFired(3.0, "late"), Grant(0, 8, 2, "go")))
    lines.append(observed(4.0, "cancelled", 0, samples=8, seconds=1.0, cause="cancel"))
    lines += [header(strategy="asp"), joined(4.0, 0), decision(pushed(6.0, 0, 2, compute_s=2.0))]
    metric = fold(lines)
    assert metric.time_law() == {0: (6.0, 6.0)}
    assert metric.report(None).per_worker[0].wait_s == 2.0
    assert metric.report(None).strategy == "bsp"


@pytest.mark.parametrize("observation_first", [True, False])
def test_stays_add_up_and_absence_is_not_counted(observation_first: bool) -> None:
    crash = decision(Left(2.0, 0, "crash"))
    lost = observed(2.0, "cancelled", 0, samples=8, seconds=2.0, cause="crash")
    lines = [header(), joined(0.0, 0)] + ([lost, crash] if observation_first else [crash, lost])
    lines += [joined(10.0, 0), decision(pushed(11.0, 0, 1, compute_s=1.0)), decision(Left(14.0, 0, "leave"))]
    lines.append(observed(20.0, "end", cause="done"))
    metric = fold(lines)
    worker = metric.report(None).per_worker[0]
    assert (worker.compute_s, worker.wait_s, worker.lost_s) == (1.0, 3.0, 2.0)
    assert metric.time_law() == {0: (6.0, 6.0)}


def test_a_running_grant_is_left_out_until_the_run_ends() -> None:
    lines = [header(), joined(0.0, 0), joined(0.0, 1), decision(pushed(3.0, 0, 1, compute_s=3.0))]
    assert fold(lines).time_law() == {0: (3.0, 3.0), 1: (0.0, 0.0)}
    unaccounted = fold([*lines, observed(4.0, "end", cause="limit")]).time_law()
    assert unaccounted[1] == (4.0, 0.0)  # an engine that forgets the cancelled grant breaks the law


def test_joined_of_a_present_worker_only_corrects_its_work() -> None:
    lines = [header(), joined(0.0, 0), decision(Joined(1.0, 0, 4)), decision(pushed(2.0, 0, 1, compute_s=2.0))]
    metric = fold(lines)
    assert metric.time_law() == {0: (2.0, 2.0)}
    assert metric._monitor.time(0) == pytest.approx(1.0)


def test_evaluation_target_marks_and_warnings() -> None:
    lines = two_workers()[:-1]
    lines.append(observed(6.0, "evaluation", version=1, metrics={"loss": 0.5, "accuracy": 0.91, "f1": "nan"}))
    lines.append(observed(6.0, "target", metric="accuracy", value=0.9, reached_at=5.5))
    lines += [observed(6.0, "warning", text="slow disk")] * 2 + [observed(6.0, "warning", text="norm grows")]
    lines.append(decision(TimerFired(6.0, "deadline"), Mark(1, "SYNC", "fast"), Mark(1, "ASYNC", "late")))
    report = fold(lines).report(None)
    assert (report.loss, report.accuracy) == (0.5, 0.91)
    assert math.isnan(report.metrics["f1"])
    assert report.target == metrics.TargetReport("accuracy", 0.9, 5.5)
    assert report.warnings == ["slow disk (2 times)", "norm grows"]
    assert [worker.state for worker in report.per_worker] == [None, "ASYNC"]
    assert json.loads(to_json(report))["metrics"]["f1"] == "nan"


def test_loss_without_evaluation_is_of_the_last_round() -> None:
    lines = [header(workers=2), joined(0.0, 0)]
    for push, (samples, loss) in enumerate([(8, 100.0), (2, 1.0), (6, 3.0)]):
        push_line = pushed(1.0, 0, push, samples=samples, loss=loss, read_version=push)
        lines.append(decision(push_line, Apply((push,), (1.0,), "at once")))
    assert fold(lines).report(None).loss == pytest.approx((2 * 1.0 + 6 * 3.0) / 8)


def test_report_of_nothing_has_nulls_where_nothing_has_meaning() -> None:
    report = Metrics().report(None)
    assert (report.samples_per_second, report.wait_fraction, report.loss, report.target) == (None, None, None, None)
    assert report.staleness == metrics.Staleness(None, None, None)


def cluster(strategy: type[Strategy], seed: int, **options: object) -> JournalledCluster:
    """Five uneven workers with a crash, a return, a leaver and a newcomer, on data that runs out now and then."""
    built = strategy(strategy.Options(**options), Random(seed))
    seconds = [1.0, 1.0, 2.0, 4.0, 1.5]
    made = JournalledCluster(built, seconds, transfer=0.2, jitter=0.3, seed=seed, refuse=0.02)
    made.absent(4)
    made.at(9.3, "crash", worker=1)
    made.at(15.1, "join", worker=1)
    made.at(20.4, "join", worker=4)
    made.at(31.7, "leave", worker=2)
    return made


DRIVEN = [(Bsp, {}), (Asp, {}), (Ssp, {"staleness": 2}), (FastestK, {"k": 2})]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("strategy", "options"), DRIVEN)
def test_laws_hold_for_driven_strategies(strategy: type[Strategy], options: dict[str, object], seed: int) -> None:
    made = cluster(strategy, seed, **options).run(pushes=200)
    lines = made.finish()
    metric = fold(lines)
    for worker, (present, accounted) in metric.time_law().items():
        assert accounted == pytest.approx(present, rel=1e-9), f"worker {worker}"
    assert metric.versions == made.version
    assert metric.pushes == made.arrived
    report = metric.report(None)
    assert sum(worker.samples for worker in report.per_worker) == report.samples_used
    assert report.samples_used > 0
    fastest = max(worker.score or 0 for worker in report.per_worker)
    assert fastest == 1.0
    assert report.per_worker[3].score == pytest.approx(metric._monitor.score(3))
    waited = dict.fromkeys(metric._workers, 0.0)
    for row in blame.fold(lines).waited_for():
        waited[row.waiter] += row.seconds
    for worker_report in report.per_worker:
        assert waited[worker_report.worker] == pytest.approx(worker_report.wait_s, abs=1e-9)


EVENTFUL = """
seed = 3
[compute]
seconds_per_sample = 0.002
jitter = "lognormal:0.1"
[network]
latency_ms = 5
bandwidth_mbps = 1000
[[workers]]
count = 4
speed = 1.0
[[workers]]
count = 2
speed = 0.25
"""
EVENTFUL += "".join(
    f"[[events]]\n{text}\n"
    for text in (
        'kind = "slow"\nworker = 0\nat = 0.5\nfor = 1.0\nfactor = 4.0',
        'kind = "pause"\nworker = 1\nat = 1.0\nfor = 0.7',
        'kind = "partition"\nworkers = [2]\nat = 1.5\nfor = 0.5',
        'kind = "crash"\nworker = 1\nat = 2.0',
        'kind = "rejoin"\nworker = 1\nat = 2.5',
        'kind = "join"\nat = 3.0\nspeed = 0.5',
        'kind = "leave"\nworker = 4\nat = 3.5',
    )
)
NEED_OPTIONS = {"fastest_k": "fastest_k:k=3", "k_async": "k_async:k=2"}
NEED_LOSSES = {"adaptive_k_load"}  # light workers report none


@pytest.mark.parametrize("name", [name for name in strategies.names() if name not in NEED_LOSSES])
def test_laws_hold_under_the_simulator(name: str) -> None:
    lines = Lines([header(workers=6)])
    strategy = strategies.build(NEED_OPTIONS.get(name, name), 0)
    cluster = scenario.parse(EVENTFUL, "eventful", Path())
    simulate(strategy, cluster, work=32, max_versions=200, samples=12_000, model_bytes=100_000, sink=lines)
    metric = fold(lines)
    for worker, (present, accounted) in metric.time_law().items():
        assert accounted == pytest.approx(present, rel=1e-9), f"worker {worker}"
    end = lines[-1]
    assert isinstance(end, Observation)
    assert (metric.versions, metric.samples_used) == (end.data["versions"], end.data["samples_used"])
    assert metric.report(None).seconds == end.at


def test_live_and_read_back_folds_agree() -> None:
    lines = cluster(Bsp, 5).run(pushes=60).finish()
    live = fold(lines).report(None)
    text = msgspec.json.encode(list(lines))
    assert fold(msgspec.json.decode(text, type=list[Line])).report(None) == live
