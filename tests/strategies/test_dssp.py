"""DSSP: the controller's vectors, the range of the bound, and what the extra clocks are for."""

import random

import pytest
from random_histories import Leads, cluster_of
from virtual_cluster import VirtualCluster

from paceline import strategies
from paceline.strategies.dssp import extra_clocks


@pytest.mark.parametrize(
    ("now", "fast", "last_slow", "slow", "reach", "extra"),
    [
        (10, 1, 9, 4, 12, 3),
        (10, 1, 9.5, 3.3, 12, 6),
        (10, 1, 9.9, 1, 12, 1),
        (10, 2, 8, 5, 12, 4),
        (10, 1, 9, 40, 12, 12),
        (10, 1, 9, 40, 60, 39),
        (10, 1, 9, 4, 0, 0),
        (10, 1, 12, 0, 12, 2),
        (10, 0, 9, 4, 12, 0),
    ],
)
def test_controller(now, fast, last_slow, slow, reach, extra):
    assert extra_clocks(now, fast, last_slow, slow, reach) == extra


@pytest.mark.parametrize("seed", range(60))
def test_controller_is_the_search_over_all_pairs(seed):
    draw = random.Random(seed)
    now, fast, slow, reach = draw.uniform(10, 20), draw.uniform(0.1, 2), draw.uniform(0.1, 9), draw.randint(0, 20)
    last = now - draw.uniform(0, slow)
    gaps = {r: min(abs(last + (k + 1) * slow - (now + r * fast)) for k in range(reach + 1)) for r in range(reach + 1)}
    assert gaps[extra_clocks(now, fast, last, slow, reach)] == pytest.approx(min(gaps.values()), abs=1e-8)


@pytest.mark.parametrize(("lower", "upper"), [(0, 4), (3, 15), (2, 3)])
@pytest.mark.parametrize("seed", range(4))
def test_nobody_computes_beyond_upper_and_nobody_waits_within_lower(lower, upper, seed):
    leads = Leads()

    def check(cluster, decision):
        leads(cluster, decision)
        assert leads.longest_computing <= upper
        assert all(lead > lower for lead in leads.parked().values())

    cluster_of(f"dssp:lower={lower},upper={upper}", seed, after=check).run(pushes=400)
    assert leads.longest_computing >= lower


def test_the_fastest_gets_extra_clocks_on_uneven_workers():
    leads = Leads()
    dssp = strategies.build("dssp", 0)
    cluster = VirtualCluster(dssp, seconds=[1.0, 1.5, 6.0], jitter=0.1, after=leads).run(pushes=300)
    assert 3 < leads.longest_computing <= 15
    assert any("extra clocks" in a.reason for d in cluster.decisions for a in d.actions)


def test_the_slowest_is_the_lowest_id_at_min_and_the_largest_clock_is_right():
    def check(cluster, decision):
        state = cluster.strategy.state
        clocks = state.clocks
        if clocks.of:
            assert state.slowest() == min(w for w, c in clocks.of.items() if c == clocks.min)
            assert state.largest == max(clocks.of.values())
        assert set(state.last) <= set(clocks.of)

    for seed in range(4):
        cluster_of("dssp:lower=1,upper=5", seed, after=check).run(pushes=400)
