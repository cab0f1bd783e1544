"""Vectorized operations on rows: writes, sums over repeated rows, and the update rules of tables.

A rule is applied at the server, and in the cache of the worker that made the increment. `add` is the publication's.
`adagrad:rate=R` treats an increment as a direction of ascent and steps along it by R / sqrt(sum of squares so far),
element by element; the sums travel with the rows. `clip:limit=L` cuts each element of what one worker adds in one clock
to [-L, L]. The server applies a rule to a clock's summed increments; until a row is fetched again, its writer sees the
rule applied to each increment by itself.
"""

import math
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.core.errors import OptionError

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]
TINY = 1e-10  # below any square that matters; avoids a division by zero for elements that never changed


def put_rows(target: Array, places: Array | slice, rows: Array) -> None:
    """`target[places] = rows` for distinct places, row by row; NumPy's own indexing copies element by element."""
    if isinstance(places, slice):
        target[places] = rows
        return
    whole = np.dtype((np.void, target.shape[1] * target.itemsize))
    rows = np.ascontiguousarray(rows, dtype=target.dtype)
    np.put(target.view(whole).reshape(-1), places, rows.view(whole).reshape(-1))


def add_rows(target: Array, places: Array | slice, deltas: Array) -> None:
    """`target[places] += deltas` for distinct places."""
    if isinstance(places, slice):
        target[places] += deltas
        return
    sums = target.take(places, axis=0)
    sums += deltas
    put_rows(target, places, sums)


def bytes_of_logs(logs: Iterable[Any]) -> int:
    """Return how many bytes these increments have, each a `TableLog`."""
    return sum(log.sums.nbytes + (0 if log.rows is None else log.rows.nbytes) for log in logs)


class RowDedup:
    """Finds repeated rows with a scratch array as long as the table: one write and one read, no sorting."""

    def __init__(self, rows: int) -> None:
        self._last = np.zeros(rows, dtype=np.int32)

    def last_of_each(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return a mask that is True at the last occurrence of each row."""
        order = np.arange(len(rows), dtype=np.int32)
        self._last[rows] = order
        return np.asarray(self._last[rows] == order)

    def distinct(self, rows: Rows) -> Rows:
        """Return each row once."""
        last = self.last_of_each(rows)
        return rows if last.all() else rows[last]

    def summed(self, rows: Rows, deltas: Array) -> tuple[Rows, Array]:
        """Return each row once, and the sum of its deltas."""
        last = self.last_of_each(rows)
        if last.all():
            return rows, deltas
        distinct = rows[last]
        self._last[distinct] = np.arange(len(distinct), dtype=np.int32)
        places = self._last[rows]
        shape = (len(distinct), deltas.shape[1])
        if deltas.dtype.kind == "i":  # `bincount` sums in doubles, which are not exact for large integers
            sums = np.zeros(shape, dtype=deltas.dtype)
            np.add.at(sums, places, deltas)
            return distinct, sums
        cells = places.astype(np.int64)[:, None] * shape[1] + np.arange(shape[1])
        counted = np.bincount(cells.ravel(), weights=deltas.ravel(), minlength=shape[0] * shape[1])
        return distinct, counted.astype(deltas.dtype).reshape(shape)


class Rule(msgspec.Struct, frozen=True):
    """The rule `add`, and the base of the others."""

    remembers = False  # whether each element has a second number, which travels with the row
    fits_integers = True

    def apply(self, values: Array, places: Array | slice, deltas: Array) -> None:
        """Apply these increments to the rows at distinct places."""
        add_rows(values, places, deltas)


class Clip(Rule, frozen=True):
    """The rule `clip`: increments cut to [-limit, limit]."""

    limit: float

    def apply(self, values: Array, places: Array | slice, deltas: Array) -> None:
        limit = deltas.dtype.type(self.limit)
        add_rows(values, places, np.clip(deltas, -limit, limit))


class Adagrad(Rule, frozen=True):
    """The rule `adagrad`: increments as directions, with steps that shrink with the squares seen so far."""

    rate: float

    remembers = True
    fits_integers = False

    def apply(self, values: Array, places: Array | slice, deltas: Array) -> None:
        width, number = deltas.shape[1], deltas.dtype.type
        part = values[places]
        squares = part[:, width:]
        squares += deltas * deltas
        part[:, :width] += number(self.rate) * deltas / np.sqrt(squares + number(TINY))
        put_rows(values, places, part)


ADD = Rule()
FORMS = "add, clip:limit=NUMBER or adagrad:rate=NUMBER"


def parse_rule(text: str) -> Rule:
    """Return the rule that `text` describes."""
    if text == "add":
        return ADD
    name, _, option = str(text).partition(":")
    key, _, number = option.partition("=")
    kinds: dict[tuple[str, str], type[Clip] | type[Adagrad]] = {("clip", "limit"): Clip, ("adagrad", "rate"): Adagrad}
    kind = kinds.get((name, key))
    if kind is None:
        raise OptionError(f"a table's update must be {FORMS}, not {text!r}")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise OptionError(f"{name}'s {key} must be a number > 0, not {number!r}")
    return kind(value)
