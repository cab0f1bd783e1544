"""Follow a run by its journal, which is read as it grows."""

import time
from collections.abc import Iterator
from pathlib import Path

from paceline.core.errors import JournalError
from paceline.core.regular_files import open_regular
from paceline.core.values import shown
from paceline.records.journal import MAX_LINE, Line, Observation, parse
from paceline.records.live_view import LiveView, Standing
from paceline.records.metrics import Metrics


def grown(path: Path, patience_s: float) -> Iterator[list[Line]]:
    """Yield the lines that have been added, again and again, at most `patience_s` apart; the first are those there."""
    number, rest = 0, b""
    try:
        with open_regular(path) as file:
            while True:
                data = rest + file.read(MAX_LINE)
                *whole, rest = data.split(b"\n")
                lines = [parse(text, number + place, path) for place, text in enumerate(whole, 1)]
                number += len(whole)
                if len(rest) >= MAX_LINE:
                    raise JournalError(f"{path} has a line of more than {MAX_LINE:,} bytes; is it a journal?")
                yield lines
                if len(data) < MAX_LINE // 2:
                    time.sleep(patience_s)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise JournalError(f"cannot open journal {shown(str(path))}: {reason}") from error


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
        standing = Standing(m.seconds, m.versions, m.samples_used, self._total, m.evaluation, m.loss())
        self._view.stands(standing, now)
