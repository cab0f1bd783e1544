"""A worker's copy of the model in memory shared with the server.

The user's parameters *are* the region's: the server writes a version there before it grants work, so loading it moves
no byte. Gradients end up in the slot that the grant names, and `parameter.grad` becomes the slot's view: further
backward passes, in-place zeroing and clipping then work on the slot itself, and a push moves no byte either.

A hook copies a large gradient as soon as it is complete, while it is still in the processor's cache; its own memory is
free again before the next one comes. A hook costs some microseconds, so small gradients are copied all at once at the
next look (`news`). A look needs no hook to see what came: a gradient that is not the slot's view was set where there
was none, and the view counts the writes to it.

The worker writes only to the slot named last. A parameter without a gradient has zeros there; the replica remembers
which parts hold zeros, so that frozen layers cost nothing.

The server writes a version before it announces it. A worker that waits sees all of it. One that computes meanwhile may
read a mix of two versions, but only for a void grant, whose push is refused: before the grant that follows a
cancellation, and at the end of a phase. Once the server knows that a script left its loop, it writes no more to that
worker; until then, for the time of a message, the end of the phase may still replace the model that the script uses.
"""

import math
from collections.abc import Sequence, Set

import torch

from paceline.model.buffers import Changes, write_changes
from paceline.model.flat import master_dtype
from paceline.model.regions import SLOTS, Region, Slot
from paceline.model.spec import ModelSpec
from paceline.model.store import Gradient, Parameters, Unwritten, add_changes, buffer_norm
from paceline.transport.messages import OwnUpdate
from paceline.worker.replica import News, Replica

HOOKED = 1 << 15  # elements; from here on copying a gradient from the cache saves more than the hook costs


class Stage:
    """The tensors that a worker computes with: those of the region itself.

    The subclass `DeviceStage` is for a device with its own memory: `parameters`, `flat` and `gradients` are tensors on
    the device, `fetch` copies the region's version there and `deliver` copies the gradient into the region's slot.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        self.flat = region.flat
        self.parameters = region.parameters

    def gradients(self, slot: int) -> Slot:
        """Return the tensors in which the gradients of this slot's push are gathered."""
        return self.region.slots[slot]

    def publish(self) -> None:
        """Copy parameters into the region for the server."""

    @property
    def reads(self) -> bool:
        """Whether versions are copied to a device, which is possible from the server's own memory too."""
        return False

    def fetch(self, flat: Sequence[torch.Tensor]) -> None:
        """Load a version's parameters from these flat buffers."""
        if flat is not self.region.flat:
            _bring(self.region.flat, flat)

    def settle(self) -> None:
        """Finish reading the region: the server may write to it next."""

    def landed(self, slot: int, place: int) -> None:
        """Note that backward has completed one parameter's gradient; the script may still change it."""

    def deliver(self, slot: int, missing: Set[int], *, extends: bool) -> None:
        """Copy the complete gradient, with zeros for what is missing, to the region's slot for the server to read.

        `extends`: the server then adds a held push to it, in place.
        """

    def read_buffers(self, buffers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the module's buffers in memory where the region's can be subtracted from them."""
        return buffers

    def write_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """Copy the region's buffers to the module's."""
        with torch.no_grad():
            torch._foreach_copy_(list(buffers), self.region.buffers)


class SlotReplica(Replica):
    """The user's module with its parameters in a region."""

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
        self._zeros: dict[Slot, set[int]] = {slot: set() for slot in slots}  # parameters known to be zero there
        self._extends = False
        self._absent: list[int] = []  # parameters without gradient at the last look
        self._unwritten: Unwritten | None = None  # gradients that the slot does not have yet
        self._sum: list[torch.Tensor] | None = None  # of the pieces' gradients, each times its samples
        self._summed = 0  # samples in `_sum`
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

    # -- incoming gradients ------------------------------------------------------------------------------------------

    def _watches(self, parameter: torch.Tensor) -> bool:
        return parameter.numel() >= HOOKED

    def _on_backward(self, place: int, parameter: torch.Tensor) -> None:
        self.touched = True
        gradient, view = parameter.grad, self._views[place]
        # A gradient that is part of a graph may still be differentiated; the next look copies it.
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
        """Reset only `touched`: writes are counted from the last look."""
        self._write()
        self.touched = False

    def news(self, *, by_hand: bool = True) -> News:
        """Look for gradients; write counts show every write. `by_hand`: a push or another batch follows."""
        self._write()
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
            came, fresh = True, self._land(strays, later=by_hand and self._sent_from_slot) or fresh
        self._absent = absent
        self.touched = self._fresh = False
        if not came:
            return News.NONE
        return News.FRESH if fresh else News.ADDED

    def _land(self, strays: list[int], *, later: bool) -> bool:
        """Copy gradients from elsewhere into the slot; return whether one of them replaces another.

        `later`: large ones are copied while the push is sent, or before the script sees them again.
        """
        views, marks, parameters = self._views, self._marks, self.parameters
        homes = [views[place] for place in strays]
        values = [self._plain_gradient(place, parameters[place]) for place in strays]
        if later and any(value.numel() >= HOOKED for value in values):
            self._unwritten = Unwritten(zip(homes, values, strict=True))
        else:
            torch._foreach_copy_(homes, values)
        replaced = False
        for place, home in zip(strays, homes, strict=True):
            parameters[place].grad = home
            if marks[place] is not None:
                replaced = True
            marks[place] = home._version
        if self._zeros[self._gathered]:
            self._zeros[self._gathered].difference_update(strays)
        return replaced

    @property
    def _sent_from_slot(self) -> bool:
        return self.region.mirrored and self._gathered is self.region.slots[self._slot]

    def _write(self) -> None:
        if self._unwritten is not None:
            self._unwritten.write()
            self._unwritten = None

    def _plain_gradient(self, place: int, parameter: torch.Tensor) -> torch.Tensor:
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return self._dense(place)
        return gradient.detach() if gradient.requires_grad else gradient

    # -- incoming versions -------------------------------------------------------------------------------------------

    def values(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the region's own tensors, which the server sees without a copy."""
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
        self._checksum = self._pushed = None

    def add_own(self, own: OwnUpdate) -> None:
        pushed, self._pushed = self._pushed, None
        self._write()
        if pushed is not None and own.mass:
            with torch.no_grad():
                self._own_updates.add(self._stage.parameters, self._gathered.views, pushed, own)
                add_changes(self.region.buffers, pushed.buffer_change, own.mass)
        if self._buffer_homes:
            self._stage.write_buffers(self.buffers)
        if not self._at_home():
            self._move_in()
        self._checksum = None

    def use(self, slot: int, *, extends: bool) -> None:
        self._extends = extends
        self._write()
        if slot == self._slot:
            return
        before, gathered = self._views, self._stage.gradients(slot)
        self._slot, self._gathered, self._views = slot, gathered, gathered.views
        if gathered.views is before:
            return
        # After step() a script may still read its gradients, add to them, or zero them in place.
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

    @property
    def knows_edits(self) -> bool:
        return self._checksum is not None

    def edited(self) -> bool:
        if self._checksum is None:
            return False
        return not self._at_home() or self._checksum != self._parameters_checksum()

    def _parameters_checksum(self) -> int:
        # Integer sums do not depend on the order; flat buffers are padded to multiples of 8 bytes.
        return sum(int(flat.view(torch.int64).sum()) for flat in self._stage.flat)

    # -- outgoing pushes ---------------------------------------------------------------------------------------------

    def add(self, samples: int, *, last: bool) -> None:
        """Add the gradients as of the last look to the push."""
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
            self._write()
            self._add_to_sum(samples)
        if last and self._summed:
            self._fold()

    def _add_to_sum(self, samples: int) -> None:
        gathered = self._gathered.flat
        if self._sum is None:
            self._sum = [torch.empty_like(flat, dtype=master_dtype(flat.dtype)) for flat in gathered]
        for total, flat in zip(self._sum, gathered, strict=True):
            if self._summed:
                total.add_(flat, alpha=samples)
            else:
                total.copy_(flat).mul_(samples)
        self._summed += samples

    def _fold(self) -> None:
        """Replace the last piece in the slot by the mean over all pieces."""
        if self._sum is None:
            return
        for total, flat in zip(self._sum, self._gathered.flat, strict=True):
            torch.div(total, self._summed, out=flat)
        self._summed = 0
        self._zeros[self._gathered] = set(self._missing)
        self.mark()

    def forget(self) -> None:
        self._write()
        self._missing, self._samples, self._summed = frozenset(), 0, 0

    def take(self, loss: float | None) -> Gradient | None:
        if not self._samples:
            return None
        if self._summed:  # the script skipped the remaining pieces
            self._fold()
        missing, unwritten = self._missing, self._unwritten
        self._missing, self._samples, self._summed = frozenset(), 0, 0
        if self._extends:  # the server adds the held push to this one, in this slot
            self._zeros[self._gathered].clear()
        slot = self.region.slots[self._slot]
        change: Changes = []
        finite = True
        if self._buffer_homes:
            change, finite = write_changes(self._stage.read_buffers(self.buffers), self.region.buffers, slot.changes)
        norm: float | None = math.nan
        if finite:  # what is sent from the slot is measured by the server as it arrives
            norm = None if self._sent_from_slot else _norm(self._gathered.flat)
        self._stage.deliver(self._slot, missing, extends=self._extends)
        options = self.options()
        gradient = Gradient(slot.flat, missing, options, change, loss, norm, self._slot, slot.views, unwritten)
        self._remember(gradient)
        return gradient


def _bring(homes: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy each value to its home unless it is there already."""
    for home, value in zip(homes, values, strict=True):
        if home is not value:
            home.copy_(value)


def _norm(flat: Sequence[torch.Tensor]) -> float:
    norms = [buffer_norm(part) for part in flat]
    return norms[0] if len(norms) == 1 else math.hypot(*norms)
