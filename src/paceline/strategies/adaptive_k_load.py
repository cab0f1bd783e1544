"""Adaptive fastest k and load: small batches of few workers first, more workers and larger batches later.

Published claims (Egger, Kas Hanna, Bitar, "Fast and straggler-tolerant distributed SGD with reduced computation load",
2023): communication and computation times are independent; adapting both the number of workers waited for and the load
of each converges faster with significantly less computation and slightly more communication than adapting k alone.
Reconstruction, the rule: response C + b P for b samples; walk the Pareto frontier of (k b, mu(k, b)) upwards, one
point at a time, when a test (see adaptive_k.py) says that the present point makes no more progress; k b never falls.
With `bound`, for known constants, every round is at the point of the largest (E - phi(k, b)) / mu(k, b), where
phi(k, b) = eta L sigma2 / (2 c k b) and each step brings the bound E nearer to phi by the factor 1 - eta c. With one
load these are the published switches of adaptive_k.

The frontier is measured: the first MEASURED_ROUNDS rounds wait for everybody at the smallest load, because the fastest
k alone would make the cluster look faster than it is; Pushed.transfer_s and Pushed.compute_s per sample are kept by
worker, and mu comes from them by Monte Carlo with the injected chance. `loads` defaults to 1/8, 1/4, 1/2 and all of
the smallest nominal work present.

When later rounds leave what was measured (`FrontierWatch` in load_frontier.py), it is measured again: MEASURED_ROUNDS
rounds wait for everybody, at the smallest load whose steps are no smaller than the last ones, and the walk goes on at
the first point of the new frontier with at least as many samples per step. A refresh that finds what was known makes
the next one wait for twice as many rounds. A change that slows only workers beyond the first k shows when k reaches
them. So it is when for WATCHED_ROUNDS rounds there were fewer workers than k, or more than were measured, idle ones
counted: steps of k pushes cannot be made then, or could be larger. Where too few are left for the last steps, steps
shrink.
"""

from typing import Annotated, Literal, assert_never

import msgspec
from msgspec import Meta

from paceline.core.actions import Action, Track
from paceline.core.errors import OptionError
from paceline.core.events import Applied, Event, Joined, Left, Pushed, TimerFired
from paceline.strategies.adaptive_k import GrowthOptions
from paceline.strategies.base import Strategy, require_k_within
from paceline.strategies.cover import Cover
from paceline.strategies.error_bound import fastest_falling, floor_of
from paceline.strategies.load_frontier import (
    LEAST_CHANGE,
    MEASURED_ROUNDS,
    WATCHED_ROUNDS,
    FrontierWatch,
    Point,
    frontier,
    growing_ks,
    mean_seconds,
    times_of,
)
from paceline.strategies.roster import Rounds
from paceline.strategies.stationarity import SinceChange

FRACTIONS = (8, 4, 2, 1)  # of nominal work, as divisors


class AdaptiveKLoadOptions(GrowthOptions, frozen=True, kw_only=True):
    """Which test, and which loads to choose from."""

    test: Annotated[
        Literal["pflug", "trend", "bound"], Meta(description="what ends a point; trend needs reported losses")
    ] = "trend"
    loads: Annotated[
        tuple[Annotated[int, Meta(ge=1)], ...] | None,
        Meta(description="samples per push to choose from; none: 1/8, 1/4, 1/2 and all of nominal work"),
    ] = None
    error: Annotated[float, Meta(gt=0, description="bound: error of the initial model")] | None = None
    cover: Annotated[
        bool, Meta(description="keep late pushes of workers hardly ever among the first k, for a share of each shard")
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loads is not None and list(self.loads) != sorted(set(self.loads)):
            written = "/".join(map(str, self.loads))
            raise OptionError(f"loads must rise, as 5/10/20, not {written}; sort them")


class AdaptiveKLoadState(Rounds):
    """A round, the point of the frontier it is at, and the measurements the frontier is made from."""

    load: int = 0  # 0: the run has not begun
    measured: int = 0  # rounds
    workers: int = 0  # that the frontier was measured of; 0: not known
    communication: dict[int, list[float]] = {}
    computation: dict[int, list[float]] = {}  # per sample
    points: list[Point] = []  # empty while measuring
    position: int = 0
    progress: SinceChange = msgspec.field(default_factory=SinceChange)
    watch: FrontierWatch = msgspec.field(default_factory=FrontierWatch)
    left: Point | None = None  # where the walk was interrupted to measure again
    error: float = 0.0  # the bound, with test=bound


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
        options = self.options
        self.may_leave_out = not options.cover
        self.state.cover = Cover() if options.cover else None
        self.needs_applied = options.test != "bound"
        self.needs_losses = options.test == "trend"
        if options.error is not None:
            self.state.error = options.error

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
            actions = state.join(event, state.load)
            if actions and state.left is not None:
                actions.append(Track("k", len(state.roster.present), "everybody is waited for while they are measured"))
            return actions
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
        seen = times_of(state.held.values())
        pushed, present = len(state.held), len(state.roster.present)
        load = state.load
        actions: list[Action]
        if not state.points:
            state.measured += 1
            self._contract(pushed * load)
            tracks = self._begin_walk() if self._is_measured() else []
        else:
            point = state.points[state.position]
            self._contract(point.batch)
            changed = self._misfit(point) or (state.watch.left(point, seen) if pushed == point.k else None)
            tracks = self._measure_again(point, present, changed) if changed and present else self._follow_bound()
        actions = state.end(state.load)
        return [*actions, *tracks]

    def _misfit(self, point: Point) -> str | None:
        """Return how the workers there are lastingly too few for the point, or more than the frontier is for."""
        state, roster = self.state, self.state.roster
        there = len(roster.present) + len(roster.idle)
        return state.watch.outnumbered(point, there, min(there, self.options.stop or there), state.workers)

    def _is_measured(self) -> bool:
        """Whether the rounds suffice; covered workers that still compute on older versions are to be measured, too."""
        state = self.state
        under_way = state.cover is not None and bool(state.cover.running)
        return state.measured >= MEASURED_ROUNDS and bool(state.communication) and not under_way

    def _contract(self, batch: int) -> None:
        """Bring the bound on the error one step nearer to the floor of such steps."""
        if self.options.test == "bound" and batch:
            constants = self.options.constants_of(batch)
            floor = floor_of(1, constants)
            self.state.error = floor + constants.contraction * (self.state.error - floor)

    def _measure_again(self, point: Point, present: int, changed: str) -> list[Action]:
        state = self.state
        state.left, state.points, state.position, state.measured = point, [], 0, 0
        state.load = next((load for load in self._loads() if load * present >= point.batch), state.load)
        reason = f"{MEASURED_ROUNDS} rounds of everybody measure the cluster again: {changed}"
        return [Track("k", present, reason), Track("load", state.load, reason)]

    def _loads(self) -> tuple[int, ...] | list[int]:
        nominal = min(self.state.roster.present.values(), default=self.state.load * FRACTIONS[0])
        return self.options.loads or sorted({max(1, nominal // part) for part in FRACTIONS})

    def _begin_walk(self) -> list[Action]:
        state, options = self.state, self.options
        measured = state.workers = len(state.communication)
        start = min(options.start, measured)
        ks = growing_ks(start, max(start, min(options.stop or measured, measured)), options.step)
        points = mean_seconds(state.communication, state.computation, ks, self._loads(), self.rng)
        state.points = frontier(points)
        state.communication, state.computation = {}, {}
        found = f"{len(state.points)} of {len(points)} pairs of k and load are on the measured frontier"
        if state.left is not None:
            return self._resume_walk(state.left, found)
        return self._move_to(self._best(0), found)

    def _resume_walk(self, left: Point, found: str) -> list[Action]:
        """Go on at the first point whose steps are no smaller than those before the frontier was measured again."""
        state, last = self.state, len(self.state.points) - 1
        position = next((i for i, point in enumerate(state.points) if point.batch >= left.batch), last)
        same = (left.k, left.load) == (state.points[position].k, state.points[position].load)
        progress = state.progress
        in_vain = same and 1 / LEAST_CHANGE < state.points[position].seconds / left.seconds < LEAST_CHANGE
        patience = 2 * state.watch.patience if in_vain else WATCHED_ROUNDS
        state.left = None
        actions = self._move_to(self._best(position), found)
        state.watch = FrontierWatch(patience=patience)
        if same:
            state.progress = progress
        return actions

    def _best(self, least: int) -> int:
        """Return the position where the bound falls fastest, from `least` on; `least` without a bound."""
        state = self.state
        if self.options.test != "bound":
            return least
        floors = [floor_of(1, self.options.constants_of(point.batch)) for point in state.points[least:]]
        return least + fastest_falling(state.error, floors, [point.seconds for point in state.points[least:]])

    def _follow_bound(self) -> list[Action]:
        state = self.state
        position = self._best(state.position)
        if position == state.position:
            return []
        return self._move_to(position, f"the error bound is {state.error:.4g}, and falls fastest there")

    def _observe(self, event: Applied) -> list[Action]:
        state, options, progress = self.state, self.options, self.state.progress
        if options.test == "bound" or state.position + 1 >= len(state.points):
            return []
        progress.observe(event, options.window)
        if progress.iterations <= options.burn_in:
            return []
        cause = progress.ended(options.test, options.threshold, options.window)
        return self._move_to(state.position + 1, cause) if cause else []

    def _move_to(self, position: int, cause: str) -> list[Action]:
        state = self.state
        state.position, state.progress = position, SinceChange()
        state.watch.rounds = []
        point = state.points[position]
        state.load = point.load
        reason = f"k={point.k} and load {point.load}, {point.seconds:.3g} s a step expected: {cause}"
        return [Track("k", point.k, reason), Track("load", point.load, reason)]
