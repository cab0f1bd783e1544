"""The server's link in a scenario: one first-come queue per direction, and faults of messages."""

import math

import msgspec

from paceline.core.scenario.costs import Times
from paceline.core.scenario.file import Scenario
from paceline.core.scenario.jitter import MESSAGE_FAULT, uniform, worker_key


class MessageFaults:
    """Decides by a hash of worker and attempt which pushes are duplicated or reordered."""

    def __init__(self, scenario: Scenario) -> None:
        self._seed = scenario.seed
        self._events = [event for event in scenario.events if event.kind in ("duplicate", "reorder")]

    def deliveries(self, worker: int, attempt: int, sent_at: float, arrives_at: float) -> list[float]:
        """Return the push's arrival times: just `arrives_at`, unless it is duplicated or reordered."""
        if not self._events:
            return [arrives_at]
        key = worker_key(self._seed, worker)
        moments = [arrives_at]
        for number, event in enumerate(self._events):
            struck = event.at <= sent_at < event.until and (not event.workers or worker in event.workers)
            chance = uniform(key, MESSAGE_FAULT, attempt * len(self._events) + number)
            if not struck or chance >= (event.share or 0.0):
                continue
            # A delay of twice its transfer time lets pushes that were sent later overtake it.
            late = arrives_at + 2 * (arrives_at - sent_at) + 1e-3
            moments = [late] if event.kind == "reorder" else [*moments, late]
        return moments


class Direction:
    """One direction of the server's link; transfers occupy it one after the other."""

    def __init__(self, times: Times, *, upward: bool) -> None:
        self._times = times
        self._upward = upward
        self._free_at = 0.0
        self.queued_s: float | None = None  # for so long the transfer asked about last waits behind others

    def arrival(self, worker: int, attempt: int, size: int, sent_at: float) -> float:
        """Return when the last of `size` bytes sent at `sent_at` arrives. Call it in the order of sending."""
        times = self._times
        begin = times.reachable_at(worker, sent_at)
        self.queued_s = None
        seconds = 0.0
        if size and times.server_bandwidth != math.inf:
            free = begin == sent_at  # a push held back by a partition does not occupy the link
            if free and self._free_at > begin:
                begin, self.queued_s = self._free_at, self._free_at - begin
            seconds = times.line_s(size, begin)
            if free:
                self._free_at = begin + seconds
        # A slower link of the worker stretches its transfer without occupying the server's link.
        took = max(seconds, times.link_s(worker, size, begin))
        return begin + took + times.latency_s(worker, attempt, self._upward, begin + took)


class Ways(msgspec.Struct, frozen=True):
    """Both directions, and the faults of messages on them."""

    up: Direction
    down: Direction
    faults: MessageFaults
