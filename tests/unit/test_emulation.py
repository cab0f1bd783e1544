"""A scenario's times on real processes: they count from moments, so that what messages take is not added to them."""

import pytest
from clusters import cluster

from paceline.engines.local.timekeeping import Clock
from paceline.server.emulation import Emulation

NETWORK = "latency_ms = 10.0\nbandwidth_mbps = 8.0"  # a kilobyte takes a millisecond


@pytest.fixture
def emulation():
    return Emulation(cluster(1.0, 0.5, network=NETWORK))


def test_a_push_sets_out_when_its_computation_was_over_whenever_it_was_read(emulation):
    delay_s, compute_s = emulation.order(0, 0, 4, 1000, 5.0)
    begin = 5.0 + delay_s
    assert delay_s == pytest.approx(0.011)
    early, late = (Emulation(emulation.scenario) for _ in range(2))
    for one in (early, late):
        one.order(0, 0, 4, 1000, 5.0)
    over = begin + compute_s
    assert early.arrivals(0, 0, 1000, over, compute_s) == pytest.approx([over + 0.011])
    assert late.arrivals(0, 0, 1000, over + 0.004, compute_s) == pytest.approx([over + 0.011])


def test_a_computation_that_took_longer_sets_out_later(emulation):
    delay_s, compute_s = emulation.order(0, 0, 4, 1000, 5.0)
    over = 5.0 + delay_s + compute_s + 0.5
    assert emulation.arrivals(0, 0, 1000, over + 0.001, compute_s + 0.5) == pytest.approx([over + 0.011])


def test_nothing_sets_out_after_it_was_read(emulation):
    emulation.order(0, 0, 4, 1000, 5.0)
    assert emulation.arrivals(0, 0, 1000, 5.1, 100.0) == pytest.approx([5.111])


def test_a_run_and_its_host_have_one_clock():
    clock = Clock()
    clock.start(at=3.0)
    now = clock.now()
    assert clock.on_host(now) - clock.on_host(0.0) == pytest.approx(now)
    assert clock.on_host(3.0) <= clock.on_host(clock.now())
