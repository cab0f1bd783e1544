"""A worker's tensors on a device with its own memory, copied from and to the region.

Parameters and gradients are flat buffers on the device, laid out as in the region. A version takes one copy per dtype,
from the region or, where the server lends it, from the server's own memory; the server then waits for the copy.
Gradients take one copy per contiguous stretch to send. One set of gradients serves both slots. Each parameter is a
tensor with its own storage over its part of the flat buffer, as in a region.

The copy of a large gradient to the slot starts as soon as backward has completed it, while backward continues. The
script may change it after that: clip it, unscale it, add to it. Torch does not count every such write
(`GradScaler.unscale_` and writes to `grad.data` are not), so sums of the bits that were sent are kept on the device and
compared in the end; integer sums do not depend on the order. Gradients that differ are sent again.
"""

from collections.abc import Iterator, Sequence, Set
from typing import Protocol

import torch
from torch.utils.dlpack import from_dlpack

from paceline.core.errors import OptionError
from paceline.model.flat import Layout
from paceline.model.regions import SLOTS, Region, Slot
from paceline.model.spec import ModelSpec
from paceline.transport.base import Endpoint
from paceline.worker.cuda_copies import CudaCopies
from paceline.worker.replica import Replica
from paceline.worker.shared_replica import SlotReplica, Stage

EARLY = 1 << 20  # elements; from here on overlapping with backward saves more time than starting a copy costs
SUMS = 64  # at most, per gradient, each over one stretch of it

Stretches = list[list[tuple[int, int, int]]]  # per flat buffer: a parameter, its start, the next one's start
Versions = tuple[int, int]  # torch's write counts of a gradient and of its flat buffer


class Copies(Protocol):
    """Copies to the device and back."""

    def lock(self, tensors: Sequence[torch.Tensor]) -> None:
        """Prepare host memory for copies from and to it."""

    def unlock(self, tensors: Sequence[torch.Tensor]) -> None:
        """Undo `lock`: no further copies use this memory."""

    def upload(self, home: torch.Tensor, value: torch.Tensor) -> None:
        """Start a copy to the device; later computations see it."""

    def finish_uploads(self) -> None:
        """Wait until the uploads' host memory may be written again."""

    def download(self, home: torch.Tensor, value: torch.Tensor) -> None:
        """Start a copy to the host of what has been computed so far."""

    def finish_downloads(self) -> None:
        """Wait until the downloads may be read."""


def device_of(parameters: Sequence[torch.Tensor]) -> torch.device:
    """Return the one device on which a worker computes."""
    devices = list(dict.fromkeys(parameter.device for parameter in parameters))
    if len(devices) > 1:
        names = ", ".join(map(str, devices))
        raise OptionError(
            f"the model's parameters are on {len(devices)} devices ({names}) and a worker computes on one: call "
            "model.to(session.device) before prepare()"
        )
    if devices[0].type not in ("cpu", "cuda"):
        raise OptionError(
            f"the model is on {devices[0]} and a worker computes on cpu or cuda: call model.to(session.device) "
            "before prepare()"
        )
    return devices[0]


def make_replica(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, spec: ModelSpec, endpoint: Endpoint
) -> Replica:
    """Return a replica whose tensors lie where the link keeps them: in shared memory, on a device, or in the module."""
    region = endpoint.adopt(spec)
    if region is None:
        return Replica(model, optimizer, spec)
    return SlotReplica(model, optimizer, spec, region, stage_on(device_of(list(model.parameters())), region))


def stage_on(device: torch.device, region: Region) -> Stage:
    """Return the stage of a worker that computes on this device."""
    return Stage(region) if device.type == "cpu" else DeviceStage(region, device, CudaCopies(device))


class DeviceStage(Stage):
    """Tensors on a device, and their copies from and to the region."""

    def __init__(self, region: Region, device: torch.device, copies: Copies) -> None:
        super().__init__(region)
        layout = region.layout.parameters
        self._copies = copies
        self.flat = _flats(layout, device)
        self.parameters = _separate(layout, self.flat)
        gathered = _flats(layout, device)
        self._gathered = Slot(gathered, _separate(layout, gathered), [])
        self._stretches = _stretches(layout)
        self._early = EarlyCopies(region, self._gathered, self._stretches, copies)
        self._lent: Sequence[torch.Tensor] = ()  # the server's own parameters, page-locked
        self._zeros: list[set[int]] = [set() for _ in range(SLOTS)]  # parameters with zeros in the region's slot
        buffers, staged = (_flats(region.layout.buffers, where) for where in (device, torch.device("cpu")))
        self._buffers, self._staged_buffers = (_separate(region.layout.buffers, flat) for flat in (buffers, staged))
        self._buffer_pairs = list(zip(staged, buffers, strict=True))
        copies.lock([*region.flat, *(flat for slot in region.slots for flat in slot.flat), *staged])

    def gradients(self, slot: int) -> Slot:  # noqa: ARG002 - one set of gradients serves both slots
        return self._gathered

    def publish(self) -> None:
        for home, flat in zip(self.region.flat, self.flat, strict=True):
            self._copies.download(home, flat)
        self._copies.finish_downloads()

    @property
    def reads(self) -> bool:
        return True

    def fetch(self, flat: Sequence[torch.Tensor]) -> None:
        lent = flat is not self.region.flat and self.region.lent
        if not lent:
            super().fetch(flat)
            flat = self.region.flat
        elif flat is not self._lent:
            self._copies.unlock(self._lent)
            self._copies.lock(flat)
            self._lent = flat
        for home, value in zip(self.flat, flat, strict=True):
            self._copies.upload(home, value)
        if lent:
            self._copies.finish_uploads()
            self.region.lent = False

    def settle(self) -> None:
        self._copies.finish_uploads()

    def landed(self, slot: int, place: int) -> None:
        if self._early.landed(slot, place):
            self._zeros[slot].discard(place)

    def deliver(self, slot: int, missing: Set[int], *, extends: bool) -> None:
        homes = self.region.slots[slot].flat
        there = self._early.arrived(slot) | (missing & self._zeros[slot])
        for buffer, start, stop in self._runs(there):
            self._copies.download(homes[buffer][start:stop], self._gathered.flat[buffer][start:stop])
        self._copies.finish_downloads()
        self._zeros[slot] = set() if extends else set(missing)

    def _runs(self, there: Set[int]) -> Iterator[tuple[int, int, int]]:
        """Yield the longest stretches of the flat buffers without the parameters in `there`."""
        for buffer, stretches in enumerate(self._stretches):
            begin = end = 0
            for place, start, stop in stretches:
                if place in there:
                    continue
                if start != end:
                    if begin != end:
                        yield buffer, begin, end
                    begin = start
                end = stop
            if begin != end:
                yield buffer, begin, end

    def read_buffers(self, buffers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            torch._foreach_copy_(self._buffers, list(buffers))
        for home, flat in self._buffer_pairs:
            self._copies.download(home, flat)
        self._copies.finish_downloads()
        return self._staged_buffers

    def write_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        self._copies.finish_uploads()
        with torch.no_grad():
            torch._foreach_copy_(self._staged_buffers, self.region.buffers)
            for home, flat in self._buffer_pairs:
                self._copies.upload(flat, home)
            torch._foreach_copy_(list(buffers), self._buffers)


class EarlyCopies:
    """Large gradients that are sent as soon as backward has completed them.

    A gradient that changed afterwards is not sent early in the next push, but is again after a push in which it did not
    change. One with a change that torch does not count, which is expensive to detect, is never sent early again.
    """

    def __init__(self, region: Region, gathered: Slot, stretches: Stretches, copies: Copies) -> None:
        self._region = region
        self._gathered = gathered
        self._copies = copies
        self._bits: dict[int, torch.Tensor] = {}
        self._whole: dict[int, torch.Tensor] = {}  # the flat buffer that each gradient is part of
        for flat, known in zip(gathered.flat, stretches, strict=True):
            for place, start, stop in known:
                if gathered.views[place].numel() >= EARLY:
                    self._bits[place], self._whole[place] = _bits(flat[start:stop]), flat
        self._rows = {place: row for row, place in enumerate(self._bits)}
        sums = torch.zeros(2, len(self._rows), SUMS, dtype=torch.int64, device=gathered.flat[0].device)
        self._then, self._now = sums.unbind()
        self._hasty: set[int] = set()  # changed after backward in the last push
        self._completed: dict[int, Versions] = {}  # by backward, since the last push
        self._sent: dict[int, int] = {}  # of those, to which slot

    def landed(self, slot: int, place: int) -> bool:
        """Send a gradient that backward has completed, if it qualifies; return whether it was sent."""
        bits = self._bits.get(place)
        if bits is None:
            return False
        self._completed[place] = self._versions(place)
        self._sent.pop(place, None)
        if place in self._hasty:
            return False
        self._sum(bits, self._then[self._rows[place]])
        self._copies.download(self._region.slots[slot].views[place], self._gathered.views[place])
        self._sent[place] = slot
        return True

    def arrived(self, slot: int) -> set[int]:
        """Return the gradients whose current values are in the slot; all others must still be sent."""
        same = {place for place, versions in self._completed.items() if versions == self._versions(place)}
        self._hasty.difference_update(same)
        self._hasty.update(self._completed.keys() - same)
        found = {place for place, home in self._sent.items() if home == slot and place in same}
        self._completed, self._sent = {}, {}
        return found - self._secretly_changed(found)

    def _secretly_changed(self, places: Set[int]) -> set[int]:
        if not places:
            return set()
        for place in places:
            self._sum(self._bits[place], self._now[self._rows[place]])
        differs = (self._then != self._now).any(1).tolist()
        changed = {place for place in places if differs[self._rows[place]]}
        for place in changed:
            del self._bits[place]
        return changed

    def _versions(self, place: int) -> Versions:
        return self._gathered.views[place]._version, self._whole[place]._version

    @staticmethod
    def _sum(bits: torch.Tensor, home: torch.Tensor) -> None:
        torch.sum(bits, 1, out=home[: len(bits)])


def _flats(layout: Layout, device: torch.device) -> list[torch.Tensor]:
    kinds = zip(layout.lengths, layout.dtypes, strict=True)
    return [torch.zeros(length, dtype=dtype, device=device) for length, dtype in kinds]


def _separate(layout: Layout, flat: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the layout's tensors in this memory, each with its own storage and write count."""
    views = layout.views(flat)
    return [from_dlpack(view) if view.numel() else torch.empty_like(view) for view in views]


def _stretches(layout: Layout) -> Stretches:
    stretches: Stretches = [[] for _ in layout.lengths]
    for number, place in reversed(list(enumerate(layout.places))):
        known = stretches[place.buffer]
        known.append((number, place.offset, known[-1][1] if known else layout.lengths[place.buffer]))
    return [known[::-1] for known in stretches]


def _bits(stretch: torch.Tensor) -> torch.Tensor:
    """View memory as integers in rows of equal length: the largest power of two of rows up to SUMS that divides it."""
    words = stretch.view(torch.int64)
    return words.view(min(SUMS, len(words) & -len(words)), -1)
