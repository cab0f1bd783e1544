"""What a table is: its name and shape, how old a read of it may be, and what an increment does to its rows.

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
DTYPES = ("float32", "float64", "int32", "int64")
MOST_ROWS = 1 << 31  # where each row lies is kept in 32 bits
MOST_ROW_BYTES = 1 << 31  # of one thing that NumPy moves
TINY = 1e-10  # below any square that matters; an element never touched is not divided by zero


class Rule(msgspec.Struct, frozen=True):
    """Increments are added."""

    remembers = False  # whether each element has a second number that travels with it
    fits_integers = True

    def change(self, deltas: Array, history: Array | None) -> Array:  # noqa: ARG002 - most rules remember nothing
        """By how much these increments move their elements; `history` is updated in place."""
        return deltas


class Clip(Rule, frozen=True):
    """Increments are cut to a range."""

    limit: float

    def change(self, deltas: Array, history: Array | None) -> Array:  # noqa: ARG002
        limit = deltas.dtype.type(self.limit)
        return np.clip(deltas, -limit, limit)


class Adagrad(Rule, frozen=True):
    """Increments are directions, with steps that shrink by the squares seen so far."""

    rate: float

    remembers = True
    fits_integers = False

    def change(self, deltas: Array, history: Array | None) -> Array:
        assert history is not None  # `remembers` says so
        history += deltas * deltas
        return np.asarray(deltas.dtype.type(self.rate) * deltas / np.sqrt(history + deltas.dtype.type(TINY)))


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


class TableSpec(msgspec.Struct, frozen=True):
    """What every worker must open alike."""

    name: str
    rows: int
    width: int
    dtype: str
    staleness: int | None  # clocks that a read may be old; None: as many as the strategy lets it be
    update: str  # what an increment does at the server
    eager: bool  # rows once read are sent again whenever the slowest worker moves on

    @property
    def columns(self) -> int:
        """Of a row as it travels: its values, and what the rule remembers of it."""
        return self.width * (2 if parse_rule(self.update).remembers else 1)

    @property
    def row_bytes(self) -> int:
        return self.columns * int(np.dtype(self.dtype).itemsize)

    def require_same(self, other: "TableSpec", whose: str) -> None:
        """A table has one shape, whoever opens it."""
        for field in self.__struct_fields__:
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                raise OptionError(
                    f"table {self.name!r} has {field} {mine}, {whose} opens it with {field} {theirs}: open it alike, "
                    "or under another name"
                )


def make_spec(
    name: str, rows: int, width: int, dtype: Any, staleness: int | None, update: str, eager: bool
) -> TableSpec:
    """A table's spec, checked."""
    if not isinstance(name, str) or not name:
        raise OptionError(f"a table's name must be some text, not {name!r}")
    rows, width = _whole("rows", rows, MOST_ROWS), _whole("width", width, MOST_ROWS)
    try:
        kind = np.dtype(str(dtype).removeprefix("torch.") if not isinstance(dtype, type) else dtype).name
    except TypeError:
        kind = str(dtype)
    if kind not in DTYPES:
        raise OptionError(f"table {name!r}: dtype must be one of {', '.join(DTYPES)}, not {kind}")
    if staleness is not None:
        if isinstance(staleness, bool) or not isinstance(staleness, int | np.integer) or staleness < 0:
            raise OptionError(
                f"table {name!r}: staleness must be a whole number of clocks >= 0 or None, not {staleness!r}"
            )
        staleness = int(staleness)
    rule = parse_rule(update)
    if kind.startswith("int") and not rule.fits_integers:
        raise OptionError(f"table {name!r}: update {update!r} needs a table of floats, not {kind}; use update='add'")
    if isinstance(rule, Clip) and kind.startswith("int"):
        most = np.iinfo(kind).max
        if rule.limit != int(rule.limit) or rule.limit > most:
            raise OptionError(
                f"table {name!r}: clip's limit must be a whole number <= {most} for {kind}, not {update!r}"
            )
    spec = TableSpec(name, rows, width, kind, staleness, update, bool(eager))
    if spec.row_bytes >= MOST_ROW_BYTES:
        raise OptionError(f"table {name!r}: a row must take less than {MOST_ROW_BYTES} bytes, not {spec.row_bytes}")
    return spec


def _whole(name: str, value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value < most:
        raise OptionError(f"a table's {name} must be a whole number from 1 to {most - 1}, not {value!r}")
    return int(value)
