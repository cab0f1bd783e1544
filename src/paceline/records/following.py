"""Follow a run by its journal, which is read as it grows, until nobody writes it any more.

Who writes a journal holds its lock, which goes with the process. A lock that is free for a moment says little: a server
that died may be started again. From another machine a lock may be free though somebody holds it, as not every file
system passes locks on: unless it was seen held, a long silence must join it.
"""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.core.errors import JournalError
from paceline.core.regular_files import open_regular
from paceline.core.values import shown
from paceline.records.journal import MAX_LINE, Header, Line, Observation, parse
from paceline.records.journal_file import is_being_written
from paceline.records.live_view import Headway, LiveView
from paceline.records.metrics import Metrics

FREE_S = 1.0  # that a lock must be free at least
LEFT_S = 10.0  # without a lock and without a line, for a server to be started again, which may have to import torch
SILENT_S = 300.0  # the same where a free lock may not be seen to be held


def grown(path: Path, patience_s: float) -> Iterator[list[Line]]:
    """Yield the lines that have been added, again and again, at most `patience_s` apart; the first are those there.

    Ends when nobody writes the journal any more.
    """
    number, end = 0, 0  # of the whole lines so far; a server that starts again drops half a line, and writes on there
    try:
        with open_regular(path) as file:
            writer = _Writer(file.fileno())
            while True:
                file.seek(end)
                data = file.read(MAX_LINE)
                *whole, rest = data.split(b"\n")
                end += len(data) - len(rest)
                lines = [parse(text, number + place, path) for place, text in enumerate(whole, 1)]
                number += len(whole)
                if len(rest) >= MAX_LINE:
                    raise JournalError(f"{path} has a line of more than {MAX_LINE:,} bytes; is it a journal?")
                for line in lines:
                    if isinstance(line, Header):
                        writer.host = line.host
                yield lines
                if os.fstat(file.fileno()).st_size < end:
                    raise JournalError(f"another run has begun to write {shown(str(path))}: watch it again")
                if not lines and writer.has_left():
                    return
                if len(data) < MAX_LINE // 2:
                    time.sleep(patience_s)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise JournalError(f"cannot open journal {shown(str(path))}: {reason}") from error


class _Writer:
    """Whoever writes a journal, as far as its lock and its growth tell."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._free_since: float | None = None
        self._seen = False
        self.host: str | None = None  # of the run; None: unknown, or in virtual time

    def has_left(self) -> bool:
        """Whether nobody writes the journal, and nobody will."""
        written = is_being_written(self._descriptor)
        if written:
            self._free_since, self._seen = None, True
            return False
        now = time.monotonic()
        if self._free_since is None:
            self._free_since = now
        free = now - self._free_since
        silent = max(free, time.time() - os.fstat(self._descriptor).st_mtime)
        trusted = written is not None and (self._seen or self.host in (None, socket.gethostname()))
        return free >= FREE_S and silent >= (LEFT_S if trusted else SILENT_S)


class Followed:
    """A journal sink that keeps a view up to date by itself, from all lines of the journal."""

    def __init__(self, view: LiveView) -> None:
        self._view = view
        self._metrics = Metrics()
        self._total: float | None = None  # samples, at the end of the current loop

    def write(self, line: Line) -> None:
        """Take in one line."""
        self._view.write(line, self._metrics.versions)
        self._metrics.write(line)
        if isinstance(line, Observation) and line.what == "phase":
            size, epochs = line.data.get("size"), line.data.get("epochs")
            self._total = self._metrics.samples_used + size * epochs if size and epochs else None

    def look(self, now: float) -> None:
        """Tell the view how far the run is, at `now` by the watcher's clock."""
        m = self._metrics
        standing = Headway(m.seconds, m.versions, m.samples_used, self._total, m.evaluation, m.loss())
        self._view.stands(standing, now)
