"""Phases: the k-th `batches` call is phase k on every worker, and starts once every worker has called it."""

from typing import Literal

import msgspec

from paceline.core.errors import OptionError
from paceline.core.ledger import Ledger, make_ledger
from paceline.transport.messages import Ready

Answer = Literal["wait", "join", "over"]


class Phases:
    """Who takes part in which phase."""

    def __init__(self) -> None:
        self.number = -1  # of the phase begun last
        self.running = False
        self.current: Ready | None = None
        self.alive: set[int] = set()  # workers whose scripts run
        self.waiting: dict[int, Ready] = {}
        self.members: set[int] = set()  # workers inside the running phase's loop

    def ready(self, worker: int, message: Ready) -> Answer:
        """A worker called `batches`: what becomes of it."""
        if message.phase < self.number or (message.phase == self.number and not self.running):
            return "over"
        if message.phase == self.number:
            self._require_same(worker, message)
            self.members.add(worker)
            return "join"
        self.waiting[worker] = message
        return "wait"

    def gone(self, worker: int) -> None:
        """The worker's script ended, or its process did."""
        self.alive.discard(worker)
        self.waiting.pop(worker, None)
        self.members.discard(worker)

    @property
    def can_begin(self) -> bool:
        """Every worker whose script runs has called `batches`."""
        return not self.running and bool(self.waiting) and self.alive <= self.waiting.keys()

    def begin(self, seed: int, workers: int) -> Ledger:
        """Start the phase that everybody waits for."""
        first = min(self.waiting)
        self.current = self.waiting[first]
        for worker, message in self.waiting.items():
            self._require_same(worker, message)
        self.number = self.current.phase
        self.running = True
        self.members = set(self.waiting)
        self.waiting = {}
        c = self.current
        return make_ledger(c.sampling, c.size, c.epochs, seed, workers, self.number, c.least)

    def end(self) -> set[int]:
        """The phase is over; who was inside its loop."""
        members, self.members = self.members, set()
        self.running = False
        return members

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
    data: dict[str, object] = msgspec.to_builtins(ready)
    data.pop("least")
    return {**data, "rounds": rounds}
