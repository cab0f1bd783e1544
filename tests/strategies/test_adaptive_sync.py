"""adaptive_sync: pace of BSP among equals, little waiting among unequals, and calm under interference."""

import random
from collections import Counter

import msgspec
import pytest
from random_histories import cluster_of, resumed_every
from virtual_cluster import VirtualCluster

from paceline import strategies
from paceline.core.actions import Apply, Grant, Mark, SetTimer
from paceline.core.events import HostLoad, Joined, Left, Pushed, TimerFired
from paceline.strategies.adaptive_sync import AdaptiveSyncOptions, RoundLengths
from paceline.strategies.roster import Roster

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
    assert state.interference.disturbed == {}
    assert 3 not in state.in_step
    marks = [a.state for d in cluster.decisions for a in d.actions if isinstance(a, Mark) and a.worker == 3]
    assert marks == ["in step", "disturbed", "apart"]


class Hosted(VirtualCluster):
    """A cluster whose workers say what goes on on their hosts: from 20 s on those named are loaded by others."""

    loaded = ()

    def _feed(self, event):
        if isinstance(event, Pushed):
            load = 2.0 if event.at > 20 and event.worker in self.loaded else 0.2
            event = msgspec.structs.replace(event, host=HostLoad(load, 0.0, 0.0))
        super()._feed(event)


def slowed(kind, who, factor, until):
    cluster = kind(strategies.build("adaptive_sync", 0), EQUAL, jitter=0.05, seed=1)
    cluster.loaded = who
    for worker in who:
        cluster.at(20.0, "slow", worker=worker, value=factor)
    return cluster.run(until=until)


@pytest.mark.parametrize(("count", "factor"), [(1, 1.5), (3, 4.0), (5, 1.5), (5, 4.0), (8, 1.5), (8, 4.0)])
def test_a_lasting_slow_down_on_loaded_hosts_is_learned_and_costs_as_little_as_on_others(count, factor):
    who = range(count)
    told, silent = (slowed(kind, who, factor, 420.0) for kind in (Hosted, VirtualCluster))
    interference = told.strategy.state.interference
    assert [interference.monitor.time(worker) for worker in who] == pytest.approx([factor] * count, rel=0.1)
    assert interference.disturbed == {}
    assert told.arrived > 0.97 * silent.arrived
    assert told.mean_staleness() < silent.mean_staleness() + 0.15


def test_an_interference_of_twenty_pushes_on_a_loaded_host_is_not_learned():
    cluster = slowed(Hosted, [3], 4.0, 100.0)
    assert cluster.workers[3].pushes > 30
    assert cluster.strategy.state.interference.monitor.time(3) == pytest.approx(1.0, rel=0.1)


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
    assert timers(actions) == [3.0], "a round in which nobody pushes is over after twice the usual time"
    assert strategy.handle(TimerFired(3.0, "round"))[0].at == 5.0
    actions = strategy.handle(push(4.0, 0, 3, 2, seconds=3.0))
    assert timers(actions) == [4.25], "w0 waits for w1, as it would if neither were late"
    assert [type(a) for a in strategy.handle(push(4.0, 1, 4, 2, seconds=3.0))][:3] == [Apply, Grant, Grant]


def timers(actions):
    return [a.at for a in actions if isinstance(a, SetTimer)]


def granted(actions):
    return [a.worker for a in actions if isinstance(a, Grant)]


def marks(actions):
    return [(a.worker, a.state) for a in actions if isinstance(a, Mark)]


def begun(count=3):
    """A strategy whose nodes have made one round together, each in a second."""
    strategy = strategies.build("adaptive_sync", 0)
    joined(strategy, *[8] * count)
    for worker in range(count):
        strategy.handle(push(1.0, worker, worker + 1, 1))
    return strategy


def test_a_round_ends_without_the_late_and_a_push_counts_where_it_arrives():
    strategy = begun()
    strategy.handle(push(2.0, 0, 4, 2))
    assert timers(strategy.handle(push(2.0, 1, 5, 2))) == [2.25], "two of three have pushed"
    actions = strategy.handle(TimerFired(2.25, "round"))
    assert actions[0].pushes == (4, 5)
    assert actions[0].weights == pytest.approx((1 / 3, 1 / 3))
    assert granted(actions) == [0, 1]
    actions = strategy.handle(push(3.0, 2, 6, 2, seconds=2.0))
    assert marks(actions) == [(2, "disturbed")]
    assert granted(actions) == [2], "it goes on at once"
    strategy.handle(push(3.3, 0, 7, 3))
    merged = strategy.handle(push(3.3, 1, 8, 3))[0]
    assert merged.pushes == (7, 8, 6)
    assert merged.weights == pytest.approx((1 / 3, 1 / 3, 1 / 3 / (1 + 2 / 3) ** 4)), "damped by what it missed"


def test_a_late_node_that_can_be_in_time_is_waited_for_and_one_that_cannot_waits():
    strategy = begun()
    for at, seconds, waits in ((2.4, 1.4, False), (2.8, 1.24, True)):
        mine = strategies.build("adaptive_sync", 0).restore(strategy.snapshot())
        mine.handle(push(2.0, 0, 4, 2))
        mine.handle(push(2.0, 1, 5, 2))
        mine.handle(TimerFired(2.25, "round"))
        mine.state.interference.monitor.nodes[2].deviation = 1.0  # so that being late is no interference
        assert granted(mine.handle(push(at, 2, 6, 2, seconds=seconds))) == ([] if waits else [2])
        assert sorted(mine.state.expected) == ([0, 1] if waits else [0, 1, 2])
        mine.handle(push(3.3, 0, 7, 3))
        actions = mine.handle(push(3.3, 1, 8, 3))
        if not waits:
            assert granted(actions) == [], "w2 is waited for"
            actions = mine.handle(push(3.4, 2, 9, 3))
            assert actions[0].pushes == (7, 8, 6, 9)
        assert granted(actions) == [0, 1, 2], "all three begin together again"


def test_nodes_apart_go_on_at_once_and_are_merged_into_the_next_apply():
    strategy = strategies.build("adaptive_sync", 0)
    joined(strategy, 8, 8, 8, 8)
    for worker in range(3):
        strategy.handle(push(1.0, worker, worker + 1, 1))
    assert granted(strategy.handle(TimerFired(1.25, "round"))) == [0, 1, 2], "the slowest is not known to be slow yet"
    assert granted(strategy.handle(push(1.9, 3, 4, 1, seconds=1.9))) == [3]
    assert strategy.handle(push(2.3, 0, 5, 2)) == []
    strategy.handle(push(2.3, 1, 6, 2))
    actions = strategy.handle(push(2.3, 2, 7, 2))
    assert actions[0].pushes == (5, 6, 7, 4)
    assert marks(actions) == [(3, "apart")], "1.9 times slower than the others, and no more concern of theirs"
    for worker in range(3):
        actions = strategy.handle(push(3.3, worker, 8 + worker, 3))
    assert actions[0].pushes == (8, 9, 10)
    assert granted(actions) == [0, 1, 2]


def test_a_fast_node_makes_no_more_starts_in_a_round_than_the_cap_allows():
    cluster = VirtualCluster(strategies.build("adaptive_sync:cap=3", 0), [1.0] * 8 + [0.2])
    cluster.run(until=20.05)
    grants = Counter(a.worker for d in cluster.decisions for a in d.actions if isinstance(a, Grant))
    assert grants[8] == pytest.approx(4 * cluster.strategy.state.round, abs=8)
    assert set(cluster.states.values()) == {"in step"}


@pytest.mark.parametrize(("times", "length", "in_step"), [
    ([1.0], 1.0, {0: 1}),
    ([1.0, 1.05, 1.1, 4.0], 1.0, {0: 1, 1: 1, 2: 1}),  # a round may last somewhat longer
    ([1.0, 1.0, 2.0, 2.0], 1.0, {0: 1, 1: 1}),  # as much a second as rounds twice as long, in smaller steps
    ([1.0, 2.0, 2.0, 2.0], 2.0, {0: 2, 1: 1, 2: 1, 3: 1}),
    ([0.2] + [1.0] * 8, 1.0, {0: 5} | dict.fromkeys(range(1, 9), 1)),
    ([0.1] + [1.0] * 8, 0.1, {0: 1}),  # steps of its own come so fast
])  # fmt: skip
def test_rounds_are_as_long_as_most_is_merged_in_a_second(times, length, in_step):
    lengths = lengths_of(times)
    assert lengths.best(None) == length
    assert lengths.pushes(length) == in_step


def lengths_of(times, alone=(), works=None, **options):
    known = [(time, worker) for worker, time in enumerate(times)]
    work = works or [8] * len(times)
    roster = Roster(dict(enumerate(work)), {}, sum(work))
    return RoundLengths(known, roster, AdaptiveSyncOptions(**options), set(alone))


def test_no_node_in_step_makes_more_pushes_than_the_cap_allows():
    assert lengths_of([0.2] + [1.0] * 8, cap=3).pushes(1.0) == {0: 4} | dict.fromkeys(range(1, 9), 1)


def test_who_has_more_work_counts_for_more():
    assert lengths_of([1.0, 2.0], works=[8, 8]).best(None) == 1.0
    assert lengths_of([1.0, 2.0], works=[8, 80]).best(None) == 2.0


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("alone", [(), range(0, 12, 3), range(12)], ids=["models", "some", "tables"])
def test_the_value_of_a_length_is_that_of_its_pushes(seed, alone):
    chance = random.Random(seed)
    times = [chance.lognormvariate(0, 1) for _ in range(12)]
    lengths = lengths_of(times, alone)
    for length in times:
        pushes = lengths.pushes(length)
        mass = min(1.0, sum(pushes.values()) / 12)
        seconds = max((times[worker] * count for worker, count in pushes.items()), default=1.0)
        assert lengths.value(length) == pytest.approx(mass / (mass + 1.5) / seconds)


def test_another_length_has_to_be_better_by_a_tenth():
    near, far = lengths_of([1.0, 1.0, 1.0, 1.3]), lengths_of([1.0, 1.0, 1.0, 1.5])
    assert near.value(1.3) < near.value(1.0) < 1.1 * near.value(1.3)
    assert (near.best(None), near.best(1.3)) == (1.0, 1.3)
    assert far.value(1.0) > 1.1 * far.value(1.5)
    assert far.best(1.5) == 1.0


def test_a_fast_node_adds_its_pushes_up_on_the_version_that_the_round_began_with():
    strategy = begun(5)
    strategy.state.interference.monitor.nodes[4].per_sample /= 3
    for worker in range(5):
        strategy.handle(push(2.0, worker, 6 + worker, 2, seconds=1 / 3 if worker == 4 else 1.0))
    assert strategy.state.in_step == {0: 1, 1: 1, 2: 1, 3: 1, 4: 3}
    for number in (1, 2):
        [grant] = strategy.handle(push(2 + number / 3, 4, 11, 3, seconds=1 / 3, samples=8 * number))
        assert (grant.worker, grant.extends, grant.through) == (4, 11, 3)
    assert strategy.handle(push(3.0, 4, 11, 3, seconds=1 / 3, samples=24)) == [], "a fourth would be late"
    for worker in range(4):
        actions = strategy.handle(push(3.0, worker, 12 + worker, 3))
    assert actions[0].pushes == (12, 13, 14, 15, 11)
    assert actions[0].weights == pytest.approx((1 / 7, 1 / 7, 1 / 7, 1 / 7, 3 / 7)), "one whole step at most"
    assert granted(actions) == [0, 1, 2, 3, 4]


def test_what_a_fast_node_has_made_counts_though_it_leaves():
    strategy = begun(5)
    strategy.state.interference.monitor.nodes[4].per_sample /= 3
    for worker in range(5):
        strategy.handle(push(2.0, worker, 6 + worker, 2, seconds=1 / 3 if worker == 4 else 1.0))
    strategy.handle(push(2.3, 4, 11, 3, seconds=0.3))
    assert strategy.handle(Left(2.5, 4, "crash")) == []
    for worker in range(4):
        actions = strategy.handle(push(3.0, worker, 12 + worker, 3))
    assert actions[0].pushes == (12, 13, 14, 15, 11)


def test_a_fast_node_that_is_overdue_with_one_push_makes_no_further_ones_in_the_round():
    strategy = begun(5)
    strategy.state.interference.monitor.nodes[4].per_sample /= 3
    for worker in range(5):
        strategy.handle(push(2.0, worker, 6 + worker, 2, seconds=1 / 3 if worker == 4 else 1.0))
    actions = strategy.handle(push(2.7, 4, 11, 3, seconds=0.7))
    assert marks(actions) == [(4, "disturbed")]
    assert granted(actions) == []


def test_on_tables_a_fast_node_goes_on_by_itself():
    strategy = strategies.build("adaptive_sync", 0)
    for worker in range(5):
        strategy.handle(Joined(0.0, worker, 8, True))
    for worker in range(5):
        strategy.handle(push(1.0, worker, worker + 1, 1))
    strategy.state.interference.monitor.nodes[4].per_sample /= 3
    for worker in range(5):
        strategy.handle(push(2.0, worker, 6 + worker, 2, seconds=1 / 3 if worker == 4 else 1.0))
    assert 4 not in strategy.state.in_step
    assert [type(a) for a in strategy.handle(push(2.3, 4, 11, 3, seconds=0.3))] == [Grant]
    actions = strategy.handle(push(2.6, 4, 12, 4, seconds=0.3))
    assert [type(a) for a in actions] == [Apply, Grant], "a second push of a node apart is not kept beside the first"
    assert actions[0].pushes == (11,)
    assert actions[1].extends is None


def test_nodes_apart_go_on_while_a_round_waits_for_one_that_is_gone_for_long():
    cluster = VirtualCluster(strategies.build("adaptive_sync:cap=4", 0), [1.0] * 7 + [3.0])
    cluster.run(until=20.0)
    cluster.at(20.0, "slow", worker=0, value=1000.0)
    cluster.run(until=27.0)
    before = cluster.workers[7].pushes
    cluster.run(until=60.0)
    assert cluster.workers[7].pushes >= before + 4, "the cap's starts and no more"
    assert cluster.workers[1].pushes < 40


def test_whom_the_round_waits_for_gets_a_model_first():
    strategy = begun(5)
    strategy.state.interference.monitor.nodes[0].per_sample *= 3
    for worker in range(1, 5):
        strategy.handle(push(2.0, worker, 6 + worker, 2))
    actions = strategy.handle(TimerFired(2.25, "round"))
    assert granted(actions) == [1, 2, 3, 4]
    assert granted(strategy.handle(push(3.2, 0, 11, 2, seconds=2.2))) == []
    for worker in range(1, 5):
        actions = strategy.handle(push(3.25, worker, 11 + worker, 3))
    assert granted(actions) == [1, 2, 3, 4, 0]


def test_a_checkpoint_of_before_can_be_restored():
    snapshot = begun(3).snapshot()
    snapshot["state"]["in_step"] = {"0": True, "1": True, "2": True}
    strategy = strategies.build("adaptive_sync", 0).restore(snapshot)
    for worker in range(3):
        actions = strategy.handle(push(2.0, worker, 4 + worker, 2))
    assert granted(actions) == [0, 1, 2]


def test_a_node_apart_waits_if_the_round_is_about_to_end():
    strategy = begun(5)
    strategy.state.interference.monitor.nodes[4].per_sample *= 3
    for worker in range(4):
        strategy.handle(push(2.0, worker, 6 + worker, 2))
    strategy.handle(TimerFired(2.25, "round"))
    waiting = strategies.build("adaptive_sync", 0).restore(strategy.snapshot())
    assert granted(strategy.handle(push(2.6, 4, 10, 2, seconds=1.6))) == [4]
    assert granted(waiting.handle(push(3.1, 4, 10, 2, seconds=2.1))) == []
    for worker in range(4):
        actions = waiting.handle(push(3.25, worker, 11 + worker, 3))
    assert granted(actions) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("transfers", [(0.0, 0.0, 0.0, 0.0), (0.0, 0.05, 0.1, 0.15)], ids=["no line", "queued"])
def test_those_who_compute_alike_stay_in_step_though_they_queue_for_a_line(transfers):
    strategy = begun(5)
    strategy.state.interference.monitor.nodes[4].per_sample *= 3
    for number in range(4):
        for worker, moved in enumerate((*transfers, 0.0)):
            one = push(2.0 + number + worker / 10, worker, 20 + 5 * number + worker, 2 + number,
                       seconds=3.0 if worker == 4 else 1.0)  # fmt: skip
            strategy.handle(msgspec.structs.replace(one, transfer_s=moved))
    assert set(strategy.state.in_step) == {0, 1, 2, 3}


def test_one_node_almost_twice_as_slow_leaves_the_others_in_step():
    """Their pushes stay merged, so that hardly any is stale."""
    mine, asp = (ran(spec, [1.0] * 7 + [1.9], jitter=0.05) for spec in ("adaptive_sync", "asp"))
    assert mine.mean_staleness() < 0.3
    assert mine.waited() < 0.15 * 120 * 8
    assert mine.arrived > 0.9 * asp.arrived
    fresh = [a for a in mine.applies() if len(a.pushes) >= 7]
    assert len(fresh) > 0.9 * len(mine.applies())


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
