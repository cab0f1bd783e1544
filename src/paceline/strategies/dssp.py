"""Dynamic SSP: the bound floats between `lower` and `upper`.

Rule: a worker may lead by `lower` clocks; when the fastest exceeds that, a controller predicts from the last push
intervals after which number r* of extra clocks its push comes closest to one of the slowest worker's, and grants them.
Published (Zhao et al., "Dynamic stale synchronous parallel distributed training for deep learning", ICDCS 2019), with
one limit the publication leaves out: a grant never takes the worker beyond min + upper, since the controller is asked
again whenever its extra clocks are used up.

Slowest: smallest clock, ties to the lowest id, kept in one heap per clock with stale entries skipped when met.
"""

import heapq
from math import floor
from typing import Annotated, assert_never

from msgspec import Meta

from paceline.core.actions import Action
from paceline.core.errors import OptionError
from paceline.core.events import Applied, Event, Joined, Left, Pushed, TimerFired
from paceline.strategies.base import Options, Strategy
from paceline.strategies.ssp import SspState, WholeSteps, apply_at_once

TIE = 1e-9  # gaps closer than this share of the interval are equal, so that rounding does not choose a longer lead


class DsspOptions(Options, frozen=True, kw_only=True):
    """The range of the bound, and how a push becomes a step."""

    lower: Annotated[int, Meta(ge=0, description="clocks every worker may lead the slowest by")] = 3
    upper: Annotated[int, Meta(ge=0, description="clocks the fastest may lead by with extra clocks")] = 15
    whole_steps: WholeSteps = False

    def __post_init__(self) -> None:
        if self.upper < self.lower:
            raise OptionError(f"upper must be >= lower ({self.lower}), not {self.upper}; raise upper")


class DsspState(SspState):
    """SSP's state with what the controller needs: push times, extra clocks, who is fastest and who slowest."""

    extra: dict[int, int] = {}
    last: dict[int, float] = {}
    interval: dict[int, float] = {}
    largest: int = 0  # clock among present workers
    at_clock: dict[int, list[int]] = {}  # heaps of worker ids; an entry counts while the worker stands at that clock

    def stand(self, worker: int, clock: int) -> None:
        """Note that the worker stands at this clock."""
        heapq.heappush(self.at_clock.setdefault(clock, []), worker)
        self.largest = max(self.largest, clock)

    def forget(self, worker: int) -> None:
        """Drop push times and extra clocks, which do not apply to a later process."""
        for record in (self.extra, self.last, self.interval):
            record.pop(worker, None)

    def tidy(self, before: int) -> None:
        """Drop the heaps `min` has passed and let the largest clock fall to one that is occupied."""
        for clock in range(before, self.clocks.min):
            self.at_clock.pop(clock, None)
        while self.largest > self.clocks.min and self.largest not in self.clocks.count:
            self.at_clock.pop(self.largest, None)
            self.largest -= 1

    def slowest(self) -> int:
        """Return the lowest id at `min`."""
        heap = self.at_clock[self.clocks.min]
        while self.clocks.of.get(heap[0]) != self.clocks.min:
            heapq.heappop(heap)
        return heap[0]

    def time_push(self, worker: int, at: float) -> None:
        """Keep the time of this push and its distance to the one before."""
        if worker in self.last:
            self.interval[worker] = at - self.last[worker]
        self.last[worker] = at


class Dssp(Strategy):
    """SSP at `lower`, with extra clocks for the fastest where they bring it closer to the slowest's next push."""

    name = "dssp"
    rule = "SSP at the lower bound; the fastest worker gets extra clocks, up to the upper bound, if they cut waiting."
    citation = "Zhao et al., Dynamic stale synchronous parallel distributed training for deep learning, ICDCS 2019"
    Options = DsspOptions
    State = DsspState
    state: DsspState
    serves_tables = True

    def set_up(self) -> None:
        self.free_lead, self.max_lead = self.options.lower, self.options.upper

    def handle(self, event: Event) -> list[Action]:
        state = self.state
        match event:
            case Pushed():
                return self._pushed(event)
            case Joined():
                actions = state.joined(event)
                if actions:
                    state.stand(event.worker, state.clocks.min)
                return actions
            case Left():
                before = state.clocks.min
                actions = state.left(event, self.options.lower)
                if event.worker not in state.clocks.of:
                    state.forget(event.worker)
                    state.tidy(before)
                return actions
            case Applied() | TimerFired():
                return []
            case _:
                assert_never(event)

    def _pushed(self, event: Pushed) -> list[Action]:
        state, worker, clock = self.state, event.worker, event.clock
        actions: list[Action] = [apply_at_once(event, state.roster.round_samples, self.options.whole_steps)]
        before = state.clocks.min
        moved = state.clocks.advance(worker, clock)
        state.stand(worker, clock)
        state.time_push(worker, event.at)
        goes = self._cause_to_go(worker, clock, event.at)
        causes: dict[int, str] = {}
        if moved:
            causes = dict.fromkeys(state.released(before), f"lower bound {self.options.lower}")
            state.tidy(before)
        if goes is None:
            state.park(worker, clock - self.options.lower)
        else:
            causes[worker] = goes
        return actions + state.grants(causes)

    def _cause_to_go(self, worker: int, clock: int, now: float) -> str | None:
        """Return why the worker may start its next clock; None if it may not."""
        state, lower, upper = self.state, self.options.lower, self.options.upper
        lead = clock - state.clocks.min
        left = state.extra.get(worker, 0)
        if left:
            state.extra[worker] = left - 1
            return f"{left - 1} extra clocks left"
        if lead <= lower:
            return f"lower bound {lower}"
        if clock < state.largest:
            return None
        extra = min(self._controller(worker, now), upper - lead + 1)
        if extra <= 0:
            return None
        state.extra[worker] = extra - 1
        return f"{extra} extra clocks within the upper bound {upper} bring it closest to the slowest's next push"

    def _controller(self, worker: int, now: float) -> int:
        state, slow = self.state, self.state.slowest()
        if worker not in state.interval or slow not in state.interval:
            return 0
        reach = self.options.upper - self.options.lower
        return extra_clocks(now, state.interval[worker], state.last[slow], state.interval[slow], reach)


def extra_clocks(now: float, fast_s: float, last_slow: float, slow_s: float, reach: int) -> int:
    """r* in 0..reach whose push at now + r*fast_s is closest to one of the slowest's reach + 1 next; ties to fewer."""
    best, best_gap = 0, float("inf")
    for r in range(reach + 1):
        arrival = now + r * fast_s
        k = floor((arrival - last_slow) / slow_s) - 1 if slow_s > 0 else 0
        around = (min(max(near, 0), reach) for near in (k, k + 1))
        gap = min(abs(last_slow + (near + 1) * slow_s - arrival) for near in around)
        if gap < best_gap - TIE * max(fast_s, slow_s):
            best, best_gap = r, gap
    return best
