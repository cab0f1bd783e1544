"""Shared bookkeeping of workers, of pushes held for a later Apply, and of rounds that they make together.

The nominal round is the work of the workers present and idle: an idle worker comes back for the next data, so its share
of a round still counts, while that of a worker that is gone does not.
"""

from collections.abc import Iterable

import msgspec

from paceline.core.actions import Action, Apply, Cancel, Grant
from paceline.core.events import Joined, Left, Pushed
from paceline.strategies.base import State


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


class Rounds(State):
    """The machine of strategies that work in rounds: all workers start on one version, one Apply ends the round.

    Clocks: a round is one clock for every worker, even for one whose work of that round was cancelled, because all of
    them restart on the same version. So `through` is the number of the running round, `min` is the number of rounds
    completed, and a joiner works on the running round at once. The number does not change while nobody is present.

    A push of a process that is gone ("left behind") goes into the next Apply, but does not count at the barrier.
    """

    roster: Roster = msgspec.field(default_factory=Roster)
    completed: int = 0
    held: dict[int, Pushed] = {}  # by worker: the pushes that count at the barrier
    left_behind: list[Pushed] = []

    def join(self, event: Joined, work: int | None = None) -> list[Action]:
        """Grant a newcomer work on the current version: `work` samples, or its nominal work."""
        if not self.roster.join(event):
            return []
        reason = f"w{event.worker} joins round {self.completed + 1}, {len(self.roster.present)} workers present"
        return [Grant(event.worker, work or event.work, self.completed + 1, reason)]

    def push(self, event: Pushed) -> None:
        """Hold the push for the end of the round."""
        self.held[event.worker] = event

    def leave(self, event: Left) -> bool:
        """Remove the worker and keep its push; return False if it was not present."""
        if not self.roster.leave(event):
            return False
        held = self.held.pop(event.worker, None)
        if held is not None:
            self.left_behind.append(held)
        return True

    def due(self, k: int) -> bool:
        """Whether `k` of the present workers have pushed, or all if they are fewer."""
        present = len(self.roster.present)
        return len(self.held) >= min(k, present) if present else bool(self.left_behind)

    def end(self, work: int | None = None) -> list[Action]:
        """Apply the held pushes, cancel work still under way, and start the next round."""
        held, present = self.held, self.roster.present
        self.held = {}
        pushes = [*held.values(), *self.left_behind]
        ended, samples = self.completed + 1, sum(h.samples for h in pushes)
        summary = f"round {ended} ends: {len(held)} of {len(present)} present workers pushed, {samples} samples"
        if self.left_behind:
            summary += f" with {len(self.left_behind)} pushes of workers that left"
        self.left_behind = []
        actions: list[Action] = [whole_step(pushes, summary)]
        if not present:
            return actions
        self.completed = ended
        if len(held) < len(present):
            late = f"is not among the first {len(held)} of {len(present)} in round {ended}"
            actions += [Cancel(w, f"w{w} {late}") for w in sorted(present) if w not in held]
        reason = f"round {ended + 1} starts with {len(present)} workers"
        actions += [Grant(w, work or present[w], ended + 1, reason) for w in sorted(present)]
        return actions
