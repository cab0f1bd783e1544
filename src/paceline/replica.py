"""A worker's copy of the model: it takes versions in and hands gradients out."""

from typing import Any

import torch

from paceline.errors import OptionError
from paceline.flat import Layout
from paceline.optimizers import describe, group_options
from paceline.store import Gradient, ModelSpec, Parameters


class Replica:
    """The user's module and optimizer, seen as flat parameters."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        named = list(model.named_parameters())
        if not named:
            raise OptionError("the model has no parameters: there is nothing to train")
        for name, parameter in named:
            if not parameter.is_floating_point():
                raise OptionError(
                    f"parameter {name} has dtype {parameter.dtype}; floating-point parameters can be trained: make it "
                    "a buffer, or split it into real ones"
                )
        self.parameters = [parameter for _, parameter in named]
        self._buffer_homes = _homes(model)
        self._values = [parameter.data for parameter in self.parameters]
        self.layout = Layout.of(self._values)
        self._read_buffers: list[torch.Tensor] = []
        self._read: Parameters | None = None
        self._marks: list[int | None] = [None] * len(self.parameters)
        self._flat: list[torch.Tensor] | None = None  # the sum of the pieces so far
        self._missing: frozenset[int] = frozenset()
        self._samples = 0
        self.spec = ModelSpec(
            tuple((name, tuple(p.shape), str(p.dtype)) for name, p in named),
            tuple((name, tuple(b.shape), str(b.dtype)) for name, b in model.named_buffers()),
            describe(optimizer, {id(parameter): place for place, (_, parameter) in enumerate(named)}),
            _state_keys(model, [*self.parameters, *self.buffers]),
        )

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The module's buffers as they are at the moment: forward may put other tensors in their place."""
        return [getattr(home, name) for home, name in self._buffer_homes]

    def mark_gradients(self) -> None:
        """Remember which gradients are there, to tell those that come later."""
        self._marks = [None if p.grad is None else id(p.grad) for p in self.parameters]

    def has_new_gradients(self) -> bool:
        """Whether a gradient is there that was not when they were marked."""
        pairs = zip(self.parameters, self._marks, strict=True)
        return any(p.grad is not None and id(p.grad) != mark for p, mark in pairs)

    def edited(self) -> bool:
        """Whether the parameters are no longer those of the version that was read."""
        if self._read is None:
            return False
        return not all(map(torch.equal, self._values, self.layout.views(self._read.flat)))

    def values(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Copies of parameters and buffers."""
        return [v.detach().clone() for v in self._values], [b.detach().clone() for b in self.buffers]

    def load(self, version: Parameters) -> None:
        """Take a whole version in."""
        with torch.no_grad():
            torch._foreach_copy_(self._values, self.layout.views(version.flat))
            for buffer, value in zip(self.buffers, version.buffers, strict=True):
                buffer.copy_(value)
        self._read = version
        self._read_buffers = version.buffers

    def add(self, samples: int) -> None:
        """The gradient in `parameter.grad` is the mean over this many samples: add it to the push."""
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
        assert gradient is not None  # the caller leaves the missing ones out
        return gradient.to_dense() if gradient.layout != torch.strided else gradient

    def forget(self) -> None:
        """Drop what was added since the last push."""
        self._flat, self._missing, self._samples = None, frozenset(), 0

    def take(self, loss: float | None) -> Gradient | None:
        """The push that the pieces make, or None if there were none."""
        flat, missing = self._flat, self._missing
        self.forget()
        if flat is None:
            return None
        change = [_change(buffer, read) for buffer, read in zip(self.buffers, self._read_buffers, strict=True)]
        return Gradient(flat, missing, group_options(self.optimizer), change, loss)


def _change(buffer: torch.Tensor, read: torch.Tensor) -> torch.Tensor | None:
    """How a buffer moved; None if it did not. Masks hold infinities, whose difference would be no number."""
    if torch.equal(buffer, read):
        return None
    if not (buffer.is_floating_point() or buffer.is_complex()):
        return buffer.clone()
    return torch.where(buffer == read, torch.zeros_like(buffer), buffer - read)


def _homes(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """The module and attribute of every buffer, in the order of `named_buffers`."""
    homes = []
    for name, _ in model.named_buffers():
        path, _, attribute = name.rpartition(".")
        homes.append((model.get_submodule(path), attribute))
    return homes


def _state_keys(model: torch.nn.Module, tensors: list[torch.Tensor]) -> tuple[tuple[str, int], ...]:
    """Which of the tensors each key of the `state_dict` stands for, tied parameters under all of their names."""
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    named: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    named.update(model.named_buffers(remove_duplicate=False))
    return tuple((key, places[id(named[key])]) for key in model.state_dict() if key in named)


def has_batch_statistics(model: torch.nn.Module) -> bool:
    """BatchNorm layers cannot be trained on a single sample."""
    return any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in model.modules())
