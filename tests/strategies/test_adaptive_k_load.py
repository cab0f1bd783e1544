"""Adaptive k and load: the measured frontier and the walk along it."""

import itertools
import random

import pytest
from switching import switches
from virtual_cluster import VirtualCluster

from paceline import strategies
from paceline.core.actions import Apply, Grant, Track
from paceline.core.errors import OptionError
from paceline.core.events import Joined, Left, Pushed
from paceline.strategies.error_bound import Constants, error_after, fastest_falling, floor_of, mean_response
from paceline.strategies.load_frontier import (
    MEASURED_ROUNDS,
    WATCHED_ROUNDS,
    Expected,
    FrontierWatch,
    Point,
    frontier,
    growing_ks,
    mean_seconds,
    times_of,
)

LOADS = "adaptive_k_load:loads=2/4/8,window=10,burn_in=10"


def run(spec=LOADS, loss=lambda: 1.0, pushes=3000, seconds=(1.0,) * 6, transfer=0.5, **options):
    cluster = VirtualCluster(
        strategies.build(spec, 0),
        seconds=list(seconds),
        transfer=transfer,
        statistics=lambda apply, pushes: (None, 1.0, loss()),
        **{"exponential": True, **options},
    )
    return cluster.run(pushes=pushes)


def tracked(cluster, name):
    return [int(value) for _, what, value, _ in cluster.tracks if what == name]


def test_frontier_keeps_what_nothing_beats_in_both():
    points = [Point(1, 4, 1.0), Point(2, 2, 1.5), Point(2, 4, 2.0), Point(4, 2, 1.2), Point(4, 4, 3.0)]
    assert frontier(points) == [Point(1, 4, 1.0), Point(4, 2, 1.2), Point(4, 4, 3.0)]


def test_frontier_prefers_the_smaller_load_where_all_else_is_equal():
    assert frontier([Point(1, 4, 1.0), Point(2, 2, 1.0)]) == [Point(2, 2, 1.0)]


def test_mean_seconds_are_exact_without_chance():
    times = {worker: [0.5] for worker in range(4)}
    samples = {worker: [float(worker + 1)] for worker in range(4)}
    points = mean_seconds(times, samples, [1, 3], [2, 10], random.Random(0))
    found = [(point.k, point.load, point.seconds) for point in points]
    assert found == [(1, 2, 2.5), (3, 2, 6.5), (1, 10, 10.5), (3, 10, 30.5)]


def test_mean_seconds_meet_the_order_statistics_of_exponential_times():
    draw = random.Random(1)
    times = {worker: [draw.expovariate(1.0) for _ in range(50)] for worker in range(10)}
    nothing = {worker: [0.0] for worker in range(10)}
    points = mean_seconds(times, nothing, range(1, 11), [1], random.Random(0))
    for point in points:
        assert point.seconds == pytest.approx(sum(1 / i for i in range(11 - point.k, 11)), rel=0.15)


def test_growing_ks_end_at_stop():
    assert growing_ks(1, 1, 1) == [1]
    assert growing_ks(10, 40, 10) == [10, 20, 30, 40]
    assert growing_ks(1, 6, 2) == [1, 3, 5, 6]


def test_the_first_rounds_wait_for_everybody_at_the_smallest_load():
    cluster = run(pushes=MEASURED_ROUNDS * 6)
    assert cluster.cancelled == 0
    assert {a.work for d in cluster.decisions[:-1] for a in d.actions if isinstance(a, Grant)} == {2}
    assert len(cluster.applies()) == MEASURED_ROUNDS
    assert cluster.strategy.state.points
    assert cluster.strategy.state.communication == {}


def test_the_batch_never_falls_and_ends_at_everybody_at_full_load():
    cluster = run()
    walked = list(zip(tracked(cluster, "k"), tracked(cluster, "load")[1:], strict=True))
    batches = [k * load for k, load in walked]
    assert batches == sorted(batches)
    assert walked[-1] == (6, 8)
    assert len(set(walked)) > 4
    assert {a.work for d in cluster.decisions[-50:] for a in d.actions if isinstance(a, Grant)} == {8}


def test_it_stays_at_a_point_while_the_loss_falls():
    losses = iter(range(10**6, 0, -1))
    cluster = run(loss=lambda: float(next(losses)))
    assert len(tracked(cluster, "k")) == 1


def test_where_responses_are_all_communication_only_the_full_load_is_sent_by_several():
    points = run(seconds=(0.01,) * 6, transfer=1.0).strategy.state.points
    assert {point.load for point in points if point.k > 1} == {8}


def test_where_everybody_takes_the_same_time_a_larger_load_is_for_batches_beyond_all_workers():
    points = run(transfer=0.001, exponential=False, jitter=0.05).strategy.state.points
    assert {point.k for point in points if point.load == 2} == {1, 2, 3, 4, 5, 6}
    assert {point.k for point in points if point.load > 2} == {4, 5, 6}


def test_loads_default_to_fractions_of_nominal_work():
    cluster = run("adaptive_k_load:window=10,burn_in=10", work=80)
    assert set(tracked(cluster, "load")) <= {10, 20, 40, 80}
    assert tracked(cluster, "load")[0] == 10
    assert tracked(cluster, "load")[-1] == 80


def test_the_walk_depends_on_the_injected_chance_alone():
    first, second = run(pushes=400), run(pushes=400)
    assert first.decisions == second.decisions


# -- a cluster whose times change ------------------------------------------------------------------------------------

STEADY = "adaptive_k_load:loads=2/4/8,window=10,burn_in=1000000"  # stays where its walk begins
AGAIN = "measure the cluster again"


def rounds_before(cluster, at):
    """How many rounds had ended by then."""
    return sum(isinstance(a, Apply) for d in cluster.decisions if d.event.at <= at for a in d.actions)


def said(cluster, name="k"):
    """(time, value, reason) of every Track of that name."""
    return [
        (d.event.at, a.value, a.reason) for d in cluster.decisions for a in d.actions
        if isinstance(a, Track) and a.name == name
    ]  # fmt: skip


def changed(factor, seed, at=30.0, spec=STEADY, workers=10, until=90.0, who=None, **options):
    cluster = VirtualCluster(
        strategies.build(spec, seed), transfer=0.1, seed=seed, statistics=lambda apply, pushes: (None, 1.0, 1.0),
        **{"seconds": [1.0] * workers, "exponential": True, **options},
    )  # fmt: skip
    for worker in range(workers) if who is None else who:
        cluster.at(at, "slow", worker=worker, value=factor)
    return cluster.run(until=until)


def cluster_load(cluster, at):
    return next(value for time, value, _ in said(cluster, "load") if time == at)


def mean_seconds_of(k, load, factor, workers=10, rounds=2000):
    """The mean of the k-th response on the cluster of `changed`, from its distributions."""
    draw, total = random.Random(5), 0.0
    for _ in range(rounds):
        responses = [
            0.1 * draw.expovariate(1) + factor * load / 8 * draw.expovariate(1) for _ in range(workers)
        ]  # fmt: skip
        total += sorted(responses)[k - 1]
    return total / rounds


@pytest.mark.parametrize("factor", [4.0, 0.25])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("start", [2, 5])
def test_the_frontier_follows_a_change_of_all_within_50_rounds(factor, seed, start):
    cluster = changed(factor, seed, spec=f"{STEADY},start={start}", until=90.0 if factor > 1 else 40.0)
    after = [each for each in said(cluster) if each[0] > 30.0]
    assert AGAIN in after[0][2]
    assert "on the measured frontier" in after[1][2]
    assert rounds_before(cluster, after[1][0]) - rounds_before(cluster, 30.0) <= 50
    said_of = float(after[1][2].split(" s a step")[0].rpartition(" ")[2])
    true = mean_seconds_of(int(after[1][1]), int(cluster_load(cluster, after[1][0])), factor)
    assert said_of == pytest.approx(true, rel=0.6)  # of eight rounds; the change is 4 times


def test_a_change_beyond_the_first_k_shows_when_k_reaches_it():
    uneven = {"seconds": [1.0] * 8 + [2.0] * 2, "exponential": False, "jitter": 0.1, "who": [8, 9]}
    steady = changed(20.0, 0, spec=f"{STEADY},start=3", **uneven)
    assert not [reason for _, _, reason in said(steady) if AGAIN in reason]
    walking = "adaptive_k_load:loads=8,window=5,burn_in=40,start=3,step=6,stop=9"
    cluster = changed(20.0, 0, spec=walking, until=1600.0, **uneven)
    again = [at for at, _, reason in said(cluster) if AGAIN in reason]
    assert again
    assert again[0] > next(at for at, k, _ in said(cluster) if k == 9)


@pytest.mark.parametrize("exponential", [True, False])
def test_a_cluster_that_stays_as_it_is_is_hardly_ever_measured_again(exponential):
    noise = {"exponential": exponential, "jitter": 0.2}
    clusters = [changed(1.0, seed, until=60.0, spec=f"{STEADY},start=2", **noise) for seed in range(6)]
    again = sum(AGAIN in reason for cluster in clusters for _, _, reason in said(cluster))
    rounds = sum(len(cluster.applies()) for cluster in clusters)
    assert again / rounds < 1 / 500


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_while_it_is_measured_again_steps_are_no_smaller_and_so_afterwards(factor):
    spec = "adaptive_k_load:loads=2/4/8,window=10,burn_in=30"
    cluster = changed(factor, 1, spec=spec, until=200.0)
    pairs = zip(said(cluster), said(cluster, "load")[1:], strict=True)
    steps = [(k * load, AGAIN in reason) for (_, k, reason), (_, load, _) in pairs]
    walked = [batch for batch, measuring in steps if not measuring]
    assert walked == sorted(walked)
    measuring = [(before, batch) for (before, _), (batch, again) in itertools.pairwise(steps) if again]
    assert measuring
    assert all(batch >= before for before, batch in measuring)


def test_refreshes_that_find_what_was_known_come_ever_later():
    strategy = strategies.build(STEADY, 0)
    VirtualCluster(strategy, seconds=[1.0] * 6, exponential=True, statistics=lambda a, p: (None, 1.0, 1.0)).run(
        pushes=60
    )
    state = strategy.state
    point = state.points[state.position]
    for patience in (32, 64):
        strategy._measure_again(point, 6, "a test says so")
        state.communication = {w: [0.1] for w in range(6)}
        state.computation = {w: [point.seconds / point.load] for w in range(6)}
        strategy._begin_walk()
        found = state.points[state.position]
        in_vain = (found.k, found.load) == (point.k, point.load) and 2 / 3 < found.seconds / point.seconds < 1.5
        assert state.watch.patience == (patience if in_vain else WATCHED_ROUNDS)
        if not in_vain:
            break
        point = found


def test_expected_times_of_the_first_k_are_theirs_not_the_clusters():
    times = {worker: [0.5] for worker in range(4)}
    samples = {worker: [float(worker + 1)] for worker in range(4)}
    (point,) = mean_seconds(times, samples, [2], [3], random.Random(0))
    assert point.expected == Expected((6.5, 0.5, 1.5), (0.0, 0.0, 0.0))


def push_of(worker, compute, transfer=0.5, samples=3):
    return Pushed(0.0, worker, worker, 1, 0, samples, compute, transfer, 0.0, 0, 0)


def test_what_a_round_shows():
    assert times_of([push_of(0, 3.0), push_of(1, 6.0)]) == (6.5, 0.5, 1.5)
    assert times_of([push_of(0, 3.0), push_of(1, 6.0, samples=0)]) is None
    assert times_of([]) is None


@pytest.mark.parametrize(
    ("seen", "what"),
    [
        ((26.0, 0.5, 1.5), "the k-th response took 4 times the expected 6.5 s"),
        ((6.5, 0.1, 1.5), "transfers took 0.2 times the expected 0.5 s"),
        ((6.5, 0.5, 6.0), "computing a sample took 4 times the expected 1.5 s"),
        ((7.0, 0.6, 1.2), None),
    ],
)
def test_the_watch_names_what_has_changed(seen, what):
    watch, point = FrontierWatch(), Point(2, 3, 6.5, Expected((6.5, 0.5, 1.5), (0.2, 0.2, 0.2)))
    early = [watch.left(point, seen) for _ in range(WATCHED_ROUNDS - 1)]
    assert early == [None] * (WATCHED_ROUNDS - 1)
    found = watch.left(point, seen)
    assert found == (what and f"in {WATCHED_ROUNDS} rounds {what}")


def test_the_watch_allows_for_chance_and_for_points_that_know_nothing():
    watch, noisy = FrontierWatch(), Point(1, 3, 6.5, Expected((6.5, 0.5, 1.5), (1.0, 1.0, 1.0)))
    assert [watch.left(noisy, (13.0, 1.0, 3.0)) for _ in range(40)] == [None] * 40
    assert FrontierWatch().left(Point(1, 3, 6.5), (100.0, 1.0, 3.0)) is None
    assert FrontierWatch().left(noisy, None) is None


def test_a_newcomer_in_rounds_that_measure_again_is_waited_for():
    cluster = changed(4.0, 0, until=31.0)
    while cluster.strategy.state.left is None:
        cluster.run(pushes=cluster.arrived + 1)
    tracks = [a for a in cluster.strategy.handle(Joined(cluster.now, 10, 8)) if isinstance(a, Track)]
    assert [(a.name, a.value) for a in tracks] == [("k", 11)]


# -- workers that go and come ----------------------------------------------------------------------------------------


class Lockstep:
    """Rounds in which each of the workers pushes, or as many as are waited for."""

    def __init__(self, spec, workers):
        self.strategy = strategies.build(spec, 0)
        self.number, self.at, self.tracks = 0, 0.0, []
        for worker in range(workers):
            self.strategy.handle(Joined(0.0, worker, 8))

    def rounds(self, count, workers, seconds=1.0):
        for _ in range(count):
            self.at += seconds
            clock = self.strategy.state.completed + 1
            for worker in workers:
                if self.strategy.state.completed + 1 > clock:
                    break  # the round is over
                self.number += 1
                work = self.strategy.state.load
                # Times differ a little, so that the k-th response rises with k.
                took = seconds * (1 + worker / 100)
                done = self.strategy.handle(Pushed(self.at, worker, self.number, clock, 0, work, took, 0, 0, 0, 0))
                self.tracks += [a for a in done if isinstance(a, Track)]

    def again(self):
        return [track.reason for track in self.tracks if AGAIN in track.reason and track.name == "k"]


OF_FOUR = "adaptive_k_load:start=3,test=pflug,loads=8"


@pytest.mark.parametrize("stop", ["", ",stop=3"])
def test_fewer_workers_than_k_are_measured_again(stop):
    steps = Lockstep(OF_FOUR + stop, 4)
    steps.rounds(MEASURED_ROUNDS, range(4))
    state = steps.strategy.state
    assert (state.points[0].k, state.points[0].seconds) == (3, pytest.approx(1.02))
    for worker in (3, 2):
        steps.strategy.handle(Left(steps.at, worker, "leave"))
    steps.rounds(WATCHED_ROUNDS, range(2), 8.0)
    assert steps.again() == [
        f"{MEASURED_ROUNDS} rounds of everybody {AGAIN}: in 16 rounds 2 workers were there, fewer than k=3"
    ]
    steps.rounds(MEASURED_ROUNDS, range(2), 8.0)
    assert [(point.k, point.seconds) for point in state.points] == [(2, pytest.approx(8.08))]
    steps.rounds(300, range(2), 8.0)
    assert len(steps.again()) == 1
    assert len(state.watch.rounds) == WATCHED_ROUNDS, "later changes are looked for as ever"
    steps.rounds(30, range(2), 24.0)
    assert "took" in steps.again()[1]


def test_workers_that_are_back_are_measured_too_and_k_may_grow_again():
    steps = Lockstep(OF_FOUR, 4)
    steps.rounds(MEASURED_ROUNDS, range(4))
    for worker in (3, 2):
        steps.strategy.handle(Left(steps.at, worker, "leave"))
    steps.rounds(WATCHED_ROUNDS + MEASURED_ROUNDS, range(2))
    for worker in (2, 3):
        steps.strategy.handle(Joined(steps.at, worker, 8))
    steps.rounds(WATCHED_ROUNDS, range(4))
    assert steps.again()[1].endswith("in 16 rounds 4 workers were there, more than the 2 measured")
    steps.rounds(MEASURED_ROUNDS, range(4))
    assert {point.k for point in steps.strategy.state.points} == {3, 4}


@pytest.mark.parametrize("cause", ["idle", "leave"])
def test_workers_that_wait_for_data_or_are_soon_back_have_nothing_measured(cause):
    steps = Lockstep(OF_FOUR, 4)
    steps.rounds(MEASURED_ROUNDS, range(4))
    for _ in range(3):
        for worker in (3, 2):
            steps.strategy.handle(Left(steps.at, worker, cause))
        steps.rounds(40 if cause == "idle" else WATCHED_ROUNDS - 1, range(2))
        for worker in (2, 3):
            steps.strategy.handle(Joined(steps.at, worker, 8))
        steps.rounds(2, range(4))
    assert steps.again() == []


# -- the error bound -------------------------------------------------------------------------------------------------

BOUND = "test=bound,eta=0.001,L=2,c=1,sigma2=10,error=100"
PUBLISHED = Constants(eta=0.001, smoothness=2, convexity=1, sigma2=10, samples=10)


def walk(points, error, constants):
    """Every change of the argmax, step by step: (time, error, position)."""
    at, position, found = 0.0, 0, []
    floors = [floor_of(1, Constants(*[getattr(constants, f) for f in ("eta", "smoothness", "convexity", "sigma2")],
                                    p.batch)) for p in points]  # fmt: skip
    while position < len(points) - 1:
        best = position + fastest_falling(error, floors[position:], [p.seconds for p in points[position:]])
        if best != position:
            found.append((at, error, best))
            position = best
        error = floors[position] + constants.contraction * (error - floors[position])
        at += points[position].seconds
    return found


def test_with_one_load_the_bound_makes_the_published_switches():
    points = [Point(k, 10, mean_response(k, 5, 5.0)) for k in range(1, 6)]
    published = switches(5, 5.0, 100.0, PUBLISHED)
    found = walk(points, 100.0, PUBLISHED)
    assert [position for _, _, position in found] == [1, 2, 3, 4]
    steps = [mean_response(k, 5, 5.0) for k in range(1, 6)]
    for switch, (at, error, _) in zip(published, found, strict=True):
        assert at == pytest.approx(switch.at, abs=sum(steps[: switch.k]))  # a switch waits for the end of a step
        assert error == pytest.approx(switch.error, rel=2e-3)
    assert [round(at) for at, _, _ in found] == pytest.approx([12423, 15541, 19841, 27563], abs=10)


def test_with_one_load_the_strategy_is_at_k_when_adaptive_k_is():
    spec = "loads=8,start=1"
    cluster = VirtualCluster(
        strategies.build(f"adaptive_k_load:{spec},test=bound,eta=0.01,L=2,c=1,sigma2=10,error=100", 0),
        seconds=[5.0] * 5, exponential=True, seed=3, transfer=0.0,
    )  # fmt: skip
    constants = Constants(eta=0.01, smoothness=2, convexity=1, sigma2=10, samples=8)
    expected = [switch.at for switch in switches(5, 5.0, 100.0, constants)]
    cluster.run(until=expected[-1] * 1.4)
    walked = [(at, k) for at, k, reason in said(cluster) if AGAIN not in reason]
    first = {k: at for at, k in reversed(walked)}
    assert sorted(first) == [1, 2, 3, 4, 5]
    # mu is measured in eight rounds of five workers, so times may be off by what such a mean is.
    assert [first[k] for k in range(2, 6)] == pytest.approx(expected, rel=0.35)


def test_the_bound_needs_neither_losses_nor_gradients_and_no_s():
    strategy = strategies.build(f"adaptive_k_load:{BOUND}", 0)
    assert (strategy.needs_applied, strategy.needs_losses) == (False, False)
    with pytest.raises(OptionError, match="test=bound needs c, error; give them or choose test=pflug"):
        strategies.build("adaptive_k_load:test=bound,eta=0.001,L=2,sigma2=10", 0)
    with pytest.raises(OptionError, match="eta is for test=bound, not trend"):
        strategies.build("adaptive_k_load:eta=0.001", 0)
    with pytest.raises(OptionError, match="adaptive_k_load has no option 's'"):
        strategies.build(f"adaptive_k_load:{BOUND},s=10", 0)


def test_the_bound_always_takes_the_steepest_point_and_its_steps_never_shrink():
    cluster = run(f"adaptive_k_load:loads=2/4/8,{BOUND}".replace("0.001", "0.05"), pushes=4000)
    strategy = cluster.strategy
    state = strategy.state
    batches = [k * load for (_, k, r), (_, load, _) in zip(said(cluster), said(cluster, "load")[1:], strict=True)
               if AGAIN not in r]  # fmt: skip
    assert batches == sorted(batches)
    rates = [
        (state.error - floor_of(1, strategy.options.constants_of(p.batch))) / p.seconds
        for p in state.points[state.position :]
    ]
    assert max(rates) == rates[0] or state.position == len(state.points) - 1


def test_below_all_floors_the_lowest_floor_is_taken():
    assert fastest_falling(0.1, [0.3, 0.2, 0.15], [1.0, 2.0, 3.0]) == 2
    assert fastest_falling(10.0, [0.3, 0.2, 0.15], [1.0, 2.0, 3.0]) == 0
    assert fastest_falling(0.31, [0.3, 0.2, 0.15], [1.0, 2.0, 3.0]) == 1


def test_the_bound_falls_with_steps_as_it_does_with_mean_time():
    error, floor = 100.0, floor_of(2, PUBLISHED)
    for _ in range(500):
        error = floor + PUBLISHED.contraction * (error - floor)
    assert error == pytest.approx(error_after(500 * 2.25, 2, 2.25, 100.0, PUBLISHED))


def test_a_snapshot_of_before_refreshes_goes_on_with_its_frontier():
    cluster = run(pushes=200)
    data = cluster.strategy.snapshot()
    for added in ("watch", "left", "error", "cover", "workers"):
        del data["state"][added]
    for point in data["state"]["points"]:
        del point["expected"]
    restored = strategies.build(LOADS, 1).restore(data)
    before = cluster.strategy.state
    assert [(p.k, p.load, p.seconds) for p in restored.state.points] == [
        (p.k, p.load, p.seconds) for p in before.points
    ]
    cluster.strategy = restored
    cluster.run(pushes=600)
    assert not [reason for _, _, reason in said(cluster) if AGAIN in reason]
    assert restored.state.position > before.position
