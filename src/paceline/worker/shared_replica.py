"""A worker's copy of the model in memory that it has in common with the server.

The user's parameters *are* the region's: the server writes a version there before it grants work, so taking it in moves
no byte. Gradients end up in the slot that the grant names, and `parameter.grad` becomes the slot's view: then further
backward passes, in-place zeroing and clipping work on the slot itself, and a push moves no byte either.

A large gradient is copied by a hook the moment it is complete, while it is still in the processor's cache; its own
memory is free again before the next one comes. A hook costs some microseconds, so small ones are copied all at once
when somebody looks. What came since the last look shows without any hook: a gradient that is not the slot's view came
onto nothing, and one that is counts the writes to it.

Only the slot that was named last is ever written to. A parameter without a gradient has zeros there; which areas are
known to hold zeros is remembered, so that frozen layers cost nothing.

The server writes a version before it tells of it. A worker that waits sees it whole. One that computes meanwhile may
read a mix of two versions, but only for a grant that is void, whose push is refused: before the grant that follows a
cancellation, and at the end of a phase. A script that left its loop is written to no more once the server has heard so;
until then, for the time of a message, an end of the phase may still replace the model under its hands.
"""

import math
from collections.abc import Sequence, Set

import torch

from paceline.model.buffers import Changes, write_changes
from paceline.model.regions import SLOTS, Region, Slot
from paceline.model.spec import Gradient, ModelSpec, Parameters
from paceline.worker.replica import News, Replica

HOOKED = 1 << 15  # elements from which on a copy while the gradient is in the cache saves more than the hook costs
HALVES = (torch.bfloat16, torch.float16)


class Stage:
    """Where the tensors that a worker computes with lie: in the region itself.

    A device with memory of its own is a subclass (`DeviceStage`): `parameters`, `flat` and `gradients` are tensors of
    the device, `fetch` brings the region's version there and `deliver` the gradient into the region's slot.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        self.flat = region.flat
        self.parameters = region.parameters

    def gradients(self, slot: int) -> Slot:
        """Where the gradients of that slot's push are gathered."""
        return self.region.slots[slot]

    def publish(self) -> None:
        """The server is to find in the region the parameters that are here."""

    @property
    def reads(self) -> bool:
        """Whether versions are copied on from the region: then it may as well be from the server's own memory."""
        return False

    def fetch(self, flat: Sequence[torch.Tensor]) -> None:
        """A version's parameters lie there."""
        if flat is not self.region.flat:
            _bring(self.region.flat, flat)

    def settle(self) -> None:
        """The server may write into the region next."""

    def landed(self, slot: int, place: int) -> None:
        """Backward has completed the gradient of one parameter; the script may change it yet."""

    def deliver(self, slot: int, missing: Set[int], *, extends: bool) -> None:
        """The gradient is complete, with zeros for what is missing; the server reads the region's slot next.

        `extends`: it then adds a held push to it, in place.
        """

    def read_buffers(self, buffers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The module's buffers where the region's can be subtracted from them."""
        return buffers

    def write_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """Give the module's buffers the values of the region's."""
        with torch.no_grad():
            torch._foreach_copy_(list(buffers), self.region.buffers)


class SlotReplica(Replica):
    """The user's module on a region."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, spec: ModelSpec, region: Region, stage: Stage
    ) -> None:
        super().__init__(model, optimizer, spec)
        self.region = region
        self._stage = stage
        self._slot = 0
        self._gathered = self._stage.gradients(0)
        self._views = self._gathered.views
        slots = [self._stage.gradients(slot) for slot in range(SLOTS)]
        self._zeros: dict[Slot, set[int]] = {slot: set() for slot in slots}  # parameters known to have zeros there
        self._extends = False
        self._absent: list[int] = []  # parameters without gradient at the last look
        self._sum: list[torch.Tensor] | None = None  # of the pieces before the last, each times its samples
        self._summed = 0  # samples in that
        self._checksum: int | None = None
        for home, value in zip(self._stage.parameters, self._values, strict=True):
            home.copy_(value)
        for home, buffer in zip(region.buffers, self.buffers, strict=True):
            home.copy_(buffer)
        self._values = self._stage.parameters
        self._addresses = [value.data_ptr() for value in self._values]
        self._stage.publish()
        self._move_in()

    def _move_in(self) -> None:
        for parameter, home in zip(self.parameters, self._values, strict=True):
            parameter.data = home

    def _at_home(self) -> bool:
        return [parameter.data_ptr() for parameter in self.parameters] == self._addresses

    # -- gradients that come -----------------------------------------------------------------------------------------

    def _watches(self, parameter: torch.Tensor) -> bool:
        return parameter.numel() >= HOOKED

    def _on_backward(self, place: int, parameter: torch.Tensor) -> None:
        self.touched = True
        gradient, view = parameter.grad, self._views[place]
        # One that is part of a graph may be differentiated yet; it is copied when somebody looks.
        if gradient is None or gradient.requires_grad:
            return
        if gradient is not view:
            if self._marks[place] is not None:
                self._fresh = True
            view.copy_(self._plain_gradient(place, parameter))
            parameter.grad = view
            self._zeros[self._gathered].discard(place)
        self._stage.landed(self._slot, place)

    def mark(self) -> None:
        pairs = zip(self.parameters, self._views, strict=True)
        self._marks = [view._version if parameter.grad is view else None for parameter, view in pairs]
        self.touched = self._fresh = False

    def mark_batch(self) -> None:
        """The writes to a gradient are counted from the last look on."""
        self.touched = False

    def news(self, *, by_hand: bool = True) -> News:  # noqa: ARG002 - a write shows, whoever made it
        marks, views = self._marks, self._views
        absent: list[int] = []
        strays: list[int] = []
        came, fresh = False, self._fresh
        for place, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is None:
                absent.append(place)
                marks[place] = None
            elif gradient is not views[place]:
                strays.append(place)
            elif views[place]._version != marks[place]:
                marks[place] = views[place]._version
                came = True
        if strays:
            came, fresh = True, self._land(strays) or fresh
        self._absent = absent
        self.touched = self._fresh = False
        if not came:
            return News.NONE
        return News.FRESH if fresh else News.ADDED

    def _land(self, strays: list[int]) -> bool:
        """Bring gradients that lie elsewhere into the slot; True if one of them replaces another."""
        views, marks, parameters = self._views, self._marks, self.parameters
        homes = [views[place] for place in strays]
        torch._foreach_copy_(homes, [self._plain_gradient(place, parameters[place]) for place in strays])
        replaced = False
        for place, home in zip(strays, homes, strict=True):
            parameters[place].grad = home
            if marks[place] is not None:
                replaced = True
            marks[place] = home._version
        if self._zeros[self._gathered]:
            self._zeros[self._gathered].difference_update(strays)
        return replaced

    def _plain_gradient(self, place: int, parameter: torch.Tensor) -> torch.Tensor:
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return self._dense(place)
        return gradient.detach() if gradient.requires_grad else gradient

    # -- versions in -------------------------------------------------------------------------------------------------

    def values(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The region's own: the server sees them without being sent anything."""
        return self.region.parameters, self.region.buffers

    def load(self, version: Parameters) -> None:
        region = self.region
        if version.buffers is not region.buffers:
            _bring(region.buffers, version.buffers)
        if self._buffer_homes:
            self._stage.write_buffers(self.buffers)
        self._stage.fetch(version.flat)
        if not self._at_home():
            self._move_in()
        self._checksum = None

    def use(self, slot: int, *, extends: bool) -> None:
        self._extends = extends
        if slot == self._slot:
            return
        before, gathered = self._views, self._stage.gradients(slot)
        self._slot, self._gathered, self._views = slot, gathered, gathered.views
        if gathered.views is before:
            return
        # A script may look at its gradients after step(), add to them, or zero them in place.
        for place, parameter in enumerate(self.parameters):
            if parameter.grad is before[place]:
                gathered.views[place].copy_(before[place])
                parameter.grad = gathered.views[place]
                self._zeros[gathered].discard(place)
        self.mark()

    @property
    def reads(self) -> bool:
        return self._stage.reads

    def settle(self) -> None:
        self._stage.settle()

    def watch_edits(self) -> None:
        self._checksum = self._parameters_checksum()

    def edited(self) -> bool:
        if self._checksum is None:
            return False
        return not self._at_home() or self._checksum != self._parameters_checksum()

    def _parameters_checksum(self) -> int:
        # Whole numbers add up to the same sum in any order; flat buffers are padded to multiples of these.
        return sum(int(flat.view(torch.int64).sum()) for flat in self._stage.flat)

    # -- pushes out --------------------------------------------------------------------------------------------------

    def add(self, samples: int, *, last: bool) -> None:
        """The gradients as of the last look belong to the push."""
        if self._absent:
            zeros = self._zeros[self._gathered]
            unknown = [place for place in self._absent if place not in zeros]
            if unknown:
                torch._foreach_zero_([self._views[place] for place in unknown])
                zeros.update(unknown)
        absent = frozenset(self._absent)
        self._missing = self._missing & absent if self._samples else absent
        self._samples += samples
        if not last or self._summed:
            self._add_to_sum(samples)
        if last and self._summed:
            self._fold()

    def _add_to_sum(self, samples: int) -> None:
        gathered = self._gathered.flat
        if self._sum is None:
            self._sum = [torch.empty_like(flat, dtype=_summing_dtype(flat.dtype)) for flat in gathered]
        for total, flat in zip(self._sum, gathered, strict=True):
            if self._summed:
                total.add_(flat, alpha=samples)
            else:
                total.copy_(flat).mul_(samples)
        self._summed += samples

    def _fold(self) -> None:
        """The mean over all pieces takes the last one's place in the slot."""
        if self._sum is None:
            return
        for total, flat in zip(self._sum, self._gathered.flat, strict=True):
            torch.div(total, self._summed, out=flat)
        self._summed = 0
        self._zeros[self._gathered] = set(self._missing)
        self.mark()

    def forget(self) -> None:
        self._missing, self._samples, self._summed = frozenset(), 0, 0

    def take(self, loss: float | None) -> Gradient | None:
        if not self._samples:
            return None
        if self._summed:  # the pieces that were to follow were skipped
            self._fold()
        missing = self._missing
        self.forget()
        if self._extends:  # the server adds the held push to this one, in this slot
            self._zeros[self._gathered].clear()
        slot = self.region.slots[self._slot]
        change: Changes = []
        finite = True
        if self._buffer_homes:
            change, finite = write_changes(self._stage.read_buffers(self.buffers), self.region.buffers, slot.changes)
        norm = _norm(self._gathered.flat) if finite else math.nan
        self._stage.deliver(self._slot, missing, extends=self._extends)
        return Gradient(slot.flat, missing, self.options(), change, loss, norm, self._slot, slot.views)


def _bring(homes: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy what is not there already."""
    for home, value in zip(homes, values, strict=True):
        if home is not value:
            home.copy_(value)


def _summing_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALVES else dtype


def _norm(flat: Sequence[torch.Tensor]) -> float:
    norms = [_single_norm(part) for part in flat]
    return norms[0] if len(norms) == 1 else math.hypot(*norms)


def _single_norm(flat: torch.Tensor) -> float:
    half = flat.dtype in HALVES  # whose norm may lie beyond their range
    norm = torch.linalg.vector_norm(flat, dtype=torch.float32) if half else torch.linalg.vector_norm(flat)
    return float(norm.item())
