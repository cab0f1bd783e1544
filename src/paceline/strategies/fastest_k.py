"""Fastest k: the first k pushes make the step, the others' work is thrown away.

Rule: all n work on version V; the first k pushes form one Apply, the other n - k are cancelled and all restart at V+1.
Published, exact (Kas Hanna, Bitar, Parag, Dasari, El Rouayheb, "Adaptive distributed stochastic gradient descent for
minimizing delay in the presence of stragglers", ICASSP 2020). An iteration takes the k-th order statistic of the
response times. `k` is capped at the workers present; with k = n this is BSP. With `cover` (ours, see cover.py) workers
that are hardly ever among the first k are not cancelled, so that their rows have a share in the model.
"""

from typing import Annotated, assert_never

from msgspec import Meta

from paceline.core.actions import Action
from paceline.core.events import Applied, Event, Joined, Left, Pushed, TimerFired
from paceline.strategies.base import Options, Strategy, require_k_within
from paceline.strategies.cover import Cover
from paceline.strategies.roster import Rounds


class FastestKOptions(Options, frozen=True, kw_only=True):
    """How many to wait for."""

    k: Annotated[int, Meta(ge=1, description="workers whose pushes make a step; the others are cancelled")]
    cover: Annotated[
        bool, Meta(description="keep late pushes of workers hardly ever among the first k, for a share of each shard")
    ] = False


class FastestK(Strategy):
    """Apply the first k pushes, cancel the rest, restart all."""

    name = "fastest_k"
    rule = "The first k pushes on a version are applied as one step; all other work is cancelled, all restart."
    citation = "Kas Hanna et al., Adaptive distributed SGD for minimizing delay in the presence of stragglers, 2020"
    Options = FastestKOptions
    State = Rounds
    state: Rounds

    def set_up(self) -> None:
        self.may_leave_out = not self.options.cover
        self.state.cover = Cover() if self.options.cover else None

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
        return state.end() if state.due(self.options.k) else []

    def check(self, workers: int) -> None:
        require_k_within(self.options.k, workers, self.name)
