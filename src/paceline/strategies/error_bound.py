"""The error bound of fastest-k SGD in wall-clock time, and the switching times that minimize it.

Published (Kas Hanna et al. 2020): for fixed k, E(t) <= phi_k + (1 - eta c)^(t / mu_k) (E_0 - phi_k), where mu_k is the
mean time of an iteration and phi_k = eta L sigma2 / (2 c k s) the floor. The steepest bound belongs to the k with the
largest (E - phi_k) / mu_k, so k is left for a larger one where the two are equal.
"""

from collections.abc import Sequence
from math import log

import msgspec


class Constants(msgspec.Struct, frozen=True):
    """Constants of the problem and the run, in the publication's letters."""

    eta: float  # learning rate
    smoothness: float  # L: Lipschitz constant of the gradient
    convexity: float  # c: strong convexity
    sigma2: float  # variance of a one-sample gradient
    samples: float  # s: samples per push

    @property
    def contraction(self) -> float:
        """The share of the error above the floor that remains after an iteration."""
        return 1 - self.eta * self.convexity


def mean_response(k: int, workers: int, mean: float) -> float:
    """mu_k: mean of the k-th smallest of `workers` exponential times."""
    return mean * sum(1 / i for i in range(workers - k + 1, workers + 1))


def floor_of(k: int, constants: Constants) -> float:
    """phi_k: the floor of the error when waiting for k."""
    c = constants
    return c.eta * c.smoothness * c.sigma2 / (2 * c.convexity * k * c.samples)


def error_after(seconds: float, k: int, mu: float, error: float, constants: Constants) -> float:
    """Return the bound after so many seconds of waiting for k, from `error`."""
    floor = floor_of(k, constants)
    return float(floor + constants.contraction ** (seconds / mu) * (error - floor))


def seconds_until_switch(k: int, larger: int, workers: int, mean: float, error: float, constants: Constants) -> float:
    """Return how long waiting for k is better than waiting for `larger`; 0 if it is not even at the start."""
    mu, mu_larger = mean_response(k, workers, mean), mean_response(larger, workers, mean)
    floor, floor_larger = floor_of(k, constants), floor_of(larger, constants)
    excess_at_switch = mu * (floor - floor_larger) / (mu_larger - mu)
    if error - floor <= excess_at_switch:
        return 0.0
    return mu / -log(constants.contraction) * log((error - floor) / excess_at_switch)


def fastest_falling(error: float, floors: Sequence[float], seconds: Sequence[float]) -> int:
    """Return the argmax of (E - phi) / mu; the lowest floor if the error is below all of them."""
    rates = [(error - floor) / mu if mu > 0 else (error - floor) for floor, mu in zip(floors, seconds, strict=True)]
    best = max(range(len(rates)), key=rates.__getitem__)
    return best if rates[best] > 0 else min(range(len(floors)), key=floors.__getitem__)
