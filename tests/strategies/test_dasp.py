"""DASP: states follow speeds, the fast hardly wait, and little is stale."""

from pathlib import Path

import msgspec
import pytest
from random_histories import Leads, cluster_of, resumed_every
from virtual_cluster import VirtualCluster

from paceline import scenario, strategies
from paceline.core.actions import Apply, Grant, Mark, SetTimer
from paceline.core.events import Joined, Left, Pushed, TimerFired
from paceline.engines.sim.light import simulate
from paceline.records.journal import Decision, Lines
from paceline.strategies.dasp import Dasp
from paceline.strategies.dasp_records import Record, Records

UNEVEN = {"8/4x": [1.0] * 4 + [2.0] * 2 + [4.0] * 2, "16/8x": [1.0] * 8 + [2.0] * 4 + [4.0] * 2 + [8.0] * 2}
MB = 1_000_000
FITS = ["join", "merge", "none"]
SPECS = ["dasp", "dasp:fit=merge", "dasp:fit=none", "dasp:theta=2", "dasp:theta=0,fit=merge", "dasp:relax=1"]


def ran(spec, seconds, until=80.0, **options):
    return VirtualCluster(strategies.build(spec, 0), seconds, **{"work": 64, **options}).run(until=until)


def high_end(staleness):
    return sorted(staleness)[int(0.95 * len(staleness))]


def marks(cluster, worker):
    return [a.state for d in cluster.decisions for a in d.actions if isinstance(a, Mark) and a.worker == worker]


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("seconds", UNEVEN.values(), ids=UNEVEN)
def test_the_fast_wait_less_and_less_is_stale(seconds, fit):
    mine, bsp, ssp, dssp, asp = (
        ran(spec, seconds, jitter=0.1) for spec in (f"dasp:fit={fit}", "bsp", "ssp", "dssp", "asp")
    )

    def waited(cluster):
        """Of the fast, waits that have not ended included."""
        fast = [worker for worker in cluster.workers.values() if worker.seconds == 1.0]
        return sum(w.waited + (0 if w.attempt else cluster.now - w.free_since) for w in fast)

    assert waited(mine) < 0.5 * min(waited(bsp), waited(ssp), waited(dssp))
    assert mine.mean_staleness() < asp.mean_staleness()
    assert high_end(mine.staleness) < high_end(asp.staleness)


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_among_equals_it_paces_as_bsp(jitter, fit):
    mine, bsp = (ran(spec, [1.0] * 8, jitter=jitter) for spec in (f"dasp:fit={fit}", "bsp"))
    assert mine.grants() == bsp.grants()
    assert [a.pushes for a in mine.applies()] == [a.pushes for a in bsp.applies()]
    assert set(mine.states.values()) == {"SYNC"}


def test_states_change_when_speeds_change():
    cluster = VirtualCluster(strategies.build("dasp:fit=merge", 0), [1.0] * 8, work=64, jitter=0.05)
    cluster.at(20.0, "slow", worker=3, value=3.0)
    cluster.at(50.0, "slow", worker=3, value=1.0)
    cluster.run(until=45.0)
    assert cluster.states[3] == "ASYNC"
    cluster.run(until=90.0)
    assert marks(cluster, 3) == ["WARMUP", "SYNC", "ASYNC", "SYNC"]
    assert all(marks(cluster, worker) == ["WARMUP", "SYNC"] for worker in range(8) if worker != 3)


def test_with_join_a_node_that_became_slow_gets_less_work_and_stays_a_member():
    cluster = VirtualCluster(strategies.build("dasp:fit=join", 0), [1.0] * 8, work=64, jitter=0.05)
    cluster.at(20.0, "slow", worker=3, value=3.0)
    cluster.run(until=70.0)
    works = [work for _, worker, work, _ in cluster.grants() if worker == 3]
    assert works[0] == 64
    assert works[-1] == pytest.approx(64 / 3, rel=0.2)
    assert cluster.states[3] == "SYNC"
    assert cluster.workers[0].waited < 0.25 * 70.0


@pytest.mark.parametrize("fit", FITS)
def test_a_slow_down_of_all_demotes_nobody(fit):
    cluster = VirtualCluster(strategies.build(f"dasp:fit={fit}", 0), [1.0] * 6, work=64, jitter=0.05)
    for worker in range(6):
        cluster.at(20.0, "slow", worker, value=3.0)
        cluster.at(60.0, "slow", worker, value=0.5)
    cluster.run(until=100.0)
    assert all(marks(cluster, worker) == ["WARMUP", "SYNC"] for worker in range(6))


def test_nodes_at_the_bound_do_not_flap():
    cluster = ran("dasp", [1.0] * 6 + [1.5, 1.5], jitter=0.1, until=300.0)
    assert all(len(marks(cluster, worker)) <= 3 for worker in range(8))


@pytest.mark.parametrize("seed", range(3))
def test_theta_bounds_the_lead(seed):
    leads = Leads()
    cluster_of("dasp:theta=2,fit=merge", seed, after=leads).run(pushes=300)
    assert leads.longest_computing == 2


def push(at, worker, number, clock, seconds=1.0, samples=64):
    return Pushed(at, worker, number, clock, 0, samples, seconds, 0.0, 0.0, 0, 0)


def started(fit="merge", workers=3, seconds=(1.0, 1.0, 4.0)):
    """The fast ones have passed the first round's barrier, for which w2 was late."""
    strategy = strategies.build(f"dasp:fit={fit}", 0)
    for worker in range(workers):
        strategy.handle(Joined(0.0, worker, 64))
    strategy.handle(push(1.0, 0, 1, 1, seconds[0]))
    [timer] = [a for a in strategy.handle(push(1.0, 1, 2, 1, seconds[1])) if isinstance(a, SetTimer)]
    assert (timer.name, timer.at) == ("barrier", 1.5)
    actions = strategy.handle(TimerFired(1.5, "barrier"))
    assert actions[0].pushes == (1, 2)
    assert [a.worker for a in actions if isinstance(a, Grant)] == [0, 1]
    assert [(a.worker, a.state) for a in actions if isinstance(a, Mark)] == [(0, "SYNC"), (1, "SYNC")]
    return strategy


def test_a_late_member_is_merged_damped_by_its_staleness_and_goes_on_with_the_group_on_cut_work():
    strategy = started()
    strategy.handle(push(2.5, 0, 3, 2))
    actions = strategy.handle(push(2.5, 1, 4, 2))
    assert actions[0].pushes == (3, 4)
    actions = strategy.handle(push(4.0, 2, 5, 1, 4.0))
    assert not any(isinstance(a, Grant) for a in actions), "its next push would read a model without this one"
    strategy.handle(push(4.1, 0, 6, 3))
    apply, *rest = strategy.handle(push(4.1, 1, 7, 3))
    assert apply.pushes == (6, 7, 5)
    tau = 2 * (2 / 3)  # two rounds of two of three workers since it read
    assert apply.weights == pytest.approx((1 / 3, 1 / 3, (1 + tau) ** -2 / 3))
    assert [(a.worker, a.work, a.through) for a in rest if isinstance(a, Grant)] == [(0, 64, 4), (1, 64, 4), (2, 16, 2)]


@pytest.mark.parametrize(("fit", "work"), [("merge", 16), ("none", 64)])
def test_states_alone_never_cut_work(fit, work):
    strategy = started(fit)
    strategy.handle(push(4.0, 2, 5, 1, 4.0))
    strategy.handle(push(4.1, 0, 6, 2))
    [grant] = [a for a in strategy.handle(push(4.1, 1, 7, 2)) if isinstance(a, Grant) and a.worker == 2]
    assert grant.work == work


def test_a_group_that_hangs_keeps_nobody_waiting():
    strategy = started()
    [timer] = [a for a in strategy.handle(push(2.0, 2, 3, 1, 4.0)) if isinstance(a, SetTimer)]
    assert (timer.name, timer.at) == ("merge", 3.5)
    apply, grant = strategy.handle(TimerFired(3.5, "merge"))
    assert (apply.pushes, grant.worker) == ((3,), 2)
    [timer] = [a for a in strategy.handle(push(4.0, 2, 4, 2, 0.5, samples=16)) if isinstance(a, SetTimer)]
    assert (timer.name, timer.at) == ("merge", 5.5)
    strategy.handle(push(4.1, 0, 5, 2))
    actions = strategy.handle(push(4.1, 1, 6, 2))
    assert actions[0].pushes == (5, 6, 4)
    assert ("merge", None) in [(a.name, a.at) for a in actions if isinstance(a, SetTimer)]


def test_without_members_pushes_are_applied_at_once_also_when_the_last_member_leaves():
    strategy = started()
    strategy.handle(push(2.0, 2, 3, 1, 4.0))
    assert strategy.handle(Left(2.1, 0, "crash")) == []
    actions = strategy.handle(Left(2.2, 1, "crash"))
    assert [a.pushes for a in actions if isinstance(a, Apply)] == [(3,)]
    assert [a.worker for a in actions if isinstance(a, Grant)] == [2]
    assert strategy.handle(push(3.0, 2, 4, 2, 1.0, samples=16))[0].pushes == (4,)


def test_a_leaver_that_waited_to_be_merged_is_merged_all_the_same():
    strategy = started()
    strategy.handle(push(2.0, 2, 3, 1, 4.0))
    strategy.handle(Left(2.1, 2, "crash"))
    strategy.handle(push(2.5, 0, 4, 2))
    actions = strategy.handle(push(2.5, 1, 5, 2))
    assert actions[0].pushes == (4, 5, 3)
    assert [a.worker for a in actions if isinstance(a, Grant)] == [0, 1]


def test_with_join_a_sized_node_is_expected_at_the_barrier():
    strategy = started(fit="join")
    actions = strategy.handle(push(2.0, 2, 3, 1, 4.0))
    assert [(a.worker, a.state) for a in actions if isinstance(a, Mark)] == [(2, "SYNC")]
    assert not any(isinstance(a, Grant) for a in actions)
    strategy.handle(push(2.5, 0, 4, 2))
    actions = strategy.handle(push(2.5, 1, 5, 2))
    assert actions[0].pushes == (4, 5, 3)
    assert [(a.worker, a.work) for a in actions if isinstance(a, Grant)] == [(0, 64), (1, 64), (2, 16)]
    strategy.handle(push(3.5, 0, 6, 3))
    assert not any(isinstance(a, Apply) for a in strategy.handle(push(3.5, 1, 7, 3))), "w2 is missing"
    assert strategy.handle(push(3.6, 2, 8, 2, 1.0, samples=16))[0].pushes == (6, 7, 8)


def test_a_returning_process_warms_up_afresh_and_its_old_push_still_counts():
    strategy = started()
    strategy.handle(push(2.5, 0, 3, 2))
    strategy.handle(Left(2.6, 0, "crash"))
    actions = strategy.handle(Joined(2.7, 0, 64))
    assert [(a.worker, a.state) for a in actions if isinstance(a, Mark)] == [(0, "WARMUP")]
    assert strategy.handle(push(2.8, 1, 4, 2))[0].pushes == (3, 4)


def arrived(worker, seconds, transfer=0.0, samples=64, read_version=0):
    return Pushed(0.0, worker, 0, 1, read_version, samples, seconds - transfer, transfer, 0.0, 0, 0)


def records(times, transfers=None, nominal=64):
    book = Records()
    for worker, seconds in enumerate(times):
        book.nodes[worker] = Record("SYNC", 0.0)
        transfer = transfers[worker] if transfers else 0.0
        book.update(arrived(worker, seconds + transfer, transfer), nominal, 0)
    book.regroup(dict.fromkeys(range(len(times)), nominal), "merge")
    return book


def test_the_reference_is_the_lower_quartile_and_the_usual_round_the_slowest_full_member():
    book = records([3.0, 1.0, 1.2, 1.1, 1.3])
    assert (book.reference, book.usual) == (1.1, 3.0)
    book.nodes[0].sized = True
    book.regroup(dict.fromkeys(range(5), 64), "merge")
    assert book.usual == 1.3


@pytest.mark.parametrize(
    ("state", "seconds", "fit", "expected"),
    [
        ("WARMUP", 1.49, "merge", ("SYNC", False)),
        ("WARMUP", 1.51, "merge", ("ASYNC", True)),
        ("ASYNC", 1.29, "merge", ("SYNC", False)),
        ("ASYNC", 1.33, "merge", ("ASYNC", True)),
        ("ASYNC", 1.6, "none", ("ASYNC", False)),
        ("SYNC", 1.6, "merge", ("SYNC", False)),
        ("SYNC", 1.8, "merge", ("ASYNC", True)),
        ("SYNC", 1.8, "join", ("SYNC", True)),
        ("SYNC", 17.0, "join", ("ASYNC", False)),
    ],
)
def test_decisions_have_hysteresis_and_a_smallest_worthwhile_size(state, seconds, fit, expected):
    book = records([1.0, 1.0, 1.0, 1.0])
    book.nodes[4] = Record(state, 0.0)
    book.update(arrived(4, seconds), 64, 0)
    assert book.decide(4, 1.5, fit, grouped=True)[:2] == expected


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize(
    ("state", "behind", "grouped", "expected"),
    [
        ("ASYNC", 1, True, "SYNC"),
        ("ASYNC", 2, True, "ASYNC"),  # as fast as the others by its average, and yet it does not keep step
        ("WARMUP", 2, True, "ASYNC"),
        ("ASYNC", 2, False, "SYNC"),  # nobody is in step
        ("SYNC", 2, True, "SYNC"),
    ],
)
def test_who_comes_back_has_to_keep_step(state, behind, grouped, expected, fit):
    book = records([1.0, 1.0, 1.0, 1.0])
    book.nodes[3].state = state
    book.update(arrived(3, 1.0, read_version=7), 64, 7 + behind)
    name, _, reason = book.decide(3, 1.5, fit, grouped)
    assert name == expected
    assert ("read version 7" in reason) == (expected == "ASYNC")


def test_after_a_slow_push_only_the_latest_version_counts_as_keeping_step():
    book = records([1.0, 1.0, 1.0, 1.0])
    book.nodes[3].state = "ASYNC"
    book.update(arrived(3, 1.7, read_version=7), 64, 8)
    assert book.decide(3, 1.5, "none", grouped=True)[0] == "ASYNC"
    book.update(arrived(3, 1.0, read_version=8), 64, 9)
    assert book.decide(3, 1.5, "none", grouped=True)[0] == "SYNC"


def test_a_single_stall_does_not_enter_the_average_but_a_level_does_at_once():
    book = records([1.0, 1.0])
    for seconds in (1.1, 9.0, 0.95):
        book.update(arrived(0, seconds), 64, 0)
    assert book.monitor.time(0) == pytest.approx(1.0, rel=0.05)
    for seconds in (4.0, 4.4):
        book.update(arrived(0, seconds), 64, 0)
    assert book.monitor.time(0) == pytest.approx(4.1, rel=0.02)
    for seconds in (9.0, 1.0, 1.0):  # one up, then two down
        book.update(arrived(0, seconds), 64, 0)
    assert book.monitor.time(0) == pytest.approx(1.0)


def test_a_node_is_expected_to_stay_as_slow_as_its_last_push_was():
    book = records([1.0, 1.0, 1.0])
    book.update(arrived(2, 4.0), 64, 3)
    assert (book.fitting(2), book.monitor.time(2)) == (16, 1.0)
    book.update(arrived(2, 0.25, samples=16), 64, 3)
    assert book.fitting(2) == 64


def test_a_refused_push_says_nothing_of_times():
    book = records([1.0, 1.0])
    book.update(arrived(0, 5.0, samples=0, read_version=2), 64, 3)
    assert (book.monitor.time(0), book.nodes[0].odd) == (1.0, None)
    assert book.nodes[0].behind == 1


@pytest.mark.parametrize(
    ("transfers", "line"),
    [
        ([0.125, 0.25, 0.375, 0.5], 4 * 0.125 / 1.5),  # each takes 1/8 of a compute time on the line
        ([0.5, 0.5, 0.5, 0.5], 0.0),  # far away, but not one after the other
        ([0.0, 0.0, 0.0, 0.45], 0.0),  # one distant link
        ([0.1, 0.1, 0.6, 0.6], 0.0),  # two of them
        ([0.02, 0.47], 2 * 0.02 / 1.47),  # of two, one is distant: on the line no push takes longer than the other's
        ([0.13, 0.25, 0.37, 1.5], 4 * 0.12 / 2.5),  # a distant link and a busy line
        ([0.0, 0.0, 0.0, 0.0], 0.0),
    ],
)
def test_the_members_transfers_show_how_busy_the_line_is(transfers, line):
    assert records([1.0] * len(transfers), transfers).line == pytest.approx(line)


def test_on_a_busy_line_no_work_is_cut_and_it_stays_busy_until_clearly_calm():
    busy = [0.25, 0.5, 0.75, 1.0]
    book = records([1.0] * 4, busy)
    book.nodes[4] = Record("ASYNC", 0.0)
    book.update(arrived(4, 4.0, 0.5), 64, 0)
    for fit in FITS:
        assert book.decide(4, 1.5, fit, grouped=True)[:2] == ("ASYNC", False)
    assert "of a round on the line" in book.decide(4, 1.5, "merge", grouped=True)[2]
    for slot, still in ((0.1, True), (0.05, False), (0.1, False)):
        for worker in range(4):
            book.monitor.nodes[worker].transfer = slot * (1 + worker)
        book.regroup(dict.fromkeys(range(5), 64), "merge")
        assert book.busy == still, book.line
    assert book.decide(4, 1.5, "merge", grouped=True)[:2] == ("ASYNC", True)


def test_one_distant_link_is_not_taken_for_a_busy_line_and_work_is_cut():
    cluster = ran("dasp", [1.0, 1.0, 1.0, 1.0, 4.0], transfer=[0.02, 0.02, 0.02, 0.45, 0.02])
    assert not cluster.strategy.state.records.busy
    assert cluster.states[4] == "SYNC"
    assert [work for _, worker, work, _ in cluster.grants() if worker == 4][-1] < 32


@pytest.mark.parametrize("line", [0.3, 1.0])
def test_a_busy_line_is_recognized_where_pushes_do_not_say_how_long_they_waited(line):
    strategy, handle = strategies.build("dasp:fit=none", 0), Dasp.handle
    strategy.handle = lambda event: handle(strategy, without_queues(event))
    simulate(strategy, behind(line, {1.0: 4, 0.5: 2, 0.25: 2}, 0.1, 0), work=64, model_bytes=MB, max_seconds=30.0)
    records = strategy.state.records
    assert records.shares.line.each == 0.0
    assert records.busy == (line == 1.0)
    assert 0.6 * line < records.line < 0.9 * line  # of the usual round, which contains it


def without_queues(event):
    if isinstance(event, Pushed):
        return msgspec.structs.replace(event, queued_down_s=None, queued_up_s=None)
    return event


def behind(line, speeds, jitter, seed):
    """Workers that compute for 1 s at speed 1, behind a line that all models take `line` seconds of."""
    workers = "".join(f"[[workers]]\ncount = {count}\nspeed = {speed}\n" for speed, count in speeds.items())
    text = f"""
seed = {seed}
[compute]
seconds_per_sample = {1 / 64}
jitter = "lognormal:{jitter}"
[network]
bandwidth_mbps = {8 * MB * sum(speeds.values()) / line / 1e6}
{workers}"""
    return scenario.parse(text, "behind a line", Path())


def behind_a_line(per_sample, each, fit="join", nominal=64):
    """Records after two rounds of members whose models went down one after the other, `each` seconds apart."""
    book = Records()
    for worker, seconds in enumerate(per_sample):
        book.nodes[worker] = Record("SYNC" if seconds <= 1.5 * min(per_sample) else "ASYNC", 0.0)
    for at in (0.0, 10.0):
        for worker in range(len(per_sample)):
            book.shares.line.note_model(worker, at)
        for worker, seconds in enumerate(per_sample):
            down = each * worker
            event = arrived(worker, seconds * nominal + 2 * each + down, 2 * each + down)
            event = msgspec.structs.replace(event, queued_down_s=down, queued_up_s=0.0)
            book.update(event, nominal, 0)
    book.regroup(dict.fromkeys(range(len(per_sample)), nominal), fit)
    return book


def test_on_a_busy_line_whose_queue_is_known_members_share_a_nominal_round_by_their_turns():
    book = behind_a_line([0.01, 0.01, 0.01, 0.011], each=0.18)
    shares = book.shares
    assert book.busy
    assert shares.line.each == pytest.approx(0.18)
    assert 4 * 64 <= sum(shares.of.values()) <= 4 * 64 + 3  # whole samples
    # The fastest are first down and last up, so they have most time.
    assert shares.of[0] >= shares.of[1] >= shares.of[2] > shares.of[3] > 0
    assert shares.line.in_turn([3, 2, 1, 0]) == [0, 1, 2, 3]
    assert book.usual == shares.span
    assert book.work(0, 64)[0] == shares.of[0]
    assert book.decide(3, 1.5, "join", grouped=True)[:2][0] == "SYNC"
    for worker, samples in shares.of.items():  # nobody's push is late for its turn
        turn = shares.span - (shares.line.place[worker] + 1) * 0.18
        assert (shares.line.place[worker] + 1) * 0.18 + samples * (0.01, 0.01, 0.01, 0.011)[worker] <= turn + 1e-9


def test_who_has_no_time_between_its_turns_is_left_out_of_the_planned_round():
    book = behind_a_line([0.01, 0.01, 0.01, 1.0], each=0.2)
    assert set(book.shares.of) == {0, 1, 2}
    assert 4 * 64 <= sum(book.shares.of.values()) <= 4 * 64 + 2
    assert book.decide(3, 1.5, "join", grouped=True)[:2] == ("ASYNC", False)
    assert book.work(3, 64)[0] == 64


@pytest.mark.parametrize("fit", ["merge", "none"])
def test_no_round_is_planned_where_slower_nodes_are_no_members(fit):
    assert behind_a_line([0.01, 0.01, 0.01, 0.011], 0.18, fit).shares.of == {}


def test_on_a_free_line_no_round_is_planned():
    assert behind_a_line([0.01, 0.01, 0.01, 0.011], 0.001).shares.of == {}


def test_a_node_that_is_gone_has_no_share():
    book = behind_a_line([0.01, 0.01, 0.01, 0.011], 0.18)
    book.forget(1)
    assert set(book.shares.of) == {0, 2, 3}
    book.regroup(dict.fromkeys((0, 2, 3), 64), "join")
    assert sum(book.shares.of.values()) >= 3 * 64


def test_sizing_estimates_compute_and_transfer_separately():
    book = records([1.0, 1.0])
    book.nodes[2] = Record("ASYNC", 0.0, sized=True)
    book.monitor.record(2, 64, 64, 3.2, 0.5)
    assert book.work(2, 64)[0] == 10


CHANGES = {  # of worker 3's speed: (time, factor); then how many they are
    "slower": [(20.0, 4.0)],
    "slower for a while": [(20.0, 4.0), (45.0, 1.0)],
    "faster": [(20.0, 0.25)],
    "slightly slower": [(20.0, 1.4)],
    "at the bound": [(20.0, 1.6)],
    "stalls": [(at + late, factor) for at in range(20, 140, 20) for late, factor in ((0, 6.0), (1.5, 1.0))],
    "again and again": [(20.0 * n, 4.0 if n % 2 else 1.0) for n in range(1, 8)],
    "slower and slower": [(30.0 * n, float(1 + n)) for n in range(1, 5)],
}


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("jitter", [0.0, 0.1])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_a_change_of_speed_changes_the_state_at_most_twice(changes, jitter, fit):
    for seed in range(3):
        cluster = VirtualCluster(strategies.build(f"dasp:fit={fit}", 0), [1.0] * 8, work=64, jitter=jitter, seed=seed)
        for at, factor in changes:
            cluster.at(at, "slow", worker=3, value=factor)
        cluster.run(until=160.0)
        assert len(marks(cluster, 3)) - 2 <= 2 * len(changes), marks(cluster, 3)
        assert all(marks(cluster, worker) == ["WARMUP", "SYNC"] for worker in range(8) if worker != 3)


def changed(decisions):
    """When states changed after a node's first one."""
    marked = [(d.event.at, a.worker) for d in decisions for a in d.actions if isinstance(a, Mark)]
    return [at for number, (at, worker) in enumerate(marked) if sum(w == worker for _, w in marked[:number]) > 1]


MIXES = {"equal": {1.0: 8}, "uneven": {1.0: 4, 0.5: 2, 0.25: 2}}


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("speeds", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize(("jitter", "lasting"), [(0.1, 0), (0.2, 1), (0.3, 2)])
def test_jitter_alone_changes_no_states(jitter, lasting, speeds, fit):
    """After half a minute, in which estimates from one push each are corrected: `lasting` changes on average."""
    seconds = [1 / speed for speed, count in speeds.items() for _ in range(count)]
    runs = [changed(ran(f"dasp:fit={fit}", seconds, 160.0, jitter=jitter, seed=seed).decisions) for seed in range(6)]
    assert sum(len(changes) for changes in runs) <= 6 * 4
    assert all(len(changes) <= 8 for changes in runs), "once a node"
    assert sum(at > 30.0 for changes in runs for at in changes) <= 6 * lasting / 2


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("speeds", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("line", [0.3, 1.0])
def test_jitter_alone_changes_no_states_behind_a_line(line, speeds, fit):
    late = 0
    for seed in range(3):
        lines = Lines()
        strategy = strategies.build(f"dasp:fit={fit}", 0)
        cluster = behind(line, speeds, 0.3, seed)
        simulate(strategy, cluster, work=64, model_bytes=MB, max_seconds=160.0, sink=lines)
        changes = changed([written for written in lines if isinstance(written, Decision)])
        assert len(changes) <= 8
        late += sum(at > 30.0 for at in changes)
    assert late <= 6


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("jitter", [0.2, 0.3])
@pytest.mark.parametrize("times", [2.0, 4.0, 8.0])
def test_under_jitter_a_slow_down_changes_the_state_at_most_twice(times, jitter, fit):
    counts = []
    for seed in range(6):
        cluster = VirtualCluster(strategies.build(f"dasp:fit={fit}", 0), [1.0] * 8, work=64, jitter=jitter, seed=seed)
        cluster.at(40.0, "slow", worker=3, value=times)
        cluster.run(until=160.0)
        mine = [d for d in cluster.decisions if any(isinstance(a, Mark) and a.worker == 3 for a in d.actions)]
        counts.append(sum(d.event.at > 40.0 for d in mine))
        if times >= 4:
            assert cluster.states[3] == ("SYNC" if fit == "join" else "ASYNC")
    assert max(counts) <= 2, counts


def test_a_member_that_is_late_once_stays_one_and_its_push_is_damped():
    strategy = started()
    strategy.handle(push(2.5, 0, 3, 2))
    [timer] = [a for a in strategy.handle(TimerFired(3.0, "barrier")) if isinstance(a, SetTimer)] or [None]
    assert timer is None
    assert strategy.state.missing == {1}
    strategy.handle(push(3.2, 1, 4, 2, 1.7))
    actions = strategy.handle(push(4.0, 0, 5, 3))
    assert [a.pushes for a in actions if isinstance(a, Apply)] == [(5, 4)]
    assert [a.weights for a in actions if isinstance(a, Apply)] == [pytest.approx((1 / 3, (1 + 1 / 3) ** -2 / 3))]
    assert not any(isinstance(a, Mark) for a in actions)
    strategy.handle(push(5.0, 0, 6, 4))
    strategy.handle(push(5.1, 1, 7, 3))
    assert strategy.state.records.nodes[1].late == 0


def test_a_member_that_is_late_twice_in_a_row_leaves_the_group():
    strategy = started()
    strategy.handle(push(2.5, 0, 3, 2))
    [apply, *_] = strategy.handle(TimerFired(3.0, "barrier"))
    assert "without w1, late after 1.5 s" in apply.reason
    actions = strategy.handle(push(4.0, 0, 4, 3))
    assert [a.pushes for a in actions if isinstance(a, Apply)] == [(4,)]
    [mark] = [a for a in actions if isinstance(a, Mark)]
    assert (mark.worker, mark.state) == (1, "ASYNC")
    assert "w1 was late for 2 steps in a row" in mark.reason


def test_a_barrier_waits_longer_where_times_vary_but_no_more_than_twice_the_usual_round():
    for deviation, patience in ((0.08, 1.5), (0.16, 1.64), (0.24, 1.96), (0.75, 2.0)):
        book = records([1.0] * 4)
        for node in book.monitor.nodes.values():
            node.deviation, node.pushes = deviation, 100
        book.monitor.nodes[0].deviation = 5.0  # a restless node alone
        book.regroup(dict.fromkeys(range(4), 64), "merge")
        assert book.patience(1.5) == pytest.approx(patience)
        assert book.patience(3.0) == 3.0


def test_deviations_of_few_pushes_count_in_full():
    book = records([1.0] * 4)
    for worker in range(4):
        book.update(arrived(worker, 1.2), 64, 0)
    book.regroup(dict.fromkeys(range(4), 64), "merge")
    assert book.spread == pytest.approx(0.2 / 1.04)


@pytest.mark.parametrize("fit", FITS)
def test_a_node_that_becomes_slow_costs_the_others_a_round_at_most(fit):
    for jitter, seed in ((0.0, 0), (0.3, 0), (0.3, 1), (0.3, 2)):
        steps = []
        for factor in (1.0, 4.0):
            cluster = VirtualCluster(
                strategies.build(f"dasp:fit={fit}", 0), [1.0] * 8, work=64, jitter=jitter, seed=seed
            )
            cluster.at(20.0, "slow", worker=3, value=factor)
            steps.append(cluster.run(until=60.0).version)
        assert steps[1] >= steps[0] - 2


@pytest.mark.parametrize("fit", FITS)
def test_a_node_that_recovers_is_a_member_again_after_two_pushes(fit):
    cluster = VirtualCluster(strategies.build(f"dasp:fit={fit}", 0), [1.0] * 8, work=64, jitter=0.05)
    cluster.at(20.0, "slow", worker=3, value=4.0)
    cluster.at(60.0, "slow", worker=3, value=1.0)
    cluster.run(until=60.0)
    assert cluster.states[3] == ("SYNC" if fit == "join" else "ASYNC")
    cluster.run(until=68.0)
    assert cluster.states[3] == "SYNC"
    assert [work for _, worker, work, _ in cluster.grants() if worker == 3][-1] == 64


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


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("seconds", [[0.0] * 4, [0.0, 0.0, 1.0, 2.0], [1e-9, 1.0, 50.0, 1e4]])
def test_extreme_times_stop_nothing(seconds, fit):
    for transfer in (0.0, 0.5):
        strategy = strategies.build(f"dasp:fit={fit}", 0)
        cluster = VirtualCluster(strategy, seconds, transfer=transfer, exponential=True, refuse=0.1)
        assert cluster.run(pushes=200).arrived == 200
