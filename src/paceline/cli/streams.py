"""Which output goes where: the report to standard output, all else about the run to standard error."""

import contextlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

from paceline.core.values import visible
from paceline.records.logs import NOTICE
from paceline.records.terminals import closed_is_fine


class _ToStandardError(logging.Handler):
    """Looks up `sys.stderr` for each record, so that a progress display that wraps it stays in one piece."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__()
        self._quiet = quiet

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, NOTICE, False):
            with closed_is_fine():
                print("\n".join(map(visible, self.format(record).split("\n"))), file=sys.stderr)
        elif not self._quiet:
            say(record.getMessage())


@contextlib.contextmanager
def logging_shown(level: str, *, quiet: bool = False) -> Iterator[None]:
    """Show the records of the `paceline` logger on standard error inside this context; `quiet` leaves out notices."""
    logger = logging.getLogger("paceline")
    handler = _ToStandardError(quiet=quiet)
    handler.setFormatter(logging.Formatter("paceline: %(levelname)s: %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


@contextlib.contextmanager
def output_kept_clean() -> Iterator[None]:
    """Send what the script and its child processes print to standard error."""
    sys.stdout.flush()
    with _descriptor_redirected(sys.stdout, sys.stderr), contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def _descriptor_redirected(source: TextIO, target: TextIO) -> Iterator[None]:
    try:
        output, error = source.fileno(), target.fileno()
    except (AttributeError, OSError, ValueError):  # no child process can write to a stream that is not a file
        yield
        return
    saved = os.dup(output)
    os.dup2(error, output)
    try:
        yield
    finally:
        source.flush()
        os.dup2(saved, output)
        os.close(saved)


def never_refusing() -> None:
    """Print a question mark for a character that a terminal lacks, rather than fail after an hour of training."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextlib.contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Make SIGTERM, and SIGHUP unless it is ignored, end a run as Ctrl-C does: with the report so far."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(text: str) -> None:
    """Print one line for the user, on standard error."""
    with closed_is_fine():
        print(f"paceline: {visible(text)}", file=sys.stderr)
