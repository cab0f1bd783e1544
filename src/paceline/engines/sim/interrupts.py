"""Ctrl-C at a safe moment: the engine and its workers pass a baton, and an exception in mid-pass would lose it.

The first interrupt is noted and ends the run between two events; a second one is Python's own again.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class Interrupts:
    """Whether somebody wants the run to end."""

    def __init__(self) -> None:
        self.pending = False


@contextlib.contextmanager
def deferred(stop: Callable[[], None]) -> Iterator[Interrupts]:
    """Note interrupts while this lasts and call `stop`; signals whose handling is not Python's own stay as they are."""
    interrupts = Interrupts()
    before = {}

    def note(number: int, _: FrameType | None) -> None:
        interrupts.pending = True
        signal.signal(number, signal.default_int_handler)
        stop()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is signal.default_int_handler:
                before[number] = signal.signal(number, note)
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
