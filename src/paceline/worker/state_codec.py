"""Encoding of plain Python values as bytes, and back, without running code: nothing is ever unpickled.

The bytes are one safetensors block. Tensors and arrays are its tensors; the rest is a JSON tree in its metadata. Lists,
finite numbers, strings, true, false and null are themselves; any other value is an object with one key that names its
kind. Decoded values equal the originals to the last bit, with the same types, except that subclasses of dict come back
as dict and torch.Size as tuple.
"""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from paceline.core.errors import CheckpointError, OptionError
from paceline.model.tensor_files import NAMES, from_bytes, to_bytes

FORMAT = 1
USABLE = "numbers, strings, bytes, None, tensors, NumPy arrays, and lists, tuples and dicts of them"
KEYS = (str, int, float, bool)


def pack(value: Any) -> bytes:
    """Encode the value; raise an error for unsupported kinds that names the place, as in `kept.scaler.scale`."""
    packer = _Packer()
    try:
        tree = packer.tree(value, "")
    except RecursionError:
        raise OptionError(f"the state to be kept contains itself: keep {USABLE}") from None
    return to_bytes(packer.tensors, {"format": str(FORMAT), "tree": json.dumps(tree, allow_nan=False)})


def unpack(data: bytes) -> Any:
    """Decode what `pack` encoded."""
    tensors, metadata = from_bytes(data)
    try:
        found = int(metadata["format"])
        if found > FORMAT:
            raise CheckpointError(
                f"saved state has format {found}; this version reads up to {FORMAT}: install a newer paceline"
            )
        return _value(json.loads(metadata["tree"]), tensors)
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{len(data)} bytes of saved state are damaged: {error!r}") from error


class _Packer:
    """Collects the tensors of a tree."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def tree(self, value: Any, path: str) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if type(value) is list:
            return self._items(value, path)
        if type(value) in (tuple, torch.Size):
            return {"tuple": self._items(value, path)}
        if isinstance(value, dict):
            return self._dict(value, path)
        if type(value) in (bytes, bytearray):
            return {type(value).__name__: self._tensor(torch.frombuffer(bytearray(value), dtype=torch.uint8))
                    if value else None}  # fmt: skip
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(self._checked(value, path))}
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value, path)
        raise _cannot_keep(f"a {type(value).__qualname__}", path)

    def _items(self, values: Any, path: str) -> list[Any]:
        return [self.tree(item, f"{path}.{number}") for number, item in enumerate(values)]

    def _dict(self, value: dict[Any, Any], path: str) -> Any:
        for key in value:
            if type(key) not in KEYS:
                raise _cannot_keep(f"a dict with the key {key!r}", path)
        pairs = [(key, self.tree(item, f"{path}.{key}")) for key, item in value.items()]
        if all(type(key) is str for key, _ in pairs):
            return {"dict": dict(pairs)}
        return {"items": [[self.tree(key, path), item] for key, item in pairs]}

    def _tensor(self, tensor: torch.Tensor) -> str:
        name = str(len(self.tensors))
        self.tensors[name] = tensor
        return name

    def _checked(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        if tensor.layout != torch.strided or tensor.dtype not in NAMES:
            raise _cannot_keep(f"a tensor of kind {tensor.layout}, {tensor.dtype}", path)
        return tensor.detach()

    def _array(self, value: Any, path: str) -> Any:
        array = np.ascontiguousarray(value)
        if array.dtype.hasobject or array.dtype.names is not None or np.dtype(array.dtype.str) != array.dtype:
            raise _cannot_keep(f"an array of {array.dtype}", path)
        name = self._tensor(torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)) if array.size else None
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {kind: [name, array.dtype.str, list(np.shape(value))]}


def _cannot_keep(what: str, path: str) -> OptionError:
    return OptionError(f"{path.lstrip('.') or 'the state'} is {what}, which a checkpoint cannot hold: keep {USABLE}")


def _value(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(tree, list):
        return [_value(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    return _READERS[kind](content, tensors)


def _bytes(name: str | None, tensors: dict[str, torch.Tensor]) -> bytes:
    return b"" if name is None else tensors[name].numpy().tobytes()


def _array(content: list[Any], tensors: dict[str, torch.Tensor]) -> Any:
    name, dtype, shape = content
    return np.frombuffer(bytearray(_bytes(name, tensors)), dtype=dtype).reshape(shape)


_READERS: dict[str, Callable[[Any, dict[str, torch.Tensor]], Any]] = {
    "float": lambda content, _: float(content),
    "tuple": lambda content, tensors: tuple(_value(item, tensors) for item in content),
    "dict": lambda content, tensors: {key: _value(item, tensors) for key, item in content.items()},
    "items": lambda content, tensors: {_value(key, tensors): _value(item, tensors) for key, item in content},
    "bytes": _bytes,
    "bytearray": lambda content, tensors: bytearray(_bytes(content, tensors)),
    "tensor": lambda content, tensors: tensors[content],
    "array": _array,
    "scalar": lambda content, tensors: _array(content, tensors)[()],
}
