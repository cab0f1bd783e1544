"""What goes to which stream: standard output is the report's, everything about the run goes to standard error."""

import contextlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TextIO


class _ToStandardError(logging.Handler):
    """Finds `sys.stderr` at each record, so that a progress display that wraps it stays in one piece."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


@contextlib.contextmanager
def logging_shown(level: str) -> Iterator[None]:
    """Show the records of the `paceline` logger on standard error for as long as this lasts."""
    logger = logging.getLogger("paceline")
    handler = _ToStandardError()
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
    """Send what the script prints to standard error, and what its child processes print too."""
    sys.stdout.flush()
    with _descriptor_redirected(sys.stdout, sys.stderr), contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def _descriptor_redirected(source: TextIO, target: TextIO) -> Iterator[None]:
    try:
        output, error = source.fileno(), target.fileno()
    except (AttributeError, OSError, ValueError):  # a stream that is no file has no child process writing to it
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
    """A terminal that lacks a character gets a question mark, not a failure after an hour of training."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextlib.contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does: cleanly, with the report so far."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def say(text: str) -> None:
    """One line for the person in front of the terminal."""
    print(f"paceline: {text}", file=sys.stderr)
