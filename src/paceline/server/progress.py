"""How far a run has come, reported at most ten times a second, and what of its journal is newest.

Whoever shows a run wants the latest lines about each worker, and not the thousands that a fast run writes in a second.
So lines are selected: all of them while they are few, beyond that the latest push of each worker, those that have
waited longest first.
"""

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from paceline.core.actions import Mark
from paceline.core.events import Applied, Pushed
from paceline.core.ledger import ENDLESS
from paceline.records.journal import Decision, Header, Line, PeerDecision

if TYPE_CHECKING:
    from paceline.server.run import ServerRun

PAUSE_S = 0.1  # between two reports, in wall-clock time
LINES_S = 0.5  # between two that have lines
FEW_LINES = 128  # that are all reported
MOST_PUSHES = 64  # beyond those, in one report
MOST_OTHERS = 256  # lines about who came, left or changed its state, beside the few


class RecentLine(msgspec.Struct, frozen=True, gc=False):
    """A line of the journal, and the model's version when it was written."""

    version: int
    line: Line


class Progress(msgspec.Struct, frozen=True):
    """How far a run has come."""

    seconds: float
    versions: int
    samples_used: int
    total_samples: int | None
    metrics: dict[str, float]
    loss: float | None
    samples_lost: int = 0  # settled without being used; they count towards the total, too
    paused: bool = False  # a debugger has the terminal: show nothing
    recent: list[RecentLine] = []  # of the journal, a selection since the last report that has some


class RecentLines:
    """A journal sink that selects what a view of the run needs."""

    def __init__(self) -> None:
        self._lines: list[RecentLine] = []
        self._latest: dict[tuple[int, str], RecentLine] = {}  # beyond the few: a worker's push, a node's step

    def add(self, line: Line, version: int) -> None:
        """Take in a line."""
        if len(self._lines) < FEW_LINES:
            self._lines.append(RecentLine(version, line))
            return
        if isinstance(line, PeerDecision):
            self._latest[(line.node, "step")] = RecentLine(version, line)
        elif isinstance(line, Decision | Header):
            event = line.event if isinstance(line, Decision) else None
            marks = isinstance(line, Decision) and any(isinstance(action, Mark) for action in line.actions)
            if isinstance(event, Pushed) and not marks:
                self._latest[(event.worker, "push")] = RecentLine(version, line)
            elif (marks or not isinstance(event, Applied)) and len(self._lines) < FEW_LINES + MOST_OTHERS:
                self._lines.append(RecentLine(version, line))

    def take(self) -> list[RecentLine]:
        """Return lines in their order, and forget them; those of further workers are left for the next time."""
        chosen = list(itertools.islice(self._latest, MOST_PUSHES))
        found = [*self._lines, *(self._latest.pop(key) for key in chosen)]
        self._lines.clear()
        return found


class ProgressReports:
    """Progress reports of one run."""

    def __init__(self, run: "ServerRun", show: Callable[[Progress], None]) -> None:
        self._run = run
        self._show = show
        self._shown = self._told = time.monotonic()
        self._recent = RecentLines()

    def write(self, line: Line) -> None:
        """Take in a line of the journal; report if nothing has been for a while, as when no version comes."""
        c = self._run.coordinator
        self._recent.add(line, c.version)
        if time.monotonic() - self._shown > LINES_S:
            self._report(c.version, self._run.moment())

    def on_version(self, version: int, at: float) -> None:
        """Report progress, unless the last report is too recent."""
        if time.monotonic() - self._shown > PAUSE_S:
            self._report(version, at)

    def _report(self, version: int, at: float) -> None:
        self._shown = time.monotonic()
        recent: list[RecentLine] = []
        if self._shown - self._told > LINES_S:
            self._told, recent = self._shown, self._recent.take()
        c = self._run.coordinator
        before = c.totals.used_before + c.totals.lost_before
        total = before + c.ledger.total if c.ledger is not None and c.ledger.total < ENDLESS else None
        metrics = dict(self._run.evaluations.metrics)
        self._show(Progress(at, version, c.used, total, metrics, c.watch.loss, c.lost, recent=recent))
