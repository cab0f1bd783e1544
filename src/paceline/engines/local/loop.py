"""The launcher's event loop: messages, output and exits of processes, and descriptors of its own."""

import contextlib
import os
import selectors
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from paceline.engines.local.output import Voice
from paceline.engines.local.processes import Process
from paceline.records.terminals import leave_terminal
from paceline.transport.base import Lost
from paceline.transport.shm import Frame

LOOK_S = 0.05  # between checks for exits on systems without process handles

_READ = selectors.EVENT_READ
_BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE


class Loop:
    """A single-threaded loop that calls back."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._ends: dict[Process, Callable[[], None]] = {}
        self._readers: dict[Process, Callable[[], None]] = {}

    def watch(self, process: Process, on_frame: Callable[[Frame], None], on_exit: Callable[[], None]) -> None:
        """Call `on_frame` with every frame of this process, and then `on_exit` when it has exited."""

        def end() -> None:
            self._read(process, on_frame)
            self.forget(process)
            on_exit()

        def read() -> None:
            if not self._read(process, on_frame):
                self._stop_reading(process)

        for voice in process.voices:
            self._selector.register(voice.descriptor, _READ, _listener(self._selector, voice))
        self._ends[process] = end
        self._readers[process] = read
        self._selector.register(process.channel, _READ, read)
        if process.handle is not None:
            self._selector.register(process.handle, _READ, end)

    def watch_descriptor(self, descriptor: int, call: Callable[[], None]) -> None:
        """Call back whenever the descriptor is readable."""
        self._selector.register(descriptor, _READ, call)

    def unwatch_descriptor(self, descriptor: int) -> None:
        """Stop watching a descriptor that is about to be closed."""
        self._selector.unregister(descriptor)

    def catch_up(self, process: Process) -> None:
        """Handle at once what the process has sent so far."""
        if process in self._readers:
            self._readers[process]()

    def turn(self, seconds: float | None) -> None:
        """Wait at most this long, and handle what happened."""
        for process, read in self._readers.items():
            self._selector.modify(process.channel, _BOTH if process.channel.wants_write else _READ, read)
        blind = [process for process in self._ends if process.handle is None]
        if blind:
            seconds = LOOK_S if seconds is None else min(seconds, LOOK_S)
        for key, _ in self._selector.select(seconds):
            found = self._selector.get_map().get(key.fd)
            if found is not None and found.data is key.data:  # an earlier callback may have closed it
                key.data()
        for process in blind:
            if process in self._ends and process.exited:
                self._ends[process]()

    def close(self) -> None:
        self._selector.close()

    def _read(self, process: Process, on_frame: Callable[[Frame], None]) -> bool:
        """Handle what the process has sent; return False once its socket is closed."""
        with contextlib.suppress(Lost):
            process.channel.flush()
        try:
            while (frame := process.channel.collect()) is not None:
                on_frame(frame)
        except Lost:
            return False
        return True

    def _stop_reading(self, process: Process) -> None:
        if self._readers.pop(process, None) is not None:
            self._selector.unregister(process.channel)

    def forget(self, process: Process) -> None:
        """Stop watching a process that is about to be reaped."""
        self._stop_reading(process)
        del self._ends[process]
        for descriptor in (*(voice.descriptor for voice in process.voices), process.handle):
            if descriptor is not None:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(descriptor)


def _listener(selector: selectors.BaseSelector, voice: Voice) -> Callable[[], None]:
    def listen() -> None:
        if not voice.read():
            selector.unregister(voice.descriptor)

    return listen


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def interrupts() -> Iterator[int]:
    """Yield a descriptor from which one byte can be read per interrupt.

    Leaves signals alone whose handler is not Python's default; outside the main thread it installs nothing. SIGHUP
    says that the terminal is gone: it ends the run in the same way, and nothing is shown any more.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before = {}

    def note(number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        with contextlib.suppress(BlockingIOError):  # a full pipe already holds more interrupts than matter
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
