"""A link inside one process: the worker is a thread, tensors are passed by reference.

Public, for users' own tests: a session on one end and a few lines of test on the other need no processes.
"""

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from paceline.model.regions import Region
from paceline.model.spec import ModelSpec
from paceline.transport.base import Closed, Lost
from paceline.transport.messages import ToServer, ToWorker

__all__ = ["Closed", "MemoryLink"]

_LOST, _FOUND = object(), object()  # marks in the queue to the worker: the server is gone, and back
REFUSALS = 100  # a script that catches so many `Closed` would catch them for ever


class MemoryLink:
    """Both ends of one worker's link."""

    def __init__(self, on_wait: Callable[[], None] | None = None) -> None:
        self._to_worker: SimpleQueue[Any] = SimpleQueue()  # messages and marks; None: closed
        self._to_server: deque[ToServer] = deque()
        self._on_wait = on_wait
        self._closed = False
        self._refusals = 0
        self._cut = False  # the server is gone: what the worker sends is dropped until it has reconnected
        self._noticed = False  # the worker knows

    def send(self, message: ToServer) -> None:
        if self._closed:
            self._refuse()
        if not self._cut:
            self._to_server.append(message)

    def receive(self) -> ToWorker:
        """Wait for the next message; call `on_wait` first if none is there yet."""
        if self._closed:
            self._refuse()
        if self._noticed:
            raise Lost
        message = self._next()
        if message is _LOST:
            self._noticed = True
            raise Lost
        return message  # type: ignore[no-any-return]

    def _next(self) -> Any:
        if self._on_wait is not None and self._to_worker.empty():
            self._on_wait()
        message = self._to_worker.get()
        if message is None:
            raise Closed
        return message

    def poll(self, seconds: float = 0.0) -> bool:  # noqa: ARG002 - the engine decides when virtual workers wait
        return self._closed or self._noticed or not self._to_worker.empty()

    def adopt(self, spec: ModelSpec) -> Region | None:  # noqa: ARG002 - tensors are passed by reference
        return None

    def reconnect(self) -> None:
        """Wait for `restore`. Raise `Closed` if nothing was lost: inside one process no link is lost by itself."""
        if not self._noticed or self._closed:
            raise Closed
        while self._next() is not _FOUND:
            pass  # another server was lost before this worker found it
        self._cut = self._noticed = False

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

    def lose(self) -> None:
        """Drop what is on its way in both directions: the server is gone, and the worker's `receive` raises `Lost`."""
        self._cut = True
        self._to_server.clear()
        while not self._to_worker.empty():
            self._to_worker.get()
        self._to_worker.put(_LOST)

    def restore(self) -> None:
        """Let the worker's `reconnect` return: another server is there."""
        self._to_worker.put(_FOUND)

    def close(self) -> None:
        self._closed = True
        self._to_worker.put(None)
