"""Values that scripts exchange, as bytes and a list of tensors: nothing is ever pickled.

The bytes are msgpack. A tensor in a value is an extension with its place in the list, so the messages carry it as they
carry every other tensor. Tuples come back as lists, subclasses of dict as dict, NumPy scalars as Python's.
"""

from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from paceline.core.errors import OptionError, PeerError

USABLE = "numbers, text, true, false, None, torch tensors, and lists, tuples and dicts (with text as keys) of them"
LEAST, MOST = -(1 << 63), (1 << 64) - 1  # whole numbers that msgpack can hold
_TENSOR = 1  # the extension's number
_PLACE_BYTES = 4


class PackedValue(NamedTuple):
    """A value as messages carry it."""

    data: bytes
    tensors: list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        return len(self.data) + sum(tensor.nbytes for tensor in self.tensors)


def pack_value(value: Any, call: str) -> PackedValue:
    """Encode the value, with copies of its tensors; an error names `call`, the type and the place of what cannot be."""
    packer = _ValuePacker(call)
    try:
        tree = packer.tree(value, "value")
    except RecursionError:
        raise OptionError(f"{call}: the value contains itself, or is nested too deeply; give {USABLE}") from None
    return PackedValue(msgspec.msgpack.encode(tree), packer.tensors)


def unpack_value(packed: PackedValue) -> Any:
    """Decode what `pack_value` encoded; its tensors are those of the list."""

    def extension(code: int, data: memoryview) -> torch.Tensor:
        if code != _TENSOR or len(data) != _PLACE_BYTES:
            raise ValueError(f"extension {code} of {len(data)} bytes is no tensor")
        return packed.tensors[int.from_bytes(data, "little")]

    try:
        return msgspec.msgpack.decode(packed.data, ext_hook=extension)
    except (msgspec.MsgspecError, ValueError, LookupError, RecursionError) as error:
        raise PeerError(f"a malformed value arrived: {error}") from error


def placed_like(value: Any, own: Any, device: torch.device) -> Any:
    """Copy the value's tensors to where those of `own` are in the same places; to `device` where it has none."""
    if isinstance(value, torch.Tensor):
        return value.to(own.device if isinstance(own, torch.Tensor) else device, copy=True)
    if isinstance(value, list):
        known = own if isinstance(own, list | tuple) and len(own) == len(value) else [None] * len(value)
        return [placed_like(item, mine, device) for item, mine in zip(value, known, strict=True)]
    if isinstance(value, dict):
        named = own if isinstance(own, dict) else {}
        return {key: placed_like(item, named.get(key), device) for key, item in value.items()}
    return value


class _ValuePacker:
    """Collects the tensors of one value."""

    def __init__(self, call: str) -> None:
        self.tensors: list[torch.Tensor] = []
        self._call = call

    def tree(self, value: Any, place: str) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            if not LEAST <= value <= MOST:
                raise OptionError(f"{self._call}: {place} is {int(value)}; whole numbers go from -2**63 to 2**64 - 1")
            return int(value)
        if isinstance(value, float):
            return float(value)
        if isinstance(value, str):
            return self._text(value, place)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, place)
        if isinstance(value, list | tuple):
            return [self.tree(item, f"{place}[{number}]") for number, item in enumerate(value)]
        if isinstance(value, dict):
            return {self._key(key, place): self.tree(item, f"{place}[{key!r}]") for key, item in value.items()}
        raise self._refusal(f"a {type(value).__qualname__}", place)

    def _key(self, key: Any, place: str) -> str:
        if not isinstance(key, str):
            raise self._refusal(f"a dict with the key {key!r} ({type(key).__qualname__})", place)
        return self._text(key, place)

    def _text(self, text: str, place: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise self._refusal(f"text that is not valid Unicode, {text!r}", place) from None
        return str(text)

    def _tensor(self, tensor: torch.Tensor, place: str) -> msgspec.msgpack.Ext:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.device.type == "meta":
            kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
            raise self._refusal(f"a tensor that is {kind}, on {tensor.device}: it must be dense", place)
        # A copy: the script may change its tensor while the value is on its way, or with the server in one process.
        copied = tensor.detach().resolve_conj().resolve_neg().to("cpu", copy=True).contiguous()
        self.tensors.append(copied)
        return msgspec.msgpack.Ext(_TENSOR, (len(self.tensors) - 1).to_bytes(_PLACE_BYTES, "little"))

    def _refusal(self, what: str, place: str) -> OptionError:
        return OptionError(f"{self._call}: {place} is {what}, which is not sent; give {USABLE}")
