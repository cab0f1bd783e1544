"""Shared bookkeeping of workers, of pushes held for a later Apply, and of rounds that they make together.

The nominal round is the work of the workers present and idle: an idle worker comes back for the next data, so its share
of a round still counts, while that of a worker that is gone does not.
"""

from collections.abc import Iterable, Mapping

import msgspec

from paceline.core.actions import Action, Apply, Cancel, Grant, Mark
from paceline.core.events import Joined, Left, Pushed
from paceline.strategies.base import State
from paceline.strategies.cover import Cover


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


def whole_step(held: Iterable[Pushed], reason: str, counted: Mapping[int, float] | None = None) -> Apply:
    """Return one step of mass 1, each push weighted by its samples (all weights 0 if there are no samples).

    `counted` has, by push, the samples that a push counts as instead of its own.
    """
    ordered = in_worker_order(held)
    samples: list[float] = [(counted or {}).get(h.push, h.samples) for h in ordered]
    total = sum(samples)
    weights = tuple(each / total if total else 0.0 for each in samples)
    return Apply(tuple(h.push for h in ordered), weights, reason)


class Rounds(State):
    """The machine of strategies that work in rounds: all workers start on one version, one Apply ends the round.

    Clocks: a round is one clock for every worker, even for one whose work of that round was cancelled, because all of
    them restart on the same version. So `through` is the number of the running round, `min` is the number of rounds
    completed, and a joiner works on the running round at once. The number does not change while nobody is present.

    A push of a process that is gone ("left behind") goes into the next Apply, but does not count at the barrier. Nor
    does a late push of a covered worker (see cover.py), whose clock is that of the round it was granted in.
    """

    roster: Roster = msgspec.field(default_factory=Roster)
    completed: int = 0
    held: dict[int, Pushed] = {}  # by worker: the pushes that count at the barrier
    left_behind: list[Pushed] = []
    cover: Cover | None = None  # None: whoever is late is cancelled

    def join(self, event: Joined, work: int | None = None) -> list[Action]:
        """Grant a newcomer work on the current version: `work` samples, or its nominal work."""
        if not self.roster.join(event):
            return []
        reason = f"w{event.worker} joins round {self.completed + 1}, {len(self.roster.present)} workers present"
        return [Grant(event.worker, work or event.work, self.completed + 1, reason)]

    def push(self, event: Pushed) -> None:
        """Hold the push for the end of the round."""
        if self.cover is None or not self.cover.takes(event):
            self.held[event.worker] = event

    def leave(self, event: Left) -> bool:
        """Remove the worker and keep its push; return False if it was not present."""
        if not self.roster.leave(event):
            return False
        late = self.cover.leave(event) if self.cover is not None else None
        self.left_behind += [push for push in (self.held.pop(event.worker, None), late) if push is not None]
        return True

    def due(self, k: int) -> bool:
        """Whether `k` of the present workers have pushed in time, or all that can if they are fewer."""
        present, cover = len(self.roster.present), self.cover
        on_time = present if cover is None else present - cover.late
        if on_time:
            return len(self.held) >= min(k, on_time)
        return bool(self.left_behind) if cover is None or not present else bool(cover.arrived)

    def end(self, work: int | None = None) -> list[Action]:
        """Apply the held pushes, cancel work still under way, and start the next round."""
        held, present, cover = self.held, self.roster.present, self.cover
        self.held = {}
        late = list(cover.arrived.values()) if cover is not None else []
        pushes = [*held.values(), *late, *self.left_behind]
        ended, samples = self.completed + 1, sum(h.samples for h in pushes)
        summary = f"round {ended} ends: {len(held)} of {len(present)} present workers pushed, {samples} samples"
        if self.left_behind:
            summary += f" with {len(self.left_behind)} pushes of workers that left"
        counted = _counted(list(held.values()), cover) if cover is not None and late else None
        if counted:
            summary += f" and {len(late)} late, counted as {sum(counted.values()):.4g} samples"
        self.left_behind = []
        actions: list[Action] = [whole_step(pushes, summary, counted)]
        if not present:
            return actions
        self.completed = ended
        free, marks = self._who_goes_on(held, cover) if cover is not None else (sorted(present), [])
        waiting = held.keys() | {push.worker for push in late}
        if len(waiting) < len(free):
            absent = f"is not among the first {len(held)} of {len(present)} in round {ended}"
            actions += [Cancel(w, f"w{w} {absent}") for w in free if w not in waiting]
        reason = f"round {ended + 1} starts with {len(present)} workers"
        actions += [Grant(w, work or present[w], ended + 1, reason) for w in free]
        return actions + marks

    def _who_goes_on(self, held: Mapping[int, Pushed], cover: Cover) -> tuple[list[int], list[Action]]:
        """Return the workers that start the next round, and marks for those whose late work goes on from here."""
        present = sorted(self.roster.present)
        was_covered = set(cover.covered)
        begun = cover.end_round(held, present, len(present))
        marks: list[Action] = []
        for w in sorted({*begun, *(was_covered - cover.covered)}):
            if w in begun:
                reason = f"w{w} owes {cover.debt[w]:.3g} pushes of its share: its work goes on and its push is kept"
            else:
                reason = f"w{w} is among the first {len(held)} again"
            marks.append(Mark(w, "covered" if w in begun else "in step", reason))
        return [w for w in present if w not in cover.running], marks


def _counted(on_time: Iterable[Pushed], cover: Cover) -> dict[int, float]:
    """Return the samples that each late push has to count as for its share of the step; none if all of it is late."""
    samples = sum(push.samples for push in on_time)
    shares = cover.shares(on_time)
    if not samples:
        return {}
    in_step = 1 - sum(shares.values())
    return {cover.arrived[w].push: samples * share / in_step for w, share in shares.items()}
