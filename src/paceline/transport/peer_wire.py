"""Messages of nodes as they are written: values are raw bytes, in the order in which they travel.

Both ends know the model, so neither its dtypes nor its shapes are said again.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from paceline.peers import messages as p
from paceline.transport.table_wire import Form, empty

PLAIN = (p.Mailbox, p.Decisions, p.Exchanged, p.Leaving, p.Peering, p.Group, p.Collect)
TO_SERVER = (p.Mailbox, p.Decisions, p.Elastic, p.Averaging, p.Exchanged, p.Leaving, p.Snapshot)
TO_WORKER = (p.Peering, p.Pulled, p.Group, p.Collect)


class Values(msgspec.Struct, array_like=True, gc=False):
    """Numbers and bytes of tensors."""

    number: int
    alpha: float
    tensors: tuple[int, ...] | None
    split: int  # how many of the values come before the counters
    arrays: list[Form]


FORMS: dict[type[Any], type[Any]] = {
    kind: kind if kind in PLAIN else Values for kind in (*TO_SERVER, *TO_WORKER)
}  # fmt: skip


def arrays_of(message: Any) -> list[Any]:
    """Its values, as they are sent."""
    if isinstance(message, p.Snapshot):
        return [*message.values, *message.counters]
    return [] if type(message) in PLAIN else list(message.values)


def write(message: Any) -> tuple[Any, bool]:
    """Its form, and whether values go with it."""
    if type(message) in PLAIN:
        return message, False
    arrays = [("uint8", array.shape) for array in arrays_of(message)]
    match message:
        case p.Elastic():
            wire = Values(message.ticket, message.alpha, message.tensors, len(arrays), arrays)
        case p.Averaging():
            wire = Values(message.round, 0.0, None, len(arrays), arrays)
        case p.Snapshot():
            wire = Values(message.number, 0.0, None, len(message.values), arrays)
        case _:
            wire = Values(message.ticket, 0.0, None, len(arrays), arrays)
    return wire, bool(arrays)


def read(kind: type[Any], wire: Any, make: Callable[[Form], Any] | None = None) -> tuple[Any, bool]:
    """The message, with values that are yet to be filled, and whether there are any; or with those that `make` has."""
    if kind in PLAIN:
        return wire, False
    for name, shape in wire.arrays:
        if name != "uint8" or len(shape) != 1:
            raise ValueError(f"values are bytes, not {name} of shape {shape}")
    values = [(make or empty)(form) for form in wire.arrays]
    match kind:
        case p.Elastic:
            message: Any = p.Elastic(wire.alpha, wire.tensors, values, wire.number)
        case p.Averaging:
            message = p.Averaging(wire.number, values)
        case p.Snapshot:
            message = p.Snapshot(wire.number, values[: wire.split], values[wire.split :])
        case _:
            message = p.Pulled(values, wire.number)
    return message, bool(values)
