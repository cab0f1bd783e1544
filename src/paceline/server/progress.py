"""How far a run has come, told a few times a second to whoever shows it."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from paceline.server.run import ServerRun

PAUSE_S = 0.1  # between two reports, on the wall's clock


class Progress(msgspec.Struct, frozen=True):
    """How far a run has come."""

    seconds: float
    versions: int
    samples_used: int
    total_samples: int | None
    metrics: dict[str, float]
    loss: float | None


class ProgressReports:
    """Reports of one run."""

    def __init__(self, run: "ServerRun", show: Callable[[Progress], None]) -> None:
        self._run = run
        self._show = show
        self._shown = time.monotonic()

    def on_version(self, version: int, at: float) -> None:
        """A version was made."""
        if time.monotonic() - self._shown <= PAUSE_S:
            return
        self._shown = time.monotonic()
        c = self._run.coordinator
        total = c.totals.used_before + c.ledger.total if c.ledger is not None else None
        self._show(Progress(at, version, c.used, total, dict(self._run.evaluations.metrics), c.watch.loss))
