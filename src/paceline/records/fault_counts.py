"""What went wrong, counted from a journal: warnings, silence, samples that kill, and models that are not finite."""

from paceline.core.events import Left
from paceline.records.journal import Observation
from paceline.records.report import FaultReport


class FaultCounts:
    """A fold over the lines of a journal that tell of faults."""

    def __init__(self) -> None:
        self._warnings: dict[str, int] = {}
        self._timeouts = 0
        self._killers: set[int] = set()
        self._set_aside: set[int] = set()
        self._broken = 0

    def left(self, event: Left) -> None:
        """Count a worker that was taken out for its silence."""
        self._timeouts += event.cause == "timeout"

    def observed(self, line: Observation) -> None:
        """Count an observation, if it tells of a fault."""
        if line.what in ("warning", "error"):
            self._warnings[line.data["text"]] = self._warnings.get(line.data["text"], 0) + 1
        elif line.what == "lost":
            self._killers.update(line.data["indices"])
        elif line.what == "set_aside" and line.worker is not None:
            self._set_aside.add(line.worker)
        elif line.what == "not_finite":
            self._broken += 1

    def warnings(self) -> list[str]:
        """Return each warning once, with how often it came."""
        return [text if count == 1 else f"{text} ({count} times)" for text, count in self._warnings.items()]

    def report(self) -> FaultReport:
        """Return the counts."""
        return FaultReport(self._timeouts, sorted(self._killers), sorted(self._set_aside), self._broken)
