"""A link inside one process: the worker is a thread, tensors are passed by reference.

Public, for users' own tests: a session on one end and a few lines of test on the other need no processes.
"""

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from paceline.model.regions import Region
from paceline.model.spec import ModelSpec
from paceline.transport.base import Closed
from paceline.transport.messages import ToServer, ToWorker

__all__ = ["Closed", "MemoryLink"]

REFUSALS = 100  # a script that catches so many `Closed` would catch them for ever


class MemoryLink:
    """Both ends of one worker's link."""

    def __init__(self, on_wait: Callable[[], None] | None = None) -> None:
        self._to_worker: SimpleQueue[ToWorker | None] = SimpleQueue()
        self._to_server: deque[ToServer] = deque()
        self._on_wait = on_wait
        self._closed = False
        self._refusals = 0

    def send(self, message: ToServer) -> None:
        if self._closed:
            self._refuse()
        self._to_server.append(message)

    def receive(self) -> ToWorker:
        """Wait for the next message; call `on_wait` first if none is there yet."""
        if self._closed:
            self._refuse()
        if self._on_wait is not None and self._to_worker.empty():
            self._on_wait()
        message = self._to_worker.get()
        if message is None:
            raise Closed
        return message

    def poll(self, seconds: float = 0.0) -> bool:  # noqa: ARG002 - the engine decides when virtual workers wait
        return self._closed or not self._to_worker.empty()

    def adopt(self, spec: ModelSpec) -> Region | None:  # noqa: ARG002 - tensors are passed by reference
        return None

    def reconnect(self) -> None:
        """Raise `Closed`: a link inside one process is never lost by accident."""
        raise Closed

    def _refuse(self) -> None:
        """Raise `Closed`; block a thread for ever that keeps catching it."""
        self._refusals += 1
        if self._refusals > REFUSALS:
            if self._on_wait is not None:
                self._on_wait()
            threading.Event().wait()
        raise Closed

    def deliver(self, message: ToWorker) -> None:
        self._to_worker.put(message)

    def collect(self) -> ToServer | None:
        return self._to_server.popleft() if self._to_server else None

    def close(self) -> None:
        self._closed = True
        self._to_worker.put(None)
