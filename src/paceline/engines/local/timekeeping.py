"""The server's time: the run's clock, calls scheduled on it, and the processor time of the server itself."""

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from paceline.core.updates import Merged, PushRef
from paceline.model.spec import ModelSpec
from paceline.model.store import Store
from paceline.server.engine import Call

LONG_BYTES = 1 << 20  # of a model; below, a system call per step costs too much


class Clock:
    """The run's clock: seconds since its first phase began."""

    def __init__(self) -> None:
        self.zero: float | None = None  # on the machine's monotonic clock

    def start(self, at: float = 0.0) -> None:
        """Start the clock at `at` seconds into the run."""
        self.zero = time.monotonic() - at

    def now(self) -> float:
        return 0.0 if self.zero is None else time.monotonic() - self.zero


class Effort:
    """Processor seconds that the server spent applying pushes and copying versions.

    Reading them is a system call, which for a small model takes as long as the step itself; there wall-clock time,
    which needs none, is counted instead.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start counting at zero: setup is not part of the run."""
        self.apply_s = 0.0
        self.copy_s = 0.0
        self.since = time.process_time()

    def clock_for(self, nbytes: int) -> Callable[[], float]:
        """Return the clock to time one step or copy of so many bytes with."""
        return time.process_time if nbytes >= LONG_BYTES else time.perf_counter


class TimedStore(Store):
    """A store that measures the time of its steps and copies."""

    def __init__(
        self, spec: ModelSpec, values: Sequence[Tensor], buffers: Sequence[Tensor], statistics: bool, effort: Effort
    ) -> None:
        super().__init__(spec, values, buffers, statistics)
        self._effort = effort
        self._clock = effort.clock_for(self.nbytes)

    def apply(self, pushes: Sequence[PushRef], weights: Sequence[float], *, stock: bool) -> Merged:
        began = self._clock()
        merged = super().apply(pushes, weights, stock=stock)
        self._effort.apply_s += self._clock() - began
        return merged

    def write_to(self, flat: Sequence[Tensor], buffers: Sequence[Tensor]) -> int:
        began = self._clock()
        version = super().write_to(flat, buffers)
        self._effort.copy_s += self._clock() - began
        return version


class Alarms:
    """A heap of scheduled calls. None can be removed; one that is outdated when it runs must do nothing."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Call, Any, bool]] = []
        self.moving = 0  # scheduled calls with `moves`
        self._count = itertools.count()

    def at(self, moment: float, call: Call, argument: Any = None, *, moves: bool = True) -> None:
        """Schedule a call; calls at one moment keep their order.

        `moves`: a run in which nothing else happens may go on because of this call.
        """
        self.moving += moves
        heapq.heappush(self._heap, (moment, next(self._count), call, argument, moves))

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until the next call; None if there is none."""
        return max(0.0, self._heap[0][0] - now) if self._heap else None

    def ring(self, now: float) -> None:
        """Make all calls that are due, except those scheduled meanwhile."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap))
        for _, _, call, argument, moves in due:
            self.moving -= moves
            call(argument)
