"""How much each worker of a balanced round takes: arithmetic on measured times, without any state of the round.

A worker needs `start` seconds before its first sample, which is the cost of a request, and `per_sample` for each one.
"""

import heapq
from collections.abc import Iterable
from math import floor

import msgspec

from paceline.core.events import Pushed
from paceline.strategies.monitor import SMOOTHING, Monitor

ROUNDING = 1e-3  # samples; differences of times leave that much in doubt

RESERVE = 4  # mean deviations; what is kept back for later pieces, half of the share at most
EVENED_OUT = 0.5  # the part of a piece's unevenness that a further one takes away: measured


class Pace(msgspec.Struct, frozen=True, gc=False):
    """What a worker needs from here on, in seconds."""

    start: float
    per_sample: float

    def fitting(self, seconds: float) -> int:
        """Whole samples that the worker finishes in this time."""
        left = seconds - self.start
        return max(0, floor(left / self.per_sample + ROUNDING)) if left > 0 else 0


def seconds_for(samples: int, paces: Iterable[Pace]) -> float:
    """The shortest time in which these workers finish so many samples together, in whole samples each.

    The time for divisible work is too short by less than a sample of each; those are added one at a time, each to the
    worker that finishes it first.
    """
    order = sorted(paces, key=lambda pace: pace.start)
    divisible, speed, offset = order[0].start, 0.0, 0.0
    for place, pace in enumerate(order):
        speed += 1 / pace.per_sample
        offset += pace.start / pace.per_sample
        divisible = (samples + offset) / speed
        if place + 1 == len(order) or divisible <= order[place + 1].start:
            break
    taken = [pace.fitting(divisible) for pace in order]
    upcoming = [(p.start + (n + 1) * p.per_sample, i) for i, (p, n) in enumerate(zip(order, taken, strict=True))]
    heapq.heapify(upcoming)
    end = max((p.start + n * p.per_sample for p, n in zip(order, taken, strict=True) if n), default=0.0)
    for _ in range(samples - sum(taken)):
        end, i = upcoming[0]
        heapq.heapreplace(upcoming, (end + order[i].per_sample, i))
    return end


class Took(msgspec.Struct):
    """What a worker has computed in the round under way."""

    transfer_s: float  # of a piece that starts with a fresh model
    samples: int = 0
    compute_s: float = 0.0


class Paces(msgspec.Struct):
    """Every worker's measured pace: averages over whole rounds, because single pieces are noisy."""

    monitor: Monitor = msgspec.field(default_factory=Monitor)
    request: dict[int, float] = {}  # seconds that one more piece costs beside its samples
    spread: dict[int, float] = {}  # how far a piece's time is from the average, as a share of it
    took: dict[int, Took] = {}

    def known(self, worker: int) -> bool:
        """Has the worker been measured?"""
        return worker in self.monitor.nodes

    def of(self, worker: int, goes_on: bool) -> Pace:
        """The pace of its next piece; going on with a held push costs no fresh model."""
        node = self.monitor.nodes[worker]
        start = self.request.get(worker, node.transfer) if goes_on else node.transfer
        return Pace(start, node.per_sample)

    def measure(self, event: Pushed, samples: int, nominal: int, goes_on: bool) -> None:
        """Take in a piece; a worker's first one is its estimate, later ones are averaged when the round ends."""
        worker, compute_s, transfer_s = event.worker, event.compute_s, event.transfer_s
        if goes_on:
            before = self.request.get(worker, transfer_s)
            self.request[worker] = before + SMOOTHING * (transfer_s - before)
        node = self.monitor.nodes.get(worker)
        if node is None:
            self.monitor.record(worker, samples, nominal, compute_s, transfer_s)
            return
        off = min(1.0, abs(compute_s / samples / node.per_sample - 1))
        self.spread[worker] = self.spread.get(worker, 0.0) * (1 - SMOOTHING) + SMOOTHING * off
        took = self.took.setdefault(worker, Took(node.transfer))
        took.samples += samples
        took.compute_s += compute_s
        if not goes_on:
            took.transfer_s = transfer_s

    def end_round(self) -> None:
        """Average what the round has told."""
        for worker, took in self.took.items():
            nominal = self.monitor.nodes[worker].nominal
            self.monitor.record(worker, took.samples, nominal, took.compute_s, took.transfer_s)
        self.took = {}

    def forget(self, worker: int) -> None:
        """The process is gone, or has to be measured afresh."""
        self.monitor.forget(worker)
        self.request.pop(worker, None)
        self.spread.pop(worker, None)
        self.took.pop(worker, None)

    def piece(self, worker: int, fair: float, fitting: int, goes_on: bool) -> int:
        """Samples to take of a fair share: half of it or more, so that the rest can still be shifted.

        Where a request costs more than the unevenness that shifting the rest takes away, everything that fits.
        """
        pace, spread = self.of(worker, goes_on), self.spread.get(worker, 0.0)
        cost = self.request.get(worker, self.monitor.nodes[worker].transfer)
        if EVENED_OUT * fair * pace.per_sample * spread <= cost:
            return fitting
        return min(fitting, max(1, round(fair * max(0.5, 1 - RESERVE * spread))))
