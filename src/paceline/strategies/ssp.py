"""Stale synchronous parallel: nobody runs more than `staleness` clocks ahead of the slowest.

Rule: a push is applied at once; a worker that has completed c clocks starts the next one iff min >= c - staleness.
Published, exact (Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NIPS
2013). A computing worker never exceeds min + staleness; a parked one may stand one clock further. A read at clock c
therefore sees every update stamped c - staleness - 1 or older.

With `cache`, a worker whose model is recent enough for the bound goes on with it and its own updates instead of pulling
(`model_cache.py`); without, and wherever a worker cannot compute its own updates exactly, every clock pulls.

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
from paceline.strategies.model_cache import TIMER, CacheRule, ModelCache, clear
from paceline.strategies.roster import Roster

WholeSteps = Annotated[
    bool, Meta(description="true: a stock optimizer step per push on its weighted gradient; false: the mass rule")
]
PATIENCE = 0.5  # of a clock: with none, half of the pushes that a worker waits for come too late under any jitter


class SspOptions(Options, frozen=True, kw_only=True):
    """The bound, and how a push becomes a step."""

    staleness: Annotated[float, Meta(ge=0, description="clocks a worker may lead the slowest by; inf is asp")] = 3
    whole_steps: WholeSteps = False
    cache: Annotated[
        bool, Meta(description="true: pull a model only when the bound asks (plain SGD); false: at every clock")
    ] = False
    refresh: Annotated[float, Meta(ge=1, description="with cache: clocks after which a worker pulls anyway")] = inf
    patience: Annotated[
        float, Meta(ge=0, description="with cache: clocks for which a worker that is to pull awaits an overdue slowest")
    ] = PATIENCE

    def __post_init__(self) -> None:
        for name in ("staleness", "refresh"):
            value = getattr(self, name)
            if value != inf and value != int(value):
                raise OptionError(f"{name} must be a whole number of clocks or inf, not {value:g}; round it")
        if not self.cache and (self.refresh != inf or self.patience != PATIENCE):
            name = "refresh" if self.refresh != inf else "patience"
            raise OptionError(f"{name} is of the cache, which is off; add cache=true, or leave {name} out")
        if self.patience == inf:
            raise OptionError("patience must be < inf: a worker would wait for the slowest at every pull, as under bsp")
        if self.cache and self.staleness == self.refresh == inf:
            raise OptionError("cache with staleness=inf never pulls; give refresh, a number of clocks")


class SspState(State):
    """Every worker's clock, the parked workers by the `min` that releases them, and what each worker has."""

    roster: Roster = msgspec.field(default_factory=Roster)
    clocks: Clocks = msgspec.field(default_factory=Clocks)
    parked: dict[int, set[int]] = {}
    cache: ModelCache | None = None  # None: every clock pulls

    def joined(self, event: Joined) -> list[Action]:
        """Start a newcomer at `min`, which every bound allows."""
        if not self.roster.join(event):
            return []
        clock = self.clocks.join(event.worker)
        if self.cache is not None:
            self.cache.pulled(event.worker, clock, clock)
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
        timers: list[Action] = []
        caught_up: list[int] = []
        if self.cache is not None and self.cache.stop_waiting(worker):
            timers.append(clear(worker, "it has left"))
        if not clocks.leave(worker):
            return timers
        if self.cache is not None:
            caught_up = self.cache.caught_up(before, clocks.min)
        timers += [clear(w, "it pulls") for w in caught_up]
        return [*self.grants(dict.fromkeys([*self.released(before), *caught_up], f"w{worker} left")), *timers]

    def released(self, before: int) -> list[int]:
        """Unpark and return the workers that the rise of `min` from `before` releases."""
        return released(self.parked, before, self.clocks.min)

    def grants(self, causes: dict[int, str]) -> list[Action]:
        """Grant each of these workers its next clock on the current model, in worker order."""
        slowest, of, present = self.clocks.min, self.clocks.of, self.roster.present
        if self.cache is not None:
            for worker in causes:
                self.cache.pulled(worker, of[worker], slowest)
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
        self.cache_rule: CacheRule | None = self.cache_of(self.options)
        self.keeps_models = self.cache_rule is not None
        if self.keeps_models:
            self.state.cache = ModelCache()
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

    @staticmethod
    def cache_of(options: Any) -> CacheRule | None:
        """Return when these options have workers pull; None: at every clock."""
        return CacheRule(options.staleness, options.refresh, options.patience) if options.cache else None

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
        if state.cache is not None and self.cache_rule is not None:
            return [apply, *self._with_cache(event, before, goes, state.cache, self.cache_rule)]
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

    def _with_cache(
        self, event: Pushed, before: int, goes: bool, cache: ModelCache, rule: CacheRule
    ) -> list[Action]:  # fmt: skip
        """Let go whom the bound releases or the slowest has come up to, and say what the pusher computes on."""
        state, worker, clock = self.state, event.worker, event.clock
        slowest = state.clocks.min
        if slowest > before:
            cache.moved_at = event.at
        caught_up = cache.caught_up(before, slowest)
        pulling = [*caught_up, *state.released(before)]
        timers: list[Action] = [clear(w, f"the slowest is at {slowest}") for w in caught_up]
        going: Grant | None = None
        if not goes:
            state.park(worker, clock - int(self.bound))
        elif cache.serves(worker, clock, rule):
            going = cache.go_on(worker, state.roster.present[worker], clock)
        elif clock - slowest > rule.lead:
            timers.append(cache.wait(event, rule, slowest))
        else:
            pulling.append(worker)
        grants = state.grants(dict.fromkeys(pulling, f"{self._cause}, pulls"))
        if going is not None:
            grants.insert(sum(other < worker for other in pulling), going)
        return [*grants, *timers]

    def _pull_after_all(self, event: TimerFired) -> list[Action]:
        """Let a worker pull that has waited for the slowest long enough."""
        state = self.state
        if state.cache is None or not event.name.startswith(TIMER):
            return []
        worker = int(event.name.removeprefix(TIMER))
        if not state.cache.stop_waiting(worker):
            return []
        return state.grants({worker: f"{self._cause}, pulls after all"})

    def _describe_share(self, samples: int, round_samples: int) -> None:
        self._samples, self._round_samples = samples, round_samples
        self._weights, self._share = share_of_round(samples, round_samples)

    def _came_or_went(self, event: Joined | Left | Applied | TimerFired) -> list[Action]:
        match event:
            case Joined():
                return self.state.joined(event)
            case Left():
                return self.state.left(event, self.bound)
            case TimerFired():
                return self._pull_after_all(event)
            case Applied():
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
