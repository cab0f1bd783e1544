"""Messages whose arrays travel beside them, about tables and of nodes: each kind's own module knows its form."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from paceline.transport import peer_wire, table_wire
from paceline.transport.table_wire import Form

FORMS: dict[type[Any], type[Any]] = {**table_wire.FORMS, **peer_wire.FORMS}


def arrays_of(message: Any) -> list[Any]:
    """Its arrays, None where one is left out."""
    arrays: list[Any] = _of(type(message)).arrays_of(message)
    return arrays


def tensors_of(message: Any) -> list[torch.Tensor]:
    """Its arrays as tensors that share their memory."""
    return [
        torch.from_numpy(np.require(array, requirements=["C", "W"]))
        for array in arrays_of(message)
        if array is not None
    ]


def write(message: Any) -> tuple[Any, bool]:
    """Its form, and whether arrays go with it."""
    written: tuple[Any, bool] = _of(type(message)).write(message)
    return written


def read(kind: type[Any], wire: Any, make: Callable[[Form], Any] | None = None) -> tuple[Any, bool]:
    """The message, with arrays that are yet to be filled, and whether there are any; or with those that `make` has."""
    message: tuple[Any, bool] = _of(kind).read(kind, wire, make)
    return message


def _of(kind: type[Any]) -> Any:
    return peer_wire if kind in peer_wire.FORMS else table_wire
