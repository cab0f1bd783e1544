"""Shared bookkeeping of workers, and of pushes held for a later Apply.

The nominal round is the work of the workers present and idle: an idle worker comes back for the next data, so its share
of a round still counts, while that of a worker that is gone does not.
"""

from collections.abc import Iterable

import msgspec

from paceline.core.actions import Apply
from paceline.core.events import Joined, Left, Pushed


class Roster(msgspec.Struct):
    """Nominal work of every worker present or idle, and their sum."""

    present: dict[int, int] = {}
    idle: dict[int, int] = {}
    round_samples: int = 0

    def join(self, event: Joined) -> bool:
        """Add the worker; return False if it was present and only its nominal work changed."""
        worker, work = event.worker, event.work
        known = worker in self.present
        self.round_samples += work - self.present.get(worker, self.idle.pop(worker, 0))
        self.present[worker] = work
        return not known

    def leave(self, event: Left) -> bool:
        """Remove the worker, or note it as idle; return False if it was not present."""
        work = self.present.pop(event.worker, None)
        if event.cause == "idle" and work is not None:
            self.idle[event.worker] = work
        elif work is not None:
            self.round_samples -= work
        else:
            self.round_samples -= self.idle.pop(event.worker, 0)
        return work is not None


def in_worker_order(held: Iterable[Pushed]) -> list[Pushed]:
    """Sort pushes by worker, and oldest first within a worker."""
    return sorted(held, key=lambda h: (h.worker, h.push))


def whole_step(held: Iterable[Pushed], reason: str) -> Apply:
    """Return one step of mass 1, each push weighted by its samples (all weights 0 if there are no samples)."""
    ordered = in_worker_order(held)
    total = sum(h.samples for h in ordered)
    weights = tuple(h.samples / total if total else 0.0 for h in ordered)
    return Apply(tuple(h.push for h in ordered), weights, reason)
