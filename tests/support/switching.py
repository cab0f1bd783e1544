"""The published schedule of fastest k as a whole, which adaptive_k follows step by step."""

from typing import NamedTuple

from paceline.strategies.error_bound import Constants, error_after, mean_response, seconds_until_switch


class Switch(NamedTuple):
    """Leave `k` at `at`, where the bound on the error has come down to `error`."""

    k: int
    at: float
    error: float


def switches(workers: int, mean: float, error: float, constants: Constants) -> list[Switch]:
    """The bound-optimal schedule from k = 1 to all workers."""
    found: list[Switch] = []
    at = 0.0
    for k in range(1, workers):
        seconds = seconds_until_switch(k, k + 1, workers, mean, error, constants)
        error = error_after(seconds, k, mean_response(k, workers, mean), error, constants)
        at += seconds
        found.append(Switch(k, at, error))
    return found
