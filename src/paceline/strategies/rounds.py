"""The shared machine of the strategies that work in rounds: everybody starts on one version, one Apply ends the round.

Clocks: a round is one clock for everybody, also for a worker whose work of that round was cancelled, because all of
them restart on the same version. So `through` is the number of the running round, `min` is the number of rounds
completed, and a joiner works on the running round at once. The number stands still while nobody is present.

A push of a process that is gone ("left behind") goes into the next Apply, but is nobody's push at the barrier.
"""

import msgspec

from paceline.core.actions import Action, Cancel, Grant
from paceline.core.events import Joined, Left, Pushed
from paceline.strategies.base import State
from paceline.strategies.roster import Roster, whole_step


class Rounds(State):
    """Who takes part in the running round and which of them have pushed."""

    roster: Roster = msgspec.field(default_factory=Roster)
    completed: int = 0
    held: dict[int, Pushed] = {}  # by worker: the pushes that count at the barrier
    left_behind: list[Pushed] = []

    def join(self, event: Joined, work: int | None = None) -> list[Action]:
        """Put a newcomer to work on the current version; `work` stands in for its nominal work."""
        if not self.roster.join(event):
            return []
        reason = f"w{event.worker} joins round {self.completed + 1}, {len(self.roster.present)} workers present"
        return [Grant(event.worker, work or event.work, self.completed + 1, reason)]

    def push(self, event: Pushed) -> None:
        """Hold the push for the end of the round."""
        self.held[event.worker] = event

    def leave(self, event: Left) -> bool:
        """Let the worker go and keep its push; False if it was not present."""
        if not self.roster.leave(event):
            return False
        held = self.held.pop(event.worker, None)
        if held is not None:
            self.left_behind.append(held)
        return True

    def due(self, k: int) -> bool:
        """Have `k` of the present workers pushed, or all of them if they are fewer?"""
        present = len(self.roster.present)
        return len(self.held) >= min(k, present) if present else bool(self.left_behind)

    def end(self, work: int | None = None) -> list[Action]:
        """Apply what is held, take back what is still computed, and start the next round."""
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
