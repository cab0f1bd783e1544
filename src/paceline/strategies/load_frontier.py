"""Which pairs of k and load are worth using, from measured times, and whether the cluster still has these times.

A worker's response to a load of b samples is C + b P, communication and per-sample computation independent of each
other. mu(k, b) is the mean of the k-th smallest response. A step's variance falls with k b, its time is mu(k, b), so
only the pairs are of use that no other pair beats in both.

Later rounds show the times of the k fastest alone: what was cancelled is censored, so their mean times say nothing
about the cluster's. `Expected` therefore has what the k fastest of the measured cluster would show: the mean of the
k-th response, and of C and P among the first k. Only what leaves those has changed.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, repeat
from math import log, sqrt

import msgspec

from paceline.core.events import Pushed

DRAWS = 20_000  # responses per load, so that n workers get DRAWS / n rounds: a few percent of error in mu
MIN_ROUNDS = 20
MEASURED_ROUNDS = 8
WATCHED_ROUNDS = 16  # whose means are compared with the expected ones
LEAST_CHANGE = 1.5  # times slower or faster: less is not worth MEASURED_ROUNDS rounds that wait for everybody
ERRORS = 3.0  # standard errors that a change must exceed

Times = tuple[float, float, float]  # of a round: the k-th response, mean C and mean P of the first k
NAMES = ("the k-th response", "transfers", "computing a sample")


class Expected(msgspec.Struct, frozen=True):
    """Means of what a round of the first k shows, and their relative deviations from round to round."""

    means: Times
    deviations: Times


class Point(msgspec.Struct, frozen=True):
    """Wait for `k` workers that compute `load` samples each: `seconds` per step."""

    k: int
    load: int
    seconds: float
    expected: Expected | None = None  # None: never compared with later rounds

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.k * self.load


def mean_seconds(
    communication: Mapping[int, Sequence[float]], computation: Mapping[int, Sequence[float]], ks: Sequence[int],
    loads: Sequence[int], rng: random.Random,
) -> list[Point]:  # fmt: skip
    """mu(k, b) by Monte Carlo: every round draws each worker's C and P from those measured of it.

    All loads share their draws, so that a larger load never seems faster than a smaller one by chance.
    """
    workers = sorted(communication)
    rounds = max(MIN_ROUNDS, DRAWS // len(workers))
    seen: dict[tuple[int, int], list[Times]] = {(k, load): [] for load in loads for k in ks}
    for _ in repeat(None, rounds):
        drawn = [(rng.choice(communication[w]), rng.choice(computation[w])) for w in workers]
        for load in loads:
            ordered = sorted((c + load * p, c, p) for c, p in drawn)
            transfers = list(accumulate(c for _, c, _ in ordered))
            computing = list(accumulate(p for _, _, p in ordered))
            for k in ks:
                seen[k, load].append((ordered[k - 1][0], transfers[k - 1] / k, computing[k - 1] / k))
    return [_point(k, load, times) for (k, load), times in seen.items()]


def _point(k: int, load: int, times: Sequence[Times]) -> Point:
    rounds = len(times)
    means = [sum(column) / rounds for column in zip(*times, strict=True)]
    deviations = [
        sqrt(sum((value - mean) ** 2 for value in column) / rounds) / mean if mean else 0.0
        for column, mean in zip(zip(*times, strict=True), means, strict=True)
    ]
    return Point(k, load, means[0], Expected(_three(means), _three(deviations)))


def _three(values: Sequence[float]) -> Times:
    first, second, third = values
    return first, second, third


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in both samples per step and seconds, by rising samples per step."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.batch, p.seconds, p.load)):
        if not kept or point.seconds < kept[-1].seconds:
            kept.append(point)
    return kept[::-1]


def growing_ks(start: int, stop: int, step: int) -> list[int]:
    """Return start, start + step, ... and `stop` itself."""
    return list(chain(range(start, stop, step), (stop,)))


def times_of(pushes: Iterable[Pushed]) -> Times | None:
    """Return what a round's pushes in time show; None if one has no samples."""
    found = list(pushes)
    if not found or not all(push.samples for push in found):
        return None
    return (
        max(push.transfer_s + push.compute_s for push in found),
        sum(push.transfer_s for push in found) / len(found),
        sum(push.compute_s / push.samples for push in found) / len(found),
    )


class FrontierWatch(msgspec.Struct):
    """Compares rounds at a point with what its measurement lets expect."""

    rounds: list[Times] = []
    patience: int = WATCHED_ROUNDS  # rounds at a point before they are judged; grows with refreshes that found nothing
    misfits: int = 0  # rounds in a row for whose workers the frontier was not measured

    def outnumbered(self, point: Point, workers: int, useful: int, measured: int) -> str | None:
        """Count a round with so many workers, of whom so many could be waited for; return how they are too few or more.

        Rounds in a row count, so that a worker that is soon back has nothing measured again.
        """
        more = useful > measured > 0
        self.misfits = self.misfits + 1 if more or workers < point.k else 0
        if self.misfits < WATCHED_ROUNDS:
            return None
        what = f"more than the {measured} measured" if more else f"fewer than k={point.k}"
        return f"in {self.misfits} rounds {workers} workers were there, {what}"

    def left(self, point: Point, seen: Times | None) -> str | None:
        """Count a round; return how the last ones differ from the expected, or None."""
        if seen is None or point.expected is None:
            return None
        self.rounds.append(seen)
        if len(self.rounds) < self.patience:
            return None
        last = self.rounds = self.rounds[-self.patience :]
        of_last, of_measured = 1 / len(last), 1 / MEASURED_ROUNDS
        for name, column, mean, deviation in zip(
            NAMES, zip(*last, strict=True), point.expected.means, point.expected.deviations, strict=True
        ):
            found = sum(column) / len(last)
            if mean <= 0 or found <= 0:
                continue
            allowed = max(log(LEAST_CHANGE), ERRORS * deviation * sqrt(of_last + of_measured))
            if abs(log(found / mean)) > allowed:
                return f"in {len(last)} rounds {name} took {found / mean:.3g} times the expected {mean:.3g} s"
        return None
