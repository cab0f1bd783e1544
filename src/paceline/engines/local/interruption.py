"""What an interrupt does about processes that somebody has stopped: they are resumed, and later killed.

A stopped server would never hear of the interrupt, and a stopped worker would let the server wait for its state. So
from the first interrupt on the launcher resumes every process again and again for `RESUMED_S` seconds; what is stopped
even then is killed. A process that runs has its own limits and is left to them.
"""

import os
import signal
import time
from collections.abc import Iterable

from paceline.engines.local.nursery import Nursery
from paceline.engines.local.processes import RunProcess
from paceline.engines.local.scratch import state_of

LOOK_S = 0.25  # between two looks
RESUMED_S = 5.0  # with the time to end afterwards less than the ten seconds that are promised


class Interruption:
    """How often the user has asked for the end, and what is done about stopped processes since."""

    def __init__(self) -> None:
        self.count = 0
        self._since: float | None = None
        self._look_at = 0.0

    def read(self, descriptor: int) -> None:
        """Count what came; raise KeyboardInterrupt at the second interrupt."""
        self.count += len(os.read(descriptor, 64))
        if self.count > 1:
            raise KeyboardInterrupt
        self._since = self._look_at = time.monotonic()

    @property
    def over(self) -> bool:
        """Whether nothing that is stopped is waited for any more."""
        return self._since is not None and time.monotonic() - self._since > RESUMED_S

    def seconds_left(self) -> float | None:
        """Return how long until the next look; None before an interrupt."""
        return None if self._since is None else max(0.0, self._look_at - time.monotonic())

    def look(self, processes: Iterable[RunProcess], nursery: Nursery | None) -> None:
        """Resume stopped processes, or kill them if they are stopped again and again."""
        now = time.monotonic()
        if self._since is None or now < self._look_at:
            return
        self._look_at = now + LOOK_S
        over = self.over
        for process in processes:
            killed = over and state_of(process.pid) in ("T", "t")
            process.signal(signal.SIGKILL if killed else signal.SIGCONT)
        if nursery is not None:
            nursery.resume()
