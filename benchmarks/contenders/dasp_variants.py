"""Rules that were tried for `dasp` and are not in it: strategies for benchmarks/dasp_trials.py."""

from paceline.core.actions import Action, Apply, Discard, Grant, SetTimer
from paceline.core.events import Pushed
from paceline.strategies.dasp import PATIENCE, Dasp


class Root(Dasp):
    """Damped by the root of 1 + tau."""

    damping = 0.5


class Plain(Dasp):
    """Damped by 1 + tau."""

    damping = 1


class Onward(Dasp):
    """A slower node goes on at once, on a model that does not have its push and misses the group's next step."""

    def _pushed(self, event: Pushed) -> list[Action]:
        actions = super()._pushed(event)
        worker, state = event.worker, self.state
        if worker not in state.following:
            return actions
        state.following.discard(worker)
        state.patient = False
        actions = [a for a in actions if not (isinstance(a, SetTimer) and a.name == PATIENCE)]
        before = [a for a in actions if isinstance(a, Apply | Discard | Grant)]
        return [*before, *self._grants([worker], event.at), *(a for a in actions if a not in before)]
