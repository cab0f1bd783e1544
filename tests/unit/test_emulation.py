"""A scenario's times: they count from moments, so that what messages take is not added to them."""

import pytest
from clusters import cluster
from hand_driven import BATCH, HandDrivenRun

from paceline.core.events import Pushed
from paceline.engines.local.timekeeping import Clock
from paceline.transport.messages import Work

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


def test_a_grant_goes_to_the_engine_with_its_times_and_carries_none_itself(hand):
    """Where a second passes differs: a process sleeps it, a virtual worker is let go when it has passed."""
    first, second = hand.engine.timings[0], hand.engine.timings[1]
    assert first.delay_s == pytest.approx(WAY_S)
    assert first.begin == pytest.approx(GRANTED_AT + WAY_S)
    assert first.compute_s == pytest.approx(BATCH * 0.01)
    assert second.compute_s == pytest.approx(BATCH * 0.02)
    assert (hand.last(0, Work).delay_s, hand.last(0, Work).compute_s) == (0.0, None)


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
