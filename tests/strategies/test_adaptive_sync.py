"""adaptive_sync: pace of BSP among equals, little waiting among unequals, and calm under interference."""

from collections import Counter

import pytest
from random_histories import cluster_of, resumed_every
from virtual_cluster import VirtualCluster

from paceline import strategies
from paceline.core.actions import Apply, Grant, Mark, SetTimer
from paceline.core.events import Joined, Left, Pushed, TimerFired

EQUAL = [1.0] * 8
UNEVEN = {
    "1-2x": [1.0] * 4 + [2.0] * 4,
    "1-2-4x": [1.0] * 4 + [2.0] * 2 + [4.0] * 2,
    "one of 8 at 4x": [1.0] * 7 + [4.0],
}
SPECS = ["adaptive_sync", "adaptive_sync:cap=0", "adaptive_sync:cap=2,gamma=1"]


def ran(spec, seconds, until=120.0, **options):
    return VirtualCluster(strategies.build(spec, 0), seconds, **options).run(until=until)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", [{}, {"samples": 900}], ids=["endless", "finite"])
def test_without_tolerance_it_paces_as_bsp(seed, options):
    mine, bsp = (cluster_of(s, seed, **options).run(pushes=300) for s in ("adaptive_sync:cap=0", "bsp"))
    assert mine.grants() == bsp.grants()
    assert [a.pushes for a in mine.applies()] == [a.pushes for a in bsp.applies()]


@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_among_equals_it_is_as_fast_as_bsp_and_fresher_than_ssp(jitter):
    mine, bsp, ssp = (ran(s, EQUAL, jitter=jitter) for s in ("adaptive_sync", "bsp", "ssp"))
    assert mine.arrived >= 0.97 * bsp.arrived
    assert mine.mean_staleness() < 0.1 < ssp.mean_staleness()
    assert len(mine.applies()) < mine.arrived / 7, "a round among equals is one Apply"


@pytest.mark.parametrize("seconds", UNEVEN.values(), ids=UNEVEN)
def test_lasting_unevenness_costs_far_less_waiting_than_ssp(seconds):
    mine, ssp, asp = (ran(s, seconds, jitter=0.1) for s in ("adaptive_sync", "ssp", "asp"))
    assert mine.waited() < 0.6 * ssp.waited()
    assert mine.mean_staleness() <= asp.mean_staleness()
    assert mine.arrived > 1.25 * ssp.arrived


@pytest.mark.parametrize(("seconds", "seed"), [(1.0, 0), (1.0, 1), (1.0, 2), (0.2, 0)])
def test_interference_on_one_node_costs_the_others_less_than_a_second_of_work(seconds, seed):
    def work_of_others(spec, disturbed):
        cluster = VirtualCluster(strategies.build(spec, 0), [seconds] * 8, jitter=0.05, seed=seed)
        if disturbed:
            cluster.at(10.0, "slow", worker=3, value=4.0)
            cluster.at(20.0, "slow", worker=3, value=1.0)
        cluster.run(until=40.0)
        return sum(w.pushes for i, w in cluster.workers.items() if i != 3) * seconds / 7

    assert work_of_others("adaptive_sync", False) - work_of_others("adaptive_sync", True) < 1.0
    assert work_of_others("ssp", False) - work_of_others("ssp", True) > 4.0


def test_a_permanent_slow_down_is_followed_within_ten_pushes():
    cluster = VirtualCluster(strategies.build("adaptive_sync", 0), EQUAL, jitter=0.05)
    cluster.run(until=20.5)
    cluster.at(20.5, "slow", worker=3, value=4.0)
    before = cluster.workers[3].pushes
    while cluster.workers[3].pushes < before + 10:
        cluster.run(pushes=cluster.arrived + 1)
    state = cluster.strategy.state
    assert state.interference.monitor.time(3) == pytest.approx(4.0, rel=0.15)
    assert state.interference.missed == {}
    assert state.extra.get(0, 0) >= 2, "the others use the time"
    marks = [a.state for d in cluster.decisions for a in d.actions if isinstance(a, Mark) and a.worker == 3]
    assert marks[-2:] == ["disturbed", "steady"]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("seed", range(6))
def test_starts_per_round_and_rounds_without_a_push_are_bounded(spec, seed):
    starts, missed = Counter(), Counter()
    rounds = [0]

    def check(cluster, decision):
        state, cap = cluster.strategy.state, cluster.strategy.options.cap
        event = decision.event
        if isinstance(event, Left) and event.cause != "idle":
            starts.pop(event.worker, None)
            missed.pop(event.worker, None)
        if isinstance(event, Pushed):
            missed[event.worker] = -1 if state.round == rounds[0] else 0  # a push counts in the round it arrives in
        if state.round != rounds[0]:
            rounds[0] = state.round
            starts.clear()
            for worker in state.roster.present:
                pusher = isinstance(event, Pushed) and event.worker == worker
                missed[worker] = 0 if pusher else missed[worker] + 1
        starts.update(a.worker for a in decision.actions if isinstance(a, Grant))
        assert all(count <= cap + 1 for count in starts.values()), decision
        assert all(missed[worker] <= cap for worker in state.roster.present), decision

    cluster = cluster_of(spec, seed, after=check, refuse=0.0).run(pushes=400)
    assert rounds[0] > 10
    assert cluster.arrived >= 400


def test_cap_bounds_the_rounds_without_a_disturbed_node():
    cluster = VirtualCluster(strategies.build("adaptive_sync:cap=3", 0), [1.0] * 4)
    cluster.at(5.5, "slow", worker=0, value=20.0)
    cluster.run(until=25.0)
    assert cluster.workers[1].pushes == 6 + 3 + 1, "six rounds, three without w0, and one that waits for it"


def joined(strategy, *works):
    return [strategy.handle(Joined(0.0, worker, work)) for worker, work in enumerate(works)]


def push(at, worker, number, clock, seconds=1.0, samples=8):
    return Pushed(at, worker, number, clock, 0, samples, seconds, 0.0, 0.0, 0, 0)


def test_when_everybody_is_overdue_nobody_is_excused():
    strategy = strategies.build("adaptive_sync", 0)
    joined(strategy, 8, 8)
    strategy.handle(push(1.0, 0, 1, 1))
    actions = strategy.handle(push(1.0, 1, 2, 1))
    assert [a.name for a in actions if isinstance(a, SetTimer)] == ["overdue:0", "overdue:1"]
    strategy.handle(TimerFired(2.25, "overdue:0"))
    strategy.handle(TimerFired(2.25, "overdue:1"))
    assert strategy.handle(push(4.0, 0, 3, 2, seconds=3.0)) == []
    assert [type(a) for a in strategy.handle(push(4.0, 1, 4, 2, seconds=3.0))][:3] == [Apply, Grant, Grant]


def test_a_round_ends_without_the_overdue_and_its_push_counts_where_it_arrives():
    strategy = strategies.build("adaptive_sync", 0)
    joined(strategy, 8, 8, 8)
    for worker in range(3):
        strategy.handle(push(1.0, worker, worker + 1, 1))
    strategy.handle(push(2.0, 0, 4, 2))
    strategy.handle(push(2.0, 1, 5, 2))
    actions = strategy.handle(TimerFired(2.25, "overdue:2"))
    assert actions[0].pushes == (4, 5)
    assert actions[0].weights == pytest.approx((1 / 3, 1 / 3))
    assert [a.worker for a in actions if isinstance(a, Grant)] == [0, 1]
    assert [(a.worker, a.state) for a in actions if isinstance(a, Mark)] == [(2, "disturbed")]
    strategy.handle(push(3.0, 2, 6, 2, seconds=2.0))
    strategy.handle(push(3.25, 0, 7, 3))
    assert strategy.handle(push(3.25, 1, 8, 3))[0].pushes == (7, 8, 6)


def test_a_returning_process_is_a_stranger():
    strategy = strategies.build("adaptive_sync", 0)
    joined(strategy, 8, 8)
    strategy.handle(push(1.0, 0, 1, 1))
    assert [type(a) for a in strategy.handle(Left(1.1, 0, "crash"))] == []
    assert [a.through for a in strategy.handle(Joined(1.2, 0, 8))] == [1]
    assert strategy.handle(push(2.0, 1, 2, 1)) == [], "w0's push of before is no push of the present one"
    assert strategy.handle(push(2.2, 0, 3, 1))[0].pushes == (1, 3, 2)


@pytest.mark.parametrize("spec", SPECS)
def test_snapshots_in_mid_run_change_nothing(spec):
    straight = cluster_of(spec, 3).run(pushes=300)
    assert cluster_of(spec, 3, after=resumed_every(7, spec, 3)).run(pushes=300).decisions == straight.decisions


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spec", SPECS)
def test_every_push_is_settled_when_the_data_ends(spec, seed):
    cluster = cluster_of(spec, seed, samples=1500)
    for worker in range(6):
        cluster.at(500.0, "join", worker)
    cluster.run()
    assert (cluster.unallotted, cluster.held) == (0, {})
    assert not any(worker.present for worker in cluster.workers.values())


@pytest.mark.parametrize("seconds", [[0.0] * 4, [0.0, 0.0, 1.0, 2.0], [1e-9, 1.0, 50.0, 1e4]])
def test_extreme_times_stop_nothing(seconds):
    for transfer in (0.0, 0.5):
        cluster = VirtualCluster(strategies.build("adaptive_sync", 0), seconds, transfer=transfer, exponential=True)
        assert cluster.run(pushes=200).arrived == 200
