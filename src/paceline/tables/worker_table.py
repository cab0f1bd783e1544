"""What a worker keeps of a table: a cache of bounded age, the increments of its clock, and how old its reads were.

The script's `Table` reads and adds here; the `Client` puts in what the server sends and takes out what it is to have.
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

FIRST = 1024  # places of an operation log before its block has to grow


class OpLog:
    """A worker's increments of one clock, summed per row until they are shipped. Rows given to `add` are distinct.

    Each row that is incremented gets the next place in a block that grows; what is shipped is the block's beginning, as
    it lies, and the next clock gets another block. A write costs two look-ups and one sum, however many rows the table
    has.
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


class WorkerTable:
    """One worker's view of a table."""

    def __init__(self, spec: TableSpec, number: int, cache_rows: int | None, first_values: Callable[[], Array]) -> None:
        self.spec = spec
        self.number = number
        self.first_values = first_values
        self.all_rows = np.arange(spec.rows, dtype=np.int64)
        self.bound: float = 0.0  # clocks by which nothing that is read is older than the clock it is read in
        self._reuse = 0  # clocks by which a row may be older than this one and still be read without asking
        self.asked: Rows | None = None  # rows that a `get` waits for and all of which were asked for
        self.answer: tuple[Array, int] | None = None  # its values, and the slowest worker's clock
        self._rule = parse_rule(spec.update)
        self._cache = Cache(spec, cache_rows)
        self._log = OpLog(spec)
        self._marks = RowDedup(spec.rows)
        self._ages = np.zeros(8, dtype=np.int64)  # rows read in this clock, by how many clocks old they were
        self._oldest = -1

    # -- what the script's table calls -------------------------------------------------------------------------------

    def lacking(self, rows: Rows, clock: int) -> Rows | None:
        """Which of these rows must be fetched before they are read at this clock; None: none of them."""
        return self._cache.lacking(rows, clock, self._reuse, self._marks)

    def read(self, rows: Rows, clock: int, answer: tuple[Array, int] | None) -> Array:
        """The values of rows that are here, or came with this answer, in an array of the caller's own."""
        values, slowest = self._cache.read(rows) if answer is None else answer
        self._record(rows, slowest, clock)
        return values

    def _record(self, rows: Rows, slowest: Array | int, clock: int) -> None:
        """Keep how old the rows were, and stop if one was too old: then a promise of this package is broken."""
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
        if isinstance(slowest, int):  # of all of them
            self._ages[oldest] += len(rows)
        else:
            self._ages[: oldest + 1] += np.bincount(clock - slowest)
        self._oldest = max(self._oldest, oldest)

    def add(self, rows: Rows, deltas: Array) -> None:
        """Add to these rows; repeated ones are summed."""
        with np.errstate(over="ignore", invalid="ignore"):  # sums that are not finite are refused in words
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

    # -- what the client calls ---------------------------------------------------------------------------------------

    def enter(self, free_lead: float, max_lead: float) -> None:
        """The worker takes part, and may lead the slowest by so many clocks: without asking, and at all."""
        own = inf if self.spec.staleness is None else self.spec.staleness
        reuse = min(free_lead, own)
        self._reuse = 0 if reuse == inf else int(reuse)
        self.bound = min(max_lead, own)

    def take_log(self) -> TableLog | None:
        """What this clock adds, which begins anew."""
        if not self._log.count:
            return None
        rows, sums = self._log.take()
        with np.errstate(over="ignore", invalid="ignore"):
            self._require_finite(rows, sums)
        whole = len(rows) == self.spec.rows and bool((rows == self.all_rows).all())
        return TableLog(self.number, None if whole else rows, sums)

    def take_ages(self) -> tuple[int, list[int]] | None:
        """The least age in clocks of rows that this clock read, and how many were so old, one older, and so on."""
        oldest, self._oldest = self._oldest, -1
        if oldest < 0:
            return None
        first = int(np.argmax(self._ages[: oldest + 1] > 0))
        ages: list[int] = self._ages[first : oldest + 1].tolist()
        self._ages[: oldest + 1] = 0
        return first, ages

    def take_in(self, message: RowsMessage, later: Sequence[TableLog], clock: int) -> list[Rows]:
        """Rows from the server; `later` are own increments that are not in them. Which rows it need not send again."""
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
        """Whether these are all the rows that a `get` waits for, in its order."""
        asked = self.asked
        return asked is not None and (asked is self.all_rows if rows is None else np.array_equal(rows, asked))

    def _show(self, rows: Rows, sums: Array) -> None:
        """Let this worker see own increments that rows just fetched do not hold yet."""
        _, places = self._cache.change(rows)
        self._rule.apply(self._cache.values, places, sums)

    def expire(self) -> None:
        """After a barrier everything is read anew."""
        self._cache.expire()
