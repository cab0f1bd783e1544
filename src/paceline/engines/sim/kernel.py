"""The kernel of virtual time: calls, each at its moment; calls of one moment run in the order they were made.

Nothing is ever taken out: whoever made a call that no longer matters lets it run into nothing. The heap holds bare
moments and the calls lie beside it, because comparing floats is what makes a heap of 100,000 affordable.
"""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any

Call = Callable[[Any], None]


class Kernel:
    """Virtual time and what is to happen in it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._moments: list[float] = []  # a heap; each moment once
        self._calls: dict[float, tuple[Call, Any]] = {}  # the next call of each moment
        self._queues: dict[float, deque[tuple[Call, Any]]] = {}  # further calls of the same moment
        self._stopped = False

    def at(self, moment: float, call: Call, argument: Any = None) -> None:
        """Make the call at that moment; a moment in the past means: as soon as this call is done."""
        if moment < self.now:
            moment = self.now
        entry = (call, argument)
        if self._calls.setdefault(moment, entry) is entry:
            heappush(self._moments, moment)
        elif moment in self._queues:
            self._queues[moment].append(entry)
        else:
            self._queues[moment] = deque((entry,))

    def stop(self) -> None:
        """Let `run` return after the call in progress."""
        self._stopped = True

    def run(self, until: float | None = None) -> bool:
        """Make the calls in order; False if none was left, True if stopped or the next one lies beyond `until`."""
        moments, calls, queues = self._moments, self._calls, self._queues
        last = inf if until is None else until
        self._stopped = False
        while moments:
            if moments[0] > last:
                self.now = last
                return True
            self.now = moment = heappop(moments)
            call, argument = calls.pop(moment)
            if queues and moment in queues:
                self._advance(moment)
            call(argument)
            if self._stopped:
                return True
        return False

    def _advance(self, moment: float) -> None:
        """The next of the moment's further calls becomes its next."""
        queue = self._queues[moment]
        self._calls[moment] = queue.popleft()
        heappush(self._moments, moment)
        if not queue:
            del self._queues[moment]
