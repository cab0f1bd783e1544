"""Adaptive fastest k: few workers while the error falls fast, more when it no longer does.

Rule: fastest k, where k grows from `start` to `stop` in steps of `step` when a test says that waiting for k makes no
more progress. Published (Kas Hanna et al. 2020; "Adaptive stochastic gradient descent for fast and
communication-efficient distributed learning", 2022):
- `pflug`: a counter, +1 if consecutive applied gradients have a negative inner product, else -1, exceeds `threshold`
  more than `burn_in` iterations after the last change. Under momentum the model goes on in one direction for longer,
  consecutive gradients are hardly ever opposed at larger rates, and k may never grow: take `trend` there;
- `bound`: the times that minimize the error bound, for known constants (see error_bound.py). The mean response comes
  from the run: seconds computed by all workers, cancelled work included, over the pushes made of them. For exponential
  times this is the maximum-likelihood estimate although only the k fastest are ever seen. A switch happens at the
  first end of a round after its time.
- `trend` is ours: the losses of the last `window` iterations are not two standard errors below those of the window
  before (see stationarity.py).
With start = stop = k this is fastest_k, decision for decision. `cover` is ours, too (see cover.py).
"""

from typing import Annotated, Any, Literal, assert_never

import msgspec
from msgspec import Meta

from paceline.core.actions import Action, Cancel, Track
from paceline.core.errors import OptionError
from paceline.core.events import Applied, Event, Joined, Left, Pushed, TimerFired
from paceline.strategies.base import Options, Strategy, require_k_within
from paceline.strategies.cover import Cover
from paceline.strategies.error_bound import Constants, error_after, mean_response, seconds_until_switch
from paceline.strategies.roster import Rounds
from paceline.strategies.stationarity import SinceChange

CONSTANTS = ("eta", "L", "c", "sigma2", "s", "error")  # s only where the load does not change


class GrowthOptions(Options, frozen=True, kw_only=True):
    """From which k to which, which test, how patient the tests are, and the constants of `bound`."""

    start: Annotated[int, Meta(ge=1, description="workers to wait for at first")] = 1
    stop: Annotated[int, Meta(ge=1, description="workers to wait for at most; none: all present")] | None = None
    step: Annotated[int, Meta(ge=1, description="workers more at each change")] = 1
    threshold: Annotated[int, Meta(ge=0, description="pflug: surplus of negative inner products that ends a k")] = 10
    burn_in: Annotated[int, Meta(ge=0, description="iterations after a change before the next; transients pass")] = 200
    window: Annotated[int, Meta(ge=2, description="trend: iterations whose losses are compared with those before")] = (
        100
    )
    test: Annotated[
        Literal["pflug", "trend", "bound"],
        Meta(description="what ends a k; pflug is for SGD without momentum, trend needs reported losses"),
    ] = "pflug"
    eta: Annotated[float, Meta(gt=0, description="bound: learning rate")] | None = None
    L: Annotated[float, Meta(gt=0, description="bound: Lipschitz constant of the gradient")] | None = None
    c: Annotated[float, Meta(gt=0, description="bound: strong convexity")] | None = None
    sigma2: Annotated[float, Meta(gt=0, description="bound: variance of a one-sample gradient")] | None = None

    def __post_init__(self) -> None:
        if self.stop is not None and self.stop < self.start:
            raise OptionError(f"stop must be >= start ({self.start}), not {self.stop}; raise stop or lower start")
        needed = [name for name in CONSTANTS if hasattr(self, name)]
        given = [name for name in needed if getattr(self, name) is not None]
        if self.test == "bound" and len(given) < len(needed):
            missing = ", ".join(name for name in needed if name not in given)
            raise OptionError(f"test=bound needs {missing}; give them or choose test=pflug")
        if self.test != "bound" and given:
            raise OptionError(f"{given[0]} is for test=bound, not {self.test}; add test=bound or drop it")
        if self.eta is not None and self.c is not None and self.eta * self.c >= 1:
            raise OptionError(f"eta * c must be < 1, not {self.eta * self.c:g}; lower eta")

    def constants_of(self, samples: float | None) -> Constants:
        """Return the constants of the bound for pushes of so many samples; only with test=bound."""
        values: dict[str, Any] = {name: getattr(self, name) for name in CONSTANTS if hasattr(self, name)}
        return Constants(values["eta"], values["L"], values["c"], values["sigma2"], samples or 0.0)


class AdaptiveKOptions(GrowthOptions, frozen=True, kw_only=True):
    """Those of growth, and the constant of `bound` that is no constant where the load changes."""

    s: Annotated[float, Meta(gt=0, description="bound: samples per push")] | None = None
    error: Annotated[float, Meta(gt=0, description="bound: error of the initial model")] | None = None
    cover: Annotated[
        bool, Meta(description="keep late pushes of workers hardly ever among the first k, for a share of each shard")
    ] = False

    @property
    def constants(self) -> Constants:
        """The constants of the bound; only with test=bound."""
        return self.constants_of(self.s)


class AdaptiveKState(Rounds):
    """A round, the k it waits for, and what the tests have seen of it."""

    k: int = 0  # 0: the run has not begun
    progress: SinceChange = msgspec.field(default_factory=SinceChange)
    responses: int = 0
    computed_s: float = 0.0  # by all workers, cancelled work included
    round_began: float = 0.0
    error: float = 0.0  # the bound where k last changed
    changed_at: float = 0.0


class AdaptiveK(Strategy):
    """Fastest k with a k that grows when progress stops."""

    name = "adaptive_k"
    rule = "Fastest k, where k grows whenever the gradients, the losses or the error bound say that k is used up."
    citation = "Kas Hanna et al., Adaptive SGD for fast and communication-efficient distributed learning, 2020 and 2022"
    Options = AdaptiveKOptions
    State = AdaptiveKState
    options: AdaptiveKOptions
    state: AdaptiveKState

    def set_up(self) -> None:
        options = self.options
        self.may_leave_out = not options.cover
        self.state.cover = Cover() if options.cover else None
        grows = options.start != options.stop
        self.needs_applied = grows and options.test != "bound"
        self.needs_losses = grows and options.test == "trend"

    def handle(self, event: Event) -> list[Action]:
        state = self.state
        match event:
            case Pushed():
                state.push(event)
                state.responses += 1
                state.computed_s += event.compute_s + event.transfer_s
            case Joined():
                return state.join(event) + self._begin(event.at)
            case Left():
                if not state.leave(event):
                    return []
            case Applied():
                return self._observe(event)
            case TimerFired():
                return []
            case _:
                assert_never(event)
        return self._end_round(event.at) if state.due(state.k) else []

    def check(self, workers: int) -> None:
        require_k_within(self.options.start, workers, self.name)
        if self.options.stop is not None:
            require_k_within(self.options.stop, workers, f"{self.name}, stop")

    def _begin(self, at: float) -> list[Action]:
        state = self.state
        if len(state.roster.present) == 1:
            state.round_began = at
        if state.k:
            return []
        state.k, state.changed_at = self.options.start, at
        if self.options.test == "bound" and self.options.error is not None:
            state.error = self.options.error
        if self.options.start == self.options.stop:
            return []
        return [Track("k", state.k, f"the run begins with k={state.k}")]

    def _end_round(self, at: float) -> list[Action]:
        state = self.state
        actions = state.end()
        cancelled = sum(isinstance(action, Cancel) for action in actions)
        state.computed_s += cancelled * (at - state.round_began)
        state.round_began = at
        return actions + self._follow_bound(at) if self.options.test == "bound" else actions

    def _observe(self, event: Applied) -> list[Action]:
        options, progress = self.options, self.state.progress
        if options.start == options.stop:
            return []
        progress.observe(event, options.window)
        if progress.iterations <= options.burn_in:
            return []
        cause = progress.ended(options.test, options.threshold, options.window)
        return self._grow(cause, event.at) if cause else []

    def _next_k(self) -> int:
        limit = self.options.stop or len(self.state.roster.present)
        return max(self.state.k, min(self.state.k + self.options.step, limit))

    def _grow(self, cause: str, at: float) -> list[Action]:
        state, larger = self.state, self._next_k()
        if larger == state.k:
            return []
        reason = f"k grows from {state.k} to {larger}: {cause}"
        state.k, state.progress, state.changed_at = larger, SinceChange(), at
        return [Track("k", larger, reason)]

    def _follow_bound(self, at: float) -> list[Action]:
        state, workers = self.state, len(self.state.roster.present)
        actions: list[Action] = []
        while state.responses and state.k < self._next_k() <= workers:
            k, larger, constants = state.k, self._next_k(), self.options.constants
            mean = state.computed_s / state.responses
            if mean <= 0:
                break
            seconds = seconds_until_switch(k, larger, workers, mean, state.error, constants)
            if at - state.changed_at < seconds:
                break
            due = state.changed_at + seconds
            state.error = error_after(seconds, k, mean_response(k, workers, mean), state.error, constants)
            cause = f"{seconds:.4g} s at k={k} bring the error bound to {state.error:.4g}, mean response {mean:.4g} s"
            actions = self._grow(cause, due)
        return actions
