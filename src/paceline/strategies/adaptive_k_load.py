"""Adaptive fastest k and load: small batches of few workers first, more workers and larger batches later.

Published claims (Egger, Kas Hanna, Bitar, "Fast and straggler-tolerant distributed SGD with reduced computation load",
2023): communication and computation times are independent; adapting both the number of workers waited for and the load
of each converges faster with significantly less computation and slightly more communication than adapting k alone.
Reconstruction, the rule: response C + b P for b samples; walk the Pareto frontier of (k b, mu(k, b)) upwards, one
point at a time, when a test (see adaptive_k.py) says that the present point makes no more progress; k b never falls.

The frontier is measured: the first MEASURED_ROUNDS rounds wait for everybody at the smallest load, because the fastest
k alone would make the cluster look faster than it is; Pushed.transfer_s and Pushed.compute_s per sample are kept by
worker, and mu comes from them by Monte Carlo with the injected chance. `loads` defaults to 1/8, 1/4, 1/2 and all of
the smallest nominal work present.
"""

from typing import Annotated, Literal, assert_never

import msgspec
from msgspec import Meta

from paceline.core.actions import Action, Track
from paceline.core.errors import OptionError
from paceline.core.events import Applied, Event, Joined, Left, Pushed, TimerFired
from paceline.strategies.adaptive_k import GrowthOptions
from paceline.strategies.base import Strategy, require_k_within
from paceline.strategies.load_frontier import Point, frontier, growing_ks, mean_seconds
from paceline.strategies.roster import Rounds
from paceline.strategies.stationarity import SinceChange

MEASURED_ROUNDS = 8
FRACTIONS = (8, 4, 2, 1)  # of nominal work, as divisors


class AdaptiveKLoadOptions(GrowthOptions, frozen=True, kw_only=True):
    """Which test, and which loads to choose from."""

    test: Annotated[Literal["trend", "pflug"], Meta(description="what ends a point; trend needs losses")] = "trend"
    loads: Annotated[
        tuple[Annotated[int, Meta(ge=1)], ...] | None,
        Meta(description="samples per push to choose from; none: 1/8, 1/4, 1/2 and all of nominal work"),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loads is not None and list(self.loads) != sorted(set(self.loads)):
            written = "/".join(map(str, self.loads))
            raise OptionError(f"loads must rise, as 5/10/20, not {written}; sort them")


class AdaptiveKLoadState(Rounds):
    """A round, the point of the frontier it is at, and the measurements the frontier is made from."""

    load: int = 0  # 0: the run has not begun
    measured: int = 0  # rounds
    communication: dict[int, list[float]] = {}
    computation: dict[int, list[float]] = {}  # per sample
    points: list[Point] = []  # empty while measuring
    position: int = 0
    progress: SinceChange = msgspec.field(default_factory=SinceChange)


class AdaptiveKLoad(Strategy):
    """Fastest k with a k and a load that grow together along the measured frontier."""

    name = "adaptive_k_load"
    rule = "Fastest k, where k and each worker's samples grow along the measured frontier of batch against time."
    citation = "Egger et al., Fast and straggler-tolerant distributed SGD with reduced computation load, 2023"
    Options = AdaptiveKLoadOptions
    State = AdaptiveKLoadState
    options: AdaptiveKLoadOptions
    state: AdaptiveKLoadState

    def set_up(self) -> None:
        self.needs_applied = True
        self.needs_losses = self.options.test == "trend"

    def handle(self, event: Event) -> list[Action]:
        state = self.state
        match event:
            case Pushed():
                state.push(event)
                self._measure(event)
            case Joined():
                return self._joined(event)
            case Left():
                if not state.leave(event):
                    return []
            case Applied():
                return self._observe(event)
            case TimerFired():
                return []
            case _:
                assert_never(event)
        present = len(state.roster.present)
        k = state.points[state.position].k if state.points else present
        return self._end_round() if state.due(k) else []

    def check(self, workers: int) -> None:
        require_k_within(self.options.start, workers, self.name)
        if self.options.stop is not None:
            require_k_within(self.options.stop, workers, f"{self.name}, stop")

    def _joined(self, event: Joined) -> list[Action]:
        state = self.state
        if state.load:
            return state.join(event, state.load)
        state.load = self.options.loads[0] if self.options.loads else max(1, event.work // FRACTIONS[0])
        reason = f"{MEASURED_ROUNDS} rounds of {state.load} samples each measure the cluster"
        return [*state.join(event, state.load), Track("load", state.load, reason)]

    def _measure(self, event: Pushed) -> None:
        if self.state.points or not event.samples:
            return
        self.state.communication.setdefault(event.worker, []).append(event.transfer_s)
        self.state.computation.setdefault(event.worker, []).append(event.compute_s / event.samples)

    def _end_round(self) -> list[Action]:
        state = self.state
        tracks: list[Action] = []
        if not state.points:
            state.measured += 1
            if state.measured >= MEASURED_ROUNDS and state.communication:
                tracks = self._begin_walk()
        return [*state.end(state.load), *tracks]

    def _begin_walk(self) -> list[Action]:
        state, options = self.state, self.options
        measured = len(state.communication)
        start = min(options.start, measured)
        ks = growing_ks(start, max(start, min(options.stop or measured, measured)), options.step)
        nominal = min(state.roster.present.values(), default=state.load * FRACTIONS[0])
        loads = options.loads or sorted({max(1, nominal // part) for part in FRACTIONS})
        points = mean_seconds(state.communication, state.computation, ks, loads, self.rng)
        state.points = frontier(points)
        state.communication, state.computation = {}, {}
        found = f"{len(state.points)} of {len(points)} pairs of k and load are on the measured frontier"
        return self._move_to(0, found)

    def _observe(self, event: Applied) -> list[Action]:
        state, options, progress = self.state, self.options, self.state.progress
        if state.position + 1 >= len(state.points):
            return []
        progress.observe(event, options.window)
        if progress.iterations <= options.burn_in:
            return []
        cause = progress.ended(options.test, options.threshold, options.window)
        return self._move_to(state.position + 1, cause) if cause else []

    def _move_to(self, position: int, cause: str) -> list[Action]:
        state = self.state
        state.position, state.progress = position, SinceChange()
        point = state.points[position]
        state.load = point.load
        reason = f"k={point.k} and load {point.load}, {point.seconds:.3g} s a step expected: {cause}"
        return [Track("k", point.k, reason), Track("load", point.load, reason)]
