"""Tensors as views into flat buffers, one per dtype, so that one operation covers all tensors of a dtype.

Each tensor is its own view with its own storage offset, so saving or reading one layer does not involve the others.
"""

from collections.abc import Sequence

import msgspec
import torch

HALVES = (torch.bfloat16, torch.float16)
ALIGNMENT = 16  # elements; a view starts at a cache line in every common dtype


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the server keeps parameters: single precision for halves, or small steps would round to
    nothing."""
    return torch.float32 if dtype in HALVES else dtype


class Place(msgspec.Struct, frozen=True):
    """The place of one tensor in the flat buffers."""

    buffer: int
    offset: int
    shape: tuple[int, ...]
    size: int


class Layout:
    """The places of a list of tensors in the flat buffers."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> None:
        self.dtypes: list[torch.dtype] = list(dict.fromkeys(dtypes))
        self.lengths = [0] * len(self.dtypes)
        self.places: list[Place] = []
        for shape, dtype in zip(shapes, dtypes, strict=True):
            buffer = self.dtypes.index(dtype)
            size = 1
            for side in shape:
                size *= side
            self.places.append(Place(buffer, self.lengths[buffer], tuple(shape), size))
            self.lengths[buffer] += -(-size // ALIGNMENT) * ALIGNMENT

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> "Layout":
        return Layout([tuple(t.shape) for t in tensors], [t.dtype for t in tensors])

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors themselves, padding aside."""
        return sum(place.size * self.dtypes[place.buffer].itemsize for place in self.places)

    def zeros(self) -> list[torch.Tensor]:
        """Make flat buffers; the padding between tensors must stay zero, as norms include it."""
        return [torch.zeros(length, dtype=dtype) for length, dtype in zip(self.lengths, self.dtypes, strict=True)]

    def views(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return each tensor as a view into the buffers."""
        return [buffers[p.buffer][p.offset : p.offset + p.size].view(p.shape) for p in self.places]

    def pack(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy the tensors into new buffers."""
        buffers = self.zeros()
        with torch.no_grad():
            for view, tensor in zip(self.views(buffers), tensors, strict=True):
                view.copy_(tensor)
        return buffers
