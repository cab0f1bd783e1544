"""A worker's state of a table: a cache of bounded age, the increments of the current clock, and the ages of its reads.

The script's `Table` reads and adds here; the `Client` stores the server's rows here and takes increments out.
"""

from collections.abc import Callable, Sequence
from math import inf

import numpy as np

from paceline.core.errors import InternalError, OptionError
from paceline.tables.messages import Rows as RowsMessage
from paceline.tables.messages import TableLog
from paceline.tables.rowwise import Array, RowDedup, Rows, add_rows, parse_rule, put_rows
from paceline.tables.table_spec import TableSpec

NEVER = -(1 << 30)
FIRST = 1024  # rows that a log has room for before it grows


class Cache:
    """A worker's cached rows of a table, each with the slowest worker's clock when it was fetched.

    A row fetched when the slowest had completed r clocks may be used at clock c while r >= c - reuse, and in the clock
    it was fetched for, which the server checked when it answered. All methods work on many rows at once. A cache
    smaller than its table evicts the least recently used rows. Rows lie by place; in a cache of the whole table, each
    row's place is its number.
    """

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
