"""Rows of arrays, many at a time and without a loop over them: sums where rows are named more than once, writes, and
the rules by which increments change them.

Of the rules, applied at the server and in the view of the worker that made the increment, `add` is the publication's.
`adagrad:rate=R` treats an increment as a direction of ascent and steps along it by R / sqrt(sum of squares so far),
element by element; the sums travel with the rows. `clip:limit=L` cuts each element of what one worker adds in one clock
to [-L, L]. Until a row is fetched again the worker sees its own increments as these rules would have applied them one
by one.
"""

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.core.errors import OptionError

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]
TINY = 1e-10  # below any square that matters; an element never touched is not divided by zero


def put_rows(target: Array, places: Array | slice, rows: Array) -> None:
    """`target[places] = rows` for distinct places: each row is moved as one thing, which NumPy's own does not."""
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


class RowDedup:
    """A scrap of paper as long as a table: tells in two strokes whether rows are distinct."""

    def __init__(self, rows: int) -> None:
        self._last = np.zeros(rows, dtype=np.int32)

    def last_of_each(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of these mentions is the last of its row."""
        order = np.arange(len(rows), dtype=np.int32)
        self._last[rows] = order
        return np.asarray(self._last[rows] == order)

    def distinct(self, rows: Rows) -> Rows:
        """Each of the rows once."""
        last = self.last_of_each(rows)
        return rows if last.all() else rows[last]

    def summed(self, rows: Rows, deltas: Array) -> tuple[Rows, Array]:
        """Each of the rows once, and the sum of what is said of it."""
        last = self.last_of_each(rows)
        if last.all():
            return rows, deltas
        distinct = rows[last]
        self._last[distinct] = np.arange(len(distinct), dtype=np.int32)
        places = self._last[rows]
        shape = (len(distinct), deltas.shape[1])
        if deltas.dtype.kind == "i":  # exact, which doubles are not
            sums = np.zeros(shape, dtype=deltas.dtype)
            np.add.at(sums, places, deltas)
            return distinct, sums
        cells = places.astype(np.int64)[:, None] * shape[1] + np.arange(shape[1])
        counted = np.bincount(cells.ravel(), weights=deltas.ravel(), minlength=shape[0] * shape[1])
        return distinct, counted.astype(deltas.dtype).reshape(shape)


class Rule(msgspec.Struct, frozen=True):
    """Increments are added."""

    remembers = False  # whether each element has a second number that travels with it
    fits_integers = True

    def apply(self, values: Array, places: Array | slice, deltas: Array) -> None:
        """Let these increments act on the rows at distinct places."""
        add_rows(values, places, deltas)


class Clip(Rule, frozen=True):
    """Increments are cut to a range."""

    limit: float

    def apply(self, values: Array, places: Array | slice, deltas: Array) -> None:
        limit = deltas.dtype.type(self.limit)
        add_rows(values, places, np.clip(deltas, -limit, limit))


class Adagrad(Rule, frozen=True):
    """Increments are directions, with steps that shrink by the squares seen so far."""

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
    """The rule of that name."""
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
