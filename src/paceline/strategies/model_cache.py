"""Which workers go on from the model that they have, and when they pull: SSP's cache, for models.

Rule: a version that a worker pulled when the slowest had done r clocks is good for a read at clock c while
r >= c - staleness, as a row of a table is. Until then the worker goes on with it and its own updates (read-my-writes).

When to pull is ours. A worker that leads by d clocks pulls a version without the clocks that others are about to
finish, good for staleness + 1 - d clocks: as clocks are never quite equally long, each clock of the leaders would soon
pull. So a worker that is to pull waits until it leads by a fifth of staleness + 1 at most, which leaves a pull four
fifths of its clocks; then equal workers stay in step, and the slack keeps the waiting short. It waits only for a
slowest that is expected there soon, at one clock of its own for each that the slowest lacks, counted from the slowest's
last one; and it goes on waiting for `patience` clocks when that time is over. While the slowest stalls nobody waits
longer than that; when it is back, leaders that are to pull wait until it has caught up, if it is `soon` there. A worker
that the bound parks pulls when it is released.
"""

from math import inf

import msgspec

from paceline.core.actions import Grant, SetTimer
from paceline.core.events import Pushed
from paceline.strategies.clocks import may_read, park, released

TIMER = "pull.w"  # with the worker's number
SLACK = 1e-9  # of a clock: sums of the same times differ by rounding
SHARE = 5  # a pull may have one of so many of its clocks less: 1.25 times the fewest pulls at most
SOON = 1.0  # clocks, beside those of a fifth: a slowest further off is disturbed, and a lead is there to bridge that


class CacheRule(msgspec.Struct, frozen=True):
    """When a worker pulls, and how long it waits for a version that lasts longer."""

    staleness: float
    refresh: float = inf
    patience: float = 0.5

    @property
    def lead(self) -> float:
        """Clocks that a worker may lead by when it pulls, without a wait; what `refresh` cuts off anyway is free."""
        clocks = self.staleness + 1
        return inf if clocks == inf else max(clocks // SHARE, clocks - self.refresh)

    @property
    def soon(self) -> float:
        """Clocks within which the slowest has to be expected, for a worker to wait for it."""
        return SOON + (self.staleness + 1) / SHARE


class ModelCache(msgspec.Struct):
    """What each worker has: where the slowest and it itself stood when it pulled; and who waits to pull."""

    slowest: dict[int, int] = {}
    clock: dict[int, int] = {}
    waiting: dict[int, set[int]] = {}  # by the `min` that lets them pull
    until: dict[int, int] = {}  # that `min`, by worker
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
        """Let a worker wait until it leads by few clocks, but not for long."""
        worker, until = event.worker, event.clock - int(rule.lead)
        self.until[worker] = until
        park(self.waiting, worker, until)
        clock_s = event.compute_s + event.transfer_s
        due_s = self.moved_at + (until - slowest) * clock_s - event.at
        soon = due_s <= rule.soon * clock_s
        wait_s = max(due_s + max(rule.patience, SLACK) * clock_s, 0.0) if soon else 0.0
        waits = f"waits {round(wait_s, 6):g} s at most for the slowest at {slowest} to be at {until}"
        reason = f"w{worker} is to pull: {event.clock} clocks done, {waits}"
        return SetTimer(f"{TIMER}{worker}", event.at + wait_s, reason)

    def caught_up(self, before: int, slowest: int) -> list[int]:
        """Return the workers that the slowest has come up to; they wait no longer."""
        found = released(self.waiting, before, slowest)
        for worker in found:
            del self.until[worker]
        return found

    def stop_waiting(self, worker: int) -> bool:
        """End the wait of a worker; return whether it waited."""
        until = self.until.pop(worker, None)
        if until is None:
            return False
        workers = self.waiting[until]
        workers.discard(worker)
        if not workers:
            del self.waiting[until]
        return True


def clear(worker: int, why: str) -> SetTimer:
    """Clear the timer of a worker that waits no longer."""
    return SetTimer(f"{TIMER}{worker}", None, f"w{worker} waits no longer: {why}")
