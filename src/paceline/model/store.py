"""The store holds the server's tensors: versioned flat parameters, module buffers and the optimizer's state.

A version is one Apply of positive mass. Readers get an immutable copy of one whole version, shared by all readers of
the same version. BatchNorm's statistics follow the pushes: `buffer += sum of m_i (buffer_i - buffer read)`, while
counters take the maximum.
"""

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch

from paceline.core.errors import CheckpointError
from paceline.core.updates import UNMEASURED, UNMEASURED_PLAIN, Contents, Merged, PushRef
from paceline.model.flat import HALVES, Layout, master_dtype
from paceline.model.joint_optimizer import make_optimizer
from paceline.model.mass_optimizer import GroupOptions, is_plain, mean_options
from paceline.model.regions import Region
from paceline.model.sharding import GRADIENT, joined_files
from paceline.model.spec import ModelSpec, dtype_of, state_of

LARGE_BYTES = 1 << 24  # a copy of this size or more does not stay in the cache
LENT_AT_ONCE = 2  # memories of parameters that versions are sent from while the store goes on in another
PIECE = 1 << 18  # elements that are written at once where the first ones are sent meanwhile
MODEL, OPTIMIZER, SERVER = "model.safetensors", "optimizer.safetensors", "server.safetensors"  # files of a checkpoint

Floats = np.ndarray[Any, np.dtype[Any]]
AddInSlot = Callable[["Gradient", int, "Gradient", int], None]
MakeStore = Callable[[ModelSpec, list[torch.Tensor], list[torch.Tensor], bool], "Store"]


class Unwritten:
    """Values that are still elsewhere than where they belong. Whoever sends the memory writes them on the way."""

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Each pair is the place of some values and the tensor that has them."""
        parts = [(t, s) for pair in pairs for t, s in zip(*map(_cut, pair), strict=True)]
        self._pieces = deque(sorted(parts, key=_address))

    @property
    def left(self) -> bool:
        """Whether something is still to be written."""
        return bool(self._pieces)

    def write(self, before: int | None = None) -> None:
        """Write what belongs before this address, or all."""
        pieces = self._pieces
        while pieces and (before is None or _address(pieces[0]) < before):
            _copy(*pieces.popleft())


def _cut(tensor: torch.Tensor) -> list[torch.Tensor]:
    return list(tensor.data.reshape(-1).split(PIECE))  # of `data`, so that torch counts no write to the tensor


def _address(piece: tuple[torch.Tensor, torch.Tensor]) -> int:
    return piece[0].data_ptr()


class Gradient:
    """The contents of a push: tensors, which parameters had no gradient, and the optimizer's options."""

    __slots__ = (
        "buffer_change", "flat", "in_parts", "loss", "missing", "norm", "options", "slot", "unwritten", "views",
    )  # fmt: skip

    def __init__(
        self,
        flat: list[torch.Tensor],
        missing: frozenset[int],
        options: Sequence[GroupOptions],
        buffer_change: Sequence[torch.Tensor | None] = (),  # None: unchanged; for counters, their value
        loss: float | None = None,
        norm: float | None = None,  # if the worker has measured it
        slot: int | None = None,  # of the worker's region, if the tensors lie in one
        views: list[torch.Tensor] | None = None,  # each parameter's part of `flat`, if already made
        unwritten: Unwritten | None = None,
    ) -> None:
        self.flat, self.missing, self.options, self.buffer_change = flat, missing, options, buffer_change
        self.loss, self.norm, self.slot, self.views, self.unwritten = loss, norm, slot, views, unwritten
        self.in_parts = False  # its flat tensors go to shards, each a part

    def all(self) -> list[torch.Tensor]:
        """Return every tensor, in the order in which they are sent."""
        flat = () if self.in_parts else self.flat
        return [*flat, *(change for change in self.buffer_change if change is not None)]


class Parameters:
    """One whole version, read by any number of workers and never written to.

    `unwritten`: values of `flat` that are still in the store's memory. If nobody sends them, the store writes them
    before it changes. `lent`: the store's own memory, to be sent in place of `flat`; it does not change while anything
    refers to these arrays. `parts`: shards send the parameters, under this number.
    """

    __slots__ = ("buffers", "flat", "lent", "parts", "unwritten", "version")

    def __init__(
        self, version: int, flat: list[torch.Tensor], buffers: list[torch.Tensor],
        unwritten: Unwritten | None = None, parts: int | None = None, lent: "list[Floats] | None" = None,
    ) -> None:  # fmt: skip
        self.version, self.flat, self.buffers = version, flat, buffers
        self.unwritten, self.parts, self.lent = unwritten, parts, lent

    def all(self) -> "list[torch.Tensor | Floats]":
        """Return every tensor, in the order in which they are sent."""
        flat = self.flat if self.lent is None else self.lent
        return [*(flat if self.parts is None else ()), *self.buffers]


class ArrivingNorm:
    """The norm of a push that arrives in pieces, each measured while it is still in the processor's cache."""

    def __init__(self, gradient: Gradient, length: int, after: int) -> None:
        """`length`: bytes of a piece; the last one of each buffer may be shorter. `after`: pieces of other things come
        first."""
        self._gradient = gradient
        self._others = after
        self._pieces = deque(part for flat in gradient.flat for part in flat.split(length // flat.itemsize))
        self._norms: list[float] = []

    def add(self) -> None:
        """Take note of the next piece, which has arrived."""
        if self._others:
            self._others -= 1
        elif self._pieces:
            self._norms.append(buffer_norm(self._pieces.popleft()))

    def finish(self) -> None:
        """Give the push its norm; all of it has arrived."""
        self._gradient.norm = math.hypot(*self._norms) if _finite_buffers(self._gradient) else math.nan


def buffer_norm(flat: torch.Tensor) -> float:
    """Return the Euclidean norm of one buffer; that of half precision may exceed its range."""
    half = flat.dtype in HALVES
    return float(torch.linalg.vector_norm(flat, dtype=torch.float32 if half else None))


def flat_norm(flat: Sequence[torch.Tensor]) -> float:
    """Return the Euclidean norm over all buffers; not finite if a value is not finite or the sum overflows."""
    if len(flat) == 1:
        return float(torch.linalg.vector_norm(flat[0]))
    return math.sqrt(math.fsum(float(torch.linalg.vector_norm(part)) ** 2 for part in flat))


def gradient_norm(gradient: Gradient) -> float:
    """Return the gradient's norm; not finite if any gradient or buffer change is not finite."""
    if gradient.norm is not None:
        return gradient.norm
    return flat_norm(gradient.flat) if _finite_buffers(gradient) else math.nan


def _finite_buffers(gradient: Gradient) -> bool:
    moved = [c for c in gradient.buffer_change if c is not None and c.is_floating_point()]
    return all(bool(torch.isfinite(change).all()) for change in moved)


def add_changes(buffers: Sequence[torch.Tensor], changes: Sequence[torch.Tensor | None], weight: float) -> None:
    """Apply a push's changes of buffers, in place: weighted, of counters the maximum."""
    for buffer, change in zip(buffers, changes, strict=False):  # a push may bring no changes at all
        if change is None:
            continue
        if buffer.is_floating_point() or buffer.is_complex():
            buffer.add_(change, alpha=weight)
        else:
            torch.maximum(buffer, change, out=buffer)


def extend(
    held: Gradient, samples: int, piece: Gradient, piece_samples: int, add: "AddInSlot | None" = None
) -> Gradient:
    """Merge a held push with a further piece computed on the same version: means weighted by samples.

    A piece that lies in a slot is summed there, by `add` if it is given, which frees the held push's slot.
    """
    total = samples + piece_samples
    if not piece_samples:
        return held
    if not samples:
        return piece
    if piece.slot is None:
        pairs = zip(held.flat, piece.flat, strict=True)
        flat = [torch.add(old * (samples / total), new, alpha=piece_samples / total) for old, new in pairs]
    else:
        flat = piece.flat
        if add is not None:
            add(held, samples, piece, piece_samples)
        else:
            add_in_place(held.flat, samples, flat, piece_samples)
    loss = _mean_loss(held.loss, samples, piece.loss, piece_samples)
    missing = held.missing & piece.missing
    return Gradient(
        flat, missing, piece.options, piece.buffer_change, loss, slot=piece.slot,
        views=None if piece.slot is None else piece.views,
    )  # fmt: skip


def add_in_place(held: Sequence[torch.Tensor], samples: int, piece: Sequence[torch.Tensor], piece_samples: int) -> None:
    """Replace a piece's gradients by the mean over it and a held push."""
    total = samples + piece_samples
    for old, new in zip(held, piece, strict=True):
        new.mul_(piece_samples / total).add_(old, alpha=samples / total)


def out_of_slot(gradient: Gradient) -> Gradient:
    """Copy a push out of its slot, for a worker that needs the slot for the next push."""
    change = [None if c is None else c.clone() for c in gradient.buffer_change]
    flat = [part.clone() for part in gradient.flat]
    return Gradient(flat, gradient.missing, gradient.options, change, gradient.loss, gradient.norm)


def _mean_loss(first: float | None, samples: int, second: float | None, more: int) -> float | None:
    if first is None or second is None:
        return second if first is None else first
    return (first * samples + second * more) / (samples + more)


class Lending:
    """Which memory of parameters versions are still being sent from.

    A version that goes to several workers is sent from one memory and copied for none of them. If one of them has not
    taken it when the store changes, the store goes on in a copy, and the memory is used again when nobody reads it.
    """

    def __init__(self) -> None:
        self._readers: list[weakref.ref[Floats]] = []  # of the memory that the store is in
        self._left: list[tuple[list[torch.Tensor], list[weakref.ref[Floats]]]] = []  # memory that it has left

    @property
    def read(self) -> int:
        """How many memories that the store has left are still read."""
        return sum(map(_is_read, self._left))

    def lend(self, flat: Sequence[torch.Tensor]) -> list[Floats] | None:
        """Return arrays over the store's memory, which are read as long as they exist; None if too much is read."""
        if self.read >= LENT_AT_ONCE:
            return None
        arrays = [each.numpy() for each in flat]
        self._readers = [*filter(_lives, self._readers), *map(weakref.ref, arrays)]
        return arrays

    def copied(self, flat: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return a copy of the store's memory that nobody reads; None if that itself is not read."""
        if not any(map(_lives, self._readers)):
            self._readers.clear()
            return None
        free = next((pair for pair in self._left if not _is_read(pair)), None)
        if free is not None:
            self._left.remove(free)
        copies = [torch.empty_like(each) for each in flat] if free is None else free[0]
        for copy, each in zip(copies, flat, strict=True):
            _copy(copy, each)
        self._left.append((flat, self._readers))
        self._readers = []
        return copies

    def forget(self) -> None:
        """Forget memory that is nobody's any more; it lives as long as it is read."""
        self._readers.clear()
        self._left.clear()


def _lives(reader: "weakref.ref[Floats]") -> bool:
    return reader() is not None


def _is_read(memory: "tuple[list[torch.Tensor], list[weakref.ref[Floats]]]") -> bool:
    return any(map(_lives, memory[1]))


class Store:
    """Applies pushes and hands out versions."""

    of_clocks: ClassVar[bool] = False

    def __init__(
        self, spec: ModelSpec, values: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], statistics: bool
    ) -> None:
        self.spec = spec
        self.layout = Layout.of(values)
        self.version = 0
        self.statistics = statistics
        self._flat = [flat.to(master_dtype(flat.dtype)) for flat in self.layout.pack(values)]
        self._parameters = self.layout.views(self._flat)
        self._sum: list[torch.Tensor] | None = None  # made when a push cannot be applied without a copy
        self._summed: list[torch.Tensor] = []
        self._previous: list[torch.Tensor] | None = None
        self._buffers = [b.detach().clone() for b in buffers]
        self.optimizer = make_optimizer(spec.optimizer, self._parameters)
        self.notice = self.optimizer.notice  # about the optimizer, for the user
        self._read: Parameters | None = None
        self._pushes: dict[int, Gradient] = {}  # of held pushes, by ticket
        self._handed_out: list[Unwritten] = []  # versions that may not have been sent
        self._lending = Lending()
        self._is_shared = False  # others map the memory that the parameters are in
        self.before_apply: Callable[[], None] | None = None  # waits for a worker that may still read the parameters

    @property
    def nbytes(self) -> int:
        """Bytes that a push or a pull transfers."""
        return self.layout.nbytes + sum(b.nbytes for b in self._buffers)

    def read(self) -> Parameters:
        """Return the current version."""
        if self._read is None:
            pairs = zip(self._flat, self.layout.dtypes, strict=True)
            flat = [master.to(dtype, copy=True) for master, dtype in pairs]
            self._read = Parameters(self.version, flat, [b.clone() for b in self._buffers])
        return self._read

    def overwrite(self, values: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        """Replace parameters and buffers by those of a model trained elsewhere."""
        self._before_change()
        with torch.no_grad():
            for mine, value in zip(self._parameters, values, strict=True):
                mine.copy_(value)
            for own, buffer in zip(self._buffers, buffers, strict=True):
                own.copy_(buffer)
        self._read = None

    def write_to(self, flat: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> int:
        """Copy the current version into memory with the store's layout; return its number."""
        for target, master in zip(flat, self._flat, strict=True):
            _copy(target, master)
        self.write_buffers(buffers)
        return self.version

    def hand_out(self, flat: list[torch.Tensor], buffers: list[torch.Tensor]) -> Parameters:
        """Return the current version for a worker whose memory is mirrored here: to be sent from the store's own memory
        where that is possible, else from the mirror, where its parameters may be unwritten."""
        self.write_buffers(buffers)
        lent = None if self._is_shared or self.has_masters else self._lending.lend(self._flat)
        if lent is not None:
            return Parameters(self.version, flat, buffers, lent=lent)
        self._handed_out = [values for values in self._handed_out if values.left]
        unwritten = Unwritten(zip(flat, self._flat, strict=True))
        self._handed_out.append(unwritten)
        return Parameters(self.version, flat, buffers, unwritten)

    def _before_change(self) -> None:
        """Prepare for a change of the parameters while versions are being sent."""
        for values in self._handed_out:
            values.write()
        self._handed_out.clear()
        elsewhere = self._lending.copied(self._flat)
        if elsewhere is not None:
            self._continue_in(elsewhere)

    def write_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """Copy only the module buffers of the current version."""
        for target, buffer in zip(buffers, self._buffers, strict=True):
            target.copy_(buffer)

    def move_to(self, flat: Sequence[torch.Tensor]) -> None:
        """Move the parameters into this memory, which has the store's layout and dtypes; others may map it."""
        self._before_change()
        for home, before in zip(flat, self._flat, strict=True):
            _copy(home, before)
        self._lending.forget()
        self._continue_in(list(flat))
        self._is_shared = True

    def move_home(self) -> None:
        """Move the parameters back into the store's own memory."""
        self.move_to([torch.empty_like(flat) for flat in self._flat])
        self._is_shared = False

    def _continue_in(self, flat: list[torch.Tensor]) -> None:
        """Use this memory, which has the parameters already."""
        self._flat = flat
        for parameter, home in zip(self._parameters, self.layout.views(flat), strict=True):
            parameter.data = home  # keeps the tensor object, by which the optimizer finds its state

    # -- pushes ------------------------------------------------------------------------------------------------------

    def hold(self, ticket: int, gradient: Gradient) -> float:
        """Keep a push in place until it is applied or discarded; return its norm."""
        self._pushes[ticket] = gradient
        return gradient_norm(gradient)

    def extend(self, held: PushRef, piece: PushRef) -> PushRef:
        """Merge a held push with a further piece computed on the same version, in the piece's memory."""
        before, gradient = self._pushes.pop(held.ticket, None), self._pushes.pop(piece.ticket)
        if before is not None:
            gradient = self._extended(before, held.samples, gradient, piece.samples)
        self._pushes[piece.ticket] = gradient
        piece.samples += held.samples
        piece.allotments = held.allotments + piece.allotments
        piece.loss = gradient.loss
        return piece

    def _extended(self, held: Gradient, samples: int, piece: Gradient, piece_samples: int) -> Gradient:
        return extend(held, samples, piece, piece_samples)

    def discard(self, push: PushRef) -> None:
        """Drop a push."""
        self._pushes.pop(push.ticket, None)

    def free_slot(self, region: Region, last: int) -> int:
        """Return the slot for the worker's next push. If held pushes take all slots, copy the oldest out of its own.
        Pushes in the region of an earlier incarnation do not count."""
        taken: dict[int, int] = {}
        for ticket, gradient in self._pushes.items():
            if gradient.slot is not None and gradient.views is region.slots[gradient.slot].views:
                taken[gradient.slot] = ticket
        free: int | None = next((slot for slot in (last, *range(len(region.slots))) if slot not in taken), None)
        if free is not None:
            return free
        oldest, ticket = next(iter(taken.items()))  # pushes are held in the order of their arrival
        self._pushes[ticket] = self._out_of_slot(self._pushes[ticket])
        return oldest

    def _out_of_slot(self, gradient: Gradient) -> Gradient:
        return out_of_slot(gradient)

    def apply(self, pushes: Sequence[PushRef], weights: Sequence[float], *, stock: bool) -> Merged:
        """Merge these pushes into one version; the weights add up to its mass, which must be positive."""
        gradients = [self._pushes.pop(push.ticket) for push in pushes]
        return self.merge(gradients, weights, [push.samples for push in pushes], stock=stock)

    def merge(
        self, gradients: Sequence[Gradient], weights: Sequence[float], samples: Sequence[int], *, stock: bool
    ) -> Merged:
        """Merge these gradients into one version.

        The gradients are not written to. A single one is applied without a copy, unless its dtype or the mass
        rule for momentum requires one.
        """
        if self.before_apply is not None:
            self.before_apply()
        self._before_change()
        mass = math.fsum(weights)
        first, alone = gradients[0], len(gradients) == 1
        options = first.options if alone else mean_options([g.options for g in gradients], samples)
        copied = not alone or self.optimizer.multiplies_gradients(mass, options, stock=stock)
        if copied or not all(map(_same_dtype, first.flat, self._flat)):
            flat, views = self._merge(gradients, weights, mass)
        else:
            flat, views = first.flat, first.views or self.layout.views(first.flat)
        plain = alone and self._is_plain(options)
        merged = self._measure(flat, plain) if self.statistics else UNMEASURED_PLAIN if plain else UNMEASURED
        absent = first.missing if alone else frozenset.intersection(*[g.missing for g in gradients])
        given = [None if i in absent else view for i, view in enumerate(views)] if absent else views
        self.optimizer.step(mass, options, stock=stock, gradients=given)
        self._merge_buffers(gradients, weights)
        self.version += 1
        self._read = None
        return merged

    def _merge(
        self, gradients: Sequence[Gradient], weights: Sequence[float], mass: float
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the weighted mean, summed in the order given so that it is bitwise reproducible."""
        if self._sum is None:
            self._sum = [torch.zeros_like(flat) for flat in self._flat]
            self._summed = self.layout.views(self._sum)
        for place, total in enumerate(self._sum):
            torch.mul(gradients[0].flat[place], weights[0] / mass, out=total)
            for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
                total.add_(gradient.flat[place], alpha=weight / mass)
        return self._sum, self._summed

    def _is_plain(self, options: Sequence[GroupOptions]) -> bool:
        """Return whether a worker can make a step of a push with these options itself, in its own precision."""
        return is_plain(self.spec.optimizer, options) and not self.has_masters

    def _measure(self, flat: Sequence[torch.Tensor], plain: bool) -> Merged:
        norm = flat_norm(flat)
        if self._previous is None:
            self._previous = [total.clone() for total in flat]
            return Merged(norm, None, plain)
        pairs = list(zip(flat, self._previous, strict=True))
        inner = math.fsum(float(torch.dot(total, previous)) for total, previous in pairs)
        for total, previous in pairs:
            previous.copy_(total)
        return Merged(norm, inner, plain)

    def _merge_buffers(self, gradients: Sequence[Gradient], weights: Sequence[float]) -> None:
        for gradient, weight in zip(gradients, weights, strict=True):
            add_changes(self._buffers, gradient.buffer_change, weight)

    def state(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return copies of parameters and buffers, in the spec's order."""
        dtypes = [self.layout.dtypes[place.buffer] for place in self.layout.places]
        values = [view.to(dtype, copy=True) for view, dtype in zip(self._parameters, dtypes, strict=True)]
        return values, [b.clone() for b in self._buffers]

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def lendable(self) -> bool:
        """Whether workers could read the parameters in the store's own memory."""
        return not self.has_masters

    @property
    def has_masters(self) -> bool:
        """Whether parameters are kept in a higher precision than the model's."""
        return any(flat.dtype != dtype for flat, dtype in zip(self._flat, self.layout.dtypes, strict=True))

    def snapshot(self) -> "StoreSnapshot":
        """Return the current version and all state that later versions depend on, not copied: save before an apply."""
        names = [name for name, _, _ in self.spec.parameters]
        tensors, optimizer = self.optimizer.snapshot()
        previous = {str(i): flat for i, flat in enumerate(self._previous or [])}
        parameters = dict(zip(names, self._parameters, strict=True))
        buffers = {name: b for (name, _, _), b in zip(self.spec.buffers, self._buffers, strict=True)}
        return StoreSnapshot(self.version, parameters, buffers, tensors, optimizer, previous)

    def contents(self) -> Contents:
        """Return a checkpoint's files and head. Only half-precision parameters are copied."""
        taken = self.snapshot()
        model, beside = sorted_out(self.spec, taken)
        files = {MODEL: model, OPTIMIZER: taken.optimizer_tensors, **({SERVER: beside} if beside else {})}
        return Contents(files, {"spec": msgspec.to_builtins(self.spec), "optimizer": taken.optimizer})

    def restore(self, snapshot: "StoreSnapshot") -> None:
        """Continue from a snapshot of a store with the same spec; takes over optimizer tensors without a copy."""
        self._before_change()
        for (name, _, _), mine in zip(self.spec.parameters, self._parameters, strict=True):
            mine.copy_(snapshot.parameters[name])
        for (name, _, _), mine in zip(self.spec.buffers, self._buffers, strict=True):
            mine.copy_(snapshot.buffers[name])
        self.optimizer.restore(snapshot.optimizer_tensors, snapshot.optimizer)
        self._previous = [snapshot.previous[str(i)] for i in range(len(snapshot.previous))] or None
        self.version = snapshot.version
        self._read = None


class StoreSnapshot(msgspec.Struct, frozen=True):
    """A store's tensors by name, in the precision it computes in, and its optimizer's numbers."""

    version: int
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    optimizer_tensors: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    previous: dict[str, torch.Tensor]  # the last applied gradient, if the store measures `statistics`


def store_of(contents: Contents, version: int, statistics: bool, make: MakeStore = Store) -> Store:
    """Rebuild the store of a checkpoint."""
    spec = spec_of_contents(contents)
    if spec is None:
        raise CheckpointError("a checkpoint of tables holds no model")
    model, optimizer, beside = (contents.files.get(name, {}) for name in (MODEL, OPTIMIZER, SERVER))
    of_shards = joined_files(contents.files, spec)
    optimizer = {**optimizer, **{key: value for key, value in of_shards.items() if not key.startswith(GRADIENT)}}
    previous = {key: value for key, value in (beside | of_shards).items() if key.startswith(GRADIENT)}
    keys = {place: key for key, place in reversed(spec.keys)}
    values: list[torch.Tensor] = []
    for place, (name, _, _) in enumerate(spec.parameters + spec.buffers):
        values.append(model[keys[place]] if place in keys else beside[f"model.{name}"])
    count = len(spec.parameters)
    store = make(spec, values[:count], values[count:], statistics)
    masters = zip(spec.parameters, values, strict=False)
    store.restore(
        StoreSnapshot(
            version,
            {name: beside.get(f"master.{name}", value) for (name, _, _), value in masters},
            {name: value for (name, _, _), value in zip(spec.buffers, values[count:], strict=True)},
            optimizer,
            contents.head["optimizer"],
            {key.removeprefix(GRADIENT): value for key, value in previous.items()},
        )
    )
    return store


def spec_of_contents(contents: Contents) -> ModelSpec | None:
    """Return the spec of the model in a checkpoint; None if it holds no model."""
    data = contents.head.get("spec")
    if data is None:
        return None
    spec = msgspec.convert(data, ModelSpec, strict=False)
    return msgspec.structs.replace(spec, optimizer=spec.optimizer.with_tuples())


def sorted_out(spec: ModelSpec, taken: StoreSnapshot) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Split a snapshot into tensors under `state_dict` keys and tensors that only the server has."""
    tensors: list[torch.Tensor] = []
    beside = {f"{GRADIENT}{key}": value for key, value in taken.previous.items()}
    for name, _, dtype in spec.parameters:
        master = taken.parameters[name]
        if str(master.dtype) != dtype:
            beside[f"master.{name}"] = master
        tensors.append(master.to(dtype_of(dtype)))
    tensors += [taken.buffers[name] for name, _, _ in spec.buffers]
    named = {place for _, place in spec.keys}
    for place, (name, _, _) in enumerate(spec.parameters + spec.buffers):
        if place not in named:
            beside[f"model.{name}"] = tensors[place]
    return {key: tensors[place] for key, place in spec.keys}, beside


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor; by NumPy if it is large and torch has one thread, as NumPy bypasses the cache and is faster."""
    if source.nbytes < LARGE_BYTES or target.dtype != source.dtype or torch.get_num_threads() > 1:
        target.copy_(source)
    else:
        np.copyto(target.numpy(), source.numpy())


def _same_dtype(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype


def model_state(store: Store) -> dict[str, torch.Tensor]:
    """Return copies of the trained model's tensors under its `state_dict` keys."""
    return state_of(store.spec, *store.state())
