"""The only server-side home of tensors: versioned flat parameters, module buffers and the optimizer's state.

A version is one Apply of positive mass. Readers get an immutable copy of one whole version, shared by everybody who
asks for the same one. BatchNorm's statistics follow the pushes: `buffer += sum of m_i (buffer_i - buffer read)`, while
counters take the maximum.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from paceline.core.errors import CheckpointError
from paceline.core.updates import UNMEASURED, Contents, Merged, PushRef
from paceline.model.flat import Layout
from paceline.model.mass_optimizer import MassOptimizer, mean_options
from paceline.model.regions import Region
from paceline.model.spec import (
    Gradient,
    ModelSpec,
    Parameters,
    dtype_of,
    extend,
    flat_norm,
    gradient_norm,
    out_of_slot,
    state_of,
)

LARGE_BYTES = 1 << 24  # from which on a copy does not stay in the cache
MODEL, OPTIMIZER, SERVER = "model.safetensors", "optimizer.safetensors", "server.safetensors"  # files of a checkpoint

MakeStore = Callable[[ModelSpec, list[torch.Tensor], list[torch.Tensor], bool], "Store"]


class Store:
    """Applies pushes and hands out versions."""

    def __init__(
        self, spec: ModelSpec, values: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], statistics: bool
    ) -> None:
        self.spec = spec
        self.layout = Layout.of(values)
        self.version = 0
        self.statistics = statistics
        # Steps smaller than a half-precision number's last digit must not vanish: masters have single precision.
        self._flat = [_master(flat) for flat in self.layout.pack(values)]
        self._parameters = self.layout.views(self._flat)
        self._sum: list[torch.Tensor] | None = None  # made when a push cannot be applied from where it lies
        self._summed: list[torch.Tensor] = []
        self._previous: list[torch.Tensor] | None = None
        self._buffers = [b.detach().clone() for b in buffers]
        self.optimizer = MassOptimizer(spec.optimizer, self._parameters)
        self._read: Parameters | None = None
        self._pushes: dict[int, Gradient] = {}  # what pushes brought that are not yet applied, by ticket
        self.before_apply: Callable[[], None] | None = None  # somebody may still be reading where it lies

    @property
    def nbytes(self) -> int:
        """Bytes that a push or a pull moves."""
        return self.layout.nbytes + sum(b.nbytes for b in self._buffers)

    def read(self) -> Parameters:
        """The current version."""
        if self._read is None:
            pairs = zip(self._flat, self.layout.dtypes, strict=True)
            flat = [master.to(dtype, copy=True) for master, dtype in pairs]
            self._read = Parameters(self.version, flat, [b.clone() for b in self._buffers])
        return self._read

    def overwrite(self, values: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        """Hold this model from here on; it was trained elsewhere."""
        with torch.no_grad():
            for mine, value in zip(self._parameters, values, strict=True):
                mine.copy_(value)
            for own, buffer in zip(self._buffers, buffers, strict=True):
                own.copy_(buffer)
        self._read = None

    def write_to(self, flat: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> int:
        """Copy the current version into memory laid out as the store's; its number."""
        for target, master in zip(flat, self._flat, strict=True):
            _copy(target, master)
        self.write_buffers(buffers)
        return self.version

    def write_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """Of the current version, copy the module's buffers alone."""
        for target, buffer in zip(buffers, self._buffers, strict=True):
            target.copy_(buffer)

    def move_to(self, flat: Sequence[torch.Tensor]) -> None:
        """From here on the parameters lie in this memory, laid out as the store's and of its dtypes."""
        for home, before in zip(flat, self._flat, strict=True):
            _copy(home, before)
        self._flat = list(flat)
        for parameter, home in zip(self._parameters, self.layout.views(self._flat), strict=True):
            parameter.data = home  # the optimizer knows the parameter, and its state by it

    def move_home(self) -> None:
        """The parameters lie in memory of the store's own again."""
        self.move_to([torch.empty_like(flat) for flat in self._flat])

    # -- pushes ------------------------------------------------------------------------------------------------------

    def hold(self, ticket: int, gradient: Gradient) -> float:
        """Keep what a push brings, where it lies, until it is applied or discarded; its norm."""
        self._pushes[ticket] = gradient
        return gradient_norm(gradient)

    def extend(self, held: PushRef, piece: PushRef) -> PushRef:
        """A held push with a further piece computed on the same version; it lies where the piece does."""
        before, gradient = self._pushes.pop(held.ticket, None), self._pushes.pop(piece.ticket)
        if before is not None:
            gradient = extend(before, held.samples, gradient, piece.samples)
        self._pushes[piece.ticket] = gradient
        piece.samples += held.samples
        piece.allotments = held.allotments + piece.allotments
        piece.loss = gradient.loss
        return piece

    def discard(self, push: PushRef) -> None:
        """Forget what a push brought."""
        self._pushes.pop(push.ticket, None)

    def free_slot(self, region: Region, last: int) -> int:
        """Where the next push of this region's worker is to lie: not where a held one does, or after that has been
        copied to another place. A push in the memory of a process before it takes no room here."""
        taken: dict[int, int] = {}
        for ticket, gradient in self._pushes.items():
            if gradient.slot is not None and gradient.views is region.slots[gradient.slot].views:
                taken[gradient.slot] = ticket
        free: int | None = next((slot for slot in (last, *range(len(region.slots))) if slot not in taken), None)
        if free is not None:
            return free
        oldest, ticket = next(iter(taken.items()))  # pushes are held in the order of their coming
        self._pushes[ticket] = out_of_slot(self._pushes[ticket])
        return oldest

    def apply(self, pushes: Sequence[PushRef], weights: Sequence[float], *, stock: bool) -> Merged:
        """One version out of these pushes; the weights add up to its mass, which must be positive."""
        gradients = [self._pushes.pop(push.ticket) for push in pushes]
        return self.merge(gradients, weights, [push.samples for push in pushes], stock=stock)

    def merge(
        self, gradients: Sequence[Gradient], weights: Sequence[float], samples: Sequence[int], *, stock: bool
    ) -> Merged:
        """One version out of these gradients.

        None of them is written to. A single one is applied from where it lies, unless its dtype or the mass rule for
        momentum asks for another form of it.
        """
        if self.before_apply is not None:
            self.before_apply()
        mass = math.fsum(weights)
        first, alone = gradients[0], len(gradients) == 1
        options = first.options if alone else mean_options([g.options for g in gradients], samples)
        copied = not alone or self.optimizer.multiplies_gradients(mass, options, stock=stock)
        if copied or not all(map(_same_dtype, first.flat, self._flat)):
            flat, views = self._merge(gradients, weights, mass)
        else:
            flat, views = first.flat, first.views or self.layout.views(first.flat)
        merged = self._measure(flat) if self.statistics else UNMEASURED
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
        """The weighted mean, summed in the order given so that it is the same to the last bit every time."""
        if self._sum is None:
            self._sum = [torch.zeros_like(flat) for flat in self._flat]
            self._summed = self.layout.views(self._sum)
        for place, total in enumerate(self._sum):
            torch.mul(gradients[0].flat[place], weights[0] / mass, out=total)
            for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
                total.add_(gradient.flat[place], alpha=weight / mass)
        return self._sum, self._summed

    def _measure(self, flat: Sequence[torch.Tensor]) -> Merged:
        norm = flat_norm(flat)
        if self._previous is None:
            self._previous = [total.clone() for total in flat]
            return Merged(norm, None)
        pairs = list(zip(flat, self._previous, strict=True))
        inner = math.fsum(float(torch.dot(total, previous)) for total, previous in pairs)
        for total, previous in pairs:
            previous.copy_(total)
        return Merged(norm, inner)

    def _merge_buffers(self, gradients: Sequence[Gradient], weights: Sequence[float]) -> None:
        for position, buffer in enumerate(self._buffers):
            for gradient, weight in zip(gradients, weights, strict=True):
                if not gradient.buffer_change:
                    continue
                change = gradient.buffer_change[position]
                if change is None:
                    continue
                if buffer.is_floating_point() or buffer.is_complex():
                    buffer.add_(change, alpha=weight)
                else:
                    torch.maximum(buffer, change, out=buffer)

    def state(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Copies of parameters and buffers, in the spec's order."""
        dtypes = [self.layout.dtypes[place.buffer] for place in self.layout.places]
        values = [view.to(dtype, copy=True) for view, dtype in zip(self._parameters, dtypes, strict=True)]
        return values, [b.clone() for b in self._buffers]

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def has_masters(self) -> bool:
        """Whether parameters are kept in a higher precision than the model's own."""
        return any(flat.dtype != dtype for flat, dtype in zip(self._flat, self.layout.dtypes, strict=True))

    def snapshot(self) -> "StoreSnapshot":
        """The current version and all that further versions depend on. Nothing is copied: save it before an apply."""
        names = [name for name, _, _ in self.spec.parameters]
        tensors, optimizer = self.optimizer.snapshot()
        previous = {str(i): flat for i, flat in enumerate(self._previous or [])}
        parameters = dict(zip(names, self._parameters, strict=True))
        buffers = {name: b for (name, _, _), b in zip(self.spec.buffers, self._buffers, strict=True)}
        return StoreSnapshot(self.version, parameters, buffers, tensors, optimizer, previous)

    def contents(self) -> Contents:
        """A checkpoint's files and what its head says of them. Nothing is copied but half-precision parameters."""
        taken = self.snapshot()
        model, beside = _sorted_out(self.spec, taken)
        files = {MODEL: model, OPTIMIZER: taken.optimizer_tensors, **({SERVER: beside} if beside else {})}
        return Contents(files, {"spec": msgspec.to_builtins(self.spec), "optimizer": taken.optimizer})

    def restore(self, snapshot: "StoreSnapshot") -> None:
        """Go on from a snapshot of a store of the same spec; optimizer tensors become this store's own."""
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
    previous: dict[str, torch.Tensor]  # the gradient applied last, for stores that compare it with the next


def store_of(contents: Contents, version: int, statistics: bool, make: MakeStore = Store) -> Store:
    """The store that a checkpoint of a model was made of."""
    spec = spec_of_contents(contents)
    if spec is None:
        raise CheckpointError("a checkpoint of tables holds no model")
    model, optimizer, beside = (contents.files.get(name, {}) for name in (MODEL, OPTIMIZER, SERVER))
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
            {key.partition(".")[2]: value for key, value in beside.items() if key.startswith("gradient.")},
        )
    )
    return store


def spec_of_contents(contents: Contents) -> ModelSpec | None:
    """Of the model in a checkpoint; None if it is of something else."""
    data = contents.head.get("spec")
    if data is None:
        return None
    spec = msgspec.convert(data, ModelSpec, strict=False)
    return msgspec.structs.replace(spec, optimizer=spec.optimizer.with_tuples())


def _sorted_out(spec: ModelSpec, taken: StoreSnapshot) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Tensors under the keys of the `state_dict`, and what the server has beside them."""
    tensors: list[torch.Tensor] = []
    beside = {f"gradient.{key}": value for key, value in taken.previous.items()}
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
    """Of large memory, and with one thread, NumPy's is the faster copy: it writes past the cache."""
    if source.nbytes < LARGE_BYTES or target.dtype != source.dtype or torch.get_num_threads() > 1:
        target.copy_(source)
    else:
        np.copyto(target.numpy(), source.numpy())


def _same_dtype(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype


def _master(flat: torch.Tensor) -> torch.Tensor:
    return flat.float() if flat.dtype in (torch.bfloat16, torch.float16) else flat


def model_state(store: Store) -> dict[str, torch.Tensor]:
    """The trained model under its ordinary `state_dict` keys."""
    return state_of(store.spec, *store.state())
