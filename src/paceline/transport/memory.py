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

REFUSALS = 100  # a script that swallows that many would swallow them for ever


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
        """Wait for the next message; `on_wait` is told first if there is none yet."""
        if self._closed:
            self._refuse()
        if self._on_wait is not None and self._to_worker.empty():
            self._on_wait()
        message = self._to_worker.get()
        if message is None:
            raise Closed
        return message

    def poll(self, seconds: float = 0.0) -> bool:  # noqa: ARG002 - whoever runs virtual workers decides when they wait
        return self._closed or not self._to_worker.empty()

    def adopt(self, spec: ModelSpec) -> Region | None:  # noqa: ARG002 - tensors are passed by reference
        return None

    def reconnect(self) -> None:
        """Nothing inside one process is lost by accident."""
        raise Closed

    def _refuse(self) -> None:
        """Say that the link is down; to whoever will not hear it, never answer again."""
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
