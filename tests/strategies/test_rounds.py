"""BSP and fastest k: what a round is, and what leaving does to it."""

import pytest
from virtual_cluster import VirtualCluster

from paceline import strategies
from paceline.core.actions import Apply, Cancel, Grant
from paceline.core.events import Joined, Left, Pushed


def started(spec, workers=3):
    strategy = strategies.build(spec, 0)
    for worker in range(workers):
        strategy.handle(Joined(0.0, worker, 8))
    return strategy


def pushed(worker, push, clock=1, samples=8, at=1.0):
    return Pushed(at, worker, push, clock, clock - 1, samples, 1.0, 0.0, 0.0, 0, 0)


def bare(actions):
    return [
        (a.pushes, a.weights) if isinstance(a, Apply) else (type(a).__name__, a.worker, getattr(a, "through", None))
        for a in actions
    ]


def test_bsp_holds_until_the_last_and_applies_in_worker_order():
    bsp = started("bsp")
    assert bsp.handle(pushed(2, 10)) == []
    assert bsp.handle(pushed(0, 11, samples=4)) == []
    assert bare(bsp.handle(pushed(1, 12, samples=4))) == [
        ((11, 12, 10), (0.25, 0.25, 0.5)),
        ("Grant", 0, 2),
        ("Grant", 1, 2),
        ("Grant", 2, 2),
    ]


def test_bsp_goes_on_without_a_leaver_in_the_same_decision():
    bsp = started("bsp")
    bsp.handle(pushed(0, 10))
    bsp.handle(pushed(1, 11))
    assert bare(bsp.handle(Left(2.0, 2, "crash"))) == [((10, 11), (0.5, 0.5)), ("Grant", 0, 2), ("Grant", 1, 2)]


def test_a_leavers_push_counts_in_the_apply_but_not_at_the_barrier():
    bsp = started("bsp", workers=2)
    bsp.handle(pushed(0, 10))
    assert bsp.handle(Left(2.0, 0, "crash")) == []
    assert bare(bsp.handle(Joined(3.0, 0, 8))) == [("Grant", 0, 1)]
    assert bsp.handle(pushed(1, 11)) == []
    assert bare(bsp.handle(pushed(0, 12))) == [
        ((10, 12, 11), (1 / 3, 1 / 3, 1 / 3)),
        ("Grant", 0, 2),
        ("Grant", 1, 2),
    ]


def test_fastest_k_cancels_the_rest_and_restarts_all():
    fastest = started("fastest_k:k=2", workers=4)
    assert fastest.handle(pushed(3, 10)) == []
    assert bare(fastest.handle(pushed(1, 11))) == [
        ((11, 10), (0.5, 0.5)),
        ("Cancel", 0, None),
        ("Cancel", 2, None),
        ("Grant", 0, 2),
        ("Grant", 1, 2),
        ("Grant", 2, 2),
        ("Grant", 3, 2),
    ]


def test_k_is_capped_at_the_workers_present():
    fastest = started("fastest_k:k=3", workers=3)
    fastest.handle(pushed(0, 10))
    assert fastest.handle(Left(2.0, 2, "leave")) == []
    assert bare(fastest.handle(Left(2.0, 1, "leave"))) == [((10,), (1.0,)), ("Grant", 0, 2)]


def test_a_held_push_of_a_leaver_does_not_count_towards_k():
    fastest = started("fastest_k:k=2", workers=3)
    fastest.handle(pushed(0, 10))
    fastest.handle(Left(2.0, 0, "crash"))
    fastest.handle(Joined(2.0, 0, 8))
    assert fastest.handle(pushed(2, 11)) == []
    assert bare(fastest.handle(pushed(1, 12)))[:2] == [((10, 12, 11), (1 / 3, 1 / 3, 1 / 3)), ("Cancel", 0, None)]


def test_the_round_number_stands_still_while_nobody_is_present():
    bsp = started("bsp", workers=2)
    bsp.handle(pushed(0, 10))
    assert bsp.handle(Left(2.0, 0, "done")) == []
    assert bare(bsp.handle(Left(2.0, 1, "done"))) == [((10,), (1.0,))]
    assert bare(bsp.handle(Joined(9.0, 1, 8))) == [("Grant", 1, 1)]


@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_round_of_fastest_k_takes_the_kth_order_statistic(k):
    cluster = VirtualCluster(strategies.build(f"fastest_k:k={k}", 0), seconds=[5.0] * 5, exponential=True, seed=1)
    cluster.run(pushes=1500 * k)
    expected = 5.0 * sum(1 / i for i in range(5 - k + 1, 6))
    assert cluster.now / 1500 == pytest.approx(expected, rel=0.06)
    assert cluster.cancelled == 1500 * (5 - k)
    assert set(cluster.staleness) == {0}


def test_bsp_wastes_and_cancels_nothing():
    cluster = VirtualCluster(strategies.build("bsp", 0), seconds=[1, 1, 4], jitter=0.2).run(pushes=300)
    assert cluster.cancelled == 0
    assert set(cluster.staleness) == {0}
    assert not any(isinstance(a, Cancel) for d in cluster.decisions for a in d.actions)
    assert sum(isinstance(a, Grant) for d in cluster.decisions for a in d.actions) == 303
