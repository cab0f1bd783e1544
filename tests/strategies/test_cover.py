"""Cover: late pushes of workers that are hardly ever among the first k."""

import itertools

import pytest
from virtual_cluster import VirtualCluster

from paceline import strategies
from paceline.core.actions import Apply, Cancel, Grant, Mark
from paceline.core.events import Joined, Left, Pushed
from paceline.strategies.cover import MEMORY, OWED, Cover, rounds_between

SPEEDS = [1.0] * 7 + [8.0]  # seconds of a push; the last one is lastingly slow
SPEC = "fastest_k:k=6,cover=true"


def pushed(worker, push, clock=1, samples=8):
    return Pushed(1.0, worker, push, clock, clock - 1, samples, 1.0, 0.0, 0.0, 0, 0)


def run(spec=SPEC, seconds=SPEEDS, pushes=3000, **options):
    return VirtualCluster(strategies.build(spec, 0), seconds=seconds, **{"jitter": 0.1, **options}).run(pushes=pushes)


def workers_of_pushes(cluster):
    return {d.event.push: d.event.worker for d in cluster.decisions if isinstance(d.event, Pushed)}


def weights(cluster, worker):
    """By round: the weight of this worker's pushes."""
    of = workers_of_pushes(cluster)
    return [
        sum(w for push, w in zip(a.pushes, a.weights, strict=True) if of[push] == worker) for a in cluster.applies()
    ]


def test_without_it_a_lastingly_slow_worker_brings_nothing():
    assert sum(weights(run(SPEC.removesuffix(",cover=true")), 7)) == 0


def test_a_slow_worker_brings_its_share_at_no_cost_in_time():
    seconds = [1.0] * 7 + [4.0]  # less than half as many rounds as there are workers
    covered, plain = (run(spec, seconds, pushes=3000) for spec in (SPEC, SPEC.removesuffix(",cover=true")))
    rounds = len(covered.applies())
    assert min(sum(weights(covered, w)) for w in range(8)) / rounds > 0.85 / 8
    assert covered.now / rounds == pytest.approx(plain.now / len(plain.applies()), rel=0.02)


def test_one_that_takes_longer_has_half_a_step_each_time():
    cluster = run()
    rounds = len(cluster.applies())
    between = 8.0 / (cluster.now / rounds)  # rounds of one push of it
    assert sum(weights(cluster, 7)) / rounds == pytest.approx(1 / (2 * between), rel=0.15)


def test_a_push_of_it_is_merged_as_often_as_promised():
    cluster = run()
    found = [number for number, weight in enumerate(weights(cluster, 7)) if weight]
    longest = 8.0 * 1.5 / 0.95  # rounds of one push of it: nothing else takes longer than these
    assert found[0] <= rounds_between(6, 8) + longest
    assert max(after - before for before, after in itertools.pairwise(found)) <= rounds_between(6, 8) + longest


def test_late_pushes_are_at_most_half_of_a_step():
    for seconds in (SPEEDS, [1.0] * 6 + [30.0, 30.0]):
        cluster = run(seconds=seconds)
        clocks = {d.event.push: d.event.clock for d in cluster.decisions if isinstance(d.event, Pushed)}
        shares = []
        for apply in cluster.applies():
            current = max(clocks[push] for push in apply.pushes)
            shares.append(sum(w for p, w in zip(apply.pushes, apply.weights, strict=True) if clocks[p] < current))
        assert 0.3 < max(shares) <= 0.5 + 1e-9


def test_on_equal_workers_chance_covers_nobody():
    cluster = run("fastest_k:k=2,cover=true", [1.0] * 10, pushes=4000, exponential=True)
    plain = run("fastest_k:k=2", [1.0] * 10, pushes=4000, exponential=True)
    assert cluster.without_reasons() == plain.without_reasons()


def test_a_covered_worker_is_not_cancelled_and_counts_no_further_once_it_is_in_time_again():
    cluster = VirtualCluster(strategies.build(SPEC, 0), seconds=SPEEDS, jitter=0.1)
    cluster.at(200.0, "slow", worker=7, value=1 / 16)
    cluster.run(until=300.0)
    marks = [a for d in cluster.decisions for a in d.actions if isinstance(a, Mark)]
    assert [(mark.worker, mark.state) for mark in marks] == [(7, "covered"), (7, "in step")]
    assert "owes 20" in marks[0].reason
    since = next(i for i, d in enumerate(cluster.decisions) if marks[0] in d.actions)
    until = next(i for i, d in enumerate(cluster.decisions) if marks[1] in d.actions)
    cancelled = [a.worker for d in cluster.decisions[since:until] for a in d.actions if isinstance(a, Cancel)]
    assert 7 not in cancelled
    assert cluster.strategy.state.cover.running == set()


def test_late_pushes_have_the_share_that_is_owed():
    cover = Cover(debt={1: 2.0, 2: 0.2}, arrived={1: pushed(1, 10, samples=2), 2: pushed(2, 11, samples=2)})
    assert cover.shares([pushed(w, w) for w in range(3, 13)]) == pytest.approx({1: 0.2, 2: 0.1})
    assert cover.shares([pushed(3, 3)] * 3) == pytest.approx({1: 1 / 3, 2: 1 / 6})
    assert cover.shares([]) == {1: 0.5, 2: 0.5}
    cover.arrived[1] = pushed(1, 10, samples=0)  # refused
    assert cover.shares([pushed(3, 3)] * 4) == {2: 0.25}
    assert Cover().shares([]) == {}


def test_debt_is_forgotten_paid_and_never_negative():
    cover = Cover()
    for _ in range(1000):
        cover.end_round({0: pushed(0, 1)}, [0, 1], 2)
    assert cover.debt[0] == pytest.approx(0.0, abs=0.6)
    assert cover.debt[1] == pytest.approx(MEMORY, rel=1e-3)
    assert (cover.covered, cover.running) == ({1}, {1})
    assert cover.takes(pushed(1, 2))
    assert not cover.takes(pushed(0, 3))
    cover.end_round({0: pushed(0, 4)}, [0, 1], 2)
    assert cover.debt[1] == pytest.approx(MEMORY - 0.5, rel=1e-3)  # half of that step, which is of one push
    assert cover.running == set()


def test_rounds_between_are_those_of_a_worker_that_brings_nothing():
    cover, rounds = Cover(), 0
    while 3 not in cover.covered:
        cover.end_round({0: pushed(0, 1), 1: pushed(1, 2)}, range(4), 4)
        rounds += 1
    assert rounds == pytest.approx(rounds_between(2, 4), abs=1)
    assert rounds_between(2, 4) == pytest.approx(OWED / 0.5, rel=0.35)


def test_who_leaves_while_its_late_push_waits_leaves_it_behind():
    strategy = strategies.build("fastest_k:k=2,cover=true", 0)
    for worker in range(3):
        strategy.handle(Joined(0.0, worker, 8))
    cover = strategy.state.cover
    cover.covered.add(2)
    strategy.handle(pushed(0, 1))
    actions = strategy.handle(pushed(1, 2))
    assert [a.worker for a in actions if isinstance(a, Grant)] == [0, 1]
    assert not any(isinstance(a, Cancel) for a in actions)
    assert strategy.handle(pushed(2, 3)) == []
    assert strategy.handle(Left(2.0, 2, "crash")) == []
    assert cover.arrived == {}
    assert 2 not in cover.debt
    strategy.handle(pushed(0, 4, clock=2))
    (apply,) = [a for a in strategy.handle(pushed(1, 5, clock=2)) if isinstance(a, Apply)]
    assert (apply.pushes, apply.weights) == ((4, 5, 3), (1 / 3, 1 / 3, 1 / 3))


def test_when_only_late_workers_are_left_each_of_their_pushes_ends_a_round():
    strategy = strategies.build("fastest_k:k=1,cover=true", 0)
    for worker in range(2):
        strategy.handle(Joined(0.0, worker, 8))
    strategy.state.cover.covered.add(1)
    strategy.handle(pushed(0, 1))
    assert strategy.handle(Left(2.0, 0, "leave")) == []
    actions = strategy.handle(pushed(1, 2))
    assert [type(a) for a in actions][:2] == [Apply, Grant]
    assert actions[0].weights == (1.0,)


@pytest.mark.parametrize("spec", ["adaptive_k:start=2,stop=6,burn_in=20,threshold=2,cover=true",
                                  "adaptive_k_load:loads=2/8,window=8,burn_in=5,stop=6,cover=true"])  # fmt: skip
def test_the_strategies_that_grow_cover_too(spec):
    cluster = run(spec, statistics=lambda apply, pushes: (-1.0, 1.0, 1.0))
    late = weights(cluster, 7)[len(cluster.applies()) // 2 :]
    assert sum(late) / len(late) > 0.4 / 8
    assert run(spec.replace(",cover=true", ""), statistics=lambda a, p: (-1.0, 1.0, 1.0)).states == {}
