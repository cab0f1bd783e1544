"""Shared bookkeeping of clocks: how many each worker has completed, and the smallest in O(1) amortized.

Clocks of one worker only grow and every joiner starts at `min`, so `min` never falls: the search for the next occupied
clock walks upwards once over the whole run. Only workers of a restored table `enter` at clocks of their own.
"""

import msgspec

from paceline.core.errors import InternalError


class Clocks(msgspec.Struct):
    """A multiset of the clocks of present workers. `min` keeps its value while nobody is present."""

    min: int = 0
    of: dict[int, int] = {}
    count: dict[int, int] = {}

    def join(self, worker: int) -> int:
        """Enter at `min`, so that a newcomer holds nobody back."""
        self.of[worker] = self.min
        self.count[self.min] = self.count.get(self.min, 0) + 1
        return self.min

    def enter(self, worker: int, clock: int) -> None:
        """Enter at a clock of its own; one below `min`, or of the only worker, becomes `min`."""
        if not self.of or clock < self.min:
            self.min = clock
        self.of[worker] = clock
        self.count[clock] = self.count.get(clock, 0) + 1

    def advance(self, worker: int, clock: int) -> bool:
        """Note that the worker has completed `clock`; return whether `min` moved."""
        of, count = self.of, self.count
        old = of[worker]
        if clock <= old:
            if clock == old:
                return False
            raise InternalError(f"worker {worker} has completed {old} clocks and is said to have completed {clock}")
        of[worker] = clock
        if clock in count:
            count[clock] += 1
        else:
            count[clock] = 1
        left = count[old] - 1
        if left:  # inlined from `_drop`: most advances end here
            count[old] = left
            return False
        return self._drop(old)

    def leave(self, worker: int) -> bool:
        """Remove the worker; return whether `min` moved."""
        return self._drop(self.of.pop(worker))

    def _drop(self, clock: int) -> bool:
        left = self.count[clock] - 1
        if left:
            self.count[clock] = left
            return False
        del self.count[clock]
        if clock != self.min or not self.of:
            return False
        while self.min not in self.count:
            self.min += 1
        return True


def may_read(slowest: int, clock: int, staleness: float) -> bool:
    """Whether a read at `clock` sees all that a bound of `staleness` promises: every update stamped
    clock - staleness - 1 or older. It does once all workers have completed clock - staleness clocks."""
    return slowest >= clock - staleness


def park(parked: dict[int, set[int]], worker: int, until: int) -> None:
    """Make the worker wait until `min` is at least `until`."""
    parked.setdefault(until, set()).add(worker)


def released(parked: dict[int, set[int]], before: int, after: int) -> list[int]:
    """Unpark and return the workers that wait for a `min` of at most `after`; amortized O(1) per clock it gains."""
    if not parked:
        return []
    free: list[int] = []
    for clock in range(before + 1, after + 1):
        free += parked.pop(clock, ())
    return free
