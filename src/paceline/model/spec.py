"""What all workers of a run have in common: the spec of a model and its optimizer."""

import math
from collections.abc import Sequence

import msgspec
import torch

from paceline.core.errors import OptionError
from paceline.model.flat import Layout
from paceline.model.mass_optimizer import OptimizerSpec


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
    def layout(self) -> Layout:
        """Where each parameter lies in flat buffers."""
        entries = self.parameters
        return Layout([tuple(shape) for _, shape, _ in entries], [dtype_of(dtype) for _, _, dtype in entries])

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


def state_of(
    spec: ModelSpec, values: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a model under its `state_dict` keys."""
    tensors = [*values, *buffers]
    return {key: tensors[place] for key, place in spec.keys}
