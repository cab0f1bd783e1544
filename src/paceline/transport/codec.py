"""Encoding of messages as bytes, and back. Nothing is ever unpickled: every field is checked against its type.

A message is one byte for its kind, then its fields in msgpack as declared. A hook encodes tensors and arrays:

* tensors in the worker's region are not written: the message names their slot, or the region's model;
* likewise the server's own weights, where the worker maps them;
* small arrays are written inline: dtype, shape and bytes; of indices, the bytes alone;
* all others are described by dtype and shape and put on a side list, which the transport carries in order.

A `Hello` starts with the number of this format, so that incompatible versions get a clear error.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from paceline.core.errors import InternalError, OptionError, PeerError
from paceline.core.ledger import Indices
from paceline.model.mass_optimizer import GroupOptions
from paceline.model.regions import SLOTS, Region
from paceline.model.spec import ModelSpec, dtype_of
from paceline.model.store import Gradient, Parameters
from paceline.transport.limits import Limits
from paceline.transport.messages import KIND_OF_NUMBER, KINDS, Array, Hello, Kind, RawBytes, ToServer, ToWorker

FORMAT = 6
MOST_SAID = 500  # characters of what is wrong with a message, which may quote it
MOST_DIMENSIONS = 64  # of a tensor, as in torch and NumPy
INLINE_BYTES = 1 << 14  # per message, of all arrays; larger ones can go through a ring, which is faster than the socket
Bytes = bytearray | memoryview
Shape = Sequence[int]
MakeArray = Callable[["np.dtype[Any]", Shape], Array]

_INT64 = np.dtype("int64")
_DTYPES = {np.dtype(name): name for name in ("float32", "float64", "int32", "int64", "uint8")}  # NumPy's lookup is slow
_DTYPE_OF_NAME = {name: dtype for dtype, name in _DTYPES.items()}
_DEMANDS: dict[Any, tuple["np.dtype[Any] | None", int | None]] = {  # required dtype and dimensions by annotation
    Array: (None, None), Indices: (_INT64, 1), RawBytes: (np.dtype("uint8"), 1),
}  # fmt: skip
_IN_REGION, _LENT, _IN_PARTS = 0, 1, 2  # where a version's parameters are; from the last on, plus a number of parts
_MALFORMED = (
    msgspec.MsgspecError, ValueError, TypeError, LookupError, OverflowError, RuntimeError, MemoryError,
    OptionError,
)  # fmt: skip


class _BesideTensors(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The rest of a push. A struct, whose type msgspec keeps: that of a tuple it works out anew at every push."""

    missing: frozenset[int]
    options: list[GroupOptions]
    loss: float | None
    norm: float | None


class Codec:
    """The encoder and decoder of one link. `open_region` opens the region that a worker's `Hello` refers to.

    `shared` holds the tensors of the last message that are in the region: a transport without shared memory sends and
    fills them too.
    """

    def __init__(self, open_region: Callable[[ModelSpec], Region] | None = None) -> None:
        self.region: Region | None = None
        self.lent: list[torch.Tensor] | None = None  # the server's own parameters, if the worker may read them
        self.shared: list[Parameters | Gradient] = []
        self.limits: Limits | None = None  # of a worker of another host
        self.in_parts = False  # pushes and versions come without their tensors, which shards receive and send
        self._open_region = open_region
        self._loose: list[Any] = []  # the side list
        self._inline_bytes = 0  # that may still be written inline
        self._make: MakeArray | None = None
        self._keeps = True  # the receiver may keep the message's arrays, so they are copied
        self._pack = msgspec.msgpack.Encoder(enc_hook=self._write).encode
        self._decoders: dict[int, Callable[[memoryview], Any]] = {}

    def forget(self) -> None:
        """Release the region and the lent parameters; their memory lives as long as its tensors."""
        self.region = self.lent = None
        self.shared.clear()

    def _begin(self) -> list[Any]:
        self.shared.clear()
        self._inline_bytes = INLINE_BYTES
        if self._loose:  # left by a message that failed
            self._loose = []
        return self._loose

    # -- to bytes ----------------------------------------------------------------------------------------------------

    def encode(self, message: ToServer | ToWorker) -> tuple[bytes, list[Any]]:
        """Return the message's bytes, and the tensors and arrays to send with it."""
        kind = KINDS.get(type(message))
        if kind is None:
            raise InternalError(f"a {type(message).__name__} has no number and cannot be sent: use @registered")
        prefix, loose = kind.prefix, self._begin()
        if kind.local:
            message = msgspec.structs.replace(message, **dict.fromkeys(kind.local))
        if kind.type is Hello:
            prefix += FORMAT.to_bytes(2, "little")
            if self.region is not None:
                self.shared.append(Parameters(0, self.region.parameters, self.region.buffers))
                message = msgspec.structs.replace(message, values=[], buffers=[], in_region=True)
        try:
            data = prefix + self._pack(message)
        except UnicodeEncodeError:  # an error may quote a file name that is not valid text, and must still arrive
            data = prefix + self._pack(_readable(message))
        if loose:
            self._loose = []  # keeping the list would keep a whole model alive
        return data, loose

    def _write(self, value: Any) -> Any:
        """Return the encoding of a value that msgpack does not know."""
        kind = type(value)
        if kind is np.ndarray:
            return self._write_array(value)
        if kind is Gradient:
            return *self._write_push(value), value.missing, value.options, value.loss, value.norm
        if kind is Parameters:
            return value.version, self._write_version(value)
        if isinstance(value, torch.Tensor):
            self._loose.append(value)
            return str(value.dtype), tuple(value.shape)
        if isinstance(value, np.generic):
            return value.item()
        if hasattr(value, "write_to"):  # rows that are copied only when their destination is known
            return self._write_array(value)
        raise OptionError(f"{value!r} ({kind.__name__}) cannot be sent; use numbers, strings, None, lists or tuples")

    def _write_array(self, array: Any) -> Any:
        dtype, shape, size = array.dtype, array.shape, array.nbytes
        if size > self._inline_bytes:
            self._loose.append(array)
            return _DTYPES[dtype], shape
        self._inline_bytes -= size
        data = np.asarray(array).tobytes()
        return data if dtype is _INT64 and len(shape) == 1 else (_DTYPES[dtype], shape, data)

    def _write_push(self, push: Gradient) -> tuple[Any, Any]:
        """Return where the push's tensors are, and which buffers changed."""
        if push.slot is None:
            return self._write_all(push.flat), self._write_all(push.buffer_change)
        self.shared.append(push)
        return push.slot + SLOTS * push.in_parts, bytes([change is not None for change in push.buffer_change])

    def _write_version(self, version: Parameters) -> Any:
        region = self.region
        if region is not None and version.flat is region.flat and version.buffers is region.buffers:
            self.shared.append(version)
            return _IN_REGION if version.parts is None else _IN_PARTS + version.parts
        if self.lent is not None and version.flat is self.lent:
            return _LENT
        return self._write_all(version.flat), self._write_all(version.buffers)

    def _write_all(self, tensors: Sequence[torch.Tensor | None]) -> list[Any]:
        return [None if tensor is None else self._write(tensor) for tensor in tensors]

    # -- from bytes --------------------------------------------------------------------------------------------------

    def at_server(self, data: Bytes, make: MakeArray | None = None) -> tuple[Any, list[Any]]:
        """Decode a worker's message; also return the tensors and arrays still to be filled. With `make`, arrays are
        copies of those that `make` returns."""
        return self._decode(data, make, False)

    def at_worker(self, data: Bytes, make: MakeArray | None = None) -> tuple[Any, list[Any]]:
        """Decode the server's message likewise; of an `in_place` kind, the arrays are those that `make` returns."""
        return self._decode(data, make, True)

    def require_length(self, number: int, nbytes: int) -> None:
        """Raise if a message of this kind may not be that long; its first byte is all that has arrived of it."""
        kind = _kind_of(number)
        if self.limits is not None:
            self.limits.require_length(kind, nbytes)

    def _decode(self, data: Bytes, make: MakeArray | None, to_worker: bool) -> tuple[Any, list[Any]]:
        if not data:
            raise PeerError("an empty message arrived")
        kind = KIND_OF_NUMBER.get(data[0]) or _kind_of(data[0])
        if kind.to_worker is not to_worker:
            raise PeerError(f"a message of kind {data[0]} ({kind.name}) arrived at the wrong end of the link")
        body = memoryview(data)[1:]
        if kind.type is Hello:
            body = _checked_format(body)
        decode = self._decoders.get(data[0])
        if decode is None:
            decode = self._decoders[data[0]] = msgspec.msgpack.Decoder(kind.type, dec_hook=self._read).decode
        loose = self._begin()
        self._make, self._keeps = make, not kind.in_place
        limits = self.limits
        if limits is not None:
            limits.begin(kind, len(data))
        try:
            message = decode(body)
            if kind.type is Hello and (message.in_region or limits is not None):
                _require_sides(message.spec)
            if limits is not None and kind.announces:
                limits.announce(message.announced_bytes())
            if kind.type is Hello and message.in_region:
                message = self._enter_region(message)
        except _MALFORMED as error:
            raise PeerError(f"a malformed {kind.name} arrived: {str(error)[:MOST_SAID]}") from error
        if loose:
            self._loose = []
        return message, loose

    def _read(self, kind: Any, found: Any) -> Any:
        """Decode what `_write` encoded, for an annotated type that msgpack does not know."""
        if kind is Gradient:
            return self._read_push(found)
        if kind is Parameters:
            return self._read_version(found)
        if kind is Indices and type(found) is bytes:
            return np.frombuffer(bytearray(found), _INT64)  # a bytearray is writable, as torch demands
        if kind is torch.Tensor:
            return self._read_tensor(found)
        demand = _DEMANDS.get(kind)
        if demand is None:
            raise ValueError(f"a {kind} cannot be received")
        array = np.frombuffer(bytearray(found), _INT64) if type(found) is bytes else self._read_array(*found)
        dtype, dimensions = demand
        if dtype not in (None, array.dtype) or dimensions not in (None, array.ndim):
            raise ValueError(f"an array of {array.dtype} and shape {array.shape} does not match the field's type")
        return array

    def _read_array(self, name: Any, shape: Any, data: Any = None) -> Array:
        dtype, make = _DTYPE_OF_NAME[name], self._make
        _require_shape(shape)
        if data is not None:
            if type(data) is not bytes:
                raise ValueError(f"an array is bytes, not {data!r}")
            return np.frombuffer(bytearray(data), dtype).reshape(shape)
        if self.limits is not None:
            self.limits.spend(math.prod(shape) * dtype.itemsize)
        array = np.empty(shape, dtype) if make is None else make(dtype, shape)
        if make is not None and self._keeps:
            array = array.copy()
        self._loose.append(array)
        return array

    def _read_tensor(self, form: Any) -> torch.Tensor:
        name, shape = form
        _require_shape(shape)
        dtype = dtype_of(str(name))
        if self.limits is not None:
            self.limits.spend(math.prod(shape) * dtype.itemsize)
        tensor = torch.empty(shape, dtype=dtype)
        self._loose.append(tensor)
        return tensor

    def _read_push(self, found: Any) -> Gradient:
        where, what, *rest = found
        beside = msgspec.convert(rest, _BesideTensors)
        missing, options, loss, norm = beside.missing, beside.options, beside.loss, beside.norm
        if type(where) is list:
            flat = [self._read_tensor(form) for form in where]
            moved_to = [None if form is None else self._read_tensor(form) for form in what]
            return Gradient(flat, missing, options, moved_to, loss, norm)
        region = self.region or self._known_region()
        first = SLOTS if self.in_parts else 0
        if type(where) is not int or not first <= where < first + SLOTS:
            raise ValueError(f"slot must be {first} to {first + SLOTS - 1}, not {where}")
        where -= first
        if missing and not 0 <= min(missing) <= max(missing) < len(region.parameters):
            raise ValueError(f"a parameter without gradient is not one of the model's {len(region.parameters)}")
        slot = region.slots[where]
        changes: list[torch.Tensor | None] = []
        if what:
            if type(what) is not bytes or len(what) != len(slot.changes):
                raise ValueError(f"flags of changed buffers are {what!r}, the model has {len(slot.changes)} buffers")
            changes = [change if moved else None for change, moved in zip(slot.changes, what, strict=True)]
        push = Gradient(slot.flat, missing, options, changes, loss, norm, where, slot.views)
        push.in_parts = self.in_parts
        self.shared.append(push)
        return push

    def _read_version(self, found: Any) -> Parameters:
        version, where = found
        if type(version) is not int:
            raise ValueError(f"a version is a whole number, not {version!r}")
        if type(where) is list:
            flat, buffers = where
            return Parameters(version, [self._read_tensor(f) for f in flat], [self._read_tensor(f) for f in buffers])
        region = self.region or self._known_region()
        if type(where) is int and (where == _IN_REGION or (self.in_parts and where >= _IN_PARTS)):
            parts = where - _IN_PARTS if where >= _IN_PARTS else None
            parameters = Parameters(version, region.flat, region.buffers, parts=parts)
            self.shared.append(parameters)
            return parameters
        if where != _LENT or self.lent is None:
            raise ValueError("its parameters lie in the server's memory, which this link does not map")
        return Parameters(version, self.lent, region.buffers)

    def _enter_region(self, hello: Hello) -> Hello:
        region = self.region = self._known_region() if self._open_region is None else self._open_region(hello.spec)
        self.shared.append(Parameters(0, region.parameters, region.buffers))
        return msgspec.structs.replace(hello, values=region.parameters, buffers=region.buffers)

    def _known_region(self) -> Region:
        if self.region is None:
            raise ValueError("its tensors lie in a region, and this link has none")
        return self.region


def bytes_of(value: Any) -> memoryview:
    """Return the bytes of a tensor or array: its own memory, or a copy if it is not contiguous, on a device or lazy."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        value = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data


def _require_shape(shape: Any) -> None:
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"an array has at most {MOST_DIMENSIONS} dimensions, not {len(shape)}")
    for side in shape:
        if type(side) is not int or side < 0:
            raise ValueError(f"an array cannot have shape {shape}")


def _kind_of(number: int) -> Kind:
    kind = KIND_OF_NUMBER.get(number)
    if kind is None:
        raise PeerError(f"a message of kind {number} arrived, which this process does not know")
    return kind


def _require_sides(spec: ModelSpec) -> None:
    for name, shape, _ in spec.parameters + spec.buffers:
        if any(side < 0 for side in shape) or len(shape) > MOST_DIMENSIONS:
            raise ValueError(f"{name} has shape {list(shape)}")


def _checked_format(body: memoryview) -> memoryview:
    theirs = int.from_bytes(body[:2], "little")
    if theirs != FORMAT:
        raise PeerError(
            f"a worker speaks wire format {theirs}, this server {FORMAT}: install the same version of paceline for both"
        )
    return body[2:]


def _readable(message: Any) -> Any:
    texts = {name: getattr(message, name) for name in message.__struct_fields__}
    clean = {n: t.encode("utf-8", "backslashreplace").decode() for n, t in texts.items() if isinstance(t, str)}
    return msgspec.structs.replace(message, **clean)
