"""Several optimizers over parts of one flat model, stepped together."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.model.mass_optimizer import Gradients, GroupOptions, MassOptimizer, OptimizerSpec


def make_optimizer(spec: OptimizerSpec, parameters: Sequence[torch.Tensor]) -> "MassOptimizer | JointOptimizer":
    """Make the optimizer of a spec, or all of them."""
    return JointOptimizer(spec, parameters) if spec.counts else MassOptimizer(spec, parameters)


class JointOptimizer:
    """Behaves as one `MassOptimizer`. An optimizer whose parameters have no gradient in an update makes no step."""

    def __init__(self, spec: OptimizerSpec, parameters: Sequence[torch.Tensor]) -> None:
        self.spec = spec
        self._parts = [MassOptimizer(part, parameters) for part in spec.split()]
        ends = list(itertools.accumulate(spec.counts))
        self._ranges = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        self._places = [{place for members in part.spec.members for place in members} for part in self._parts]
        notices = dict.fromkeys(part.notice for part in self._parts if part.notice is not None)
        self.notice = "; ".join(notices) or None

    def scale_rate(self, factor: float) -> None:
        """Multiply every learning rate that pushes bring by this factor."""
        for part in self._parts:
            part.scale_rate(factor)

    def multiplies_gradients(self, mass: float, options: Sequence[GroupOptions], *, stock: bool) -> bool:
        """Return whether `step` writes to its gradients; if so, the caller must pass a copy."""
        parts = zip(self._parts, self._ranges, strict=True)
        return any(part.multiplies_gradients(mass, options[own], stock=stock) for part, own in parts)

    def step(self, mass: float, options: Sequence[GroupOptions], *, stock: bool, gradients: Gradients) -> None:
        """Advance the time of each optimizer that has gradients by `mass` rounds."""
        for part, own, places in zip(self._parts, self._ranges, self._places, strict=True):
            mine = [gradient if place in places else None for place, gradient in enumerate(gradients)]
            if any(gradient is not None for gradient in mine):
                part.step(mass, options[own], stock=stock, gradients=mine)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the state of all as a script sees it."""
        tensors: dict[str, torch.Tensor] = {}
        numbers: dict[str, Any] = {}
        for part in self._parts:
            more, others = part.state()
            tensors |= more
            numbers |= others
        return tensors, numbers

    def load(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Continue from a state that a script has loaded into one of them, or into several."""
        for part, places in zip(self._parts, self._places, strict=True):
            mine, own = _of(places, tensors), _of(places, numbers)
            if mine or own:
                part.load(mine, own)

    def snapshot(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the tensors of all, not copied, and the rest as plain data."""
        taken = [part.snapshot() for part in self._parts]
        tensors = {key: value for found, _ in taken for key, value in found.items()}
        return tensors, {"name": self.spec.name, "parts": [data for _, data in taken]}

    def restore(self, tensors: Mapping[str, torch.Tensor], data: Mapping[str, Any]) -> None:
        """Continue from a snapshot."""
        for part, places, own in zip(self._parts, self._places, data["parts"], strict=True):
            part.restore(_of(places, tensors), own)


def _of(places: set[int], values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if int(key.partition(".")[0]) in places}
