"""A worker's cached rows of a table, each with the slowest worker's clock when it was fetched.

A row fetched when the slowest had completed r clocks may be used at clock c while r >= c - reuse, and in the clock it
was fetched for, which the server checked when it answered. All methods work on many rows at once. A cache smaller than
its table evicts the least recently used rows.
"""

import numpy as np

from paceline.core.errors import OptionError
from paceline.tables.rowwise import Array, RowDedup, Rows, put_rows
from paceline.tables.table_spec import TableSpec

NEVER = -(1 << 30)


class Cache:
    """Rows by place; in a cache of the whole table, each row's place is its number."""

    def __init__(self, spec: TableSpec, limit: int | None) -> None:
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | np.integer) or limit < 1):
            raise OptionError(f"table {spec.name!r}: cache_rows must be a whole number >= 1, not {limit!r}")
        self.limit = None if limit is None or limit >= spec.rows else limit
        places = spec.rows if self.limit is None else self.limit
        self._name = spec.name
        self._width = spec.width
        self.values = np.zeros((places, spec.columns), dtype=spec.dtype)  # by place, with the rule's state
        self._clock = np.full(places, NEVER, dtype=np.int32)  # the slowest worker's clock when the row was fetched
        self._fetched = np.full(places, NEVER, dtype=np.int32)  # the own clock that it was fetched for
        self._newest = self._last = NEVER  # the maxima of `_clock` and `_fetched`
        self._place: np.ndarray | None = None
        if self.limit is not None:
            self._place = np.full(spec.rows, -1, dtype=np.int32)
            self._row = np.full(places, -1, dtype=np.int64)
            self._used = np.zeros(places, dtype=np.int64)
            self._reads = 0
            self._filled = 0
        self.evicted: list[Rows] = []  # since last read by `WorkerTable`, which reports them for eager tables

    def lacking(self, rows: Rows, clock: int, reuse: int, marks: RowDedup) -> Rows | None:
        """Return the rows, each once, that must be fetched before they are read at this clock; None if none must."""
        places = rows
        if self._place is not None:
            places = self._touch(rows, marks)
            if len(places) and places.min() < 0:
                return self._lacking_or_absent(rows, places, clock, reuse, marks)
        elif self._newest < clock - reuse and self._last < clock:
            return marks.distinct(rows) if len(rows) else None
        fetched = self._clock[places]
        if not len(fetched) or fetched.min() >= clock - reuse:
            return None
        old = (fetched < clock - reuse) & (self._fetched[places] != clock)
        return marks.distinct(rows[old]) if old.any() else None

    def read(self, rows: Rows) -> tuple[Array, Array]:
        """Return the values of cached rows, and the slowest worker's clock when each was fetched."""
        places = rows if self._place is None else self._place[rows]
        values = self.values.take(places, axis=0)
        if values.shape[1] != self._width:
            values = np.ascontiguousarray(values[:, : self._width])
        return values, self._clock[places]

    def install(self, rows: Rows, values: Array, slowest: int, clock: int | None) -> None:
        """Store distinct rows from the server. `clock` is the one that they were fetched for; None: sent unasked."""
        places = rows if self._place is None else self._place_for(rows)
        put_rows(self.values, places, values)
        self._clock[places] = slowest
        self._newest = max(self._newest, slowest)
        if clock is not None:
            self._fetched[places] = clock
            self._last = max(self._last, clock)

    def refresh(self, slowest: int) -> None:
        """Mark all cached rows as current at that clock of the slowest worker."""
        known = self._clock > NEVER
        self._clock[known] = np.maximum(self._clock[known], slowest)
        self._newest = max(self._newest, slowest)

    def change(self, rows: Rows) -> tuple[Array, Array]:
        """Return which of these distinct rows are cached (a mask), and their places in `values`."""
        places = rows if self._place is None else self._place[rows]
        known = (places >= 0) & (self._clock[places] > NEVER)
        return known, places[known]

    def expire(self) -> None:
        """Invalidate all rows: each must be fetched again before it is read."""
        self._clock.fill(NEVER)
        self._fetched.fill(NEVER)
        self._newest = self._last = NEVER

    # -- a cache smaller than its table ------------------------------------------------------------------------------

    def _touch(self, rows: Rows, marks: RowDedup) -> Array:
        assert self._place is not None
        assert self.limit is not None
        places = self._place[rows]
        self._reads += 1
        if len(rows) > self.limit and (asked := len(marks.distinct(rows))) > self.limit:
            raise OptionError(
                f"table {self._name!r}: {asked} rows are read at once and the cache holds {self.limit}; raise "
                "cache_rows or read fewer"
            )
        self._used[places[places >= 0]] = self._reads
        return places

    def _lacking_or_absent(self, rows: Rows, places: Array, clock: int, reuse: int, marks: RowDedup) -> Rows:
        absent = places < 0
        here = np.where(absent, 0, places)
        old = (self._clock[here] < clock - reuse) & (self._fetched[here] != clock)
        return marks.distinct(rows[absent | old])

    def _place_for(self, rows: Rows) -> Array:
        assert self._place is not None
        places = self._place[rows]
        absent = places < 0
        count = int(absent.sum())
        if count:
            free = np.arange(self._filled, min(self._filled + count, len(self._row)), dtype=np.int64)
            self._filled += len(free)
            if len(free) < count:
                free = np.concatenate((free, self._evict(count - len(free), places[~absent], free)))
            fresh = rows[absent]
            self._row[free] = fresh
            self._place[fresh] = free
            self._used[free] = self._reads
            places = self._place[rows]
        return places

    def _evict(self, count: int, *kept: Array) -> Array:
        """Evict the least recently used rows, except those at `kept`, and return their places."""
        assert self._place is not None
        used = self._used.copy()
        for places in kept:
            used[places] = np.iinfo(used.dtype).max
        oldest = np.argpartition(used, count - 1)[:count]
        rows = self._row[oldest]
        self._place[rows] = -1
        self._clock[oldest] = NEVER
        self._fetched[oldest] = NEVER
        self.evicted.append(rows)
        return oldest
