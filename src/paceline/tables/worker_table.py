"""A worker's state of a table: a cache of bounded age, the increments of the current clock, and the ages of its reads.

The script's `Table` reads and adds here; the `Client` stores the server's rows here and takes increments out.
"""

from collections.abc import Callable, Sequence
from math import inf

import numpy as np

from paceline.core.errors import InternalError, OptionError
from paceline.tables.messages import Rows as RowsMessage
from paceline.tables.messages import TableLog
from paceline.tables.row_cache import Cache
from paceline.tables.rowwise import Array, RowDedup, Rows, add_rows, parse_rule
from paceline.tables.table_spec import TableSpec

FIRST = 1024  # rows that a log has room for before it grows


class OpLog:
    """A worker's increments of one clock, summed per row until they are shipped. Rows given to `add` are distinct.

    Each row gets the next place in a block that grows. The filled part of the block is sent without a copy, and the
    next clock gets another block. A write costs two look-ups and one sum, however many rows the table has.
    """

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
        """Return which of these rows have sums (a mask), and those sums."""
        places = self._place[rows]
        known = places >= 0
        return known, self._sums.take(places[known], axis=0)

    def take(self) -> tuple[Rows, Array]:
        """Return all sums and start over."""
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


class WorkerTable:
    """One worker's view of a table."""

    def __init__(self, spec: TableSpec, number: int, cache_rows: int | None, first_values: Callable[[], Array]) -> None:
        self.spec = spec
        self.number = number
        self.first_values = first_values
        self.all_rows = np.arange(spec.rows, dtype=np.int64)
        self.bound: float = 0.0  # the largest age in clocks of anything that is read
        self._reuse = 0  # the largest age in clocks at which a cached row is read without a fetch
        self.asked: Rows | None = None  # the rows of a `get`, if it fetches all of them
        self.answer: tuple[Array, int] | None = None  # the values for that `get`, and the slowest worker's clock
        self._rule = parse_rule(spec.update)
        self._cache = Cache(spec, cache_rows)
        self._log = OpLog(spec)
        self._marks = RowDedup(spec.rows)
        self._ages = np.zeros(8, dtype=np.int64)  # rows read in this clock, by age in clocks
        self._oldest = -1

    # -- called by the script's table --------------------------------------------------------------------------------

    def lacking(self, rows: Rows, clock: int) -> Rows | None:
        """Return the rows that must be fetched before they are read at this clock; None if none must."""
        return self._cache.lacking(rows, clock, self._reuse, self._marks)

    def read(self, rows: Rows, clock: int, answer: tuple[Array, int] | None) -> Array:
        """Return a copy of cached rows, or the answer that brought them."""
        values, slowest = self._cache.read(rows) if answer is None else answer
        self._record(rows, slowest, clock)
        return values

    def _record(self, rows: Rows, slowest: Array | int, clock: int) -> None:
        """Record the ages of rows that were read; raise if one exceeds the bound, which would be a bug of paceline."""
        if not len(rows):
            return
        oldest = clock - int(np.min(slowest))
        if int(np.max(slowest)) > clock:
            raise InternalError(f"table {self.spec.name!r} was read at clock {clock}, and the slowest worker is said "
                                f"to be at {int(np.max(slowest))}")  # fmt: skip
        if oldest > self.bound:
            row = int(rows[int(np.argmin(slowest))])
            raise InternalError(
                f"row {row} of table {self.spec.name!r} was read at clock {clock} as of clock {clock - oldest} of the "
                f"slowest worker: {oldest} clocks old, and the bound is {self.bound:g}"
            )
        if oldest >= len(self._ages):
            self._ages = np.concatenate((self._ages, np.zeros(2 * oldest + 2 - len(self._ages), dtype=np.int64)))
        if isinstance(slowest, int):  # the same for all rows
            self._ages[oldest] += len(rows)
        else:
            self._ages[: oldest + 1] += np.bincount(clock - slowest)
        self._oldest = max(self._oldest, oldest)

    def add(self, rows: Rows, deltas: Array) -> None:
        """Add to these rows; repeated ones are summed."""
        with np.errstate(over="ignore", invalid="ignore"):  # `_require_finite` reports them with the row
            if rows is not self.all_rows:
                rows, deltas = self._marks.summed(rows, deltas)
            if not len(rows):
                return
            self._require_finite(rows, deltas)
            self._log.add(rows, deltas)
            known, places = self._cache.change(rows)
            self._rule.apply(self._cache.values, places, deltas if known.all() else deltas[known])

    def _require_finite(self, rows: Rows, sums: Array) -> None:
        if sums.dtype.kind != "f" or np.isfinite(sums.sum()) or np.isfinite(sums).all():
            return
        row = int(rows[int(np.argmin(np.isfinite(sums).all(axis=1)))])
        raise OptionError(f"table {self.spec.name!r}: the delta of row {row} is not finite; nothing of it was applied")

    # -- called by the client ----------------------------------------------------------------------------------------

    def enter(self, free_lead: float, max_lead: float) -> None:
        """Set the bounds: the worker may lead the slowest by `free_lead` clocks without asking, `max_lead` at most."""
        own = inf if self.spec.staleness is None else self.spec.staleness
        reuse = min(free_lead, own)
        self._reuse = 0 if reuse == inf else int(reuse)
        self.bound = min(max_lead, own)

    def take_log(self) -> TableLog | None:
        """Return this clock's increments and start over."""
        if not self._log.count:
            return None
        rows, sums = self._log.take()
        with np.errstate(over="ignore", invalid="ignore"):
            self._require_finite(rows, sums)
        whole = len(rows) == self.spec.rows and bool((rows == self.all_rows).all())
        return TableLog(self.number, None if whole else rows, sums)

    def take_ages(self) -> tuple[int, list[int]] | None:
        """Return the least age in clocks of this clock's reads, and how many rows were that old, one older, ..."""
        oldest, self._oldest = self._oldest, -1
        if oldest < 0:
            return None
        first = int(np.argmax(self._ages[: oldest + 1] > 0))
        ages: list[int] = self._ages[first : oldest + 1].tolist()
        self._ages[: oldest + 1] = 0
        return first, ages

    def take_in(self, message: RowsMessage, later: Sequence[TableLog], clock: int) -> list[Rows]:
        """Store rows from the server, with the own increments that they lack (`later`, and those of this clock).

        Return the evicted rows of an eager table, which the server need not send again.
        """
        cache, log = self._cache, self._log
        rows, values, slowest = self.all_rows if message.rows is None else message.rows, message.values, message.slowest
        if message.clock is None:
            known, _ = cache.change(rows)
            rows, values = rows[known], values[known]
            cache.install(rows, values, slowest, None)
            cache.refresh(slowest)
        else:
            cache.install(rows, values, slowest, message.clock)
            if message.clock == clock and not later and not log.count and self._is_asked_for(message.rows):
                self.answer = np.array(values[:, : self.spec.width]), slowest
        for logged in later:
            named = self.all_rows if logged.rows is None else logged.rows
            chosen = np.isin(named, rows)
            if chosen.any():
                self._show(named[chosen], logged.sums[chosen])
        if log.count:
            written, sums = log.of(rows)
            if len(sums):
                self._show(rows[written], sums)
        evicted, cache.evicted = cache.evicted, []
        return evicted if self.spec.eager else []

    def _is_asked_for(self, rows: Rows | None) -> bool:
        """Whether these are exactly the rows that a `get` waits for, in the same order."""
        asked = self.asked
        return asked is not None and (asked is self.all_rows if rows is None else np.array_equal(rows, asked))

    def _show(self, rows: Rows, sums: Array) -> None:
        """Apply own increments to fetched rows that do not include them yet."""
        _, places = self._cache.change(rows)
        self._rule.apply(self._cache.values, places, sums)

    def expire(self) -> None:
        """Invalidate the cache."""
        self._cache.expire()
