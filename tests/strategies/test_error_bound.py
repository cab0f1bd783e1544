"""The published bound of fastest k, and its switching times."""

from math import log

import pytest
from switching import switches

from paceline.strategies.error_bound import (
    Constants,
    error_after,
    floor_of,
    mean_response,
    seconds_until_switch,
)

CONSTANTS = Constants(eta=0.001, smoothness=2, convexity=1, sigma2=10, samples=10)


def test_switches_of_the_published_example():
    found = switches(5, 5.0, 100.0, CONSTANTS)
    assert [switch.k for switch in found] == [1, 2, 3, 4]
    assert [round(switch.at, 2) for switch in found] == [12422.99, 15540.59, 19841.34, 27562.97]
    assert [round(switch.error, 6) for switch in found] == [0.0014, 0.000725, 0.000464, 0.000314]


def test_mean_of_the_kth_of_exponential_times():
    assert mean_response(1, 5, 5.0) == pytest.approx(1.0)
    assert mean_response(5, 5, 5.0) == pytest.approx(5 * (1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5))


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_the_time_is_that_of_the_published_formula(k):
    eta, big_l, c, sigma2, s, error = 0.001, 2, 1, 10, 10, 100.0
    mu, larger = mean_response(k, 5, 5.0), mean_response(k + 1, 5, 5.0)
    excess = 2 * c * k * (k + 1) * s * error - eta * big_l * (k + 1) * sigma2
    formula = mu / -log(1 - eta * c) * (log(larger - mu) - log(eta * big_l * sigma2 * mu) + log(excess))
    assert seconds_until_switch(k, k + 1, 5, 5.0, error, CONSTANTS) == pytest.approx(formula)


def test_at_a_switch_both_bounds_fall_equally_fast():
    found = switches(5, 5.0, 100.0, CONSTANTS)
    for switch in found:
        rates = [(switch.error - floor_of(k, CONSTANTS)) / mean_response(k, 5, 5.0) for k in range(1, 6)]
        assert rates[switch.k - 1] == pytest.approx(rates[switch.k])
        assert max(rates) == pytest.approx(rates[switch.k])


def test_a_k_that_is_never_best_is_skipped():
    assert seconds_until_switch(1, 2, 5, 5.0, 0.0012, CONSTANTS) == 0.0
    assert [switch.at for switch in switches(3, 5.0, 0.0005, CONSTANTS)] == [0.0, 0.0]


def test_the_bound_falls_to_the_floor():
    assert error_after(0.0, 2, 2.25, 100.0, CONSTANTS) == pytest.approx(100.0)
    assert error_after(1e6, 2, 2.25, 100.0, CONSTANTS) == pytest.approx(floor_of(2, CONSTANTS))
