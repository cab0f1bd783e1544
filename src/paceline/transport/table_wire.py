"""Messages about tables as they are written: arrays by dtype and shape, in the order in which they travel."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from paceline.tables import messages as t

Form = tuple[str, tuple[int, ...]]  # of an array: dtype and shape
DTYPES = {np.dtype(name): name for name in ("float32", "float64", "int32", "int64", "uint8")}  # asking NumPy is slow
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
PLAIN = (
    t.OpenTable, t.AtBarrier, t.Opened, t.Roster, t.Entered, t.Clocked, t.Included, t.Passed, t.Save,
)  # fmt: skip


class Tick(msgspec.Struct, array_like=True, gc=False):
    """A completed clock, with the tables that its arrays belong to."""

    through: int
    work: int
    loss: float | None
    compute_s: float
    reads: list[tuple[int, int, list[int]]]
    tables: list[int]
    arrays: list[Form | None]
    era: int


class Sides(msgspec.Struct, array_like=True, gc=False):
    """A message of whole numbers and arrays."""

    numbers: list[int | None]
    names: list[str]
    arrays: list[Form | None]


FORMS: dict[type[Any], type[Any]] = {
    t.TableInit: Sides, t.Measures: Sides, t.Fetch: Sides, t.Forget: Sides, t.Tick: Tick, t.Rows: Sides,
    t.EvaluateTables: Sides, **{kind: kind for kind in PLAIN},
}  # fmt: skip


def arrays_of(message: Any) -> list[Any]:
    """Its arrays, None where one is left out."""
    match message:
        case t.Tick():
            return [array for log in message.logs for array in (log.rows, log.sums)]
        case t.Rows():
            return [message.rows, message.values]
        case t.Fetch() | t.Forget():
            return [message.rows]
        case t.TableInit():
            return [message.values]
        case t.EvaluateTables():
            return list(message.values)
    return []


def write(message: Any) -> tuple[Any, bool]:
    """Its form, and whether arrays go with it."""
    arrays = [None if a is None else (DTYPES[a.dtype], a.shape) for a in arrays_of(message)]
    wire: Any
    match message:
        case t.Tick():
            wire = Tick(
                message.through, message.work, message.loss, message.compute_s, message.reads,
                [log.table for log in message.logs], arrays, message.era,
            )  # fmt: skip
        case t.Rows():
            wire = Sides([message.table, message.slowest, message.included, message.clock], [], arrays)
        case t.Fetch():
            wire = Sides([message.table, message.clock], [], arrays)
        case t.Forget() | t.TableInit():
            wire = Sides([message.table], [], arrays)
        case t.EvaluateTables():
            wire = Sides([message.number], message.names, arrays)
        case t.Measures():
            wire = Sides([], [], [])
        case _:
            wire = message
    return wire, any(form is not None for form in arrays)


def read(kind: type[Any], wire: Any, make: Callable[[Form], Any] | None = None) -> tuple[Any, bool]:
    """The message, with arrays that are yet to be filled, and whether there are any; or with those that `make` has."""
    if kind in PLAIN:
        return wire, False
    make = make or empty
    arrays = [None if form is None else make(form) for form in wire.arrays]
    loose = any(array is not None for array in arrays)
    if kind is t.Tick:
        pairs = zip(wire.tables, arrays[::2], arrays[1::2], strict=True)
        logs = [t.TableLog(table, rows, sums) for table, rows, sums in pairs]
        tick = t.Tick(wire.through, wire.work, logs, wire.loss, wire.compute_s, wire.reads, wire.era)
        return tick, loose
    numbers = wire.numbers
    match kind:
        case t.Rows:
            table, slowest, included, clock = numbers
            return t.Rows(table, arrays[0], arrays[1], slowest, included, clock), loose
        case t.Fetch:
            return t.Fetch(numbers[0], numbers[1], arrays[0]), loose
        case t.Forget | t.TableInit:
            return kind(numbers[0], arrays[0]), loose
        case t.EvaluateTables:
            return t.EvaluateTables(numbers[0], wire.names, arrays), loose
    return t.Measures(), False


def dtype_and_shape(form: Form) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """What an array is to be, checked."""
    name, shape = form
    dtype = BY_NAME.get(name)
    if dtype is None:
        raise ValueError(f"{name!r} is no dtype of a table")
    if min(shape, default=0) < 0:
        raise ValueError(f"an array of shape {shape}")
    return dtype, shape


def empty(form: Form) -> Any:
    """An array of that form."""
    dtype, shape = dtype_and_shape(form)
    return np.empty(shape, dtype=dtype)
