"""A table's definition: its name and shape, how old a read may be, and what an increment does to its rows."""

from typing import Any

import msgspec
import numpy as np

from paceline.core.errors import OptionError
from paceline.tables.rowwise import Clip, parse_rule

DTYPES = ("float32", "float64", "int32", "int64")
MOST_ROWS = 1 << 31  # places of rows are kept in 32 bits
MOST_ROW_BYTES = 1 << 31  # `put_rows` moves a row as one NumPy item


class TableSpec(msgspec.Struct, frozen=True):
    """The definition of a table, the same at every worker."""

    name: str
    rows: int
    width: int
    dtype: str
    staleness: int | None  # the largest age of a read in clocks; None: the strategy's bound alone
    update: str  # what an increment does at the server
    eager: bool  # rows once read are sent again whenever the slowest worker moves on

    @property
    def columns(self) -> int:
        """Numbers in a row on the wire: its values and the rule's state."""
        return self.width * (2 if parse_rule(self.update).remembers else 1)

    @property
    def row_bytes(self) -> int:
        return self.columns * int(np.dtype(self.dtype).itemsize)

    def require_same(self, other: "TableSpec", whose: str) -> None:
        """Raise if another worker's spec of this table differs."""
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
    """Check the options and return a table's spec."""
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
