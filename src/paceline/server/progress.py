"""How far a run has come, reported at most ten times a second."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from paceline.core.ledger import ENDLESS

if TYPE_CHECKING:
    from paceline.server.run import ServerRun

PAUSE_S = 0.1  # between two reports, in wall-clock time


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


class ProgressReports:
    """Progress reports of one run."""

    def __init__(self, run: "ServerRun", show: Callable[[Progress], None]) -> None:
        self._run = run
        self._show = show
        self._shown = time.monotonic()

    def on_version(self, version: int, at: float) -> None:
        """Report progress, unless the last report is too recent."""
        if time.monotonic() - self._shown <= PAUSE_S:
            return
        self._shown = time.monotonic()
        c = self._run.coordinator
        before = c.totals.used_before + c.totals.lost_before
        total = before + c.ledger.total if c.ledger is not None and c.ledger.total < ENDLESS else None
        self._show(Progress(at, version, c.used, total, dict(self._run.evaluations.metrics), c.watch.loss, c.lost))
