"""A worker's copy of the model: it loads versions and returns gradients.

`Replica` is for links that pass tensors by reference; where both sides share memory, `SlotReplica` takes its place.
The loop calls `news` (did gradients come since the last look), `add` (add them to the push) and `take` (return the
push).
"""

import enum
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from paceline.core.errors import InternalError, OptionError, UserError
from paceline.model.buffers import difference
from paceline.model.flat import Layout
from paceline.model.mass_optimizer import NO_OPTIMIZER, GroupOptions, describe, group_options, is_plain, joined
from paceline.model.spec import ModelSpec
from paceline.model.store import Gradient, Parameters, add_changes
from paceline.transport.messages import OwnUpdate
from paceline.worker.own_updates import OwnUpdates

COMPILED = "_orig_mod."  # what torch.compile puts into the names of a module's parameters


class News(enum.IntEnum):
    """What happened to the gradients since the last look."""

    NONE = 0
    ADDED = 1  # gradients came or changed
    FRESH = 2  # the earlier gradients are gone, others came


def spec_of(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> ModelSpec:
    """Describe the model for the server; a compiled one under the names of the plain module. Without an optimizer the
    script steps itself."""
    named = list(model.named_parameters())
    if not named:
        raise OptionError("the model has no parameters: there is nothing to train")
    for name, parameter in named:
        if not parameter.is_floating_point():
            raise OptionError(
                f"parameter {name} has dtype {parameter.dtype}; only floating-point parameters can be trained: "
                "make it a buffer, or split it into real ones"
            )
    buffers = list(model.named_buffers())
    tensors = [tensor for _, tensor in [*named, *buffers]]
    places = {id(parameter): place for place, (_, parameter) in enumerate(named)}
    return ModelSpec(
        tuple((_plain(name), tuple(p.shape), str(p.dtype)) for name, p in named),
        tuple((_plain(name), tuple(b.shape), str(b.dtype)) for name, b in buffers),
        joined([describe(each, places) for each in optimizers]) if optimizers else NO_OPTIMIZER,
        _state_keys(model, tensors),
    )


class Replica:
    """The user's module and optimizer, with flat parameters."""

    steps_itself: ClassVar[bool] = False  # with the script's own optimizer: a node of a run without a server
    at_once: ClassVar[bool] = False  # each `step()` is the script's own: it runs by itself
    kept_as: ClassVar[str | None] = None  # the name of its own state in a worker's checkpoint

    def __init__(self, model: torch.nn.Module, optimizer: Any, spec: ModelSpec | None = None) -> None:
        """`optimizer` may be several optimizers' groups."""
        self.model = model
        self.optimizer = optimizer
        self.spec = spec or spec_of(model, optimizer)
        self.parameters = list(model.parameters())
        self.interrupted: Any = None  # the message or `Lost` that interrupted a node's exchange
        self.closed = False  # a node has sent its model to the phase's average: what it computes now is lost
        self.touched = False  # a hook saw a backward since the last look
        self.densified: str | None = None  # a parameter whose gradient was sparse, to warn about
        self._buffer_homes = _homes(model)
        self._values = [parameter.data for parameter in self.parameters]
        self.layout = Layout.of(self._values)
        self._read: Parameters | None = None
        self._base: list[torch.Tensor] = []  # the buffers of what it reads, with its own updates
        self._pushed: Gradient | None = None  # until the next version comes
        self._unedited: list[torch.Tensor] | None = None  # copies of parameters that are not those of `_read`
        self._ahead = False  # of `_read`, by its own updates
        self._own_updates = OwnUpdates(self.spec)
        self._writes: list[tuple[int, int]] = []
        self._marks: list[Any] = [None] * len(self.parameters)
        self._after_backward: list[Any] = [None] * len(self.parameters)  # each gradient then
        self._fresh = False
        self._flat: list[torch.Tensor] | None = None  # the mean over the pieces so far
        self._missing: frozenset[int] = frozenset()
        self._samples = 0
        # The options sent last, and the groups as they were then; None: read the options every time.
        self._options: tuple[Sequence[GroupOptions], list[GroupOptions] | None] = ((), None)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The module's current buffers: forward may replace the tensors."""
        return [home[name] for home, name in self._buffer_homes]

    # -- incoming gradients ------------------------------------------------------------------------------------------

    def watch_backward(self) -> None:
        """Register hooks that note when gradients come."""
        # The garbage collector does not see torch's hooks: one with a strong reference would keep the replica for ever.
        known = weakref.ref(self)

        def watch(place: int, parameter: torch.Tensor) -> None:
            def on_backward(parameter: torch.Tensor) -> None:
                replica = known()
                if replica is not None:
                    replica._on_backward(place, parameter)

            parameter.register_post_accumulate_grad_hook(on_backward)

        for place, parameter in enumerate(self.parameters):
            if parameter.requires_grad and self._watches(parameter):
                watch(place, parameter)

    def _watches(self, parameter: torch.Tensor) -> bool:  # noqa: ARG002 - a subclass may
        return True

    def _on_backward(self, place: int, parameter: torch.Tensor) -> None:
        if not self.touched:
            self._fresh = not _is_still(self._after_backward[place], parameter.grad)
            self.touched = True
        self._after_backward[place] = _seen(parameter.grad)

    def mark(self) -> None:
        """Remember the current gradients, to recognize those that come later."""
        self._marks = [_seen(p.grad) for p in self.parameters]
        self.touched = False

    def mark_batch(self) -> None:
        """Note that a batch is handed out: gradients from here on are its own."""
        self.mark()

    def note_step(self) -> None:
        """Note that the script's own optimizer has stepped on the current batch."""

    def news(self, *, by_hand: bool = True) -> News:
        """Return what came since the last mark or look; `by_hand` also counts gradients not set by a backward."""
        if self.touched:
            self.touched = False
            return News.FRESH if self._fresh else News.ADDED
        if by_hand:
            pairs = zip(self.parameters, self._marks, strict=True)
            if any(p.grad is not None and not _is_still(mark, p.grad) for p, mark in pairs):
                return News.ADDED
        return News.NONE

    # -- incoming versions -------------------------------------------------------------------------------------------

    def values(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return copies of parameters and buffers, for the server to start from."""
        return [v.detach().clone() for v in self._values], [b.detach().clone() for b in self.buffers]

    def load(self, version: Parameters) -> None:
        """Load a whole version."""
        with torch.no_grad():
            # Not `_values`: a script may have put other tensors in their place.
            torch._foreach_copy_([parameter.data for parameter in self.parameters], self.layout.views(version.flat))
            for buffer, value in zip(self.buffers, version.buffers, strict=True):
                buffer.copy_(value)
        self._read, self._base = version, version.buffers
        self._pushed, self._unedited, self._ahead = None, None, False

    def add_own(self, own: OwnUpdate) -> None:
        """Go on without a new version: do to the parameters and buffers that are here what the server did with the
        last push, by the same kernels, so that both change by the same bits."""
        pushed, self._pushed = self._pushed, None
        self._unedited, self._ahead = None, True
        with torch.no_grad():
            if pushed is not None and own.mass:
                views = self.layout.views(pushed.flat)
                self._own_updates.add([parameter.data for parameter in self.parameters], views, pushed, own)
                self._base = [buffer.clone() for buffer in self._base]  # other workers read the version's
                add_changes(self._base, pushed.buffer_change, own.mass)
            for buffer, value in zip(self.buffers, self._base, strict=True):
                buffer.copy_(value)

    def use(self, slot: int, *, extends: bool) -> None:
        """Write the next push to this slot; `extends`: the server adds a held push to it."""

    def introduce(self) -> None:
        """Send what a node of a run without a server sends after its `Welcome`."""

    def handle(self, message: object) -> bool:  # noqa: ARG002 - only nodes know of each other
        """Deal with a message about other nodes; return whether it was one."""
        return False

    def on_grant(self, work: object) -> float:  # noqa: ARG002 - only nodes use it
        """Prepare for a grant; return the seconds that passed before computing could begin."""
        return 0.0

    def on_computed(self, compute_s: float, loss: float | None) -> None:
        """Finish a grant's computation: a node exchanges here."""

    def leave(self) -> None:
        """Leave the phase before its end, as the script did."""

    def drop_step(self) -> None:
        """Make no step of the grant: a node handles what had arrived for it."""

    def idle(self) -> None:
        """Do what can be done before waiting for the coordinator: a node reads its messages."""

    @property
    def reads(self) -> bool:
        """Whether versions are copied to a device, which is possible from the server's own memory too."""
        return False

    def settle(self) -> None:
        """Finish reading the loaded version: the server may write the next one."""

    def watch_writes(self) -> None:
        """Prepare for `rewritten`: remember torch's count of writes to each parameter, and where it lies."""
        self._writes = [(parameter._version, parameter.data_ptr()) for parameter in self.parameters]

    def rewritten(self) -> str | None:
        """Return the name of a parameter that the script has written to or replaced since; None if there is none."""
        if self.steps_itself:
            return None
        for place, (parameter, known) in enumerate(zip(self.parameters, self._writes, strict=False)):
            if (parameter._version, parameter.data_ptr()) != known:
                return self.spec.parameters[place][0]
        return None

    def require_unmoved(self) -> None:
        """Refuse a model that the script has moved or whose precision it has changed since it was prepared."""
        for parameter, value, (name, _, _) in zip(self.parameters, self._values, self.spec.parameters, strict=True):
            if (parameter.dtype, parameter.device) != (value.dtype, value.device):
                raise UserError(
                    f"parameter {name} is {parameter.dtype} on {parameter.device} and was {value.dtype} on "
                    f"{value.device} when it was prepared: call model.to(...), half() or cuda() before prepare()"
                )

    @property
    def knows_edits(self) -> bool:
        """Whether `edited` can tell."""
        return self._read is not None and (not self._ahead or self._unedited is not None)

    def watch_edits(self) -> None:
        """Prepare for `edited`: remember the parameters as they are without a change of the script's."""
        if self._ahead:
            self._unedited = [parameter.detach().clone() for parameter in self.parameters]

    def edited(self) -> bool:
        """Return whether the script has changed the parameters, as far as it is known."""
        if self._read is None or not self.knows_edits:
            return False
        pairs = zip(self.parameters, self._unedited or self.layout.views(self._read.flat), strict=True)
        return not all(torch.equal(parameter.detach().to(read.device), read) for parameter, read in pairs)

    def model_copy(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return copies of what the script's model holds, in main memory."""
        tensors = ([parameter.detach() for parameter in self.parameters], self.buffers)
        values, buffers = ([tensor.to("cpu", copy=True) for tensor in group] for group in tensors)
        return values, buffers

    # -- outgoing pushes ---------------------------------------------------------------------------------------------

    def add(self, samples: int, *, last: bool) -> None:  # noqa: ARG002 - every piece is added in the same way here
        """Add the gradient in `parameter.grad`, the mean over this many samples, to the push."""
        missing = frozenset(place for place, p in enumerate(self.parameters) if p.grad is None)
        flat = self.layout.zeros()
        views = self.layout.views(flat)
        present = [place for place in range(len(views)) if place not in missing]
        with torch.no_grad():
            torch._foreach_copy_([views[i] for i in present], [self._dense(i) for i in present])
        if self._flat is None:
            self._flat, self._missing, self._samples = flat, missing, samples
            return
        total = self._samples + samples
        for summed, piece in zip(self._flat, flat, strict=True):
            summed.mul_(self._samples / total).add_(piece, alpha=samples / total)
        self._missing &= missing
        self._samples = total

    def _dense(self, place: int) -> torch.Tensor:
        gradient = self.parameters[place].grad
        if gradient is None:
            raise InternalError(f"the gradient of parameter {self.spec.parameters[place][0]} went away during step()")
        if gradient.layout == torch.strided:
            return gradient
        self.densified = self.spec.parameters[place][0]
        return gradient.to_dense()

    def forget(self) -> None:
        """Drop the pieces added since the last push."""
        self._flat, self._missing, self._samples = None, frozenset(), 0

    def take(self, loss: float | None) -> Gradient | None:
        """Return the push made of the added pieces; None if there were none."""
        flat, missing = self._flat, self._missing
        self.forget()
        if flat is None:
            return None
        change = [_change(buffer, before) for buffer, before in zip(self.buffers, self._base, strict=True)]
        gradient = Gradient(flat, missing, self.options(), change, loss)
        self._remember(gradient)
        return gradient

    def _remember(self, gradient: Gradient) -> None:
        """Keep a push until the next version comes, if its update can be made here too."""
        self._pushed = gradient if is_plain(self.spec.optimizer, gradient.options) else None

    def options(self) -> Sequence[GroupOptions]:
        """Return the options of each group; the same object as long as they do not change."""
        groups, (options, known) = self.optimizer.param_groups, self._options
        if known is None or len(known) != len(groups) or not all(map(_same_group, groups, known)):
            options = group_options(self.optimizer)
            values = [value for group in groups for key, value in group.items() if key != "params"]
            # A tensor may be changed in place, which comparing it with itself would not show.
            changeable = any(isinstance(value, torch.Tensor) for value in values)
            self._options = options, None if changeable else [dict(group) for group in groups]
        return options


def _seen(gradient: torch.Tensor | None) -> tuple[int, Any] | None:
    """Remember which tensor this is, without keeping its memory."""
    # The identity alone would not do: a tensor that is made later may have it once this one is freed.
    return None if gradient is None else (id(gradient), torch._C._WeakTensorRef(gradient))  # type: ignore[attr-defined]


def _is_still(seen: tuple[int, Any] | None, gradient: torch.Tensor | None) -> bool:
    """Check whether this is the tensor that was seen."""
    return seen is not None and seen[0] == id(gradient) and not seen[1].expired()


def _same_group(group: GroupOptions, known: GroupOptions) -> bool:
    return group["params"] is known["params"] and group == known


def _change(buffer: torch.Tensor, read: torch.Tensor) -> torch.Tensor | None:
    """Return the change of a buffer, of a counter its value; None if it did not change."""
    if torch.equal(buffer, read):
        return None
    if not (buffer.is_floating_point() or buffer.is_complex()):
        return buffer.clone()
    return difference(buffer, read)


def _homes(model: torch.nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return each buffer's owning dict and key, in the order of `named_buffers`."""
    homes: list[tuple[dict[str, Any], str]] = []
    for name, _ in model.named_buffers():
        path, _, attribute = name.rpartition(".")
        homes.append((model.get_submodule(path)._buffers, attribute))
    return homes


def _plain(name: str) -> str:
    return name.replace(COMPILED, "")


def _state_keys(model: torch.nn.Module, tensors: list[torch.Tensor]) -> tuple[tuple[str, int], ...]:
    """Map each key of the `state_dict` to its tensor's index; tied parameters have several keys."""
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    named: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    named.update(model.named_buffers(remove_duplicate=False))
    return tuple((_plain(key), places[id(named[key])]) for key in model.state_dict() if key in named)


def has_batch_statistics(model: torch.nn.Module) -> bool:
    """Return whether the model has BatchNorm layers, which cannot be trained on a single sample."""
    return any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in model.modules())
