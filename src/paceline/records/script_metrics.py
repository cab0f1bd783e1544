"""What the journal says of the script's own side: the sizes of its updates, its numbers, its reads of tables."""

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from paceline.core.settings import rate_factor
from paceline.records.journal import Header
from paceline.records.report import BatchReport, ReportedNumber, TableReads


class UpdateSizes:
    """How large updates were, how many pushes they merged, and the mass they stood for."""

    def __init__(self) -> None:
        self._batch_size: int | None = None
        self._updates: dict[tuple[int, int], int] = {}  # how many had so many pushes and samples
        self._pushes = 0  # in all updates, as are the other two
        self._samples = 0
        self._mass = 0.0

    def phase(self, data: Mapping[str, Any]) -> None:
        """Note the batch size of a loop; one on tables has none."""
        if data.get("sampling") != "clocks":
            self._batch_size = data.get("batch_size")

    def updated(self, pushes: int, samples: int, mass: float) -> None:
        """Count an update."""
        size = (pushes, samples)
        self._updates[size] = self._updates.get(size, 0) + 1
        self._pushes += pushes
        self._samples += samples
        self._mass += mass

    def report(self, header: Header) -> BatchReport | None:
        """Return what most updates were like; None before the first phase."""
        if self._batch_size is None:
            return None
        scale, count = str(header.options.get("scale_lr", "none")), sum(self._updates.values())
        most, often = max(self._updates.items(), key=lambda each: each[1], default=((0, 0), 0))
        pushes, samples = most if 2 * often >= count else (self._pushes / count, self._samples / count)
        return BatchReport(
            self._batch_size, samples, pushes, self._mass / count if count else None,
            header.options.get("global_batch"), scale, rate_factor(scale, header.workers),
        )  # fmt: skip


class ScriptMetrics:
    """Counts what a script's loops, `report` and tables came to."""

    def __init__(self) -> None:
        self.updates = UpdateSizes()
        self.reported: dict[str, ReportedNumber] = {}
        self.streams = False  # whether a loop read streams
        self._reads: dict[str, list[int]] = {}  # by table: rows read, by their age in clocks

    def phase(self, data: Mapping[str, Any]) -> None:
        """Note the beginning of a loop."""
        self.updates.phase(data)
        self.streams |= data["sampling"] == "stream"

    def report(self, data: Mapping[str, Any]) -> None:
        """Count a number that the script reported."""
        before, value = self.reported.get(data["name"]), float(data["value"])
        count, mean = (before.count, before.mean) if before is not None else (0, 0.0)
        mean += (value - mean) / (count + 1)
        self.reported[data["name"]] = ReportedNumber(value, mean, count + 1)

    def read(self, data: Mapping[str, Any]) -> None:
        """Count reads of a table by their age."""
        ages = [0] * data["first"] + data["ages"]
        known = self._reads.get(data["table"], [])
        self._reads[data["table"]] = [a + b for a, b in zip_longest(known, ages, fillvalue=0)]

    def table_reads(self) -> dict[str, TableReads] | None:
        """Return the reads by table; None if there were none."""
        found = {name: TableReads(sum(ages), len(ages) - 1, ages) for name, ages in self._reads.items()}
        return found or None
