"""The only server-side home of tensors: versioned flat parameters, module buffers and the optimizer's state.

A version is one Apply of positive mass. Readers get an immutable copy of one whole version, shared by everybody who
asks for the same one. BatchNorm's statistics follow the pushes: `buffer += sum of m_i (buffer_i - buffer read)`, while
counters take the maximum.
"""

import math
from collections.abc import Sequence

import msgspec
import torch

from paceline.errors import OptionError
from paceline.flat import Layout
from paceline.optimizers import GroupOptions, MassOptimizer, OptimizerSpec, mean_options


class ModelSpec(msgspec.Struct, frozen=True):
    """What every worker must have alike: names, shapes and dtypes, and the optimizer."""

    parameters: tuple[tuple[str, tuple[int, ...], str], ...]
    buffers: tuple[tuple[str, tuple[int, ...], str], ...]
    optimizer: OptimizerSpec
    keys: tuple[tuple[str, int], ...]  # of the `state_dict`, and which parameter or (counted on) buffer each means

    def require_same(self, other: "ModelSpec", worker: int) -> None:
        """Workers that train different models cannot be merged."""
        for mine, theirs in zip(self.parameters + self.buffers, other.parameters + other.buffers, strict=False):
            if mine != theirs:
                raise OptionError(f"worker {worker} has {_spell(theirs)} where worker 0 has {_spell(mine)}")
        if len(self.parameters) != len(other.parameters) or len(self.buffers) != len(other.buffers):
            raise OptionError(
                f"worker {worker}'s model has {len(other.parameters)} parameters and {len(other.buffers)} buffers, "
                f"worker 0's has {len(self.parameters)} and {len(self.buffers)}"
            )
        if (self.optimizer.name, self.optimizer.members) != (other.optimizer.name, other.optimizer.members):
            raise OptionError(f"worker {worker}'s optimizer ({other.optimizer.name}) differs from worker 0's")


def _spell(entry: tuple[str, tuple[int, ...], str]) -> str:
    return f"{entry[0]} {list(entry[1])} {entry[2]}"


class Gradient(msgspec.Struct):
    """What one push brings: flat gradients, which parameters had none, and the module buffers it ended with."""

    flat: list[torch.Tensor]
    missing: frozenset[int]
    options: Sequence[GroupOptions]
    buffer_change: list[torch.Tensor | None] = []  # since the read, None if there is none; of counters, their value
    loss: float | None = None


class Parameters(msgspec.Struct, frozen=True):
    """One whole version, to be read by any number of workers and written by none."""

    version: int
    flat: list[torch.Tensor]
    buffers: list[torch.Tensor]


class Merged(msgspec.Struct, frozen=True):
    """Statistics of one applied gradient."""

    norm: float | None
    inner_product: float | None


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
        self._parameters = [view.requires_grad_() for view in self.layout.views(self._flat)]
        self._sum = [torch.zeros_like(flat) for flat in self._flat]
        self._gradients = self.layout.views(self._sum)
        self._previous: list[torch.Tensor] | None = None
        self._buffers = [b.detach().clone() for b in buffers]
        self.optimizer = MassOptimizer(spec.optimizer, self._parameters)
        self._read: Parameters | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that a push or a pull moves."""
        return self.layout.nbytes + sum(b.nbytes for b in self._buffers)

    def read(self) -> Parameters:
        """The current version."""
        if self._read is None:
            pairs = zip(self._flat, self.layout.dtypes, strict=True)
            flat = [master.detach().to(dtype, copy=True) for master, dtype in pairs]
            self._read = Parameters(self.version, flat, [b.clone() for b in self._buffers])
        return self._read

    def apply(
        self, gradients: Sequence[Gradient], weights: Sequence[float], samples: Sequence[int], *, stock: bool
    ) -> Merged:
        """One version out of these pushes; the weights add up to its mass, which must be positive."""
        mass = math.fsum(weights)
        self._merge(gradients, weights, mass)
        merged = self._measure() if self.statistics else Merged(None, None)
        absent = frozenset.intersection(*[g.missing for g in gradients])
        for position, parameter in enumerate(self._parameters):
            parameter.grad = None if position in absent else self._gradients[position]
        self.optimizer.step(mass, mean_options([g.options for g in gradients], samples), stock=stock)
        self._merge_buffers(gradients, weights)
        self.version += 1
        self._read = None
        return merged

    def _merge(self, gradients: Sequence[Gradient], weights: Sequence[float], mass: float) -> None:
        """The weighted mean, summed in the order given so that it is the same to the last bit every time."""
        for place, total in enumerate(self._sum):
            torch.mul(gradients[0].flat[place], weights[0] / mass, out=total)
            for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
                total.add_(gradient.flat[place], alpha=weight / mass)

    def _measure(self) -> Merged:
        norm = flat_norm(self._sum)
        inner = None
        if self._previous is None:
            self._previous = [total.clone() for total in self._sum]
        else:
            pairs = zip(self._sum, self._previous, strict=True)
            inner = math.fsum(float(torch.dot(total, previous)) for total, previous in pairs)
            for total, previous in zip(self._sum, self._previous, strict=True):
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
        version = self.read()
        values = [view.clone() for view in self.layout.views(version.flat)]
        return values, [b.clone() for b in version.buffers]


def _master(flat: torch.Tensor) -> torch.Tensor:
    return flat.float() if flat.dtype in (torch.bfloat16, torch.float16) else flat


def flat_norm(flat: Sequence[torch.Tensor]) -> float:
    """The Euclidean norm over all buffers; not finite exactly if one of the values is not (or is beyond reason)."""
    if len(flat) == 1:
        return float(torch.linalg.vector_norm(flat[0]))
    return math.sqrt(math.fsum(float(torch.linalg.vector_norm(part)) ** 2 for part in flat))


def gradient_norm(gradient: Gradient) -> float:
    """The gradient's norm; not finite if the push would bring anything into the model that is not."""
    moved = [c for c in gradient.buffer_change if c is not None and c.is_floating_point()]
    if moved and not all(bool(torch.isfinite(change).all()) for change in moved):
        return math.nan
    return flat_norm(gradient.flat)


def extend(held: Gradient, samples: int, piece: Gradient, piece_samples: int) -> Gradient:
    """A held push with a further piece computed on the same version: means weighted by samples."""
    total = samples + piece_samples
    if not piece_samples:
        return held
    if not samples:
        return piece
    flat = [
        torch.add(old * (samples / total), new, alpha=piece_samples / total)
        for old, new in zip(held.flat, piece.flat, strict=True)
    ]
    loss = _mean_loss(held.loss, samples, piece.loss, piece_samples)
    return Gradient(flat, held.missing & piece.missing, piece.options, piece.buffer_change, loss)


def _mean_loss(first: float | None, samples: int, second: float | None, more: int) -> float | None:
    if first is None or second is None:
        return second if first is None else first
    return (first * samples + second * more) / (samples + more)


def model_state(store: Store) -> dict[str, torch.Tensor]:
    """The trained model under its ordinary `state_dict` keys."""
    values, buffers = store.state()
    tensors = [*values, *buffers]
    return {key: tensors[place] for key, place in store.spec.keys}
