"""A scenario's times: they count from moments, so that what messages take is not added to them."""

from pathlib import Path

import pytest
import torch
from clusters import Rows, cluster, event, mean_square, network
from hand_driven import BATCH, HandDrivenRun
from one_worker import work

import paceline
from paceline.core.events import Pushed
from paceline.core.settings import RunConfig
from paceline.engines.local.control import Setup
from paceline.engines.local.server import Clock, LocalEngine
from paceline.records.journal import Header
from paceline.server.emulation import Timing
from paceline.server.plan import Plan
from paceline.transport.messages import Extra, More, Work
from paceline.transport.shm import Channel
from paceline.worker.batch_loop import BatchLoop

NETWORK = "latency_ms = 10.0\nbandwidth_mbps = 8.0"  # a kilobyte takes a millisecond
GRANTED_AT = 5.0
WAY_S = 0.010004  # of four bytes


@pytest.fixture
def hand():
    """Two workers that were granted their first work five seconds into the run."""
    hand = HandDrivenRun(scenario=cluster(1.0, 0.5, network=NETWORK))
    hand.engine.time = GRANTED_AT
    return hand.train()


def arrivals(hand):
    """When pushes are going to be there, and how long they say that they travelled."""
    moments = hand.engine.pending
    hand.engine.advance(max(moments))
    return moments, [event for event in hand.events if isinstance(event, Pushed)]


def test_the_engine_is_told_how_long_a_model_travels_and_how_long_to_compute(hand):
    timing = hand.engine.timings[0]
    assert timing.delay_s == pytest.approx(WAY_S)
    assert timing.begin == pytest.approx(GRANTED_AT + WAY_S)
    assert timing.compute_s == pytest.approx(BATCH * 0.01)
    assert hand.engine.timings[1].compute_s == pytest.approx(BATCH * 0.02)


def test_waiting_for_others_on_the_line_is_told_apart(hand):
    first, second = hand.engine.timings[0], hand.engine.timings[1]
    hand.engine.time = second.end
    hand.pushes(0, compute_s=first.compute_s)
    hand.pushes(1, compute_s=second.compute_s)
    _, events = arrivals(hand)
    assert [event.queued_down_s for event in events] == [None, pytest.approx(4e-6, abs=1e-9)]
    assert [event.queued_up_s for event in events] == [None, None], "they are not on the line at once"


def test_further_samples_are_computed_at_once(hand):
    hand.engine.time = GRANTED_AT + 0.2
    hand.says(0, More(hand.last(0, Work).ticket))
    timing = hand.engine.timings[0]
    assert (timing.begin, timing.delay_s) == (GRANTED_AT + 0.2, 0.0)
    assert timing.compute_s == pytest.approx(BATCH * 0.01)


TIMING = Timing(attempt=0, granted_at=5.0, begin=5.25, compute_s=2.0)
AT_ONCE = Timing(attempt=1, granted_at=7.0, begin=7.0, compute_s=2.0)


def test_a_process_is_told_to_take_that_long():
    header = Header(engine="local", strategy="bsp", seed=0, workers=1)
    plan = Plan(config=RunConfig(), scenario=cluster(1.0), header=header, folder=None, journal=None)
    ours, theirs = Channel.pair()
    engine = LocalEngine(ours, Setup(plan=plan, relay=False, folder=""), Path(), on_idle=lambda: None)
    told = []
    engine.send = lambda worker, message: told.append((worker, message))
    engine.now = lambda: TIMING.granted_at + 0.1  # the server took so long to copy the version
    for message, timing in ((work(1, 5), TIMING), (Extra(None), AT_ONCE)):
        engine.dispatch(3, message, None)
        engine.dispatch(3, message, timing)
    (_, plain), (_, grant), (_, more), (worker, extra) = told
    assert (plain.delay_s, plain.compute_s, more.compute_s) == (0.0, None, None)
    assert (grant.delay_s, grant.compute_s) == (pytest.approx(0.15), 2.0)
    assert (worker, extra.compute_s) == (3, 2.0)
    engine.close()
    ours.close()
    theirs.close()


def test_a_virtual_worker_takes_no_time_of_the_machine(monkeypatch):
    taken = []
    take_up = BatchLoop._take_up

    def noted(self, work):
        taken.append((work.delay_s, work.compute_s))
        take_up(self, work)

    monkeypatch.setattr(BatchLoop, "_take_up", noted)

    def script():
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        for number, (x, y, _) in enumerate(session.batches(Rows(), batch_size=5)):
            mean_square(model, x, y).backward()
            if number % 2:  # further samples on the same grant
                optimizer.step()
                optimizer.zero_grad()

    run = paceline.launch(script, engine="sim", scenario=cluster(1.0, 0.5, network=NETWORK), threads=1)
    assert run.summary.samples_used == len(Rows())
    assert set(taken) == {(0.0, None)}


@pytest.mark.parametrize("read_late_s", [0.0, 0.004])
def test_a_push_sets_out_when_its_computation_was_over_whenever_it_was_read(hand, read_late_s):
    timing = hand.engine.timings[0]
    hand.engine.time = timing.end + read_late_s
    hand.pushes(0, compute_s=timing.compute_s)
    moments, (pushed,) = arrivals(hand)
    assert moments == pytest.approx([timing.end + WAY_S])
    assert pushed.at == pytest.approx(timing.end + WAY_S)
    assert pushed.transfer_s == pytest.approx(2 * WAY_S)
    assert pushed.compute_s == timing.compute_s


def test_a_slow_link_makes_models_and_pushes_travel_longer_and_nothing_else():
    slow = event("slow_link", GRANTED_AT - 1, worker=0, for_=60, factor=4)
    hand = HandDrivenRun(scenario=cluster(1.0, 0.5, network=NETWORK, events=slow))
    hand.engine.time = GRANTED_AT
    hand.train()
    slowed, usual = hand.engine.timings[0], hand.engine.timings[1]
    assert slowed.delay_s == pytest.approx(4 * WAY_S)
    assert usual.delay_s == pytest.approx(WAY_S, abs=0.0001)  # the server sends to one after the other
    assert slowed.compute_s == pytest.approx(BATCH * 0.01)
    hand.engine.time = slowed.end
    hand.pushes(0, compute_s=slowed.compute_s)
    _, (pushed,) = arrivals(hand)
    assert pushed.at == pytest.approx(slowed.end + 4 * WAY_S)
    assert pushed.transfer_s == pytest.approx(8 * WAY_S)


def test_a_computation_that_took_longer_sets_out_later(hand):
    timing = hand.engine.timings[0]
    hand.engine.time = timing.end + 0.5 + 0.001
    hand.pushes(0, compute_s=timing.compute_s + 0.5)
    moments, (pushed,) = arrivals(hand)
    assert moments == pytest.approx([timing.end + 0.5 + WAY_S])
    assert pushed.compute_s == timing.compute_s + 0.5


def test_nothing_sets_out_after_it_was_read(hand):
    hand.engine.time = GRANTED_AT + 0.1
    hand.pushes(0, compute_s=100.0)
    moments, _ = arrivals(hand)
    assert moments == pytest.approx([GRANTED_AT + 0.1 + WAY_S])


def test_a_push_that_crossed_a_cancellation_takes_no_part_in_the_emulated_traffic(hand):
    hand.engine.time = GRANTED_AT + 0.1
    hand.pushes(0, ticket=77)
    assert hand.engine.pending == []
    assert [line.data["samples"] for line in hand.observed("refused")] == [0]


def test_a_run_goes_on_counting_from_where_it_stands():
    clock = Clock()
    assert clock.now() == 0.0
    clock.start(at=3.0)
    first = clock.now()
    assert 3.0 <= first <= clock.now()
