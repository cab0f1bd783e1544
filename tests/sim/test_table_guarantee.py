"""The publication's promise, by its own test: what a worker reads is never older than the bound, and holds its own."""

import pytest
from clusters import cluster
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launching import launch
from table_jobs import Counters

import paceline
from paceline.core.errors import InternalError, ScriptError
from paceline.tables import host
from paceline.tables.worker_table import WorkerTable

STRATEGIES = ("bsp", "asp", "ssp:staleness=3", "dssp:lower=1,upper=4", "adaptive_sync")


def real_cases():
    """All of them are for `make soak`; an ordinary run takes one with each transport."""
    bounds = [f"ssp:staleness={staleness}" for staleness in (0, 1, 3, 8)]
    every = [(s, t, n) for s in (*bounds, "bsp", "asp") for t in ("shm", "zeromq") for n in (2, 4, 8)]
    chosen = [("ssp:staleness=1", "shm", 2), ("ssp:staleness=3", "zeromq", 2)]
    assert set(chosen) <= set(every)
    return [pytest.param(*case, marks=() if case in chosen else (pytest.mark.soak,)) for case in every]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("staleness", [0, 1, 3, 8])
def test_virtual_workers_read_nothing_older_than_the_bound(staleness, eager):
    speeds = (1.0, 0.5, 0.25, 1.0, 0.7)
    run = paceline.launch(
        Counters(30, eager=eager), engine="sim", strategy=f"ssp:staleness={staleness}", evaluate_every="off",
        scenario=cluster(*speeds, jitter="exponential", network="latency_ms = 3.0"),
    )  # fmt: skip
    assert run.summary.pushes == 5 * 30


@pytest.mark.parametrize("staleness", [None, 0, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_keeps_a_tables_own_bound(strategy, staleness):
    run = paceline.launch(
        Counters(20, staleness), engine="sim", strategy=strategy, evaluate_every="off",
        scenario=cluster(1.0, 0.5, 0.25, jitter="lognormal:0.5"),
    )  # fmt: skip
    assert run.summary.pushes == 60


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(("strategy", "transport", "workers"), real_cases())
def test_real_workers_read_nothing_older_than_the_bound(strategy, transport, workers):
    run = launch(Counters(40, delay_s=0.003), workers=workers, strategy=strategy, transport=transport)
    assert run.summary.pushes == 40 * workers


@pytest.mark.slow
@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(
    staleness=st.sampled_from([0, 1, 3, 8]),
    seed=st.integers(0, 1000),
    jitter=st.sampled_from(["none", "exponential", "lognormal:0.5"]),
    latency=st.sampled_from([0.0, 0.5, 30.0]),
    eager=st.booleans(),
)
def test_sixty_four_virtual_workers_keep_the_bound(staleness, seed, jitter, latency, eager):
    scenario = cluster(*([1.0, 0.5] * 32), jitter=jitter, network=f"latency_ms = {latency}", seed=seed)
    run = paceline.launch(
        Counters(7, eager=eager), engine="sim", strategy=f"ssp:staleness={staleness}", evaluate_every="off",
        scenario=scenario,
    )  # fmt: skip
    assert run.summary.pushes == 64 * 7
    assert run.summary.table_reads["counters"].max_age <= staleness


class TestPlantedFaults:
    """A bound that is off by one is caught twice: by the counters, and by the check of every read."""

    def run(self, staleness=1):
        strategy = "asp" if staleness is not None else "ssp:staleness=1"
        scenario = cluster(1.0, 0.25, jitter="lognormal:0.3")
        paceline.launch(
            Counters(20, staleness), engine="sim", strategy=strategy, evaluate_every="off", scenario=scenario
        )

    def plant_at_server(self, monkeypatch):
        monkeypatch.setattr(host, "may_read", lambda slowest, clock, staleness: slowest >= clock - staleness - 1)

    def plant_at_worker(self, monkeypatch):
        right = WorkerTable.enter
        monkeypatch.setattr(WorkerTable, "enter", lambda table, free, most: right(table, free + 1, most))

    def test_the_check_of_every_read_catches_it_at_the_server(self, monkeypatch):
        self.plant_at_server(monkeypatch)
        with pytest.raises((InternalError, ScriptError), match="2 clocks old, and the bound is 1"):
            self.run()

    def test_the_counters_catch_it_at_the_server(self, monkeypatch):
        self.plant_at_server(monkeypatch)
        monkeypatch.setattr(WorkerTable, "_record", lambda *_: None)
        with pytest.raises(ScriptError, match="AssertionError"):
            self.run()

    def test_the_check_of_every_read_catches_it_in_the_cache(self, monkeypatch):
        self.plant_at_worker(monkeypatch)
        with pytest.raises((InternalError, ScriptError), match="2 clocks old, and the bound is 1"):
            self.run(None)

    def test_the_counters_catch_it_in_the_cache(self, monkeypatch):
        self.plant_at_worker(monkeypatch)
        monkeypatch.setattr(WorkerTable, "_record", lambda *_: None)
        with pytest.raises(ScriptError, match="AssertionError"):
            self.run(None)
