"""Which pairs of k and load are worth using, from measured times.

A worker's response to a load of b samples is C + b P, communication and per-sample computation independent of each
other. mu(k, b) is the mean of the k-th smallest response. A step's variance falls with k b, its time is mu(k, b), so
only the pairs are of use that no other pair beats in both.
"""

import random
from collections.abc import Mapping, Sequence
from itertools import chain, repeat

import msgspec

DRAWS = 20_000  # responses per load, so that n workers get DRAWS / n rounds: a few percent of error in mu
MIN_ROUNDS = 20


class Point(msgspec.Struct, frozen=True):
    """Wait for `k` workers that compute `load` samples each: `seconds` per step."""

    k: int
    load: int
    seconds: float


def mean_seconds(
    communication: Mapping[int, Sequence[float]], computation: Mapping[int, Sequence[float]], ks: Sequence[int],
    loads: Sequence[int], rng: random.Random,
) -> list[Point]:  # fmt: skip
    """mu(k, b) by Monte Carlo: every round draws each worker's C and P from those measured of it.

    All loads share their draws, so that a larger load never seems faster than a smaller one by chance.
    """
    workers = sorted(communication)
    rounds = max(MIN_ROUNDS, DRAWS // len(workers))
    sums = {(k, load): 0.0 for load in loads for k in ks}
    for _ in repeat(None, rounds):
        drawn = [(rng.choice(communication[w]), rng.choice(computation[w])) for w in workers]
        for load in loads:
            responses = sorted(c + load * p for c, p in drawn)
            for k in ks:
                sums[k, load] += responses[k - 1]
    return [Point(k, load, total / rounds) for (k, load), total in sums.items()]


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in both samples per step and seconds, by rising samples per step."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.k * p.load, p.seconds, p.load)):
        if not kept or point.seconds < kept[-1].seconds:
            kept.append(point)
    return kept[::-1]


def growing_ks(start: int, stop: int, step: int) -> list[int]:
    """Return start, start + step, ... and `stop` itself."""
    return list(chain(range(start, stop, step), (stop,)))
