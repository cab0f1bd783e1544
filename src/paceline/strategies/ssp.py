"""Stale synchronous parallel: nobody runs more than `staleness` clocks ahead of the slowest.

Rule: a push is applied at once; a worker that has completed c clocks starts the next one iff min >= c - staleness.
Published, exact (Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NIPS
2013). A computing worker never exceeds min + staleness; a parked one may stand one clock further. A read at clock c
therefore sees every update stamped c - staleness - 1 or older.

Parked workers are kept by the value of `min` that lets them go, so a push costs no scan over the workers.
"""

from math import inf
from typing import Annotated, Any, assert_never

import msgspec
from msgspec import Meta

from paceline.core.actions import Action, Apply, Grant
from paceline.core.errors import OptionError
from paceline.core.events import Applied, Event, Joined, Left, Pushed, TimerFired
from paceline.strategies.base import Options, State, Strategy
from paceline.strategies.clocks import Clocks, park, released
from paceline.strategies.roster import Roster

WholeSteps = Annotated[
    bool, Meta(description="true: a stock optimizer step per push on its weighted gradient; false: the mass rule")
]


class SspOptions(Options, frozen=True, kw_only=True):
    """The bound, and how a push becomes a step."""

    staleness: Annotated[float, Meta(ge=0, description="clocks a worker may lead the slowest by; inf is asp")] = 3
    whole_steps: WholeSteps = False

    def __post_init__(self) -> None:
        if self.staleness != inf and self.staleness != int(self.staleness):
            raise OptionError(f"staleness must be a whole number of clocks or inf, not {self.staleness:g}; round it")


class SspState(State):
    """Every worker's clock, and the parked workers by the `min` that releases them."""

    roster: Roster = msgspec.field(default_factory=Roster)
    clocks: Clocks = msgspec.field(default_factory=Clocks)
    parked: dict[int, set[int]] = {}

    def joined(self, event: Joined) -> list[Action]:
        """Start a newcomer at `min`, which every bound allows."""
        if not self.roster.join(event):
            return []
        clock = self.clocks.join(event.worker)
        reason = f"w{event.worker} joins at clock {clock}, the slowest's"
        return [Grant(event.worker, event.work, clock + 1, reason)]

    def park(self, worker: int, until: int) -> None:
        """Make the worker wait until `min` is at least `until`."""
        park(self.parked, worker, until)

    def left(self, event: Left, bound: float) -> list[Action]:
        """Remove the worker and release those that were parked only because of it."""
        if not self.roster.leave(event):
            return []
        worker, clocks = event.worker, self.clocks
        clock, before = clocks.of[worker], clocks.min
        if clock - before > bound:
            self.parked.get(clock - int(bound), set()).discard(worker)
        if not clocks.leave(worker):
            return []
        return self.grants(dict.fromkeys(self.released(before), f"w{worker} left"))

    def released(self, before: int) -> list[int]:
        """Unpark and return the workers that the rise of `min` from `before` releases."""
        return released(self.parked, before, self.clocks.min)

    def grants(self, causes: dict[int, str]) -> list[Action]:
        """Grant each of these workers its next clock, in worker order."""
        slowest, of, present = self.clocks.min, self.clocks.of, self.roster.present
        return [
            Grant(w, present[w], of[w] + 1, f"w{w} goes on: {of[w]} clocks done, slowest at {slowest}, {causes[w]}")
            for w in sorted(causes)
        ]


class Ssp(Strategy):
    """Apply at once; park workers that are too far ahead."""

    name = "ssp"
    rule = "A push is applied at once; a worker goes on unless it leads the slowest by more than staleness."
    citation = "Ho et al., More effective distributed ML via a stale synchronous parallel parameter server, NIPS 2013"
    Options = SspOptions
    State = SspState
    state: SspState
    serves_tables = True

    def set_up(self) -> None:
        self.bound: float = self.bound_of(self.options)  # clocks a computing worker may lead the slowest by
        self.free_lead = self.max_lead = self.bound
        self._cause = f"staleness {self.bound:g}"
        # Parts of reasons that many pushes share, with the values they state; rebuilt only when those change.
        self._pace, self._slowest = "", -1
        self._share, self._samples, self._round_samples = "", -1, -1
        self._weights = (0.0,)

    @staticmethod
    def bound_of(options: Any) -> float:
        """Return the bound that these options set."""
        staleness: float = options.staleness
        return staleness

    def handle(self, event: Event) -> list[Action]:
        # In one function, because a simulated cluster spends most of its time on pushes.
        if not isinstance(event, Pushed):
            return self._came_or_went(event)
        state, worker, clock = self.state, event.worker, event.clock
        clocks, roster = state.clocks, state.roster
        before = clocks.min
        moved = clocks.advance(worker, clock)
        slowest = clocks.min
        if event.samples != self._samples or roster.round_samples != self._round_samples:
            self._describe_share(event.samples, roster.round_samples)
        whole_steps = self.options.whole_steps
        apply = Apply((event.push,), self._weights, f"w{worker} pushed {self._share}", whole_steps)
        goes = clock - slowest <= self.bound
        if not goes:
            state.park(worker, clock - int(self.bound))
        if moved and state.parked:
            free = state.released(before)
            if goes:
                free.append(worker)
            return [apply, *state.grants(dict.fromkeys(free, self._cause))]
        if not goes:
            return [apply]
        if slowest != self._slowest:
            self._slowest, self._pace = slowest, f"clocks done, slowest at {slowest}, {self._cause}"
        reason = f"w{worker} goes on: {clock} {self._pace}"
        return [apply, Grant(worker, roster.present[worker], clock + 1, reason)]

    def _describe_share(self, samples: int, round_samples: int) -> None:
        self._samples, self._round_samples = samples, round_samples
        self._weights, self._share = share_of_round(samples, round_samples)

    def _came_or_went(self, event: Joined | Left | Applied | TimerFired) -> list[Action]:
        match event:
            case Joined():
                return self.state.joined(event)
            case Left():
                return self.state.left(event, self.bound)
            case Applied() | TimerFired():
                return []
            case _:
                assert_never(event)


def apply_at_once(event: Pushed, round_samples: int, whole_steps: bool) -> Apply:
    """Return one step of this push alone, weighted by its share of a nominal round."""
    weights, share = share_of_round(event.samples, round_samples)
    return Apply((event.push,), weights, f"w{event.worker} pushed {share}", whole_steps)


def share_of_round(samples: int, round_samples: int) -> tuple[tuple[float], str]:
    """Return the share as a weight and in words."""
    return (samples / round_samples,), f"{samples} samples of a round of {round_samples}"
