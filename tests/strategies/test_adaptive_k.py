"""Adaptive k: when k grows under each test, and what is said about it."""

import math
import random

import pytest
from switching import switches
from virtual_cluster import VirtualCluster

from paceline import strategies
from paceline.core.events import Applied
from paceline.strategies.stationarity import SinceChange, standard_errors_below


def ks(cluster):
    return [value for _, name, value, _ in cluster.tracks if name == "k"]


def versions_of_changes(cluster):
    """How many versions there were when each change of k was decided."""
    versions, found = 0, []
    for decision in cluster.decisions:
        if isinstance(decision.event, Applied):
            versions = decision.event.version
        if any(type(a).__name__ == "Track" for a in decision.actions):
            found.append(versions)
    return found


def run(spec, statistics=None, pushes=600, **options):
    cluster = VirtualCluster(strategies.build(spec, 0), seconds=[1.0] * 4, jitter=0.2, statistics=statistics, **options)
    return cluster.run(pushes=pushes)


def always(inner=None, loss=None):
    return lambda apply, pushes: (inner, 1.0, loss)


def test_pflug_waits_for_the_burn_in():
    cluster = run("adaptive_k:burn_in=50,threshold=10", always(inner=-1.0))
    assert ks(cluster) == [1, 2, 3, 4]
    assert versions_of_changes(cluster) == [0, 51, 102, 153]


def test_pflug_waits_for_the_counter_to_exceed_the_threshold():
    cluster = run("adaptive_k:burn_in=0,threshold=10,step=2", always(inner=-1.0))
    assert ks(cluster) == [1, 3, 4]
    assert versions_of_changes(cluster) == [0, 11, 22]


def test_pflug_stays_while_gradients_agree():
    assert ks(run("adaptive_k:burn_in=0,threshold=0", always(inner=1.0))) == [1]


def test_k_stops_where_told():
    assert ks(run("adaptive_k:start=2,stop=3,burn_in=5,threshold=1", always(inner=-1.0))) == [2, 3]


def test_trend_stays_while_the_loss_falls_and_grows_when_it_stands():
    losses = iter(range(100000, 0, -1))
    assert ks(run("adaptive_k:test=trend,window=10,burn_in=0", lambda a, p: (None, 1.0, float(next(losses))))) == [1]
    cluster = run("adaptive_k:test=trend,window=10,burn_in=0", always(loss=3.0))
    assert versions_of_changes(cluster) == [0, 20, 40, 60]


def test_steps_without_mass_and_losses_that_are_no_numbers_are_not_counted():
    progress = SinceChange()
    progress.observe(Applied(0.0, 1, (1,), 0.0, -1.0, 1.0, 1.0), 10)
    assert progress == SinceChange()
    progress.observe(Applied(0.0, 1, (1,), 1.0, -1.0, 1.0, float("nan")), 10)
    assert progress == SinceChange(iterations=1, counter=1)


def test_trend_needs_two_standard_errors():
    draw = random.Random(0)
    before = [draw.gauss(10, 1) for _ in range(100)]
    last = [draw.gauss(10, 1) for _ in range(100)]
    for drop, stalled in ((0.0, True), (0.1, True), (0.6, False), (-1.0, True)):
        progress = SinceChange(losses=before + [value - drop for value in last])
        assert (progress.stalls(100) is not None) == stalled, drop


def test_ranks_in_standard_errors():
    assert standard_errors_below([1.0, 2.0], [3.0, 4.0]) == pytest.approx(2 / (4 * 5 / 12) ** 0.5)
    assert standard_errors_below([3.0, 4.0], [1.0, 2.0]) == pytest.approx(-2 / (4 * 5 / 12) ** 0.5)
    assert standard_errors_below([1.0, 1.0], [1.0, 1.0]) == 0


def test_huge_losses_at_the_start_are_no_stall():
    losses = [1e8 * math.exp(-i) + 200 - i for i in range(200)]
    assert SinceChange(losses=losses).stalls(100) is None


@pytest.mark.parametrize(
    ("spec", "applied", "losses"),
    [
        ("adaptive_k", True, False),
        ("adaptive_k:test=trend", True, True),
        ("adaptive_k:test=bound,eta=0.01,L=2,c=1,sigma2=10,s=10,error=100", False, False),
        ("adaptive_k:start=2,stop=2,test=trend", False, False),
    ],
)
def test_it_asks_only_for_what_its_test_needs(spec, applied, losses):
    strategy = strategies.build(spec, 0)
    assert (strategy.needs_applied, strategy.needs_losses) == (applied, losses)


def test_bound_switches_at_the_bounds_times():
    strategy = strategies.build("adaptive_k:test=bound,eta=0.01,L=2,c=1,sigma2=10,s=10,error=100", 0)
    cluster = VirtualCluster(strategy, seconds=[5.0] * 5, exponential=True, seed=3)
    expected = [switch.at for switch in switches(5, 5.0, 100.0, strategy.options.constants)]
    cluster.run(until=expected[-1] * 1.2)
    times = [time for time, name, _, _ in cluster.tracks if name == "k"]
    assert ks(cluster) == [1, 2, 3, 4, 5]
    assert times[1:] == pytest.approx(expected, rel=0.08)
    assert strategy.state.computed_s / strategy.state.responses == pytest.approx(5.0, rel=0.08)


def test_the_changes_are_explained():
    cluster = run("adaptive_k:burn_in=5,threshold=2", always(inner=-1.0))
    reasons = [a.reason for d in cluster.decisions for a in d.actions if type(a).__name__ == "Track"]
    assert reasons[0] == "the run begins with k=1"
    assert reasons[1] == "k grows from 1 to 2: 6 more negative than positive inner products in 6 iterations"


def test_bound_keeps_its_k_while_no_response_has_taken_any_time():
    strategy = strategies.build("adaptive_k:test=bound,eta=0.01,L=2,c=1,sigma2=10,s=10,error=100", 0)
    assert ks(VirtualCluster(strategy, seconds=[0.0] * 3).run(pushes=20)) == [1]
