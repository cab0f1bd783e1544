"""Ctrl-C at a safe moment: engine and workers pass a baton, and an exception in mid-pass would lose it.

The first interrupt ends the run between two events; a second one raises KeyboardInterrupt as usual.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from paceline.records.terminals import leave_terminal


class Interrupts:
    """Whether an interrupt has arrived."""

    def __init__(self) -> None:
        self.pending = False


@contextlib.contextmanager
def deferred(stop: Callable[[], None]) -> Iterator[Interrupts]:
    """Record interrupts and call `stop`; leave signals alone whose handler is not Python's default."""
    interrupts = Interrupts()
    before = {}

    def note(number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        interrupts.pending = True
        signal.signal(number, signal.default_int_handler)
        stop()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.default_int_handler:
                before[number] = signal.signal(number, note)
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
