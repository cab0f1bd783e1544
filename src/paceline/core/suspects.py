"""Find the samples that kill the process which computes them, without losing the others.

Samples that a process had when it died are suspects. They are issued again in halves, one group at a time in the whole
run, so that at most one process dies of them at a time. A group that comes through is innocent. One that kills is split
again, down to the fewest samples that a model can be trained on (one, or two with BatchNorm); such a group that has
killed `STRIKES` processes is given up. A process that died of something else loses nothing: its samples come through.

A sample that was given up comes again in the next epoch. It is then issued alone, and given up at the first death.

After `MOST_KILLERS` different ones nothing more is suspected: where so many samples kill, it is not the samples.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from paceline.core.allotments import Allotment, DeathVerdict, Indices

STRIKES = 3  # processes that a smallest group must have killed alone: one or two may have died of anything
MOST_KILLERS = 8


class Suspicion(msgspec.Struct):
    """Samples one of which may kill, and how many processes have died of these alone."""

    allotment: Allotment
    strikes: int = 0


class Suspects:
    """The suspected samples of one phase."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._waiting: deque[Suspicion] = deque()
        self._tried: tuple[int, Suspicion] | None = None  # the group that a worker has at the moment
        self._given_up = 0  # groups, the first time
        self.known: set[int] = set()  # samples that were given up

    @property
    def can_try(self) -> bool:
        """Whether a group waits, and no other is being computed."""
        return bool(self._waiting) and self._tried is None

    @property
    def waiting(self) -> Iterator[Allotment]:
        """The groups that are with no worker."""
        return (suspicion.allotment for suspicion in self._waiting)

    def try_next(self, worker: int, work: int) -> Allotment:
        """Allot the worker the next group, at most `work` samples of it."""
        first = self._waiting.popleft()
        if first.allotment.samples > max(work, self._least):
            fits, rest = _cut(first.allotment, max(work, self._least))
            if rest.samples >= self._least:
                self._waiting.appendleft(Suspicion(rest))
                first = Suspicion(fits)
        self._tried = worker, first
        return first.allotment

    def sift(self, epoch: int, indices: Indices) -> Indices:
        """Keep back the samples that have killed before, each to be tried alone; return the others."""
        if self._least > 1:
            return indices  # such a model cannot be trained on one sample
        kills = np.isin(indices, list(self.known))
        for index in indices[kills]:
            self._waiting.append(Suspicion(Allotment(epoch, 1, np.array([index])), STRIKES - 1))
        return indices[~kills]

    def acquit(self, worker: int) -> None:
        """Clear the group that this worker has come through."""
        if self._tried is not None and self._tried[0] == worker:
            self.known.difference_update(map(int, self._tried[1].allotment.indices))
            self._tried = None

    def give_back(self, worker: int, allotment: Allotment) -> bool:
        """Take back a group that was not computed; return False for samples that are no suspects."""
        if self._tried is None or self._tried[0] != worker or self._tried[1].allotment is not allotment:
            return False
        self._waiting.append(self._tried[1])
        self._tried = None
        return True

    def accuse(self, worker: int, allotments: Sequence[Allotment]) -> tuple[DeathVerdict, list[Allotment]]:
        """Suspect what a process had when it died; return the verdict, and what is not suspected."""
        named = [allotment for allotment in allotments if allotment.samples]
        if self._tried is None or self._tried[0] != worker:
            if self._given_up >= MOST_KILLERS:
                return DeathVerdict(), named
            for allotment in named:
                self._suspect(Suspicion(allotment))
            return DeathVerdict(), []
        tried = self._tried[1]
        self._tried = None
        others = [allotment for allotment in named if allotment is not tried.allotment]
        lost = self._suspect(tried)
        if self._given_up >= MOST_KILLERS:
            others += self._forget()
        return DeathVerdict(True, tuple(map(int, tried.allotment.indices)) if lost else ()), others

    def _suspect(self, killer: Suspicion) -> bool:
        """Split a group that has killed, or count a strike against a smallest one; return whether it is lost."""
        samples = killer.allotment.samples
        if samples >= 2 * self._least:
            self._waiting.extend(Suspicion(half) for half in _cut(killer.allotment, samples // 2))
            return False
        if killer.strikes + 1 >= STRIKES:
            indices = set(map(int, killer.allotment.indices))
            self._given_up += not indices <= self.known
            self.known |= indices
            return True
        self._waiting.append(Suspicion(killer.allotment, killer.strikes + 1))
        return False

    def _forget(self) -> list[Allotment]:
        """Suspect nothing more, but for what is known to kill; return all that was."""
        doubtful, known = [], deque[Suspicion]()
        for suspicion in self._waiting:
            if set(map(int, suspicion.allotment.indices)) <= self.known:
                known.append(suspicion)
            else:
                doubtful.append(suspicion.allotment)
        self._waiting = known
        return doubtful


def _cut(allotment: Allotment, samples: int) -> tuple[Allotment, Allotment]:
    first, second = allotment.indices[:samples], allotment.indices[samples:]
    return Allotment(allotment.epoch, len(first), first), Allotment(allotment.epoch, len(second), second)
