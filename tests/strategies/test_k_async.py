"""K-async: who is merged, who is released, and with which weights."""

import pytest
from random_histories import Leads, cluster_of
from virtual_cluster import VirtualCluster

from paceline import strategies
from paceline.core.events import Joined, Left, Pushed


def push(worker, number, clock=1, read_version=0):
    return Pushed(float(number), worker, number, clock, read_version, 8, 1.0, 0.0, 0.0, 0, 0)


def started(k, workers=4):
    strategy = strategies.build(f"k_async:k={k}", 0)
    for worker in range(workers):
        strategy.handle(Joined(0.0, worker, 8))
    return strategy


def test_only_the_k_that_pushed_are_released():
    k_async = started(2)
    assert k_async.handle(push(3, 1)) == []
    apply, *grants = k_async.handle(push(1, 2))
    assert (apply.pushes, apply.weights) == ((2, 1), (0.25, 0.25))
    assert [(g.worker, g.through) for g in grants] == [(1, 2), (3, 2)]


def test_a_leavers_push_is_applied_with_the_next_k():
    k_async = started(2)
    k_async.handle(push(0, 1))
    k_async.handle(Left(2.0, 0, "crash"))
    k_async.handle(Joined(2.0, 0, 8))
    assert k_async.handle(push(0, 3)) == []
    apply, *grants = k_async.handle(push(1, 4))
    assert apply.pushes == (1, 3, 4)
    assert [g.worker for g in grants] == [0, 1]


def test_k_is_capped_at_the_workers_present():
    k_async = started(3, workers=3)
    k_async.handle(push(0, 1))
    k_async.handle(push(1, 2))
    apply, *grants = k_async.handle(Left(3.0, 2, "leave"))
    assert (apply.pushes, apply.weights) == ((1, 2), (0.5, 0.5))
    assert [g.worker for g in grants] == [0, 1]


def test_the_last_leavers_push_is_weighted_by_the_round_it_was_part_of():
    k_async = started(2, workers=2)
    k_async.handle(push(0, 1))
    assert k_async.handle(Left(3.0, 0, "leave")) == []
    (apply,) = k_async.handle(Left(4.0, 1, "leave"))
    assert (apply.pushes, apply.weights) == ((1,), (1.0,))


@pytest.mark.parametrize("k", [1, 2, 4])
def test_mass_of_a_full_step_is_k_over_n_and_staleness_falls_with_k(k):
    cluster = VirtualCluster(strategies.build(f"k_async:k={k}", 0), seconds=[1.0] * 8, jitter=0.3).run(pushes=800)
    assert all(sum(apply.weights) == pytest.approx(k / 8) for apply in cluster.applies())
    assert cluster.mean_staleness() < 8 / k
    assert cluster.cancelled == 0


def test_clocks_are_each_workers_own():
    leads = Leads()
    cluster_of("k_async:k=2", 1, after=leads).run(pushes=300)
    assert leads.longest_computing > 3
