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

from paceline.core.errors import OptionError
from paceline.model.flat import Layout
from paceline.model.mass_optimizer import GroupOptions, MassOptimizer, OptimizerSpec, mean_options

LARGE_BYTES = 1 << 24  # from which on a copy does not stay in the cache


class ModelSpec(msgspec.Struct, frozen=True):
    """What every worker must have alike: names, shapes and dtypes, and the optimizer."""

    parameters: tuple[tuple[str, tuple[int, ...], str], ...]
    buffers: tuple[tuple[str, tuple[int, ...], str], ...]
    optimizer: OptimizerSpec
    keys: tuple[tuple[str, int], ...]  # of the `state_dict`, and which parameter or (counted on) buffer each means

    def require_same(self, other: "ModelSpec", worker: int) -> None:
        """Workers that train different models cannot be merged."""
        difference = self.difference(other, "worker 0", f"worker {worker}")
        if difference is not None:
            raise OptionError(difference)

    def difference(self, other: "ModelSpec", mine: str, theirs: str) -> str | None:
        """In what the other's model differs from this one, in words; None if it does not."""
        for here, there in zip(self.parameters + self.buffers, other.parameters + other.buffers, strict=False):
            if here != there:
                return f"{theirs} has {_spell(there)} where {mine} has {_spell(here)}"
        if len(self.parameters) != len(other.parameters) or len(self.buffers) != len(other.buffers):
            return (
                f"{theirs}'s model has {len(other.parameters)} parameters and {len(other.buffers)} buffers, "
                f"{mine}'s has {len(self.parameters)} and {len(self.buffers)}"
            )
        if (self.optimizer.name, self.optimizer.members) != (other.optimizer.name, other.optimizer.members):
            return f"{theirs}'s optimizer ({other.optimizer.name}) differs from {mine}'s ({self.optimizer.name})"
        return None


def _spell(entry: tuple[str, tuple[int, ...], str]) -> str:
    return f"{entry[0]} {list(entry[1])} {entry[2]}"


class Gradient(msgspec.Struct):
    """What one push brings: flat gradients, which parameters had none, and the module buffers it ended with."""

    flat: list[torch.Tensor]
    missing: frozenset[int]
    options: Sequence[GroupOptions]
    buffer_change: list[torch.Tensor | None] = []  # since the read, None if there is none; of counters, their value
    loss: float | None = None
    norm: float | None = None  # where the worker has measured it
    slot: int | None = None  # of the worker's region, where the tensors lie in one
    views: list[torch.Tensor] | None = None  # each parameter's part of `flat`, where somebody has them at hand


class Parameters(msgspec.Struct, frozen=True):
    """One whole version, to be read by any number of workers and written by none."""

    version: int
    flat: list[torch.Tensor]
    buffers: list[torch.Tensor]


class Merged(msgspec.Struct, frozen=True):
    """Statistics of one applied gradient."""

    norm: float | None
    inner_product: float | None


UNMEASURED = Merged(None, None)


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

    def apply(
        self, gradients: Sequence[Gradient], weights: Sequence[float], samples: Sequence[int], *, stock: bool
    ) -> Merged:
        """One version out of these pushes; the weights add up to its mass, which must be positive.

        No push is written to. A single one is applied from where it lies, unless its dtype or the mass rule for
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


def flat_norm(flat: Sequence[torch.Tensor]) -> float:
    """The Euclidean norm over all buffers; not finite exactly if one of the values is not (or is beyond reason)."""
    if len(flat) == 1:
        return float(torch.linalg.vector_norm(flat[0]))
    return math.sqrt(math.fsum(float(torch.linalg.vector_norm(part)) ** 2 for part in flat))


def gradient_norm(gradient: Gradient) -> float:
    """The gradient's norm; not finite if the push would bring anything into the model that is not."""
    if gradient.norm is not None:
        return gradient.norm
    moved = [c for c in gradient.buffer_change if c is not None and c.is_floating_point()]
    if moved and not all(bool(torch.isfinite(change).all()) for change in moved):
        return math.nan
    return flat_norm(gradient.flat)


def extend(held: Gradient, samples: int, piece: Gradient, piece_samples: int) -> Gradient:
    """A held push with a further piece computed on the same version: means weighted by samples.

    A piece that lies in a slot is summed there, so that the held push's slot is free from then on.
    """
    total = samples + piece_samples
    if not piece_samples:
        return held
    if not samples:
        return piece
    pairs = zip(held.flat, piece.flat, strict=True)
    if piece.slot is None:
        flat = [torch.add(old * (samples / total), new, alpha=piece_samples / total) for old, new in pairs]
    else:
        flat = [new.mul_(piece_samples / total).add_(old, alpha=samples / total) for old, new in pairs]
    loss = _mean_loss(held.loss, samples, piece.loss, piece_samples)
    missing = held.missing & piece.missing
    return Gradient(
        flat, missing, piece.options, piece.buffer_change, loss, slot=piece.slot,
        views=None if piece.slot is None else piece.views,
    )  # fmt: skip


def out_of_slot(gradient: Gradient) -> Gradient:
    """The same push in memory of its own, for a worker that needs the slot for the next one."""
    change = [None if c is None else c.clone() for c in gradient.buffer_change]
    flat = [part.clone() for part in gradient.flat]
    return msgspec.structs.replace(gradient, flat=flat, buffer_change=change, slot=None, views=None)


def _mean_loss(first: float | None, samples: int, second: float | None, more: int) -> float | None:
    if first is None or second is None:
        return second if first is None else first
    return (first * samples + second * more) / (samples + more)


def model_state(store: Store) -> dict[str, torch.Tensor]:
    """The trained model under its ordinary `state_dict` keys."""
    return state_of(store.spec, *store.state())


def state_of(
    spec: ModelSpec, values: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """A model of that spec under its ordinary `state_dict` keys."""
    tensors = [*values, *buffers]
    return {key: tensors[place] for key, place in spec.keys}
