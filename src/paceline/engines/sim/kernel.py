"""The kernel of virtual time: scheduled calls, in the order of their moments and, at one moment, of their scheduling.

A call cannot be removed; one that is outdated when it runs must do nothing.

A single heap of 100,000 calls would walk through uncached memory for each of them. So the kernel orders bare moments
and keeps the calls in a dict beside them. Moments beyond a horizon stay unsorted until it moves, and are quick to sort
then, since most of them were sorted before; only moments before the horizon go through a heap.
"""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any

Call = Callable[[Any], None]

SHARE = 4  # the horizon moves over 1/SHARE of the far moments: more sorting against a larger heap; 2 to 8 are alike


class Kernel:
    """Virtual time and the calls scheduled in it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: dict[float, tuple[Call, Any]] = {}  # the first call of each moment
        self._queues: dict[float, deque[tuple[Call, Any]]] = {}  # further calls of the same moment
        # Each moment is in exactly one of these, once.
        self._near: list[float] = []  # up to the horizon, descending: the last is the next
        self._soon: list[float] = []  # a heap: before the horizon, too
        self._far: list[float] = []  # from the horizon on, in any order
        self._horizon = 0.0
        self._stopped = False

    def at(self, moment: float, call: Call, argument: Any = None) -> None:
        """Schedule a call; a moment in the past means right after the call in progress."""
        if moment < self.now:
            moment = self.now
        entry = (call, argument)
        if self._calls.setdefault(moment, entry) is entry:
            if moment >= self._horizon:
                self._far.append(moment)
            else:
                heappush(self._soon, moment)
        elif moment in self._queues:
            self._queues[moment].append(entry)
        else:
            self._queues[moment] = deque((entry,))

    @property
    def pending(self) -> bool:
        """Whether any call is scheduled."""
        return bool(self._calls)

    def stop(self) -> None:
        """Make `run` return after the call in progress."""
        self._stopped = True

    def run(self, until: float | None = None) -> bool:
        """Make the calls in order; return False if none is left, True if stopped or the next is later than `until`."""
        near, soon, calls, queues = self._near, self._soon, self._calls, self._queues
        last = inf if until is None else until
        self._stopped = False
        while True:  # CPython 3.11 specializes a loop that is entered once only if its jump is unconditional
            if near:
                moment = heappop(soon) if soon and soon[0] < near[-1] else near.pop()
            elif soon:
                moment = heappop(soon)
            elif self._advance_horizon():
                continue
            else:
                return False
            if moment > last:
                heappush(soon, moment)
                self.now = last
                return True
            self.now = moment
            call, argument = calls.pop(moment)
            if queues and moment in queues:
                self._advance_queue(moment)
            call(argument)
            if self._stopped:
                return True

    def _advance_horizon(self) -> bool:
        """Sort the next moments into `_near`; return False if there are none."""
        far = self._far
        if not far:
            return False
        far.sort()
        count = len(far) // SHARE + 1
        self._near.extend(reversed(far[:count]))
        del far[:count]
        self._horizon = far[0] if far else self._near[0]
        return True

    def _advance_queue(self, moment: float) -> None:
        """Make the next queued call of this moment its first one."""
        queue = self._queues[moment]
        self._calls[moment] = queue.popleft()
        heappush(self._soon, moment)
        if not queue:
            del self._queues[moment]
