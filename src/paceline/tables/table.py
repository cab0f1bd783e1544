"""The script's handle of a table: `get` reads rows, `inc` adds to them, and reads see this worker's own writes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from paceline.core.errors import OptionError
from paceline.tables.client import Client
from paceline.tables.rowwise import Array, Rows
from paceline.tables.table_spec import TableSpec
from paceline.tables.worker_table import WorkerTable


def as_array(given: Any, what: str) -> Array:
    """Convert to an array; a CPU tensor's memory is shared, not copied."""
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
    """Convert to another dtype; raise if an integer does not fit."""
    if dtype.kind == "i" and array.dtype.kind in "iu" and array.size:
        low, high, bounds = int(array.min()), int(array.max()), np.iinfo(dtype)
        if low < bounds.min or high > bounds.max:
            wrong = low if low < bounds.min else high
            raise OptionError(f"{what}: {wrong} is not within what {dtype} holds, {bounds.min} to {bounds.max}")
    return array.astype(dtype)


def initial_values(spec: TableSpec, init: Any) -> Callable[[], Array]:
    """Return the function that makes a table's first values; only the worker that the server asks calls it."""

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


class Table:
    """One worker's view of a table: a cache of bounded age, and the increments of its current clock."""

    def __init__(self, client: Client, own: WorkerTable) -> None:
        self.spec = own.spec
        self._client = client
        self._own = own
        self._dtype = np.dtype(own.spec.dtype)

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

    @property
    def bound(self) -> float:
        """The largest age in clocks of anything that `get` returns."""
        return self._own.bound

    def get(self, rows: Any = None) -> Any:
        """Return a copy of these rows, one line each; without rows, of the whole table.

        It holds every update of clocks further back than the bound, all of this worker's own, and perhaps newer ones.
        Rows may be a number, a sequence, a slice, a NumPy array or a torch tensor; for a tensor the result is a tensor.
        """
        client, own = self._client, self._own
        client.require_going("get()")
        wanted = own.all_rows if rows is None else self._checked(rows)
        lacking = own.lacking(wanted, client.clock)
        answer = None if lacking is None else self._fetch(wanted, lacking)
        values = own.read(wanted, client.clock, answer)
        if isinstance(rows, torch.Tensor):
            return torch.from_numpy(values)
        return values[0] if _is_number(rows) else values

    def inc(self, rows: Any, deltas: Any) -> None:
        """Add to these rows (None: to all); repeated rows are summed. Other workers see it after this clock."""
        self._client.require_going("inc()")
        named = self._own.all_rows if rows is None else self._checked(rows)
        self._own.add(named, self._checked_deltas(deltas, named, one=_is_number(rows)))

    def prefetch(self, rows: Any = None) -> None:
        """Start fetching rows for the next clock, so that a `get` of them after `clock()` waits less or not at all."""
        self._client.require_going("prefetch()")
        wanted = self._own.all_rows if rows is None else self._checked(rows)
        clock = self._client.clock + 1
        lacking = self._own.lacking(wanted, clock)
        if lacking is not None:
            self._client.fetch(self._own, lacking.copy(), clock)  # the caller may overwrite its array meanwhile

    def _fetch(self, wanted: Rows, lacking: Rows | None) -> tuple[Array, int] | None:
        """Fetch rows into the cache; if one answer brought them all, return it with the slowest worker's clock."""
        client, own = self._client, self._own
        if client.await_rows(own):  # a prefetch may have requested them already
            lacking = own.lacking(wanted, client.clock)
        while lacking is not None:
            own.asked, own.answer = lacking if lacking is wanted else None, None
            client.fetch(own, lacking, client.clock)
            client.await_rows(own)
            answer, own.asked, own.answer = own.answer, None, None
            if answer is not None:
                return answer
            # A restarted server may have set the clock back, and does not know the fetch.
            lacking = own.lacking(wanted, client.clock)
        return None

    # -- input -------------------------------------------------------------------------------------------------------

    def _checked(self, rows: Any) -> Rows:
        if isinstance(rows, slice):
            try:
                return self._own.all_rows[rows]
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

    def _converted(self, deltas: Any) -> Array:
        """Convert lists and numbers to the table's dtype, unless that would cut off fractions."""
        given = as_array(deltas, f"table {self.name!r}: deltas")
        if not given.size and given.ndim == 1:
            return np.empty((0, self.spec.width), dtype=self._dtype)
        lossless = given.dtype.kind in "biu" or (given.dtype.kind == "f" and self._dtype.kind == "f")
        return in_range(given, self._dtype, f"table {self.name!r}: deltas") if lossless else given


def _is_number(rows: Any) -> bool:
    return isinstance(rows, int | np.integer) and not isinstance(rows, bool)
