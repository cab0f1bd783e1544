"""What the children print: live, each line under its process's name, and in the run's folder for later."""

import contextlib
import fcntl
import os
import sys
import termios
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Literal

LONGEST = 65536  # bytes of a line that is shown in one piece
READ = 65536

Target = Literal["stdout", "stderr"]


class Console:
    """The launcher's own streams. Looked up at each line, so that a progress bar or a redirection that wraps them is
    obeyed. Once a failure is known nothing more is shown, so that its cause is what a person reads first."""

    def __init__(self) -> None:
        self.muted = False

    def show(self, prefix: str, line: str, target: Target) -> None:
        if not self.muted:
            print(f"{prefix}{line}", file=sys.stdout if target == "stdout" else sys.stderr, flush=True)


class Transcript:
    """The log file of one process and of those that had its place before."""

    def __init__(self, folder: Path | None, name: str) -> None:
        self._file: BinaryIO | None = None
        if folder is not None:
            place = folder / "logs" / f"{name.replace(' ', '-')}.log"
            place.parent.mkdir(parents=True, exist_ok=True)
            self._file = place.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk must not end a run that can do without its logs
                self._file.write(data)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Voice:
    """One stream of one process, read as it comes and shown line by line."""

    def __init__(self, descriptor: int, show: Callable[[str], None], transcript: Transcript) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._show = show
        self._transcript = transcript
        self._partial = bytearray()

    def read(self) -> bool:
        """Take in some of what is there; False once there will be no more.

        Never all of it: a script that prints without a pause would keep the launcher from everything else.
        """
        return self._take(READ) != 0

    def drain(self) -> None:
        """Take in what is there at this moment."""
        left = _waiting(self.descriptor)
        while left > 0 and (taken := self._take(min(left, READ))):
            left -= taken

    def finish(self) -> None:
        """The process is gone: show what is left."""
        self.drain()
        if self._partial:
            self._show_line(bytes(self._partial))
            self._partial.clear()

    def _take(self, most: int) -> int | None:
        """How many bytes were read; None: there is nothing at the moment."""
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
        # A bar that is drawn over and over between two line ends is shown as it last was.
        text = line.rstrip(b"\r").rpartition(b"\r")[2]
        self._show(text.decode(errors="replace"))


def _waiting(descriptor: int) -> int:
    """How many bytes are there to be read."""
    count = array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count[0]
