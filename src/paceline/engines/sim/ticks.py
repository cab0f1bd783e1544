"""Evaluations by virtual seconds."""

from typing import Any

from paceline.engines.sim.kernel import Kernel
from paceline.server.run_control import Conduct


class Ticks:
    """One every so many seconds, while anything else is to come."""

    def __init__(self, kernel: Kernel, conduct: Conduct, seconds: float | None) -> None:
        self._kernel = kernel
        self._conduct = conduct
        self._seconds = seconds

    def begin(self) -> None:
        if self._seconds is not None:
            self._kernel.at(self._seconds, self._tick, 1)

    def _tick(self, count: Any) -> None:
        self._conduct.evaluate(self._kernel.now)
        # Ticks alone keep no run alive: where nothing else is to come, nothing will change.
        if self._seconds is not None and self._conduct.active and self._kernel.pending:
            self._kernel.at((count + 1) * self._seconds, self._tick, count + 1)
