"""The coordinator's strategy in every run without a server: which nodes are present, and which samples each gets.

Rule: a step that a node reports counts at once, and the node gets its next samples at once. The nodes' own machines
decide what they exchange.
"""

from typing import assert_never

from paceline.core.actions import Action, Apply, Grant
from paceline.core.events import Applied, Event, Joined, Left, Pushed, TimerFired
from paceline.strategies.base import State, Strategy
from paceline.strategies.roster import Roster


class MembersState(State):
    """The nodes with their samples per step, and the steps that each has made."""

    roster: Roster
    steps: dict[int, int] = {}


class Members(Strategy):
    """Nobody waits for anybody."""

    name = "members"
    rule = "A node's step counts at once, and it gets its next samples at once."
    citation = "paceline's own"
    state: MembersState

    def set_up(self) -> None:
        self.state = MembersState(Roster())

    def handle(self, event: Event) -> list[Action]:
        state = self.state
        match event:
            case Pushed():
                worker = event.worker
                state.steps[worker] = event.clock
                reason = f"n{worker} made step {event.clock}"
                weight = 1.0 if event.samples else 0.0
                apply = Apply((event.push,), (weight,), reason)
                return [apply, Grant(worker, state.roster.present[worker], event.clock + 1, reason)]
            case Joined():
                if not state.roster.join(event):
                    return []
                steps = state.steps
                start = steps.get(event.worker)
                if start is None:
                    start = steps[event.worker] = min(steps.values(), default=0)  # of all nodes present or idle
                return [Grant(event.worker, event.work, start + 1, f"n{event.worker} joins after {start} steps")]
            case Left():
                state.roster.leave(event)
                if event.cause != "idle":
                    state.steps.pop(event.worker, None)
                elif state.steps and not state.roster.present:  # the phase is over: in the next one all begin together
                    state.steps = dict.fromkeys(state.steps, max(state.steps.values()))
                return []
            case TimerFired() | Applied():
                return []
            case _:
                assert_never(event)
