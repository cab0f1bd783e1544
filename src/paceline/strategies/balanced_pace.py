"""How many samples each worker of a balanced round takes: arithmetic on measured times, without the round's state.

A worker needs `start` seconds before its first sample, which is the cost of a request, and `per_sample` for each one.
"""

import heapq
from collections.abc import Iterable
from math import floor

import msgspec

from paceline.core.events import Pushed
from paceline.strategies.monitor import SHORTEST, SMOOTHING, Monitor

ROUNDING = 1e-3  # samples; the rounding error that differences of times leave

RESERVE = 4  # mean deviations; kept back for later pieces, half of the share at most
EVENED_OUT = 0.5  # the part of a piece's unevenness that one more piece removes; measured


class Pace(msgspec.Struct, frozen=True, gc=False):
    """The time that a worker needs, in seconds."""

    start: float
    per_sample: float

    def fitting(self, seconds: float) -> int:
        """Return the whole samples that the worker finishes in this time."""
        left = seconds - self.start
        return max(0, floor(left / self.per_sample + ROUNDING)) if left > 0 else 0


def seconds_for(samples: int, paces: Iterable[Pace]) -> float:
    """Return the shortest time in which these workers together finish so many samples, in whole samples each.

    In the time for divisible work each worker falls short by less than one sample; the missing ones are added one at a
    time, each to the worker that finishes it first.
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
    """The samples and times of a worker in the round under way."""

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
        """Whether the worker has been measured."""
        return worker in self.monitor.nodes

    def of(self, worker: int, goes_on: bool) -> Pace:
        """Return the pace of its next piece; going on with a held push costs no fresh model."""
        node = self.monitor.nodes[worker]
        start = self.request.get(worker, node.transfer) if goes_on else node.transfer
        return Pace(start, node.per_sample)

    def measure(self, event: Pushed, samples: int, nominal: int, goes_on: bool) -> None:
        """Record a piece; a worker's first one is its estimate, later ones are averaged when the round ends.

        A worker's own times leave out what it waited for others on the server's line, which depends on its place.
        """
        worker, compute_s = event.worker, event.compute_s
        transfer_s = event.transfer_s - (event.queued_down_s or 0.0) - (event.queued_up_s or 0.0)
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
        """Add the round's times to the averages."""
        for worker, took in self.took.items():
            nominal = self.monitor.nodes[worker].nominal
            self.monitor.record(worker, took.samples, nominal, took.compute_s, took.transfer_s)
        self.took = {}

    def per_sample(self, worker: int) -> float | None:
        """Return the seconds that the worker usually takes for a sample; None if it was never measured."""
        return self.monitor.nodes[worker].per_sample if self.known(worker) else None

    def renew(self, worker: int, per_sample: float) -> None:
        """Replace what was measured of a worker whose speed has changed."""
        self.monitor.nodes[worker].per_sample = max(per_sample, SHORTEST)
        self.took.pop(worker, None)

    def forget(self, worker: int) -> None:
        """Drop the measurements of a process that is gone or has to be measured again."""
        self.monitor.forget(worker)
        self.request.pop(worker, None)
        self.spread.pop(worker, None)
        self.took.pop(worker, None)

    def piece(self, worker: int, fair: float, fitting: int, goes_on: bool, delay_s: float = 0.0) -> int:
        """Return the samples to take of a fair share: half of it or more, so that the rest can still be shifted.

        Where one more request, with the seconds by which it delays others, costs more than the unevenness that it would
        remove, all that fits.
        """
        pace, spread = self.of(worker, goes_on), self.spread.get(worker, 0.0)
        cost = self.request.get(worker, self.monitor.nodes[worker].transfer) + delay_s
        if EVENED_OUT * fair * pace.per_sample * spread <= cost:
            return fitting
        return min(fitting, max(1, round(fair * max(0.5, 1 - RESERVE * spread))))
