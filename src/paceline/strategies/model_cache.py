"""Which workers go on from the model that they have, and when they pull: SSP's cache, for models.

Rule: a version that a worker pulled when the slowest had done r clocks is good for a read at clock c while
r >= c - staleness, as a row of a table is. Until then the worker goes on with it and its own updates (read-my-writes).

When to pull is ours. A worker that leads pulls a version without the clocks that others are about to finish, which
lasts the less: on equal workers that are out of step, every clock of the leaders could pull. So a worker that is to
pull and leads by one clock waits until the slowest's next push is due, one clock of its own after the slowest's last
one, and all are in step from then on. It never waits for a push that is overdue: a worker that stalls delays nobody.
With `patience` it waits for so many of its clocks in any case. A worker that the bound parks pulls when it is released.
"""

from math import inf

import msgspec

from paceline.core.actions import Grant, SetTimer
from paceline.core.events import Pushed
from paceline.strategies.clocks import may_read, park, released

TIMER = "pull.w"  # with the worker's number
SLACK = 1e-9  # of a clock: sums of the same times differ by rounding


class CacheRule(msgspec.Struct, frozen=True):
    """When a worker pulls, and how long it waits for a version that lasts longer."""

    staleness: float
    refresh: float = inf
    patience: float = 0.0


class ModelCache(msgspec.Struct):
    """What each worker has: where the slowest and it itself stood when it pulled; and who waits to pull."""

    slowest: dict[int, int] = {}
    clock: dict[int, int] = {}
    waiting: dict[int, set[int]] = {}  # by the `min` that lets them pull
    moved_at: float = 0.0  # when `min` rose last: the last push of whoever is the slowest and came last

    def pulled(self, worker: int, clock: int, slowest: int) -> None:
        """Note that the worker pulls for its read at this clock."""
        self.slowest[worker], self.clock[worker] = slowest, clock

    def serves(self, worker: int, clock: int, rule: CacheRule) -> bool:
        """Return whether what the worker has is good enough for a read at this clock."""
        young = clock - self.clock[worker] < rule.refresh
        return young and may_read(self.slowest[worker], clock, rule.staleness)

    def go_on(self, worker: int, work: int, clock: int) -> Grant:
        """Grant the next clock on the model that the worker has."""
        reason = f"w{worker} goes on with its cache: {clock} clocks done, slowest at {self.slowest[worker]} in it"
        return Grant(worker, work, clock + 1, reason, cached=True)

    def wait(self, event: Pushed, rule: CacheRule, slowest: int) -> SetTimer:
        """Let a worker wait until the slowest has done as many clocks, but not for long."""
        park(self.waiting, event.worker, event.clock)
        clock_s = event.compute_s + event.transfer_s
        due_s = self.moved_at + (1 + SLACK) * clock_s - event.at if event.clock == slowest + 1 else 0.0
        wait_s = max(due_s, rule.patience * clock_s, 0.0)
        waits = f"waits {round(wait_s, 6):g} s at most for the slowest at {slowest}"
        reason = f"w{event.worker} is to pull: {event.clock} clocks done, {waits}"
        return SetTimer(f"{TIMER}{event.worker}", event.at + wait_s, reason)

    def caught_up(self, before: int, slowest: int) -> list[int]:
        """Return the workers that the slowest has come up to; they wait no longer."""
        return released(self.waiting, before, slowest)

    def stop_waiting(self, worker: int, clock: int) -> bool:
        """End the wait of a worker that stands at this clock; return whether it waited."""
        workers = self.waiting.get(clock, set())
        if worker not in workers:
            return False
        workers.discard(worker)
        if not workers:
            del self.waiting[clock]
        return True


def clear(worker: int, why: str) -> SetTimer:
    """Clear the timer of a worker that waits no longer."""
    return SetTimer(f"{TIMER}{worker}", None, f"w{worker} waits no longer: {why}")
