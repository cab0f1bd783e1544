"""balanced: the global batch of every version, nearly all of the cluster's speed, and BSP among equals."""

from itertools import pairwise

import pytest
from random_histories import cluster_of, resumed_every
from virtual_cluster import VirtualCluster

from paceline import strategies
from paceline.core.actions import Apply, Cancel, Grant, Mark
from paceline.core.events import Joined, Left, Pushed
from paceline.strategies.balanced_pace import Pace, Paces, seconds_for

CLUSTERS = {
    "equal": [1.0] * 8,
    "1-2x": [1.0] * 4 + [2.0] * 4,
    "1-2-4x": [1.0] * 4 + [2.0] * 2 + [4.0] * 2,
    "1-8x": [1.0, 1.3, 1.7, 2.2, 2.9, 3.8, 5.0, 8.0],
    "one of 8 at 8x": [1.0] * 7 + [8.0],
}
SPECS = ["balanced", "balanced:pieces=one"]


def cluster(spec, seconds, **options):
    return VirtualCluster(strategies.build(spec, 0), seconds, **{"work": 64, **options})


def samples_of_versions(run):
    """Samples that each Apply covers, by the last report of each of its pushes."""
    pushed = {d.event.push: d.event.samples for d in run.decisions if isinstance(d.event, Pushed)}
    return [sum(pushed[push] for push in apply.pushes) for apply in run.applies()]


def efficiency(run):
    """Achieved over summed speed, until the last Apply."""
    last = max(d.event.at for d in run.decisions if any(isinstance(a, Apply) for a in d.actions))
    return sum(samples_of_versions(run)) / last / sum(w.work / w.seconds for w in run.workers.values())


def marks(run, worker):
    return [a.state for d in run.decisions for a in d.actions if isinstance(a, Mark) and a.worker == worker]


@pytest.mark.parametrize(("jitter", "least"), [(0.0, 0.985), (0.1, 0.965)])
@pytest.mark.parametrize("seconds", CLUSTERS.values(), ids=CLUSTERS)
def test_nearly_all_of_the_clusters_speed_is_used(seconds, jitter, least):
    run = cluster("balanced", seconds, jitter=jitter).run(until=40.0)
    assert efficiency(run) > least
    assert run.arrived / len(run.applies()) / len(seconds) < 8, "requests per worker and round"


@pytest.mark.parametrize("work", [16, 64])
def test_small_batches_still_balance(work):
    run = cluster("balanced", CLUSTERS["1-8x"], work=work, jitter=0.1).run(until=60.0)
    assert efficiency(run) > 0.92


def test_dear_requests_mean_fewer_and_larger_pieces():
    cheap, dear, single = (
        cluster(spec, CLUSTERS["1-8x"], jitter=0.1, transfer=transfer).run(until=60.0)
        for spec, transfer in (("balanced", 0.0), ("balanced", 0.05), ("balanced:pieces=one", 0.05))
    )
    assert dear.arrived / len(dear.applies()) < 0.6 * cheap.arrived / len(cheap.applies())
    assert efficiency(dear) > 1.03 * efficiency(single)


@pytest.mark.parametrize("options", [{}, {"samples": 5000}], ids=["endless", "finite"])
def test_one_piece_among_equals_is_bsp_decision_for_decision(options):
    mine, bsp = (cluster(s, [1.0] * 6, **options).run(pushes=600) for s in ("balanced:pieces=one", "bsp"))
    assert mine.arrived > 70
    assert mine.without_reasons() == bsp.without_reasons()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("seconds", CLUSTERS.values(), ids=CLUSTERS)
def test_every_version_covers_the_global_batch_as_one_whole_step(seconds, spec):
    run = cluster(spec, seconds, jitter=0.2, transfer=0.01).run(until=40.0)
    assert set(samples_of_versions(run)) == {64 * 8}
    assert all(sum(apply.weights) == pytest.approx(1.0) for apply in run.applies())
    assert set(run.staleness) == {0}


@pytest.mark.parametrize("seed", range(5))
def test_leavers_return_their_samples_and_joiners_help_in_mid_round(seed):
    run = cluster("balanced", [1.0, 1.0, 2.0, 4.0], jitter=0.1, seed=seed)
    run.at(5.3, "crash", worker=1)
    run.at(9.4, "join", worker=1)
    run.run(until=20.0)
    assert set(samples_of_versions(run)) == {256, 192}
    grants = [(at, work) for at, worker, work, _ in run.grants() if worker == 1 and at > 9.0]
    assert grants[0] == (9.4, 8), "a newcomer in mid-round starts with a small piece of what is left"
    assert efficiency(run) > 0.75


def test_the_push_of_a_process_that_is_gone_counts_but_is_not_extended():
    """Whenever the crash comes, the driver refuses an extension of another process's push."""
    both = 0
    for moment in range(12):
        run = cluster("balanced", [1.0, 1.0, 2.0], jitter=0.1)
        run.at(5.0 + moment / 10, "crash", worker=1)
        run.at(5.0 + moment / 10, "join", worker=1)
        run.run(until=9.0)
        assert set(samples_of_versions(run)) <= {192, 128}
        both += sum(len(apply.pushes) == 4 for apply in run.applies())
    assert both > 3, "versions with pushes of both processes of w1"


def test_a_worker_too_slow_for_one_sample_is_left_out_and_tried_again():
    run = cluster("balanced", [1.0, 1.0, 1.0, 400.0], work=8, jitter=0.1)
    run.run(until=300.0)
    states = marks(run, 3)
    assert states[:3] == ["silent", "active", "left out"], "nobody waits for its first sample"
    assert states.count("on trial") >= 5
    assert states.count("active") == 1
    trials = [a.through for d in run.decisions for a in d.actions if isinstance(a, Grant) and a.worker == 3][3:]
    assert {later - earlier for earlier, later in pairwise(trials)} == {20}
    cancelled = [a for d in run.decisions for a in d.actions if isinstance(a, Cancel)][1:]
    assert len(cancelled) in (len(trials), len(trials) - 1)
    assert set(samples_of_versions(run)) == {32}
    rounds = [d.event.at for d in run.decisions if any(isinstance(a, Apply) for a in d.actions)]
    slowest = max(b - a for a, b in pairwise(rounds[1:]))
    assert slowest < 3.0, "a trial costs the others no more than a sample"


def test_a_left_out_worker_that_recovers_takes_part_again():
    run = cluster("balanced", [1.0, 1.0, 1.0, 1.0], work=8, jitter=0.05)
    run.at(5.0, "slow", worker=3, value=100.0)
    run.at(60.0, "slow", worker=3, value=1.0)
    run.run(until=180.0)
    assert marks(run, 3)[:3] == ["silent", "active", "left out"], "it answers, and is too slow from then on"
    assert marks(run, 3)[-2:] == ["on trial", "active"]
    recent = [work for at, worker, work, _ in run.grants() if worker == 3 and at > 170.0]
    assert sum(recent) == pytest.approx(80, rel=0.3)


def test_left_out_workers_take_over_when_all_others_leave():
    run = cluster("balanced", [1.0, 1.0, 300.0], work=8)
    run.at(700.5, "crash", worker=0)
    run.at(700.5, "crash", worker=1)
    run.run(until=20000.0)
    assert run.workers[2].pushes > 5
    assert samples_of_versions(run)[-1] == 8


def joined(strategy, *works):
    return [action for worker, work in enumerate(works) for action in strategy.handle(Joined(0.0, worker, work))]


def push(at, worker, number, samples, seconds, clock=1):
    return Pushed(at, worker, number, clock, 0, samples, seconds, 0.0, 0.0, 0, 0)


def test_pieces_extend_the_held_push_and_shortfalls_return_to_the_round():
    strategy = strategies.build("balanced", 0)
    assert [a.work for a in joined(strategy, 64, 64)] == [8, 8]
    [grant] = strategy.handle(push(1.0, 0, 1, 8, 1.0))
    assert (grant.extends, grant.through) == (1, 1)
    assert strategy.state.remaining == 128 - 16 - grant.work
    [following] = strategy.handle(push(2.0, 0, 1, 8 + grant.work - 3, 1.0))
    assert strategy.state.remaining == 128 - 16 - (grant.work - 3) - following.work
    assert following.extends == 1


def test_a_refused_push_is_not_extended():
    strategy = strategies.build("balanced", 0)
    joined(strategy, 64, 64)
    [grant] = strategy.handle(push(1.0, 0, 1, 0, 1.0))
    assert (grant.extends, grant.work) == (None, 8)


def test_nobody_left_applies_what_is_held():
    strategy = strategies.build("balanced", 0)
    joined(strategy, 64, 64)
    strategy.handle(push(1.0, 0, 1, 8, 1.0))
    assert strategy.handle(Left(1.5, 0, "crash")) == []
    [apply] = strategy.handle(Left(1.6, 1, "crash"))
    assert (apply.pushes, apply.weights) == ((1,), (1.0,))


@pytest.mark.parametrize(
    ("samples", "paces", "expected"),
    [
        (64, [(0.0, 1.0)], 64.0),
        (96, [(0.0, 1.0), (0.0, 2.0)], 64.0),
        (100, [(0.0, 1.0), (0.0, 1.0), (0.0, 1.0)], 34.0),
        (10, [(0.0, 1.0), (20.0, 1.0)], 10.0),
        (10, [(1.0, 1.0), (3.0, 1.0)], 7.0),
        (1, [(0.0, 1.0), (0.0, 9.0)], 1.0),
    ],
)
def test_the_shortest_time_in_whole_samples(samples, paces, expected):
    workers = [Pace(start, per_sample) for start, per_sample in paces]
    span = seconds_for(samples, workers)
    assert span == pytest.approx(expected)
    assert sum(worker.fitting(span) for worker in workers) >= samples
    assert sum(worker.fitting(span - 0.01) for worker in workers) < samples


def test_a_request_that_costs_more_than_it_evens_out_is_not_made():
    paces = Paces()
    paces.monitor.record(0, 64, 64, 6.4, 0.2)
    paces.spread[0] = 0.1
    assert paces.piece(0, fair=64, fitting=60, goes_on=False) == round(64 * 0.6)
    assert paces.piece(0, fair=30, fitting=28, goes_on=True) == 28
    paces.request[0] = 0.01
    assert paces.piece(0, fair=30, fitting=28, goes_on=True) == 18
    paces.spread[0] = 0.01
    assert paces.piece(0, fair=64, fitting=60, goes_on=True) == 60


@pytest.mark.parametrize("spec", SPECS)
def test_snapshots_in_mid_run_change_nothing(spec):
    straight = cluster_of(spec, 3).run(pushes=300)
    assert cluster_of(spec, 3, after=resumed_every(7, spec, 3)).run(pushes=300).decisions == straight.decisions


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("spec", SPECS)
def test_every_push_is_settled_when_the_data_ends(spec, seed):
    run = cluster_of(spec, seed, samples=1500)
    for worker in range(6):
        run.at(500.0, "join", worker)
    run.run()
    assert (run.unallotted, run.held) == (0, {})
    assert not any(worker.present for worker in run.workers.values())
    applied = [push for apply in run.applies() for push in apply.pushes]
    assert len(applied) == len(set(applied))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("seconds", [[0.0] * 4, [0.0, 0.0, 1.0, 2.0], [1e-9, 1.0, 50.0, 1e4]])
def test_extreme_times_and_scraps_of_work_stop_nothing(seconds, spec):
    """Times that a clock cannot tell apart, workers on trial as the data ends, refused pushes."""
    for work in (1, 2, 64):
        options = {"work": work, "transfer": 0.5, "exponential": True, "refuse": 0.1}
        assert cluster(spec, seconds, **options).run(pushes=200).arrived == 200
        run = cluster(spec, seconds, samples=200 * work, **options).run()
        assert (run.unallotted, run.held) == (0, {})
