"""Messages as bytes, without their tensors. Nothing is ever unpickled: every field has a type that is checked.

A message is one byte for its kind and its fields in msgpack. Tensors are named, not written: by the slot or the region
they lie in, or else by dtype and shape, and then the transport carries them in the order of `tensors_of`. Messages
that go with every push are arrays without field names; plain ones are written as they are. Indices are raw int64. A
`Hello` starts with the number of this format, so that versions that do not understand each other say so.
"""

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, cast

import msgspec
import numpy as np
import torch

from paceline.core.errors import OptionError, PeerError
from paceline.core.ledger import Allotment, Indices
from paceline.model.regions import Region, dtype_of
from paceline.model.store import Gradient, ModelSpec, Parameters
from paceline.transport import array_wire
from paceline.transport import messages as m
from paceline.transport import wire_forms as w
from paceline.transport.table_wire import Form

FORMAT = 1
Message = m.ToServer | m.ToWorker
_HELLO = w.KINDS[m.Hello][0]
_MALFORMED = (msgspec.MsgspecError, ValueError, TypeError, IndexError, OverflowError, RuntimeError, MemoryError)


class Codec:
    """The language of one link. `open_region` makes the region that a worker's Hello says its model lies in."""

    def __init__(self, open_region: Callable[[ModelSpec], Region] | None = None) -> None:
        self.region: Region | None = None
        self.lent: list[torch.Tensor] | None = None  # the server's own parameters, where the worker may read them
        self._open_region = open_region

    # -- to bytes ----------------------------------------------------------------------------------------------------

    def encode(self, message: Message) -> tuple[bytes, bool]:
        """The message's bytes, and whether it has tensors that lie outside of the region."""
        kind = type(message)
        wire: Any = message
        loose = False
        match message:
            case m.Push():
                wire = _write_push(message)
                loose = wire.gradient is not None and wire.gradient.tensors is not None
            case m.Work():
                parameters = self._write_parameters(message.parameters)
                loose = parameters is not None and parameters.tensors is not None
                wire = w.Work(
                    message.ticket, _write_allotment(message.allotment), parameters, message.position, message.slot,
                    message.delay_s, message.compute_s, message.save, message.sent_at, message.phase, message.step,
                )  # fmt: skip
            case m.Extra():
                wire = w.Extra(
                    None if message.allotment is None else _write_allotment(message.allotment), message.compute_s
                )
            case m.Hello() | m.Welcome() | m.Over() | m.Evaluate():
                wire, loose = self._write_rare(message)
            case _ if kind in array_wire.FORMS:
                wire, loose = array_wire.write(message)
        body = _pack(wire)
        if kind is m.Hello:
            body = FORMAT.to_bytes(2, "little") + body
        return w.PREFIXES[kind] + body, loose

    def _write_rare(self, message: m.Hello | m.Welcome | m.Over | m.Evaluate) -> tuple[Any, bool]:
        if isinstance(message, m.Hello):
            tensors = None if self.region is not None else _forms(message.values, message.buffers)
            return w.Hello(message.spec, tensors, message.reads), tensors is not None
        parameters = self._write_parameters(message.parameters)
        loose = parameters is not None and parameters.tensors is not None
        if isinstance(message, m.Over):
            return w.Over(message.phase, parameters, message.position, message.run_over, message.save), loose
        assert parameters is not None  # only the end of a phase may come without a model
        if isinstance(message, m.Welcome):
            return w.Welcome(parameters, message.state), loose
        return w.Evaluate(message.number, parameters), loose

    def _write_parameters(self, parameters: Parameters | None) -> w.Parameters | None:
        if parameters is None:
            return None
        region = self.region
        if self.lent is not None and parameters.flat is self.lent:
            return w.Parameters(parameters.version, None, lent=True)
        if region is not None and _same(parameters.flat, region.flat) and _same(parameters.buffers, region.buffers):
            return w.Parameters(parameters.version, None)
        return w.Parameters(parameters.version, _forms(parameters.flat, parameters.buffers))

    # -- from bytes --------------------------------------------------------------------------------------------------

    def at_server(
        self, data: bytearray | memoryview, make: Callable[[Form], Any] | None = None
    ) -> tuple[m.ToServer, bool]:
        """A worker's message, and whether it has tensors outside of the region, which are yet to be filled; of one
        about tables the arrays are those that `make` has, if it is given."""
        number, wire = _unpack(data, to_worker=False)
        message: Any = wire
        loose = False
        try:
            if isinstance(wire, w.Push):
                message = self._read_push(wire)
                loose = wire.gradient is not None and wire.gradient.tensors is not None
            elif isinstance(wire, w.Hello):
                message = self._read_hello(wire)
                loose = wire.tensors is not None
            elif number in w.ARRAY_KINDS:
                message, loose = array_wire.read(w.ARRAY_KINDS[number], wire, make)
        except _MALFORMED as error:
            raise _malformed(number, error) from error
        return message, loose

    def at_worker(
        self, data: bytearray | memoryview, make: Callable[[Form], Any] | None = None
    ) -> tuple[m.ToWorker, bool]:
        """The server's message, and whether it has tensors outside of the region, which are yet to be filled; rows of
        a table are those that `make` has, if it is given."""
        number, wire = _unpack(data, to_worker=True)
        message: Any = wire
        parameters: w.Parameters | None = None
        try:
            if number in w.ARRAY_KINDS:
                return cast(tuple[m.ToWorker, bool], array_wire.read(w.ARRAY_KINDS[number], wire, make))
            match wire:
                case w.Work():
                    parameters = wire.parameters
                    message = m.Work(
                        wire.ticket, _read_allotment(wire.allotment), self._read_parameters(parameters), wire.position,
                        wire.slot, wire.delay_s, wire.compute_s, wire.save, wire.sent_at, wire.phase, wire.step,
                    )  # fmt: skip
                case w.Extra():
                    allotment = None if wire.allotment is None else _read_allotment(wire.allotment)
                    message = m.Extra(allotment, wire.compute_s)
                case w.Over():
                    parameters = wire.parameters
                    model = self._read_parameters(parameters)
                    message = m.Over(wire.phase, model, wire.position, wire.run_over, wire.save)
                case w.Welcome():
                    parameters = wire.parameters
                    message = m.Welcome(self._read_model(parameters), wire.state)
                case w.Evaluate():
                    parameters = wire.parameters
                    message = m.Evaluate(wire.number, self._read_model(parameters))
        except _MALFORMED as error:
            raise _malformed(number, error) from error
        return message, parameters is not None and parameters.tensors is not None

    def _read_parameters(self, wire: w.Parameters | None) -> Parameters | None:
        return None if wire is None else self._read_model(wire)

    def _read_model(self, wire: w.Parameters) -> Parameters:
        if wire.tensors is None:
            region = self._known_region()
            if not wire.lent:
                return Parameters(wire.version, region.flat, region.buffers)
            if self.lent is None:
                raise ValueError("its parameters lie in the server's memory, and this link has none of it")
            return Parameters(wire.version, self.lent, region.buffers)
        flat, buffers = _empty(wire.tensors)
        return Parameters(wire.version, flat, [buffer for buffer in buffers if buffer is not None])

    def _read_hello(self, wire: w.Hello) -> m.Hello:
        spec = msgspec.structs.replace(wire.spec, optimizer=wire.spec.optimizer.with_tuples())
        if wire.tensors is not None:
            values, buffers = _empty(wire.tensors)
            return m.Hello(spec, values, [buffer for buffer in buffers if buffer is not None], reads=wire.reads)
        for name, shape, _ in spec.parameters + spec.buffers:
            if any(side < 0 for side in shape):
                raise ValueError(f"{name} has shape {list(shape)}")
        if self._open_region is None:
            raise ValueError("its tensors lie in a region, and this link has none")
        self.region = self._open_region(spec)
        return m.Hello(spec, self.region.parameters, self.region.buffers, reads=wire.reads)

    def _read_push(self, wire: w.Push) -> m.Push:
        gradient = None if wire.gradient is None else self._read_gradient(wire.gradient)
        kept = None if wire.kept is None else [_read_indices(raw) for raw in wire.kept]
        return m.Push(wire.ticket, wire.samples, gradient, kept, wire.nominal, wire.compute_s, wire.overrun_s)

    def _read_gradient(self, wire: w.Gradient) -> Gradient:
        if wire.tensors is not None:
            flat, changes = _empty(wire.tensors)
            return Gradient(flat, frozenset(wire.missing), wire.options, changes, wire.loss, wire.norm, wire.slot)
        region = self._known_region()
        if wire.slot is None or not 0 <= wire.slot < len(region.slots):
            raise ValueError(f"slot must be 0 to {len(region.slots) - 1}, not {wire.slot}")
        slot = region.slots[wire.slot]
        if wire.changed and len(wire.changed) != len(slot.changes):
            raise ValueError(f"{len(wire.changed)} buffers are named, the model has {len(slot.changes)}")
        changed: list[torch.Tensor | None] = [
            change if moved else None for change, moved in zip(slot.changes, wire.changed, strict=False)
        ]
        return Gradient(
            slot.flat, frozenset(wire.missing), wire.options, changed, wire.loss, wire.norm, wire.slot, slot.views
        )

    def _known_region(self) -> Region:
        if self.region is None:
            raise ValueError("its tensors lie in a region, and this link has none")
        return self.region


def tensors_of(message: Message) -> list[torch.Tensor]:
    """The message's tensors in the order in which they travel."""
    match message:
        case m.Push():
            if message.gradient is None:
                return []
            return [*message.gradient.flat, *(c for c in message.gradient.buffer_change if c is not None)]
        case m.Hello():
            return [*message.values, *message.buffers]
        case m.Work() | m.Over() | m.Welcome() | m.Evaluate():
            return [] if message.parameters is None else [*message.parameters.flat, *message.parameters.buffers]
    return array_wire.tensors_of(message)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory, or a copy's where it lies scattered or on a device."""
    if not tensor.numel():
        return memoryview(bytearray())
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(cast(Any, plain.numpy()))


def _pack(wire: Any) -> bytes:
    try:
        return _ENCODER.encode(wire)
    except UnicodeEncodeError:  # file names that are no text end up in errors, and an error must get through
        plain = msgspec.to_builtins(wire)
        clean = {key: _readable(value) for key, value in plain.items()} if isinstance(plain, dict) else plain
        return _ENCODER.encode(clean)


def _readable(value: Any) -> Any:
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _scalar(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise OptionError(f"{value!r} ({type(value).__name__}) cannot be sent; use numbers, strings, None, lists or tuples")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_scalar)


def _unpack(data: bytearray | memoryview, *, to_worker: bool) -> tuple[int, Any]:
    if not data:
        raise PeerError("an empty message arrived")
    number = data[0]
    decoder = w.DECODERS.get(number)
    if decoder is None or (number > w.TO_WORKER) != to_worker:
        raise PeerError(f"a message of kind {number} arrived, which is none that goes this way")
    body = memoryview(data)[1:]
    if number == _HELLO:
        theirs = int.from_bytes(body[:2], "little")
        if theirs != FORMAT:
            raise PeerError(
                f"a worker speaks wire format {theirs}, this server {FORMAT}: install the same version of paceline "
                "for both"
            )
        body = body[2:]
    try:
        return number, decoder.decode(body)
    except _MALFORMED as error:
        raise _malformed(number, error) from error


def _malformed(number: int, error: BaseException) -> PeerError:
    return PeerError(f"a malformed {w.NAMES[number]} arrived: {error}")


def _write_push(push: m.Push) -> w.Push:
    gradient = push.gradient
    wire = None
    if gradient is not None:
        change = gradient.buffer_change
        tensors = _forms(gradient.flat, change) if gradient.slot is None else None
        wire = w.Gradient(
            list(gradient.missing), cast(list[w.Options], gradient.options), [part is not None for part in change],
            gradient.loss, gradient.norm, gradient.slot, tensors,
        )  # fmt: skip
    kept = None if push.kept is None else [_write_indices(indices) for indices in push.kept]
    return w.Push(push.ticket, push.samples, wire, kept, push.nominal, push.compute_s, push.overrun_s)


def _write_allotment(allotment: Allotment) -> w.Allotment:
    indices = None if allotment.indices is None else _write_indices(allotment.indices)
    return w.Allotment(allotment.epoch, allotment.samples, indices)


def _read_allotment(wire: w.Allotment) -> Allotment:
    return Allotment(wire.epoch, wire.samples, None if wire.indices is None else _read_indices(wire.indices))


def _write_indices(indices: Indices) -> bytearray:
    return cast(bytearray, np.asarray(indices, dtype="<i8").tobytes())  # msgspec writes both alike


def _read_indices(raw: bytearray) -> Indices:
    return np.frombuffer(raw, dtype="<i8")  # of a bytearray, so that it can be written to, as torch demands


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return one is other or (len(one) == len(other) and all(map(is_, one, other)))


def _forms(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor | None]) -> w.Tensors:
    return w.Tensors([_form(t) for t in first], [None if t is None else _form(t) for t in second])


def _form(tensor: torch.Tensor) -> w.Form:
    return str(tensor.dtype), tuple(tensor.shape)


def _empty(wire: w.Tensors) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    return [_allocate(form) for form in wire.first], [None if f is None else _allocate(f) for f in wire.second]


def _allocate(form: w.Form) -> torch.Tensor:
    dtype, shape = form
    return torch.empty(shape, dtype=dtype_of(dtype))
