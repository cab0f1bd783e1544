"""The loops of one worker's script, one phase after another, and questions to the server between their messages.

`session.batches(...)` and `session.steps(...)` return iterables; each pass over one is a phase. A plan says what a loop
works on: the script's arguments, those of its `DataLoader`, and the settings that override both.
"""

import contextlib
import math
import numbers
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.core.errors import OptionError, UserError
from paceline.core.ledger import ENDLESS
from paceline.transport.base import Closed, Endpoint, Lost
from paceline.transport.messages import EpochAsked, EpochHeld, Over, Ready, Remark, ToServer, ToWorker
from paceline.worker.batch_loop import OVER, BatchLoop
from paceline.worker.collective_calls import CollectiveCalls
from paceline.worker.context import WorkerContext
from paceline.worker.enclosing_loops import is_in_loop
from paceline.worker.epoch_loops import EpochLoops
from paceline.worker.fetching import Source, parts_of
from paceline.worker.handshake import Handshake
from paceline.worker.parts import Parts
from paceline.worker.rehearsal import Rehearsal
from paceline.worker.replica import Replica, has_batch_statistics
from paceline.worker.schedules import Schedules
from paceline.worker.state import WorkerState
from paceline.worker.streaming import StreamFetcher, Unread, open_stream

Answer = TypeVar("Answer", bound=ToWorker)
EMPTY_PHASES = 1000  # loops that a script may start after the run is over; they get no data


class LoopPlan(NamedTuple):
    """A data set, how much of it a loop uses, and in which portions."""

    dataset: Any
    batch_size: int
    epochs: float  # the script's own
    loader_options: dict[str, Any]
    remark: str | None  # what the run does otherwise than the script's loader


def plan_loop(
    given: WorkerContext, dataset: Any, batch_size: int | None, epochs: float, loader_options: dict[str, Any]
) -> LoopPlan:
    """Settle on a loop's data and sizes; `--batch-size` comes first."""
    remark = None
    if isinstance(dataset, DataLoader):
        loader = parts_of(dataset)
        dataset, remark, loader_options = loader.dataset, loader.remark, {**loader.options, **loader_options}
        if batch_size is None and given.batch_size is None and loader.batch_size is None:
            raise OptionError("the DataLoader has no batch size: give one, batches(loader, batch_size=...)")
        batch_size = loader.batch_size if batch_size is None else batch_size
    batch_size = 1 if batch_size is None else batch_size
    batch_size = whole_size(given.batch_size if given.batch_size is not None else batch_size)
    if not (isinstance(epochs, int | float) and epochs > 0 and math.isfinite(epochs)):
        raise OptionError(f"epochs must be > 0 and finite, not {epochs!r}")
    return LoopPlan(dataset, batch_size, epochs, loader_options, remark)


def rounds_of(size: int, batch_size: int, epochs: float, workers: int) -> int:
    """Return how many rounds a loop has: `batch_size` samples of every worker are one."""
    return math.ceil(max(1, round(epochs * size)) / (batch_size * workers))


def whole_size(batch_size: Any) -> int:
    """Return the batch size as an int; refuse what is none."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, numbers.Integral) or batch_size < 1:
        raise OptionError(f"batch_size must be a whole number >= 1, not {batch_size!r}")
    return int(batch_size)


class LoopRunner:
    """Runs loops, and knows where the script stands among them."""

    def __init__(
        self, given: WorkerContext, state: WorkerState, schedules: Schedules, collectives: CollectiveCalls,
        kept: deque[ToWorker], parts: Parts,
    ) -> None:  # fmt: skip
        self.current: BatchLoop | Rehearsal | None = None
        self.replica: Replica | None = None
        self.handshake: Handshake | None = None
        self.phase = 0
        self.run_over = False
        self.left_early = False  # the script left the last loop before its end
        self._given = given
        self._endpoint: Endpoint = collectives.endpoint
        self._state = state
        self._schedules = schedules
        self._collectives = collectives
        self._kept = kept  # messages that came while an answer was awaited
        self._parts = parts
        self._epoch_loops = EpochLoops(given.epochs)
        self._unread: Unread = []
        self._empty_phases = 0

    @property
    def workers(self) -> int:
        """The number of workers that the run started with."""
        return self._given.workers

    @property
    def rounds_done(self) -> float:
        """How far the run is known to have come, in rounds of all its loops."""
        return self._schedules.position.rounds

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """What is trained."""
        return [] if self.replica is None else self.replica.parameters

    @property
    def least(self) -> int:
        """The fewest samples that the model can be trained on."""
        return 2 if self.replica is not None and has_batch_statistics(self.replica.model) else 1

    def run(self, fetcher: Source, ready: Ready, *, in_loop: bool = False) -> Iterator[Any]:
        """Yield this worker's batches of one phase; `in_loop`: a pass of a loop of the script's own."""
        if self.current is not None:
            raise UserError("a batches() loop is already running in this session; finish it first")
        if self.run_over or self.replica is None or self.handshake is None:
            self._empty_phases += 1
            if self._empty_phases > EMPTY_PHASES:
                raise Closed  # else a script that loops until it has seen enough data would never end
            return
        self._require_whole(self.replica, self.handshake)
        share = self._epoch_loops.share(ready) if in_loop else ready
        if share is None:
            return
        ready = msgspec.structs.replace(
            share, phase=self.phase, mark=self._epoch_loops.mark, calls=self._collectives.made,
            between=self._schedules.between,
        )  # fmt: skip
        self.phase += 1
        self._state.stream = self._stream_to_keep(fetcher)
        self._schedules.enter(ready.phase)
        loop = self.current = BatchLoop(
            self._endpoint, self.replica, fetcher, ready, self.handshake, self._state, self._kept,
            self._schedules.position, self._schedules.followers, leads=self._given.worker == 0,
        )  # fmt: skip
        self.left_early = False
        worker = self._given.workers if self._given.evaluator else self._given.worker
        try:
            loop.begin()
            batches = self._given.shared.batches
            before = batches.get(worker, 0)
            while (batch := loop.next_batch()) is not OVER:
                batches[worker] = batches.get(worker, 0) + 1
                yield batch
            over = loop.over
            if over is not None and over.late and not over.run_over and batches.get(worker, 0) == before:
                self.current = Rehearsal(self.replica, self._state, self.handshake.again)
                yield from self.current.batches(fetcher, ready.batch_size)
        except GeneratorExit:  # the script leaves the loop: what it has stepped on counts
            self.left_early = True
            loop.end_pass()
            raise
        finally:
            self.current = self._state.stream = None
            if isinstance(loop.over, Over):
                self.run_over = loop.over.run_over
            self._schedules.position.inside = False
            loop.abandon()

    def _require_whole(self, replica: Replica, handshake: Handshake) -> None:
        """Before the first loop: refuse a part of what the run trains, and name parameters that stay as they are."""
        if handshake.partial:
            raise UserError(
                f"the run trains more than the {replica.spec.calls} models and optimizers that this worker has "
                "prepared: make the same calls of prepare() in every worker, and after --resume"
            )
        if self.phase:
            return
        names = self._parts.ownerless()
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            self.remark(f"no prepared optimizer has the parameters {', '.join(names[:3])}{more}: they stay as they are")
        if self._parts.several and not replica.at_once:
            self.remark(
                "several optimizers: all steps of a pass take effect at the next batch, as one update of all models"
            )

    def _stream_to_keep(self, fetcher: Source) -> StreamFetcher | None:
        if not isinstance(fetcher, StreamFetcher):
            return None
        fetcher.restart()
        fetcher.kept_by_script = self._state.keeps(fetcher.dataset) or self._state.keeps(fetcher.source)
        return fetcher

    def open_stream(
        self, data: Any, batch_size: int | None, steps: int | None, epochs: float, options: dict[str, Any]
    ) -> tuple[StreamFetcher, Ready]:
        """Return this worker's reader of a stream, and the phase over it."""
        given, makes_batches = self._given, isinstance(data, DataLoader | IterableDataset)
        if given.batch_size is not None and makes_batches:
            batch_size = given.batch_size
        elif given.batch_size is not None:
            self.remark(f"--batch-size does not change the batches that {type(data).__name__} brings")
        if given.epochs is not None:
            self.remark("--epochs does not apply to a stream, which is read for `steps` or until it ends")
        size = None if batch_size is None else whole_size(batch_size)
        fetcher, ready = open_stream(data, size, steps, epochs, self.workers, options, self._unread)
        counts = makes_batches and getattr(data, "batch_size", batch_size) is not None
        if counts and ready.batch_size < self.least:
            raise OptionError(f"a model with BatchNorm needs batch_size >= {self.least}, not {ready.batch_size}")
        return fetcher, ready

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs of an outer loop from the one where the run stands."""
        return self._epoch_loops.epochs(
            count, lambda loop: self.ask(EpochAsked(loop), EpochHeld), self._begin_at, lambda: self.run_over
        )

    def _begin_at(self, held: EpochHeld) -> None:
        self.phase = max(self.phase, held.phase)
        if held.calls is not None:
            self._collectives.made = max(self._collectives.made, held.calls)

    def ask(self, question: ToServer, kind: type[Answer]) -> Answer:
        """Ask the server and return its answer, of that kind; a restarted one is asked again."""
        while True:
            try:
                self._endpoint.send(question)
                while not isinstance(answer := self._endpoint.receive(), kind):
                    self._kept.append(answer)
                return answer
            except Lost:
                if self.current is not None:
                    self.current.find_server()
                elif self.handshake is not None:
                    self.handshake.again()

    def remark(self, text: str) -> None:
        """Warn of something, in the run's output and report."""
        with contextlib.suppress(Closed):  # after the run is over there is nobody to tell
            self._endpoint.send(Remark(text))


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
