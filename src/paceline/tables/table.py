"""What a script holds of a table: `get` reads rows, `inc` adds to them, and both see this worker's own writes."""

from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.core.errors import InternalError, OptionError
from paceline.tables.messages import Rows as RowsMessage
from paceline.tables.messages import TableLog
from paceline.tables.row_cache import Cache
from paceline.tables.rowwise import RowDedup, add_rows, put_rows
from paceline.tables.table_spec import Array, Rows, TableSpec, parse_rule

if TYPE_CHECKING:
    from paceline.tables.client import Client


FIRST = 1024  # places of an operation log before its block has to grow


def as_array(given: Any, what: str) -> Array:
    """The numbers as an array; a tensor's own memory, where it has some."""
    if isinstance(given, torch.Tensor):
        try:
            return np.asarray(given.detach().cpu().numpy())
        except (TypeError, RuntimeError, ValueError) as error:
            form = given.dtype if given.layout == torch.strided else given.layout
            raise OptionError(f"{what} must be a dense tensor of a dtype that NumPy has, not {form}") from error
    if np.ma.isMaskedArray(given):
        raise OptionError(f"{what} must not be a masked array: fill what is masked, with .filled(0) for instance")
    try:
        return np.asarray(given)
    except ValueError as error:  # rows of unequal lengths
        raise OptionError(f"{what} must be an array or lists of equal lengths: {error}") from error


def in_range(array: Array, dtype: np.dtype[Any], what: str) -> Array:
    """The same numbers in another dtype, which must be able to hold them."""
    if dtype.kind == "i" and array.dtype.kind in "iu" and array.size:
        low, high, bounds = int(array.min()), int(array.max()), np.iinfo(dtype)
        if low < bounds.min or high > bounds.max:
            wrong = low if low < bounds.min else high
            raise OptionError(f"{what}: {wrong} is not within what {dtype} holds, {bounds.min} to {bounds.max}")
    return array.astype(dtype)


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


class Table:
    """One worker's view of a table: a cache of bounded age, and the increments of its current clock."""

    def __init__(
        self, client: "Client", spec: TableSpec, number: int, cache_rows: int | None, first_values: Callable[[], Any]
    ) -> None:
        self.spec = spec
        self.first_values = first_values
        self.number = number
        self._client = client
        self._rule = parse_rule(spec.update)
        self._cache = Cache(spec, cache_rows)
        self._log = OpLog(spec)
        self._marks = RowDedup(spec.rows)
        self._all = np.arange(spec.rows, dtype=np.int64)
        self._ages = np.zeros(8, dtype=np.int64)  # rows read in this clock, by how many clocks old they were
        self._oldest = -1
        self._asked: Rows | None = None  # rows that a `get` waits for and all of which were asked for
        self._answer: tuple[Array, int] | None = None  # its values, and the slowest worker's clock
        self._dtype = np.dtype(spec.dtype)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def rows(self) -> int:
        return self.spec.rows

    @property
    def width(self) -> int:
        return self.spec.width

    def __repr__(self) -> str:
        s = self.spec
        return f"Table({s.name!r}, rows={s.rows}, width={s.width}, dtype={s.dtype}, staleness={s.staleness})"

    # -- what scripts call -------------------------------------------------------------------------------------------

    def get(self, rows: Any = None) -> Any:
        """The values of these rows, one line each, in an array of the caller's own; without rows, the whole table.

        They hold every update of clocks that lie further back than the bound, all of this worker's own, and perhaps
        newer ones. Rows may be a number, a sequence, a slice, a NumPy array or a torch tensor, which gets a tensor.
        """
        self._client.require_going("get()")
        wanted = self._all if rows is None else self._checked(rows)
        lacking = self._lacking(wanted)
        answer = None if lacking is None else self._fetch(wanted, lacking)
        values, slowest = self._cache.read(wanted) if answer is None else answer
        self._record(wanted, slowest, self._client.clock)
        if isinstance(rows, torch.Tensor):
            return torch.from_numpy(values)
        return values[0] if _is_number(rows) else values

    def inc(self, rows: Any, deltas: Any) -> None:
        """Add to these rows (None: to all); repeated rows are summed. Others see it once this clock is completed."""
        self._client.require_going("inc()")
        named = self._all if rows is None else self._checked(rows)
        added = self._checked_deltas(deltas, named, one=_is_number(rows))
        with np.errstate(over="ignore", invalid="ignore"):  # sums that are not finite are refused in words
            if rows is not None:
                named, added = self._marks.summed(named, added)
            if not len(named):
                return
            self._require_finite(named, added)
            self._log.add(named, added)
            known, places = self._cache.change(named)
            self._show(places, added if known.all() else added[known])

    def prefetch(self, rows: Any = None) -> None:
        """Have rows of the next clock on their way: after `clock()`, a `get` of them waits for the rest of it only."""
        self._client.require_going("prefetch()")
        wanted = self._all if rows is None else self._checked(rows)
        clock = self._client.clock + 1
        lacking = self._cache.lacking(wanted, clock, self._reuse, self._marks)
        if lacking is not None:
            lacking = lacking.copy()  # the caller may write other numbers where these are
            self._client.fetch(self, None if len(lacking) == self.spec.rows else lacking, clock)

    # -- what the client calls ---------------------------------------------------------------------------------------

    def take_log(self) -> TableLog | None:
        """What this clock adds, which begins anew."""
        if not self._log.count:
            return None
        rows, sums = self._log.take()
        self._require_finite(rows, sums)
        whole = len(rows) == self.spec.rows and bool((rows == self._all).all())
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

    def take_in(self, message: RowsMessage, later: Sequence[TableLog]) -> None:
        """Rows from the server; `later` are own increments that are not in them."""
        rows, values, slowest = self._all if message.rows is None else message.rows, message.values, message.slowest
        if message.clock is None:
            known, _ = self._cache.change(rows)
            rows, values = rows[known], values[known]
            self._cache.install(rows, values, slowest, None)
            self._cache.refresh(slowest)
        else:
            self._cache.install(rows, values, slowest, message.clock)
            if not later and not self._log.count and self._answers(message):
                self._answer = np.array(values[:, : self.spec.width]), slowest
        own = [(log.rows, log.sums) for log in later]
        for named, sums in own:
            self._show_again(rows, self._all if named is None else named, sums)
        if self._log.count:
            written, sums = self._log.of(rows)
            if len(sums):
                _, places = self._cache.change(rows[written])
                self._show(places, sums)
        if self.spec.eager:
            for evicted in self._cache.evicted:
                self._client.forget(self, evicted)
        self._cache.evicted.clear()

    def expire(self) -> None:
        """After a barrier everything is read anew."""
        self._cache.expire()

    @staticmethod
    def initial_values(spec: TableSpec, init: Any) -> Callable[[], Array]:
        """What makes a table's first values: of the worker that is asked for them, theirs are taken."""

        def values() -> Array:
            given = init(spec.rows, spec.width) if callable(init) else 0 if init is None else init
            array = as_array(given, f"table {spec.name!r}: init")
            if array.ndim and array.shape != (spec.rows, spec.width):
                raise OptionError(
                    f"table {spec.name!r}: init must be a number or have shape ({spec.rows}, {spec.width}), not "
                    f"{array.shape}"
                )
            if array.dtype.kind not in "iufb" or (spec.dtype.startswith("int") and array.dtype.kind == "f"):
                raise OptionError(f"table {spec.name!r}: init is of {array.dtype}, the table of {spec.dtype}")
            array = in_range(array, np.dtype(spec.dtype), f"table {spec.name!r}: init")
            if not np.isfinite(array).all():
                raise OptionError(f"table {spec.name!r}: init has values that are not finite")
            return array if array.ndim else np.full((1, spec.width), array, dtype=spec.dtype)

        return values

    # -- reads -------------------------------------------------------------------------------------------------------

    @property
    def _reuse(self) -> int:
        """Clocks by which a row may be older than this one and still be read without asking."""
        free, own = self._client.free_lead, self.spec.staleness
        if own is not None:
            return int(min(free, own))
        return 0 if free == inf else int(free)

    @property
    def bound(self) -> float:
        """Clocks by which nothing that `get` returns is older than the clock it is called in."""
        own = self.spec.staleness
        return self._client.max_lead if own is None else min(self._client.max_lead, own)

    def _lacking(self, wanted: Rows) -> Rows | None:
        return self._cache.lacking(wanted, self._client.clock, self._reuse, self._marks)

    def _fetch(self, wanted: Rows, lacking: Rows | None) -> tuple[Array, int] | None:
        """Have these rows in the cache; if they all came with one answer, that, with the slowest worker's clock."""
        if self._client.await_rows(self):  # they may be on their way already
            lacking = self._lacking(wanted)
        while lacking is not None:
            self._asked, self._answer = lacking if lacking is wanted else None, None
            self._client.fetch(self, None if len(lacking) == self.spec.rows else lacking, self._client.clock)
            self._client.await_rows(self)
            answer, self._asked, self._answer = self._answer, None, None
            if answer is not None:
                return answer
            # A server that was lost and found again may have set the clock back, and has answered nothing.
            lacking = self._lacking(wanted)
        return None

    def _answers(self, message: RowsMessage) -> bool:
        """Whether these are all the rows that a `get` waits for, in its order."""
        asked = self._asked
        if asked is None or message.clock != self._client.clock:
            return False
        return asked is self._all if message.rows is None else np.array_equal(message.rows, asked)

    def _record(self, rows: Rows, slowest: Array | int, clock: int) -> None:
        """Keep how old the rows were, and stop if one was too old: then a promise of this package is broken."""
        if not len(rows):
            return
        alike = isinstance(slowest, int)
        oldest = clock - int(np.min(slowest))
        if int(np.max(slowest)) > clock:
            raise InternalError(f"table {self.name!r} was read at clock {clock}, and the slowest worker is said to be "
                                f"at {int(np.max(slowest))}")  # fmt: skip
        if oldest > self.bound:
            row = int(rows[int(np.argmin(slowest))])
            raise InternalError(
                f"row {row} of table {self.name!r} was read at clock {clock} as of clock {clock - oldest} of the "
                f"slowest worker: {oldest} clocks old, and the bound is {self.bound:g}"
            )
        if oldest >= len(self._ages):
            self._ages = np.concatenate((self._ages, np.zeros(2 * oldest + 2 - len(self._ages), dtype=np.int64)))
        if alike:
            self._ages[oldest] += len(rows)
        else:
            self._ages[: oldest + 1] += np.bincount(clock - slowest)
        self._oldest = max(self._oldest, oldest)

    # -- writes ------------------------------------------------------------------------------------------------------

    def _show(self, places: Array, deltas: Array) -> None:
        """Let this worker see its own increments of rows that are in its cache."""
        values, width = self._cache.values, self.spec.width
        if not self._rule.remembers:
            add_rows(values, places, self._rule.change(deltas, None))
            return
        part = values.take(places, axis=0)
        part[:, :width] += self._rule.change(deltas, part[:, width:])
        put_rows(values, places, part)

    def _show_again(self, rows: Rows, named: Rows, sums: Array) -> None:
        """Own increments that rows just fetched do not hold yet."""
        chosen = np.isin(named, rows)
        if chosen.any():
            _, places = self._cache.change(named[chosen])
            self._show(places, sums[chosen])

    # -- input -------------------------------------------------------------------------------------------------------

    def _checked(self, rows: Any) -> Rows:
        if isinstance(rows, slice):
            try:
                return self._all[rows]
            except TypeError as error:
                raise OptionError(f"table {self.name!r}: rows must be a slice of whole numbers, not {rows}") from error
        named = as_array([rows] if _is_number(rows) else rows, f"table {self.name!r}: rows")
        if not named.size:
            return np.empty(0, dtype=np.int64)
        if named.ndim != 1 or named.dtype.kind not in "iu":
            raise OptionError(
                f"table {self.name!r}: rows must be whole numbers in one dimension, not {named.dtype} of shape "
                f"{named.shape}"
            )
        low, high = int(named.min()), int(named.max())
        if low < 0 or high >= self.spec.rows:
            wrong = low if low < 0 else high
            raise OptionError(f"table {self.name!r}: rows must be 0 to {self.spec.rows - 1}, not {wrong}")
        return named.astype(np.int64, copy=False)

    def _checked_deltas(self, deltas: Any, rows: Rows, *, one: bool) -> Array:
        named = f"table {self.name!r}: deltas"
        added = as_array(deltas, named) if isinstance(deltas, np.ndarray | torch.Tensor) else self._converted(deltas)
        if one and added.ndim == 1:
            added = added[None]
        if added.shape != (len(rows), self.spec.width):
            raise OptionError(
                f"table {self.name!r}: deltas for {len(rows)} rows of width {self.spec.width} must have shape "
                f"({len(rows)}, {self.spec.width}), not {added.shape}"
            )
        if added.dtype != self._dtype:
            raise OptionError(
                f"table {self.name!r} is of {self._dtype}, the deltas of {added.dtype}: convert them with "
                + (f".to(torch.{self._dtype})" if isinstance(deltas, torch.Tensor) else f".astype(np.{self._dtype})")
            )
        return added

    def _require_finite(self, rows: Rows, sums: Array) -> None:
        if self._dtype.kind != "f":
            return
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(sums.sum()) or np.isfinite(sums).all():
                return
        row = int(rows[int(np.argmin(np.isfinite(sums).all(axis=1)))])
        raise OptionError(f"table {self.name!r}: the delta of row {row} is not finite; nothing of it was applied")

    def _converted(self, deltas: Any) -> Array:
        """Plain numbers, in the table's dtype if none is cut off by that."""
        given = as_array(deltas, f"table {self.name!r}: deltas")
        if not given.size and given.ndim == 1:
            return np.empty((0, self.spec.width), dtype=self._dtype)
        lossless = given.dtype.kind in "biu" or (given.dtype.kind == "f" and self._dtype.kind == "f")
        return in_range(given, self._dtype, f"table {self.name!r}: deltas") if lossless else given


def _is_number(rows: Any) -> bool:
    return isinstance(rows, int | np.integer) and not isinstance(rows, bool)
