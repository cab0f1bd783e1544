"""Bulk synchronous parallel: everybody waits for everybody.

Rule: hold every push until all present workers have pushed for this clock, then one Apply of all and release all.
Published, exact (Valiant, "A bridging model for parallel computation", CACM 1990). With n workers it equals training in
one process on the union of their batches, so it is the statistical yardstick of every other strategy.
"""

from typing import assert_never

from paceline.core.actions import Action
from paceline.core.events import Applied, Event, Joined, Left, Pushed, TimerFired
from paceline.strategies.base import Strategy
from paceline.strategies.roster import Rounds


class Bsp(Strategy):
    """Wait for all, apply once, release all."""

    name = "bsp"
    rule = "Every worker waits until all have pushed; their pushes are applied as one step."
    citation = "Valiant, A bridging model for parallel computation, CACM 1990"
    State = Rounds
    state: Rounds
    serves_tables = True
    max_lead = 0.0

    def handle(self, event: Event) -> list[Action]:
        state = self.state
        match event:
            case Pushed():
                state.push(event)
            case Joined():
                return state.join(event)
            case Left():
                if not state.leave(event):
                    return []
            case Applied() | TimerFired():
                return []
            case _:
                assert_never(event)
        return state.end() if state.due(len(state.roster.present)) else []
