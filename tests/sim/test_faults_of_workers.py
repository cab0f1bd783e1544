"""Silent workers and models that are not finite, in virtual time."""

import random

import pytest
import torch
from clusters import Rows, cluster, event, mean_square, network

import paceline
import paceline.scenario
from paceline.core.events import Joined, Left, Pushed
from paceline.laws.checker import check
from paceline.records.journal import Decision, Lines

ROWS = Rows(size=240)
SERVERLESS = [
    "gossip", "adaptive_gossip:warmup=2", "elastic:period=2", "adaptive_elastic:warmup=2", "local_sgd:period=3",
]  # fmt: skip


def launched(job, scenario, strategy="bsp", **settings):
    lines = Lines()
    settings = {"evaluate_every": None, **settings}
    done = paceline.launch(job, engine="sim", scenario=scenario, strategy=strategy, sink=lines, **settings)
    return done, lines


class Job:
    """A regression, after which a worker may spoil its model."""

    def __init__(self, spoils=lambda worker, step: None, epochs=1, value=float("nan")):
        self.spoils, self.epochs, self.value = spoils, epochs, value

    def __call__(self):
        session = paceline.init()
        model = network()
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5))
        for step, (x, y, _) in enumerate(session.batches(ROWS, batch_size=6, epochs=self.epochs)):
            optimizer.zero_grad()
            loss = mean_square(model, x, y)
            loss.backward()
            session.report(loss=loss.item())
            optimizer.step()
            if self.spoils(session.worker, step):
                with torch.no_grad():
                    model[0].weight.fill_(self.value)


def events_of(lines, kind):
    return [line.event for line in lines if isinstance(line, Decision) and isinstance(line.event, kind)]


@pytest.mark.parametrize("strategy", ["bsp", "asp", "ssp:staleness=1", "local_sgd:period=3", "gossip"])
def test_a_pause_longer_than_the_timeout_is_taken_out_in_virtual_time(strategy):
    scenario = cluster(1.0, 1.0, 1.0, events=event("pause", 0.3, worker=1, for_=500.0))
    done, lines = launched(Job(), scenario, strategy, worker_timeout="2..600")
    (gone,) = [event for event in events_of(lines, Left) if event.cause == "timeout"]
    assert (gone.worker, 2.0 <= gone.at <= 3.0) == (1, True)
    assert done.summary.faults.timeouts == 1
    assert done.summary.samples_used == len(ROWS)
    assert done.summary.seconds < 10.0


def test_a_virtual_clock_that_leaps_by_ages_costs_few_looks(tmp_path):
    """At a look every 30 virtual seconds this run would never end."""
    slow = paceline.scenario.parse("[compute]\nseconds_per_sample = 1e300\n[[workers]]\ncount = 2\n", "slow", tmp_path)
    done, _ = launched(Job(), slow)
    assert done.summary.samples_used == len(ROWS)


def test_a_paused_worker_comes_back_in_virtual_time():
    scenario = cluster(1.0, 1.0, 1.0, events=event("pause", 0.3, worker=1, for_=2.5))
    for strategy in ("bsp", "local_sgd:period=3"):
        done, lines = launched(Job(epochs=2), scenario, strategy, worker_timeout="2..600")
        again = [each.at for each in events_of(lines, Joined) if each.worker == 1 and each.at > 1]
        assert again
        assert 2.8 <= again[0] <= 3.0
        assert any(each.worker == 1 and each.at > again[0] for each in events_of(lines, Pushed))
        assert done.summary.samples_used == 2 * len(ROWS)
        assert any("is back after" in text for text in done.summary.warnings)
        assert strategy != "bsp" or check(lines) == []


@pytest.mark.parametrize("seed", range(3))
def test_healthy_workers_with_one_long_batch_are_not_taken_out(seed):
    chance = random.Random(seed)
    slow = event("slow", round(chance.uniform(0.3, 1), 2), worker=chance.randrange(3), for_=1.2, factor=20.0)
    scenario = cluster(1.0, 0.7, 0.4, events=slow, jitter="lognormal:0.3", seed=seed)
    done, _ = launched(Job(epochs=2), scenario, ["bsp", "asp", "local_sgd:period=3"][seed])
    assert done.summary.faults.timeouts == 0


# -- models that are not finite ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("strategy", SERVERLESS)
def test_a_node_that_breaks_once_goes_on_from_anothers_model(strategy, value):
    job = Job(lambda worker, step: worker == 1 and step == 5, epochs=2, value=value)
    done, _ = launched(job, cluster(1.0, 1.0, 1.0), strategy)
    assert finite(done.model_state)
    assert all(finite(model) for model in done.nodes.values())
    assert done.summary.faults.not_finite == 1
    assert any("the model of worker 1 is not finite after its step" in text for text in done.summary.warnings)


@pytest.mark.parametrize("strategy", SERVERLESS)
def test_a_node_that_breaks_again_and_again_is_set_aside(strategy):
    job = Job(lambda worker, step: worker == 1 and step >= 5, epochs=3)
    done, _ = launched(job, cluster(1.0, 1.0, 1.0), strategy)
    assert finite(done.model_state)
    assert done.summary.faults.set_aside == [1]
    assert set(done.nodes) == {0, 2}
    assert all(finite(model) for model in done.nodes.values())


def test_where_all_models_break_at_once_the_run_still_ends():
    job = Job(lambda worker, step: step == 5, epochs=2)
    done, _ = launched(job, cluster(1.0, 1.0, 1.0), "local_sgd:period=3")
    assert done.ended == "done"


def finite(state):
    return all(bool(torch.isfinite(tensor).all()) for tensor in state.values())
