"""Adaptive k and load: the measured frontier and the walk along it."""

import random

import pytest
from virtual_cluster import VirtualCluster

from paceline import strategies
from paceline.core.actions import Grant
from paceline.strategies.adaptive_k_load import MEASURED_ROUNDS
from paceline.strategies.load_frontier import Point, frontier, growing_ks, mean_seconds

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
