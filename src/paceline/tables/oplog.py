"""A worker's increments of one clock, summed per row until they are shipped.

Each row that is incremented gets the next place in a block that grows; what is shipped is the block's beginning, as it
lies, and the next clock gets another block. A write costs two look-ups and one sum, however many rows the table has.
"""

import numpy as np

from paceline.tables.rowwise import add_rows
from paceline.tables.table_spec import Array, Rows, TableSpec

FIRST = 1024  # places before the block has to grow


class OpLog:
    """Sums by row. Rows given to `add` are distinct."""

    def __init__(self, spec: TableSpec) -> None:
        self._place = np.full(spec.rows, -1, dtype=np.int32)
        self._rows = np.empty(min(FIRST, spec.rows), dtype=np.int64)
        self._sums = np.zeros((len(self._rows), spec.width), dtype=spec.dtype)
        self.count = 0

    def add(self, rows: Rows, deltas: Array) -> None:
        """Add to the sums of these rows."""
        places = self._place[rows]
        unknown = places < 0
        if unknown.all():
            self._append(rows, deltas)
            return
        if unknown.any():
            self._append(rows[unknown], deltas[unknown])
            known = ~unknown
            places, deltas = places[known], deltas[known]
        add_rows(self._sums, places, deltas)

    def of(self, rows: Rows) -> tuple[Array, Array]:
        """Which of these rows have sums here (a mask), and those sums."""
        places = self._place[rows]
        known = places >= 0
        return known, self._sums.take(places[known], axis=0)

    def take(self) -> tuple[Rows, Array]:
        """All sums, which are no longer here."""
        rows, sums = self._rows[: self.count], self._sums[: self.count]
        self._place[rows] = -1
        self._rows, self._sums, self.count = np.empty_like(self._rows), np.empty_like(self._sums), 0
        return rows, sums

    def _append(self, rows: Rows, deltas: Array) -> None:
        begin, end = self.count, self.count + len(rows)
        if end > len(self._rows):
            self._grow(end)
        self._place[rows] = np.arange(begin, end, dtype=np.int32)
        self._rows[begin:end] = rows
        self._sums[begin:end] = deltas
        self.count = end

    def _grow(self, needed: int) -> None:
        size = min(max(needed, 2 * len(self._rows)), len(self._place))
        rows, sums = np.empty(size, dtype=np.int64), np.empty((size, self._sums.shape[1]), dtype=self._sums.dtype)
        rows[: self.count], sums[: self.count] = self._rows[: self.count], self._sums[: self.count]
        self._rows, self._sums = rows, sums
