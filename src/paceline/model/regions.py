"""Regions: one worker's memory as both sides see it, with parameters, module buffers and two slots for pushes.

On one host a region is an anonymous file that the worker makes and the server also maps: a push then copies nothing,
and a pull is one copy. Otherwise each side has its own region and the transport keeps the two equal. Every parameter is
a tensor with its own storage, so that saving one layer does not write all of them.
"""

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch

from paceline.model.flat import Layout, master_dtype
from paceline.model.spec import ModelSpec, dtype_of

SLOTS = 2  # a held push keeps one until it is applied; the worker continues in the other
PAGE = mmap.PAGESIZE

Memory = mmap.mmap | bytearray | memoryview


class RegionLayout:
    """Offsets of everything in a region; the same spec gives the same layout on both sides."""

    def __init__(self, spec: ModelSpec) -> None:
        self.parameters = spec.layout
        self.buffers = _layout(spec.buffers)
        self._at = 0
        self.parameter_offsets = self._reserve(self.parameters)
        self.parameter_bytes = max(self._at, PAGE)  # size of memory for the parameters alone
        self.buffer_offsets = self._reserve(self.buffers)
        self.slot_offsets = [self._reserve(self.parameters) for _ in range(SLOTS)]
        self.change_offsets = [self._reserve(self.buffers) for _ in range(SLOTS)]
        self.flag_offset = self._at
        self.nbytes = self._at + PAGE

    def _reserve(self, layout: Layout) -> list[int]:
        offsets = []
        for length, dtype in zip(layout.lengths, layout.dtypes, strict=True):
            offsets.append(self._at)
            self._at += -(-length * dtype.itemsize // PAGE) * PAGE
        return offsets


def _layout(entries: Sequence[tuple[str, tuple[int, ...], str]]) -> Layout:
    return Layout([tuple(shape) for _, shape, _ in entries], [dtype_of(dtype) for _, _, dtype in entries])


def parameters_in(spec: ModelSpec, memory: mmap.mmap) -> list[torch.Tensor]:
    """Return the flat buffers of a model's parameters in memory that holds them alone, laid out as in a region."""
    layout = RegionLayout(spec)
    kinds = zip(layout.parameters.lengths, layout.parameters.dtypes, layout.parameter_offsets, strict=True)
    return [tensor_in(memory, dtype, length, offset) for length, dtype, offset in kinds]


class MasterMemory:
    """Where a model's parameters lie, as the server keeps them, in memory that holds them alone."""

    def __init__(self, spec: ModelSpec) -> None:
        layout = spec.layout
        self._places: list[tuple[torch.dtype, int, int]] = []
        self.nbytes = 0
        for length, dtype in zip(layout.lengths, map(master_dtype, layout.dtypes), strict=True):
            self._places.append((dtype, length, self.nbytes))
            self.nbytes += -(-length * dtype.itemsize // PAGE) * PAGE
        self.nbytes = max(self.nbytes, PAGE)

    def tensors(self, memory: Memory) -> list[torch.Tensor]:
        """Return the flat buffers in this memory."""
        return [tensor_in(memory, *place) for place in self._places]


def private_region(spec: ModelSpec) -> "Region":
    """Make a region that no other process maps."""
    layout = RegionLayout(spec)
    memory = mmap.mmap(-1, layout.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)  # as allocators do for large arrays
    return Region(layout, memory, mirrored=True)


class Slot:
    """The memory of one push: flat gradients, each parameter's view of them, and the changes of module buffers."""

    def __init__(self, flat: list[torch.Tensor], views: list[torch.Tensor], changes: list[torch.Tensor]) -> None:
        self.flat = flat
        self.views = views
        self.changes = changes


class Region:
    """The tensors of one worker's memory. `mirrored`: its other side has a copy, and the transport sends it."""

    def __init__(self, layout: RegionLayout, memory: Memory, *, mirrored: bool = False) -> None:
        self.layout = layout
        self.mirrored = mirrored
        self.memory = memory
        self.flat = self._flats(layout.parameters, layout.parameter_offsets)
        self.parameters = self._tensors(layout.parameters, layout.parameter_offsets)
        self.buffers = self._tensors(layout.buffers, layout.buffer_offsets)
        self.slots = [
            Slot(
                self._flats(layout.parameters, layout.slot_offsets[number]),
                self._tensors(layout.parameters, layout.slot_offsets[number]),
                self._tensors(layout.buffers, layout.change_offsets[number]),
            )
            for number in range(SLOTS)
        ]
        self._lent = self._tensor(torch.int64, 1, layout.flag_offset)

    @property
    def lent(self) -> bool:
        """Whether the worker is to read its version from the server's own memory and has not done so yet."""
        return bool(self._lent.item())

    @lent.setter
    def lent(self, value: bool) -> None:
        self._lent.fill_(int(value))

    def take_in(self, values: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        """Copy parameters and buffers into the region, except those already there."""
        with torch.no_grad():
            for home, tensor in zip([*self.parameters, *self.buffers], [*values, *buffers], strict=True):
                if home.data_ptr() != tensor.data_ptr():
                    home.copy_(tensor)

    def _flats(self, layout: Layout, offsets: list[int]) -> list[torch.Tensor]:
        kinds = zip(layout.lengths, layout.dtypes, offsets, strict=True)
        return [self._tensor(dtype, length, offset) for length, dtype, offset in kinds]

    def _tensors(self, layout: Layout, offsets: list[int]) -> list[torch.Tensor]:
        """Return the tensors, each with its own storage."""
        tensors = []
        for place in layout.places:
            dtype = layout.dtypes[place.buffer]
            offset = offsets[place.buffer] + place.offset * dtype.itemsize
            tensors.append(self._tensor(dtype, place.size, offset).view(place.shape))
        return tensors

    def _tensor(self, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
        return tensor_in(self.memory, dtype, count, offset)


def tensor_in(memory: Memory, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
    """Return memory as a tensor of one dimension."""
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
