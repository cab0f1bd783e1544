"""SSP and ASP: the bound, its exactness, and what it is for."""

import math

import pytest
from random_histories import Leads, cluster_of
from virtual_cluster import VirtualCluster

from paceline import strategies
from paceline.core.errors import OptionError
from paceline.core.events import Joined, Left, Pushed


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_nobody_computes_beyond_the_bound_and_nobody_waits_within_it(staleness, seed):
    leads = Leads()

    def check(cluster, decision):
        leads(cluster, decision)
        assert all(staleness < lead <= staleness + 1 for lead in leads.parked().values()), decision

    cluster_of(f"ssp:staleness={staleness}", seed, after=check).run(pushes=300)
    assert leads.longest_computing == staleness


def test_asp_never_parks():
    leads = Leads()

    def check(cluster, decision):
        leads(cluster, decision)
        assert leads.parked() == {}

    cluster = cluster_of("asp", 0, faults=False, after=check).run(pushes=300)
    assert cluster.waited() == 0
    assert leads.longest_computing > 20


@pytest.mark.parametrize("cache", ["", ",cache=true,patience=0"])
@pytest.mark.parametrize(("stall", "waited"), [(2.5, 0.0), (4.5, 1.5), (7.5, 4.5)])
def test_a_stall_within_the_bound_delays_nobody_and_a_longer_one_by_the_excess(stall, waited, cache):
    cluster = VirtualCluster(strategies.build(f"ssp:staleness=3{cache}", 0), seconds=[1.0] * 4)
    cluster.at(9.5, "slow", worker=2, value=1 + stall)
    cluster.at(10.5, "slow", worker=2, value=1.0)
    cluster.run(until=19.6)
    for worker in (0, 1, 3):
        assert cluster.workers[worker].waited == pytest.approx(waited, abs=1e-6)


def test_waiting_falls_as_staleness_grows():
    waited = []
    for staleness in (0, 1, 3, 10):
        cluster = VirtualCluster(strategies.build(f"ssp:staleness={staleness}", 0), seconds=[1.0] * 8, jitter=0.4)
        cluster.run(pushes=1600)
        waited.append(cluster.waited() / cluster.now)
    assert waited == sorted(waited, reverse=True)
    assert waited[-1] < waited[0] / 3


def test_with_a_cache_a_stall_delays_nobody_by_more_than_the_patience():
    cluster = VirtualCluster(strategies.build("ssp:staleness=3,cache=true", 0), seconds=[1.0] * 4)
    cluster.at(9.5, "slow", worker=2, value=1 + 2.5)
    cluster.at(10.5, "slow", worker=2, value=1.0)
    cluster.run(until=19.6)
    assert max(cluster.workers[worker].waited for worker in (0, 1, 3)) <= 0.5 + 1e-6


def run_of(staleness, more=",cache=true", jitter=0.1, pushes=1600):
    spec = f"ssp:staleness={staleness}{more}"
    return VirtualCluster(strategies.build(spec, 0), seconds=[1.0] * 8, jitter=jitter, seed=1).run(pushes=pushes)


def pulled(more, jitter=0.1):
    """Pulls per clock times staleness + 1, and waiting per second of a worker."""
    cluster = run_of(3, f",cache=true{more}", jitter)
    return 4 * cluster.pulls / cluster.arrived, cluster.waited() / (8 * cluster.now)


@pytest.mark.parametrize("jitter", [0.05, 0.1, 0.2])
@pytest.mark.parametrize(("staleness", "longer"), [(1, 1.1), (2, 1.1), (3, 1.1), (4, 1.03), (8, 1.03), (16, 1.03)])
def test_equal_workers_with_jitter_pull_once_for_a_bound_of_clocks(staleness, longer, jitter):
    """Nearly so, and at 10 % of jitter for little more time than without a cache; at first all of them pull."""
    cluster = run_of(staleness, jitter=jitter)
    assert (staleness + 1) * (cluster.pulls - 8) / cluster.arrived <= 1.25
    if jitter == 0.1:
        assert cluster.now <= longer * run_of(staleness, "").now


def test_patience_buys_fewer_pulls_with_waiting():
    (pulls, waits), (fewer, longer) = pulled(",patience=0"), pulled("")
    assert pulls > 1.1 > fewer
    assert waits < longer < 0.12


def test_a_slowest_that_is_far_behind_is_not_waited_for():
    """A lasting straggler, of a quarter of the speed: what it costs is the bound's doing, as without a cache."""
    cached, plain = (
        VirtualCluster(strategies.build(f"ssp:staleness=8{more}", 0), seconds=[1.0] * 7 + [4.0]).run(until=200)
        for more in (",cache=true", "")
    )
    assert cached.arrived == pytest.approx(plain.arrived, rel=0.01)


@pytest.mark.parametrize(
    ("options", "lead"),
    [("staleness=3", 0), ("staleness=4", 1), ("staleness=16", 3), ("staleness=7,refresh=2", 6), ("refresh=9", 0),
     ("staleness=inf,refresh=5", math.inf)],
)  # fmt: skip
def test_a_lead_that_costs_a_pull_few_of_its_clocks_is_free(options, lead):
    assert strategies.build(f"ssp:cache=true,{options}", 0).cache_rule.lead == lead


def test_equal_workers_that_are_out_of_step_get_into_step_for_their_pulls():
    """One has begun late: it costs the others that once, and from then on each pulls once in four clocks."""
    cluster = VirtualCluster(strategies.build("ssp:staleness=3,cache=true", 0), seconds=[1.0] * 4)
    cluster.at(0.5, "slow", worker=1, value=1.4)
    cluster.at(1.5, "slow", worker=1, value=1.0)
    cluster.run(until=60.9)
    assert [cluster.workers[worker].waited for worker in range(4)] == pytest.approx([0.4, 0.0, 0.4, 0.4], abs=1e-6)
    assert 4 * cluster.pulls / cluster.arrived == pytest.approx(1.0, abs=0.1)


def test_refresh_pulls_where_the_bound_would_not_ask():
    assert pulled(",refresh=2", jitter=0.0)[0] == pytest.approx(2.0, abs=0.03)
    assert pulled(",refresh=1", jitter=0.0)[0] == pytest.approx(4.0, abs=0.03)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("refresh=2", "add cache=true"),
        ("patience=1", "add cache=true"),
        ("patience=0", "add cache=true"),
        ("cache=true,refresh=1.5", "refresh must be a whole number of clocks or inf, not 1.5"),
        ("cache=true,staleness=inf", "never pulls; give refresh"),
        ("cache=true,patience=inf", "patience must be < inf"),
    ],
)
def test_options_of_the_cache_that_make_no_sense_are_refused(options, says):
    with pytest.raises(OptionError, match=says):
        strategies.build(f"ssp:{options}", 0)


def push(worker, number, clock):
    return Pushed(float(number), worker, number, clock, 0, 8, 1.0, 0.0, 0.0, 0, 0)


def test_a_leaver_releases_whoever_was_parked_only_because_of_it():
    ssp = strategies.build("ssp:staleness=1", 0)
    for worker in range(4):
        ssp.handle(Joined(0.0, worker, 8))
    for clock in (1, 2):
        for worker in (2, 0):
            ssp.handle(push(worker, 10 * clock + worker, clock))
    ssp.handle(push(1, 50, 1))
    released = ssp.handle(Left(9.0, 3, "crash"))
    assert [(a.worker, a.through) for a in released] == [(0, 3), (2, 3)]
    assert all("w3 left" in a.reason for a in released)


def test_a_parked_leaver_is_forgotten_and_starts_again_at_min():
    ssp = strategies.build("ssp:staleness=0", 0)
    for worker in range(2):
        ssp.handle(Joined(0.0, worker, 8))
    ssp.handle(push(0, 1, 1))
    assert ssp.handle(Left(2.0, 0, "crash")) == []
    assert [(a.worker, a.through) for a in ssp.handle(Joined(3.0, 0, 8))] == [(0, 1)]
    assert [type(a).__name__ for a in ssp.handle(push(1, 2, 1))] == ["Apply"]
    assert [getattr(a, "worker", None) for a in ssp.handle(push(0, 3, 1))] == [None, 0, 1]


def test_weights_follow_the_nominal_round_idle_workers_included():
    ssp = strategies.build("asp", 0)
    for worker in range(4):
        ssp.handle(Joined(0.0, worker, 8))
    ssp.handle(Left(1.0, 3, "idle"))
    assert ssp.handle(push(0, 1, 1))[0].weights == (0.25,)
    ssp.handle(Left(1.0, 2, "done"))
    assert ssp.handle(push(1, 2, 1))[0].weights == (1 / 3,)
