"""Calls to be made at their moments on the run's own clock."""

import heapq
import itertools
from collections.abc import Callable
from typing import Any

Call = Callable[[Any], None]


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
