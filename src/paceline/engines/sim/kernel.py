"""The kernel of virtual time: a heap of calls, each at its moment; calls of one moment run in the order they were made.

Nothing is ever taken out of the heap: whoever made a call that no longer matters lets it run into nothing.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Call = Callable[[Any], None]


class Kernel:
    """Virtual time and what is to happen in it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Call, Any]] = []
        self._made = 0
        self._stopped = False

    def at(self, moment: float, call: Call, argument: Any = None) -> None:
        """Make the call at that moment; a moment in the past means: as soon as this call is done."""
        self._made = made = self._made + 1
        heappush(self._heap, (moment if moment > self.now else self.now, made, call, argument))

    def stop(self) -> None:
        """Let `run` return after the call in progress."""
        self._stopped = True

    def run(self, until: float | None = None) -> bool:
        """Make the calls in order; False if none was left, True if stopped or the next one lies beyond `until`."""
        heap = self._heap
        self._stopped = False
        while heap:
            if until is not None and heap[0][0] > until:
                self.now = until
                return True
            self.now, _, call, argument = heappop(heap)
            call(argument)
            if self._stopped:
                return True
        return False
