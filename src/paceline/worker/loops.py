"""What `session.batches(...)` and `session.steps(...)` return: iterables, each pass over which is one phase."""

import math
import sys
from collections.abc import Iterator
from typing import Any

from paceline.core.ledger import ENDLESS
from paceline.transport.messages import Ready
from paceline.worker.enclosing_loops import is_in_loop
from paceline.worker.fetching import Source
from paceline.worker.loop_plan import rounds_of
from paceline.worker.loop_runner import LoopRunner


class Batches:
    """One phase as an iterable of batches; its length is the number of nominal rounds."""

    def __init__(self, runner: LoopRunner, fetcher: Source, ready: Ready, in_loop: Ready | None = None) -> None:
        self._runner = runner
        self._fetcher = fetcher
        self._ready = ready
        self._in_loop = in_loop  # instead of `ready` inside a loop of the script's own, where --epochs is given

    @property
    def dataset(self) -> Any:
        """Return the data set that is shared out."""
        return self._fetcher.dataset

    @property
    def batch_size(self) -> int:
        """Return how many samples a batch has at most, and a round for each worker."""
        return self._ready.batch_size

    def __len__(self) -> int:
        return rounds_of(self._ready.size, self._ready.batch_size, self._ready.epochs, self._runner.workers)

    def __iter__(self) -> Iterator[Any]:
        if self._in_loop is not None and is_in_loop(sys._getframe(1)):
            return self._runner.run(self._fetcher, self._in_loop, in_loop=True)
        return self._runner.run(self._fetcher, self._ready)


class Steps(Batches):
    """One phase without a data set; its length is the number of rounds."""

    def __iter__(self) -> Iterator[int]:
        before = self._runner.rounds_done
        for _ in super().__iter__():
            yield min(len(self) - 1, max(0, math.floor(self._runner.rounds_done - before + 1e-9)))


class Stream(Batches):
    """One phase over each worker's own stream; its length is the number of rounds, if there is one."""

    def __len__(self) -> int:
        if self._ready.size == ENDLESS:
            return len(self._fetcher.source)  # of this worker's stream; a TypeError where it has no length
        return super().__len__()
