"""The server's time: the run's clock, calls to be made at their moments on it, and what the server itself takes."""

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

LONG_BYTES = 1 << 20  # of a model whose steps are worth a system call each


class Clock:
    """The run's seconds: they count from the moment its first phase begins."""

    def __init__(self) -> None:
        self.zero: float | None = None  # on the machine's monotonic clock

    def start(self, at: float = 0.0) -> None:
        """It is `at` seconds into the run."""
        self.zero = time.monotonic() - at

    def now(self) -> float:
        return 0.0 if self.zero is None else time.monotonic() - self.zero


class Effort:
    """Processor seconds that the server spent applying pushes and copying versions.

    Asking for them is a system call. Of a small model it would take as long as what is measured; there the wall's
    clock, which is read at once, counts.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Count from here on: what it took to get ready is no part of the run."""
        self.apply_s = 0.0
        self.copy_s = 0.0
        self.since = time.process_time()

    def clock_for(self, nbytes: int) -> Callable[[], float]:
        """What to measure one step or copy of so many bytes with."""
        return time.process_time if nbytes >= LONG_BYTES else time.perf_counter


class TimedStore(Store):
    """A store that counts the time of its steps."""

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
    """A heap of calls; whoever made one that no longer matters lets it run into nothing."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Call, Any, bool]] = []
        self.moving = 0  # calls that a run may be waiting for
        self._count = itertools.count()

    def at(self, moment: float, call: Call, argument: Any = None, *, moves: bool = True) -> None:
        """Make the call once that moment has come; calls of one moment keep their order.

        `moves`: a run in which nothing else happens may go on because of it.
        """
        self.moving += moves
        heapq.heappush(self._heap, (moment, next(self._count), call, argument, moves))

    def seconds_left(self, now: float) -> float | None:
        """Until the next call; None if there is none."""
        return max(0.0, self._heap[0][0] - now) if self._heap else None

    def ring(self, now: float) -> None:
        """Make all calls whose moment has come, those made meanwhile not included."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap))
        for _, _, call, argument, moves in due:
            self.moving -= moves
            call(argument)
