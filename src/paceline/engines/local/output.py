"""The children's output: shown live, each line prefixed with its process's name, and logged in the run's folder."""

import contextlib
import fcntl
import logging
import os
import sys
import termios
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import IO, Literal

from paceline.records import private_files, terminals

LONGEST = 65536  # bytes; a longer line is shown in several pieces
READ = 65536
MOST_WARNINGS = 1_000  # of workers that are shown
WARNING_LETTERS = 4_000  # by which they are told apart; a machine that joins may send a megabyte

Target = Literal["stdout", "stderr"]
logger = logging.getLogger("paceline")


class Console:
    """The launcher's own streams, looked up for each line, so that a progress bar or redirection that wraps them works.
    Muted once a failure is known, so that its cause stands out."""

    def __init__(self) -> None:
        self.muted = False
        self.warnings: set[str] = set()  # of workers, shown so far

    def is_new(self, warning: str) -> bool:
        """Return whether this warning of a worker is to be shown: it was not, and there is room for more."""
        text = warning[:WARNING_LETTERS]
        new = text not in self.warnings and len(self.warnings) < MOST_WARNINGS
        if new:
            self.warnings.add(text)
        return new

    def show(self, prefix: str, line: str, target: Target) -> None:
        if not self.muted:
            with terminals.closed_is_fine():
                print(f"{prefix}{line}", file=sys.stdout if target == "stdout" else sys.stderr, flush=True)


class Transcript:
    """The log file of one process and its predecessors of the same name."""

    def __init__(self, folder: Path | None, name: str) -> None:
        self._file: IO[bytes] | None = None
        if folder is not None:
            place = folder / "logs" / f"{name.replace(' ', '-')}.log"
            try:
                private_files.make_folder(place.parent)
                self._file = private_files.open_file(place, "ab")
            except OSError as error:  # a full disk costs the logs, not the run
                logger.warning("cannot write %s: %s; what it prints is only shown", place, error.strerror)

    def write(self, data: bytes) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk costs the logs, not the run
                self._file.write(data)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Voice:
    """One output stream of one process, shown line by line."""

    def __init__(self, descriptor: int, show: Callable[[str], None], transcript: Transcript) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._show = show
        self._transcript = transcript
        self._partial = bytearray()

    def read(self) -> bool:
        """Read at most `READ` bytes; return False at the end of the stream.

        A script that prints without pause would otherwise keep the launcher from everything else.
        """
        return self._take(READ) != 0

    def drain(self) -> None:
        """Read all that is in the pipe at this moment."""
        left = _waiting(self.descriptor)
        while left > 0 and (taken := self._take(min(left, READ))):
            left -= taken

    def finish(self) -> None:
        """Show what is left, after the process has exited."""
        self.drain()
        if self._partial:
            self._show_line(bytes(self._partial))
            self._partial.clear()

    def _take(self, most: int) -> int | None:
        """Return the number of bytes read; 0 at the end, None if there is nothing at the moment."""
        try:
            data = os.read(self.descriptor, most)
        except BlockingIOError:
            return None
        self._transcript.write(data)
        self._partial += data
        self._show_lines()
        return len(data)

    def _show_lines(self) -> None:
        *lines, rest = self._partial.split(b"\n")
        if len(rest) > LONGEST:
            lines.append(rest)
            rest = bytearray()
        for line in lines:
            self._show_line(bytes(line))
        self._partial = rest

    def _show_line(self, line: bytes) -> None:
        # Of a progress bar that redraws its line, only the last state is shown.
        text = line.rstrip(b"\r").rpartition(b"\r")[2]
        self._show(text.decode(errors="replace"))


def _waiting(descriptor: int) -> int:
    """Return how many bytes can be read without waiting."""
    count = array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count[0]
