"""Calls to be made at their moments on the run's own clock."""

import heapq
import itertools
from collections.abc import Callable
from typing import Any

Call = Callable[[Any], None]


class Alarms:
    """A heap of calls; whoever made one that no longer matters lets it run into nothing."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Call, Any]] = []
        self._count = itertools.count()

    def at(self, moment: float, call: Call, argument: Any = None) -> None:
        """Make the call once that moment has come; calls of one moment keep their order."""
        heapq.heappush(self._heap, (moment, next(self._count), call, argument))

    def seconds_left(self, now: float) -> float | None:
        """Until the next call; None if there is none."""
        return max(0.0, self._heap[0][0] - now) if self._heap else None

    def ring(self, now: float) -> None:
        """Make all calls whose moment has come, those made meanwhile not included."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap))
        for _, _, call, argument in due:
            call(argument)
