"""SSP's cache for models on real processes: the same guarantee, model and bytes, by every transport and with shards."""

import pytest
import torch
from cached_models import CountingJob, PullingJob, recomputed
from clusters import cluster
from launching import launch, lines_of

from paceline.core.events import Pushed
from paceline.laws.checker import check
from paceline.records.journal import Decision
from paceline.records.replay import replay

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

PLACES = [{"transport": "shm"}, {"transport": "zeromq"}, {"transport": "shm", "servers": 2}]


@pytest.mark.parametrize("where", PLACES, ids=["shm", "zeromq", "shards"])
def test_processes_read_what_the_bound_promises_and_all_of_their_own(where, folder):
    run = launch(CountingJob(30, 2, delay_s=0.002), folder, workers=3, strategy="ssp:staleness=2,cache=true", **where)
    assert run.summary.pushes == 90
    assert 0 < run.summary.bytes_down < 90 * 24
    assert not check(lines_of(run))
    assert replay(run.journal).difference is None


@pytest.mark.parametrize("where", PLACES, ids=["shm", "zeromq", "shards"])
def test_the_model_of_processes_is_what_one_process_with_caches_computes(where, folder):
    run = launch(PullingJob(20), folder, strategy="ssp:staleness=3,cache=true", **where)
    expected, kept = recomputed(lines_of(run))
    assert kept > 10
    for ours, theirs in zip(run.model_state.values(), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def test_equal_processes_pull_the_model_once_for_a_bound_of_clocks(folder):
    """Their clocks are as long as the scenario says, but for the milliseconds that patience is for."""
    staleness, size = 3, 16
    strategy = f"ssp:staleness={staleness},cache=true,patience=0.5"
    run = launch(CountingJob(40, staleness), folder, scenario=cluster(1.0, 1.0), strategy=strategy)
    pushes = [line.event for line in lines_of(run) if isinstance(line, Decision) and isinstance(line.event, Pushed)]
    assert {push.bytes_down for push in pushes} == {0, size}
    assert run.summary.bytes_down / run.summary.pushes <= 1.25 / (staleness + 1) * size
