"""Phases: the k-th `batches` call is phase k on every worker, and starts once every worker has called it."""

from typing import Literal

import msgspec

from paceline.core.errors import OptionError
from paceline.core.ledger import Ledger, make_ledger
from paceline.server.workers import Workers
from paceline.transport.messages import Ready

Answer = Literal["wait", "join", "over"]


class Phases:
    """Which phase runs; who takes part in it is in the table of workers."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.number = -1  # of the phase begun last
        self.begun = 0  # by this run, the one it was restored from counted in
        self.running = False
        self.current: Ready | None = None

    def ready(self, worker: int, message: Ready) -> Answer:
        """A worker called `batches`: what becomes of it."""
        if message.phase < self.number or (message.phase == self.number and not self.running):
            return "over"
        if message.phase == self.number:
            self._require_same(worker, message)
            self._workers.in_phase.add(worker)
            return "join"
        self._workers.waiting[worker] = message
        return "wait"

    @property
    def can_begin(self) -> bool:
        """Every worker whose script runs has called `batches`."""
        waiting = self._workers.waiting
        return not self.running and bool(waiting) and self._workers.alive <= waiting.keys()

    def begin(self, seed: int, workers: int) -> tuple[Ready, Ledger]:
        """Start the phase that everybody waits for."""
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
        """The phase is over; who was inside its loop."""
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
                    f"batches() of worker {worker} has {name} {theirs}, that of the others {mine}: they must be alike"
                )


def as_data(ready: Ready, rounds: int) -> dict[str, object]:
    """A phase for the journal."""
    data: dict[str, object] = msgspec.structs.asdict(ready)
    data.pop("least")
    return {**data, "rounds": rounds}
