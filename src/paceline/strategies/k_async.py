"""K-async: merge the pushes of k distinct workers, cancel nobody.

Rule: Apply after k distinct workers have pushed; only those k get the fresh model, the others go on computing.
Published, exact (Dutta et al., "Slow and stale gradients can win the race", AISTATS 2018). The weights are those of the
mass rule, so a full Apply has mass k/n. With k = 1 this is ASP. `k` is capped at the workers present.
"""

from typing import Annotated, assert_never

import msgspec
from msgspec import Meta

from paceline.core.actions import Action, Apply, Grant
from paceline.core.events import Applied, Event, Joined, Left, Pushed, TimerFired
from paceline.strategies.base import Options, State, Strategy, require_k_within
from paceline.strategies.clocks import Clocks
from paceline.strategies.roster import Roster, in_worker_order


class KAsyncOptions(Options, frozen=True, kw_only=True):
    """How many to wait for."""

    k: Annotated[int, Meta(ge=1, description="distinct workers whose pushes make a step; nobody is cancelled")]


class KAsyncState(State):
    """Every worker's clock, the pushes that count towards k, and those of processes that are gone."""

    roster: Roster = msgspec.field(default_factory=Roster)
    clocks: Clocks = msgspec.field(default_factory=Clocks)
    held: dict[int, Pushed] = {}
    left_behind: list[Pushed] = []


class KAsync(Strategy):
    """Apply whenever k distinct workers have pushed, and release those."""

    name = "k_async"
    rule = "Whenever k distinct workers have pushed, their pushes are applied as one step and these k go on."
    citation = "Dutta et al., Slow and stale gradients can win the race, AISTATS 2018"
    Options = KAsyncOptions
    State = KAsyncState
    state: KAsyncState
    may_leave_out = True

    def handle(self, event: Event) -> list[Action]:
        match event:
            case Pushed():
                self.state.held[event.worker] = event
                self.state.clocks.advance(event.worker, event.clock)
                return self._merge(self.state.roster.round_samples)
            case Joined():
                return self._joined(event)
            case Left():
                return self._left(event)
            case Applied() | TimerFired():
                return []
            case _:
                assert_never(event)

    def check(self, workers: int) -> None:
        require_k_within(self.options.k, workers, self.name)

    def _joined(self, event: Joined) -> list[Action]:
        if not self.state.roster.join(event):
            return []
        clock = self.state.clocks.join(event.worker)
        return [Grant(event.worker, event.work, clock + 1, f"w{event.worker} joins at clock {clock}, the slowest's")]

    def _left(self, event: Left) -> list[Action]:
        state = self.state
        # If the last worker leaves, its push is weighted by the round that still includes it.
        before = state.roster.round_samples
        if not state.roster.leave(event):
            return []
        state.clocks.leave(event.worker)
        held = state.held.pop(event.worker, None)
        if held is not None:
            state.left_behind.append(held)
        return self._merge(state.roster.round_samples or before)

    def _merge(self, round_samples: int) -> list[Action]:
        state = self.state
        present = state.roster.present
        if present:
            if len(state.held) < min(self.options.k, len(present)):
                return []
        elif not state.left_behind:
            return []
        waiting = sorted(state.held)
        held = in_worker_order([*state.held.values(), *state.left_behind])
        state.held, state.left_behind = {}, []
        samples = sum(h.samples for h in held)
        reason = f"{len(waiting)} of k={self.options.k} distinct workers pushed, {samples} of {round_samples} samples"
        weights = tuple(h.samples / round_samples for h in held)
        actions: list[Action] = [Apply(tuple(h.push for h in held), weights, reason)]
        for worker in waiting:
            clock = state.clocks.of[worker]
            goes_on = f"w{worker} goes on: {clock} clocks done, its push is one of {len(held)} applied"
            actions.append(Grant(worker, present[worker], clock + 1, goes_on))
        return actions
