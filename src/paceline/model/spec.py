"""Values that workers and stores share: the spec of a model, the gradient of a push, the parameters of a version."""

import math
from collections.abc import Sequence

import msgspec
import torch

from paceline.core.errors import OptionError
from paceline.model.mass_optimizer import GroupOptions, OptimizerSpec


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name such as `torch.float32`."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} names no dtype")
    return found


class ModelSpec(msgspec.Struct, frozen=True):
    """What all workers must have in common: names, shapes and dtypes of the model, and the optimizer."""

    parameters: tuple[tuple[str, tuple[int, ...], str], ...]
    buffers: tuple[tuple[str, tuple[int, ...], str], ...]
    optimizer: OptimizerSpec
    keys: tuple[tuple[str, int], ...]  # `state_dict` keys, each with its index in parameters + buffers
    calls: int = 1  # of `prepare` that this is of: scripts may prepare several models and optimizers

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters and buffers."""
        entries = self.parameters + self.buffers
        return sum(math.prod(shape) * dtype_of(dtype).itemsize for _, shape, dtype in entries)

    @property
    def steps_itself(self) -> bool:
        """Whether the script's own optimizers make the steps, and the holder of the weights none."""
        return not self.optimizer.name

    def require_same(self, other: "ModelSpec", worker: int) -> None:
        """Raise if the other worker trains a different model: their pushes could not be merged."""
        difference = self.difference(other, "worker 0", f"worker {worker}")
        if difference is not None:
            raise OptionError(difference)

    def difference(self, other: "ModelSpec", mine: str, theirs: str) -> str | None:
        """Describe how the other model differs from this one; None if it does not."""
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


class Gradient:
    """The contents of a push: tensors, which parameters had no gradient, and the optimizer's options."""

    __slots__ = ("buffer_change", "flat", "loss", "missing", "norm", "options", "slot", "views")

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
    ) -> None:
        self.flat, self.missing, self.options, self.buffer_change = flat, missing, options, buffer_change
        self.loss, self.norm, self.slot, self.views = loss, norm, slot, views

    def all(self) -> list[torch.Tensor]:
        """Return every tensor, in the order in which they are sent."""
        return [*self.flat, *(change for change in self.buffer_change if change is not None)]


class Parameters:
    """One whole version, read by any number of workers and never written to."""

    __slots__ = ("buffers", "flat", "version")

    def __init__(self, version: int, flat: list[torch.Tensor], buffers: list[torch.Tensor]) -> None:
        self.version, self.flat, self.buffers = version, flat, buffers

    def all(self) -> list[torch.Tensor]:
        """Return every tensor, in the order in which they are sent."""
        return [*self.flat, *self.buffers]


def flat_norm(flat: Sequence[torch.Tensor]) -> float:
    """Return the Euclidean norm over all buffers; not finite if a value is not finite or the sum overflows."""
    if len(flat) == 1:
        return float(torch.linalg.vector_norm(flat[0]))
    return math.sqrt(math.fsum(float(torch.linalg.vector_norm(part)) ** 2 for part in flat))


def gradient_norm(gradient: Gradient) -> float:
    """Return the gradient's norm; not finite if any gradient or buffer change is not finite."""
    if gradient.norm is not None:
        return gradient.norm
    moved = [c for c in gradient.buffer_change if c is not None and c.is_floating_point()]
    if moved and not all(bool(torch.isfinite(change).all()) for change in moved):
        return math.nan
    return flat_norm(gradient.flat)


def extend(held: Gradient, samples: int, piece: Gradient, piece_samples: int) -> Gradient:
    """Merge a held push with a further piece computed on the same version: means weighted by samples.

    A piece that lies in a slot is summed there, which frees the held push's slot.
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
    """Copy a push out of its slot, for a worker that needs the slot for the next push."""
    change = [None if c is None else c.clone() for c in gradient.buffer_change]
    flat = [part.clone() for part in gradient.flat]
    return Gradient(flat, gradient.missing, gradient.options, change, gradient.loss, gradient.norm)


def _mean_loss(first: float | None, samples: int, second: float | None, more: int) -> float | None:
    if first is None or second is None:
        return second if first is None else first
    return (first * samples + second * more) / (samples + more)


def state_of(
    spec: ModelSpec, values: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a model under its `state_dict` keys."""
    tensors = [*values, *buffers]
    return {key: tensors[place] for key, place in spec.keys}
