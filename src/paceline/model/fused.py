"""Torch's fused CPU kernels, called without torch.optim's bookkeeping.

`torch.optim.Optimizer.step` takes several times as long as the arithmetic of a small model. This module passes the
kernels the same tensors, options and state as it would, in the same order, so results are bitwise equal; state stays
in the torch optimizer's own `state`, under torch's names. Gradients are arguments: a push is read where it lies, and
`parameter.grad` is never set.
"""

from collections.abc import Sequence
from typing import Any

import torch

Gradients = Sequence[torch.Tensor | None]  # by position; None: skip this parameter


class KernelGroup:
    """Parameters of one group and one dtype, for one kernel call."""

    def __init__(self, optimizer: torch.optim.Optimizer, positions: list[int], parameters: list[torch.Tensor]) -> None:
        self.positions = positions
        self.parameters = parameters
        self.state = optimizer.state
        self.states: dict[str, list[torch.Tensor]] = {}  # by name, filled once every parameter has that state

    def present(self, gradients: Gradients) -> tuple[list[torch.Tensor], list[torch.Tensor], bool]:
        """Return the parameters that have a gradient, their gradients, and whether all have one."""
        found = [gradient for position in self.positions if (gradient := gradients[position]) is not None]
        if len(found) == len(self.positions):
            return self.parameters, found, True
        pairs = zip(self.positions, self.parameters, strict=True)
        return [p for position, p in pairs if gradients[position] is not None], found, False

    def of(self, parameters: list[torch.Tensor], name: str, whole: bool) -> list[torch.Tensor]:
        """Return the state of this name; cached for the usual case that all parameters have a gradient."""
        if not whole:
            return [self.state[p][name] for p in parameters]
        known = self.states.get(name)
        if known is None:
            known = self.states[name] = [self.state[p][name] for p in parameters]
        return known


class FusedSgd(KernelGroup):
    """torch.optim.SGD."""

    def __call__(self, group: dict[str, Any], gradients: Gradients) -> None:
        parameters, given, whole = self.present(gradients)
        if not parameters:
            return
        if not group["momentum"]:
            _sgd(group, parameters, given, [], False)
            return
        if whole and self.states:
            _sgd(group, parameters, given, self.of(parameters, "momentum_buffer", True), False)
            return
        # The kernel's `is_first_step` holds for all its parameters, so those with a first gradient get their own call.
        known = [i for i, p in enumerate(parameters) if "momentum_buffer" in self.state[p]]
        fresh = sorted(set(range(len(parameters))) - set(known))
        for i in fresh:
            self.state[parameters[i]]["momentum_buffer"] = torch.empty_like(parameters[i])
        for places, first in ((known, False), (fresh, True)):
            chosen = [parameters[i] for i in places]
            if chosen:
                buffers = self.of(chosen, "momentum_buffer", False)
                _sgd(group, chosen, [given[i] for i in places], buffers, first)
        if whole:
            self.of(parameters, "momentum_buffer", True)


def _sgd(
    group: dict[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor], buffers: list[torch.Tensor],
    first: bool,
) -> None:  # fmt: skip
    torch._fused_sgd_(
        parameters, gradients, buffers, weight_decay=group["weight_decay"], momentum=group["momentum"], lr=group["lr"],
        dampening=group["dampening"], nesterov=group["nesterov"], maximize=group["maximize"], is_first_step=first,
    )  # fmt: skip


class FusedAdam(KernelGroup):
    """torch.optim.Adam and AdamW."""

    def __call__(self, group: dict[str, Any], gradients: Gradients) -> None:
        parameters, given, whole = self.present(gradients)
        if not parameters:
            return
        amsgrad = group["amsgrad"]
        if not (whole and self.states):
            for parameter in parameters:
                _begin(self.state[parameter], parameter, amsgrad)
        steps = self.of(parameters, "step", whole)
        torch._foreach_add_(steps, 1)
        kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        beta1, beta2 = group["betas"]
        kernel(
            parameters, given, self.of(parameters, "exp_avg", whole), self.of(parameters, "exp_avg_sq", whole),
            self.of(parameters, "max_exp_avg_sq", whole) if amsgrad else [], steps, amsgrad=amsgrad, lr=group["lr"],
            beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"], maximize=group["maximize"],
        )  # fmt: skip


def _begin(state: dict[str, Any], parameter: torch.Tensor, amsgrad: bool) -> None:
    """Initialize the state of a parameter with its first gradient, as torch does."""
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
        state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
        if amsgrad:
            state["max_exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)


KERNELS: dict[str, type[FusedSgd] | type[FusedAdam]] = {"SGD": FusedSgd, "Adam": FusedAdam, "AdamW": FusedAdam}
