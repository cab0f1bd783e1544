"""Ctrl-C and SIGTERM as something the launcher's loop can wait for beside everything else."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def interrupts() -> Iterator[int]:
    """A descriptor from which one byte can be read for each interrupt while this lasts.

    Signals whose handling is not Python's own stay as they are, and a thread that is not the main one has none.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before = {}

    def note(_: int, __: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):  # nobody means more by the thousandth
            os.write(writer, b"!")

    try:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is signal.default_int_handler:
                    before[number] = signal.signal(number, note)
        yield reader
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
