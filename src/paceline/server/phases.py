"""Phases: the k-th `batches` call is phase k on every worker, and starts once every worker has called it."""

from collections.abc import Mapping, Set
from typing import Any, Literal

import msgspec

from paceline.core.errors import OptionError
from paceline.core.ledger import ENDLESS, Ledger, make_ledger
from paceline.server.standing import PhaseRecords
from paceline.server.workers import Workers
from paceline.transport.messages import EpochHeld, EpochMark, Ready

Answer = Literal["wait", "join", "over"]


class Phases:
    """Which phase is running; `Workers` knows who takes part in it."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.number = -1  # of the phase begun last
        self.begun = 0  # by this run and those it was resumed from
        self.running = False
        self.stopped: str | None = None  # why it is to end early
        self.current: Ready | None = None
        self.records = PhaseRecords()
        self.spent = 0.0  # of --epochs, by the phases inside loops of the script's own
        self._epochs: dict[int, EpochHeld] = {}  # the latest epoch of each `session.epochs` loop

    def ready(self, worker: int, message: Ready) -> Answer:
        """Handle a worker's call of `batches`: it waits, joins the running phase, or is told that its phase is over."""
        if message.phase < self.number or (message.phase == self.number and not self.running):
            return "over"
        if message.phase == self.number:
            self._require_same(worker, message)
            self._workers.in_phase.add(worker)
            self._workers.late.add(worker)
            return "join"
        self._workers.waiting[worker] = message
        return "wait"

    def can_begin(self, left: Set[int] = frozenset()) -> bool:
        """Return whether every worker whose script is running has called `batches`, but for those that have left it."""
        waiting = self._workers.waiting
        return not self.running and bool(waiting) and self._workers.alive <= waiting.keys() | left

    def begin(self, seed: int, workers: int) -> tuple[Ready, Ledger]:
        """Start the phase that all workers wait for."""
        waiting = self._workers.waiting
        self.current = current = waiting[min(waiting)]
        for worker, message in waiting.items():
            self._require_same(worker, message)
        self.number = current.phase
        self.begun += 1
        self.running = True
        if current.spent is not None:
            self.spent = current.spent + current.epochs
        if current.mark is not None:
            self._note_epoch(current.mark, current)
        self._workers.in_phase = set(waiting)
        self._workers.waiting, self._workers.done, self._workers.late = {}, {}, set()
        return current, make_ledger(
            current.sampling, current.size, current.epochs, seed, workers, self.number, current.least,
            current.batch_size,
        )  # fmt: skip

    def _note_epoch(self, mark: EpochMark, first: Ready) -> None:
        known = self._epochs.get(mark.loop)
        if known is None or known.epoch != mark.epoch:
            self._epochs[mark.loop] = EpochHeld(mark.epoch, self.number, first.spent, first.calls)

    def epoch(self, loop: int) -> EpochHeld:
        """Return where the run stands in a `session.epochs` loop.

        An epoch whose phases are over counts as the latest until the next begins: what the script does after its inner
        loop is still to come for a worker that joins, or that is resumed from the checkpoint at the phase's end.
        """
        return self._epochs.get(loop, EpochHeld(None))

    def snapshot(self) -> dict[str, Any]:
        """Return what a resumed run must know of the phases before it."""
        epochs = {str(loop): [held.epoch, held.phase, held.spent] for loop, held in self._epochs.items()}
        return {"phases": self.begun, "spent": self.spent, "epochs_begun": epochs}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Continue from a snapshot; older ones know of no epochs."""
        self.begun, self.spent = data["phases"], data.get("spent", 0.0)
        self._epochs = {int(loop): EpochHeld(*held) for loop, held in data.get("epochs_begun", {}).items()}

    @property
    def last_over(self) -> int:
        """The number of the last phase that is over."""
        return self.number - 1 if self.running else self.number

    def end(self) -> list[int]:
        """End the phase; return the workers inside its loop, with those that take no more work there."""
        workers = self._workers
        inside = sorted({*workers.in_phase, *workers.done})
        workers.in_phase, workers.done = set(), {}
        self.running = False
        return inside

    def _require_same(self, worker: int, message: Ready) -> None:
        if self.current is None:
            return
        for name in ("size", "batch_size", "epochs", "sampling"):
            mine, theirs = getattr(self.current, name), getattr(message, name)
            if mine != theirs:
                raise OptionError(
                    f"batches() of worker {worker} has {name} {theirs}, the others have {mine}: give all the same"
                )


def as_data(ready: Ready, rounds: int) -> dict[str, object]:
    """Return a phase as the journal records it."""
    data: dict[str, object] = msgspec.structs.asdict(ready)
    for name in ("least", "spent", "mark", "calls", "between"):
        data.pop(name)
    if ready.sampling == "stream" and ready.size == ENDLESS:
        return {**data, "size": None, "rounds": None}
    return {**data, "rounds": rounds}
