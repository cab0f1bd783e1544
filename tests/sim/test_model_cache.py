"""SSP's cache for models: what workers read, what it saves, and that the model is what one process computes."""

import pytest
import torch
from cached_models import CountingJob, PullingJob, recomputed
from clusters import cluster, event
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import paceline
from paceline.core.errors import OptionError, ScriptError
from paceline.core.events import Joined, Pushed
from paceline.core.settings import rate_factor
from paceline.laws.checker import check
from paceline.records.journal import Decision, Lines, Observation
from paceline.records.replay import replay
from paceline.strategies.model_cache import ModelCache

SPEEDS = (1.0, 0.5, 0.25, 1.0, 0.7)


def launch(script, scenario, strategy, **given):
    lines = Lines()
    run = paceline.launch(
        script, engine="sim", scenario=scenario, strategy=strategy, sink=lines, evaluate_every="off", **given
    )  # fmt: skip
    assert not check(lines)
    return run, lines


def pushes_of(lines):
    return [line.event for line in lines if isinstance(line, Decision) and isinstance(line.event, Pushed)]


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    staleness=st.sampled_from([0, 1, 2, 5]),
    more=st.sampled_from(["", ",patience=0.3", ",refresh=2", ",whole_steps=true"]),
    jitter=st.sampled_from(["none", "exponential", "lognormal:0.3"]),
    latency=st.sampled_from([0.0, 3.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_a_worker_reads_what_the_bound_promises_and_all_of_its_own(staleness, more, jitter, latency, seed):
    scenario = cluster(*SPEEDS, jitter=jitter, network=f"latency_ms = {latency}", seed=seed)
    run, _ = launch(CountingJob(12, staleness), scenario, f"ssp:staleness={staleness},cache=true{more}")
    assert run.summary.pushes == 5 * 12
    clocks = [worker.clock for worker in run.summary.per_worker]
    assert run.model_state["counts"].tolist() == pytest.approx(clocks)


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_cache_that_serves_too_long_is_caught_by_counters_and_laws(staleness, monkeypatch):
    monkeypatch.setattr(ModelCache, "serves", lambda self, worker, clock, rule: clock - self.slowest[worker] <= 6)
    scenario = cluster(*SPEEDS, jitter="exponential")
    with pytest.raises(ScriptError, match="AssertionError"):
        launch(CountingJob(12, staleness), scenario, f"ssp:staleness={staleness},cache=true")
    lines = Lines()
    paceline.launch(
        PullingJob(12), engine="sim", scenario=scenario, sink=lines, strategy=f"ssp:staleness={staleness},cache=true"
    )  # fmt: skip
    assert any(violation.law == "bound" for violation in check(lines))


def test_a_lost_update_of_its_own_is_caught(monkeypatch):
    monkeypatch.setattr("paceline.worker.replica.Replica.add_own", lambda self, own: None)
    with pytest.raises(ScriptError, match="of its own"):
        launch(CountingJob(6, 3), cluster(*SPEEDS), "ssp:cache=true")


@pytest.mark.parametrize("staleness", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("workers", [2, 8])
def test_on_equal_workers_the_model_is_pulled_once_for_a_bound_of_clocks(workers, staleness):
    clocks = 4 * (staleness + 1)
    strategy = f"ssp:staleness={staleness},cache=true"
    run, lines = launch(CountingJob(clocks, staleness), cluster(*[1.0] * workers), strategy)
    size = 8 * workers
    assert {push.bytes_down for push in pushes_of(lines)} <= {0, size}
    assert run.summary.bytes_down / run.summary.pushes <= 1.25 / (staleness + 1) * size
    assert run.summary.wait_fraction == pytest.approx(0.0, abs=1e-6)
    assert run.summary.bytes_up == size * run.summary.pushes


@pytest.mark.parametrize("staleness", [1, 3])
def test_short_pushes_at_the_end_of_an_epoch_keep_nobody_out_of_step(staleness):
    strategy = f"ssp:staleness={staleness},cache=true"
    run, _ = launch(PullingJob(10, epochs=4, spare=1), cluster(*[1.0] * 4), strategy)
    size = 4 * (21 + 11)
    assert run.summary.bytes_down / run.summary.pushes <= 1.25 / (staleness + 1) * size
    assert run.summary.wait_fraction < 0.1


def test_what_is_not_pulled_takes_no_time_on_the_line():
    """A model needs as long on its way down as a clock's computing."""
    scenario = cluster(1.0, 1.0, network="bandwidth_mbps = 0.0128")
    (kept, lines), (pulled, _) = (
        launch(CountingJob(40, 7), scenario, f"ssp:staleness=7{more}") for more in (",cache=true", "")
    )
    assert kept.summary.seconds < 0.85 * pulled.summary.seconds
    assert all(push.transfer_s > 0.015 for push in pushes_of(lines) if push.bytes_down)
    assert min(push.transfer_s for push in pushes_of(lines) if not push.bytes_down) < 0.0101


@pytest.mark.parametrize("more", ["", ",whole_steps=true", ",refresh=2", ",patience=0.5"])
def test_the_model_is_what_one_process_with_caches_computes(more):
    scenario = cluster(*SPEEDS, jitter="lognormal:0.3")
    run, lines = launch(PullingJob(15), scenario, f"ssp:staleness=3,cache=true{more}")
    require_same(run, lines)


def test_scaled_rates_are_scaled_in_own_updates_too():
    strategy = "ssp:staleness=3,cache=true"
    run, lines = launch(PullingJob(15), cluster(*SPEEDS, jitter="lognormal:0.3"), strategy, scale_lr="sqrt")
    require_same(run, lines, rate_factor("sqrt", 5))


def require_same(run, lines, factor=1.0):
    expected, kept = recomputed(lines, factor)
    assert 10 < kept < run.summary.pushes
    for ours, theirs in zip(run.model_state.values(), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_worker_reads_the_version_that_its_push_names():
    _, lines = launch(PullingJob(12), cluster(*SPEEDS), "ssp:staleness=3,cache=true")
    before = {}
    for push in pushes_of(lines):
        if not push.bytes_down:
            assert push.read_version == before[push.worker]
        else:
            assert push.read_version > before.get(push.worker, -1)
        before[push.worker] = push.read_version


def test_workers_that_die_and_come_back_begin_with_a_pull():
    events = event("crash", 0.13, worker=1) + event("rejoin", 0.2, worker=1) + event("leave", 0.3, worker=3)
    scenario = cluster(*SPEEDS, events=events, jitter="lognormal:0.2")
    run, lines = launch(PullingJob(15), scenario, "ssp:staleness=3,cache=true")
    require_same(run, lines)
    joined = {line.event.worker: line.event.at for line in lines if is_event(line, Joined)}
    assert joined[1] == 0.2
    for worker, at in joined.items():
        first = next(push for push in pushes_of(lines) if push.worker == worker and push.at > at)
        assert first.bytes_down


def test_a_server_that_crashes_finds_workers_that_pull_first(tmp_path):
    scenario = cluster(*SPEEDS, events=event("server_crash", 0.3, for_=0.05), jitter="lognormal:0.2")
    lines = Lines()
    run = paceline.launch(
        PullingJob(15), engine="sim", scenario=scenario, strategy="ssp:staleness=3,cache=true", sink=lines,
        evaluate_every="off", checkpoint_every="5v", runs_dir=tmp_path,
    )  # fmt: skip
    assert run.summary.samples_used == 5 * 15 * 2
    back = max(line.event.at for line in lines if is_event(line, Joined))
    assert back > 0.3
    firsts = {push.worker: push for push in reversed(pushes_of(lines)) if push.at > back}
    assert all(push.bytes_down for push in firsts.values())
    assert any(not push.bytes_down for push in pushes_of(lines) if push.at > back)
    assert replay(run.journal).difference is None


def is_event(line, kind):
    return isinstance(line, Decision) and isinstance(line.event, kind)


def test_cancelled_work_of_a_worker_that_kept_its_model_sent_no_bytes_down():
    events = event("crash", 0.105, worker=0)
    _, lines = launch(PullingJob(15), cluster(1.0, 1.0, events=events), "ssp:staleness=3,cache=true")
    (taken,) = [line for line in lines if isinstance(line, Observation) and line.what == "cancelled"]
    assert (taken.worker, taken.data["bytes_down"]) == (0, 0)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(torch.optim.SGD, {"momentum": 0.5}), (torch.optim.SGD, {"weight_decay": 0.01}), (torch.optim.Adagrad, {})],
)
def test_what_cannot_be_computed_exactly_is_pulled_at_every_clock_and_the_run_says_so_once(optimizer, options):
    run, lines = launch(PullingJob(8, optimizer, **options), cluster(1.0, 1.0), "ssp:cache=true")
    assert all(push.bytes_down for push in pushes_of(lines))
    said = [text for text in run.summary.warnings if "each of their clocks pulls the model" in text]
    assert len(said) == 1


def test_tables_refuse_it():
    from table_jobs import Counters

    with pytest.raises(OptionError, match="tables have caches of their own"):
        launch(Counters(4), cluster(1.0, 1.0), "ssp:cache=true")
