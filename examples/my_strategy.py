"""A strategy of one's own: nobody waits, and a push counts the less the more updates it has missed."""

from typing import Annotated

import msgspec

from paceline.strategies import Action, Apply, Event, Grant, Joined, Left, Options, Pushed, Roster, State, Strategy


class DampedOptions(Options, frozen=True, kw_only=True):
    power: Annotated[float, msgspec.Meta(ge=0, description="of the damping; 0: none")] = 0.5


class DampedState(State):
    roster: Roster = msgspec.field(default_factory=Roster)  # who is present, and their samples per push
    version: int = 0


class Damped(Strategy):
    """Every push is applied at once, weighted by its samples and damped by the updates it has missed."""

    Options, State = DampedOptions, DampedState

    def handle(self, event: Event) -> list[Action]:
        state, actions = self.state, []
        match event:
            case Joined(worker=worker, work=work) if state.roster.join(event):
                return [Grant(worker, work, 1, f"w{worker} joins, {len(state.roster.present)} workers present")]
            case Left():
                state.roster.leave(event)
            case Pushed(worker=worker, push=push, samples=samples):
                missed = state.version - event.read_version
                weight = samples / state.roster.round_samples * (1 + missed) ** -self.options.power
                state.version += weight > 0
                reason = f"w{worker}: {samples} samples, {missed} updates missed, weight {weight:.3g}"
                actions += [Apply((push,), (weight,), reason)]
                actions += [Grant(worker, state.roster.present[worker], event.clock + 1, f"w{worker} goes on")]
        return actions
