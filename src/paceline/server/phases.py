"""Phases: the k-th `batches` call is phase k on every worker, and starts once every worker has called it."""

from collections.abc import Set
from typing import Literal

import msgspec

from paceline.core.errors import OptionError
from paceline.core.ledger import Ledger, make_ledger
from paceline.server.standing import PhaseRecords
from paceline.server.workers import Workers
from paceline.transport.messages import Ready

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

    def ready(self, worker: int, message: Ready) -> Answer:
        """Handle a worker's call of `batches`: it waits, joins the running phase, or is told that its phase is over."""
        if message.phase < self.number or (message.phase == self.number and not self.running):
            return "over"
        if message.phase == self.number:
            self._require_same(worker, message)
            self._workers.in_phase.add(worker)
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
        self._workers.in_phase = set(waiting)
        self._workers.waiting = {}
        return current, make_ledger(
            current.sampling, current.size, current.epochs, seed, workers, self.number, current.least
        )  # fmt: skip

    def end(self) -> list[int]:
        """End the phase; return the workers inside its loop."""
        inside, self._workers.in_phase = sorted(self._workers.in_phase), set()
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
    data.pop("least")
    return {**data, "rounds": rounds}
