"""The shared bookkeeping of workers and of the pushes that are held back for a later Apply.

The nominal round is the work of the workers present and idle: an idle worker comes back for the next data, so its share
of a round stands, while a worker that has gone takes its share along.
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
        """Take the worker in; False if it was present and only its nominal work changed."""
        worker, work = event.worker, event.work
        known = worker in self.present
        self.round_samples += work - self.present.get(worker, self.idle.pop(worker, 0))
        self.present[worker] = work
        return not known

    def leave(self, event: Left) -> bool:
        """Let the worker go; False if it was not present."""
        work = self.present.pop(event.worker, None)
        if event.cause == "idle" and work is not None:
            self.idle[event.worker] = work
        elif work is not None:
            self.round_samples -= work
        else:
            self.round_samples -= self.idle.pop(event.worker, 0)
        return work is not None


def in_worker_order(held: Iterable[Pushed]) -> list[Pushed]:
    """Oldest push first within a worker."""
    return sorted(held, key=lambda h: (h.worker, h.push))


def whole_step(held: Iterable[Pushed], reason: str) -> Apply:
    """One step of mass 1, each push weighted by its samples (all weights 0 if nobody has any)."""
    ordered = in_worker_order(held)
    total = sum(h.samples for h in ordered)
    weights = tuple(h.samples / total if total else 0.0 for h in ordered)
    return Apply(tuple(h.push for h in ordered), weights, reason)
