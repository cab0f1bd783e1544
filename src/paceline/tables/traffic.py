"""When messages about tables arrive under a scenario, in both directions, and how many bytes each clock moves.

Without a scenario every message arrives at once.
"""

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from paceline.server.workers import WorkerRecord
from paceline.tables import messages as t

if TYPE_CHECKING:
    from paceline.server.run import ServerRun


class TableTraffic:
    """Every worker's link to its tables."""

    def __init__(self, run: "ServerRun") -> None:
        self._run = run
        self._ways = None if run.emulation is None else run.emulation.ways
        # A real link copies rows when it sends them; a message that is delayed or passed by reference is copied first.
        self._copies = self._ways is not None or not run.engine.capabilities.own_processes
        self._messages: dict[int, int] = {}  # messages of each worker so far: the network's jitter is drawn by number
        self._in_order: dict[int, float] = {}  # when the last message arrives at each worker: none may overtake it
        self._in_order_up: dict[int, float] = {}  # the same of its questions to the host
        self._bytes: dict[int, tuple[int, int]] = {}  # up and down in each worker's current clock, less its increments

    def question_arrives(self, worker: int, size: int, sent_at: float) -> float:
        """Return when a worker's question arrives; questions keep their order."""
        if self._ways is None:
            return sent_at
        at = self._ways.up.arrival(worker, self._next(worker), size, sent_at)
        at = self._in_order_up[worker] = max(at, self._in_order_up.get(worker, 0.0))
        return at

    def increments_arrive(self, worker: int, attempt: int, size: int, sent_at: float) -> list[float]:
        """Return when a clock's increments arrive: once, unless a message fault strikes them."""
        if self._ways is None:
            return [sent_at]
        at = self._ways.up.arrival(worker, self._next(worker), size, sent_at)
        return self._ways.faults.deliveries(worker, attempt, sent_at, at)

    def deliver(self, worker: int, message: t.TableToWorker) -> None:
        """Send a message to a worker, after its link's delay."""
        engine, ways = self._run.engine, self._ways
        at = engine.now()
        if isinstance(message, t.Rows):
            if self._copies:
                message = msgspec.structs.replace(message, values=np.asarray(message.values))
            size = message.values.nbytes + (
                message.rows.nbytes if message.clock is None and message.rows is not None else 0
            )
            self.count(worker, down=size)
            if ways is not None:
                at = ways.down.arrival(worker, self._next(worker), size, at)
        elif ways is not None and isinstance(message, t.Passed):
            at = ways.down.arrival(worker, self._next(worker), 0, at)
        if ways is None:
            engine.send(worker, message)
            return
        at = self._in_order[worker] = max(at, self._in_order.get(worker, 0.0))
        engine.call_at(at, self._send, (self._run.workers.records[worker], message))

    def _send(self, going: tuple[WorkerRecord, t.TableToWorker]) -> None:
        record, message = going
        if not (record.script.gone or record.script.ended) and self._run.cause is None:
            self._run.engine.send(record.worker, message)

    def count(self, worker: int, up: int = 0, down: int = 0) -> None:
        """Add bytes to the worker's current clock."""
        known = self._bytes.get(worker, (0, 0))
        self._bytes[worker] = (known[0] + up, known[1] + down)

    def take_bytes(self, worker: int) -> tuple[int, int]:
        """Return the bytes of the clock that ends, up and down, and start over."""
        return self._bytes.pop(worker, (0, 0))

    def left(self, worker: int) -> None:
        """Drop what was kept for a worker that left."""
        for kept in (self._bytes, self._in_order, self._in_order_up):
            kept.pop(worker, None)

    def _next(self, worker: int) -> int:
        number = self._messages.get(worker, 0)
        self._messages[worker] = number + 1
        return number
