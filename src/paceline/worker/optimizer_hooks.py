"""The calls of a prepared optimizer that paceline takes over or counts: `step`, `zero_grad`, `add_param_group`.

The module is not hooked, so that it can be copied and pickled; its own `zero_grad` shows in the gradients.
"""

import types
from collections.abc import Callable
from typing import Any

import torch

from paceline.core.errors import UserError


def take_over(
    optimizer: torch.optim.Optimizer,
    step: Callable[..., Any],
    on_zero_grad: Callable[[], None],
    *,
    fixed: bool,
) -> None:
    """Make `step` the optimizer's method of that name, and call `on_zero_grad` after its `zero_grad`.

    `fixed`: its groups are described to a server, so that none can be added any more.
    """
    zero_in_place = optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        if set_to_none:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            zero_in_place(set_to_none=False)
        on_zero_grad()

    def add_param_group(_: Any) -> None:
        raise UserError("add_param_group() was called after prepare(): add all groups before it")

    if fixed:
        optimizer.add_param_group = add_param_group  # type: ignore[method-assign,assignment]
    # Schedulers look for this mark to tell their own wrapper from a step that someone else replaced.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer._opt_called = True  # type: ignore[attr-defined]
    # A fused optimizer offers to unscale gradients in its step; a GradScaler must do that before the push.
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def count_steps(
    optimizer: torch.optim.Optimizer, on_step: Callable[[], None], on_zero_grad: Callable[[], None]
) -> None:  # fmt: skip
    """Call `on_step` after each step that the optimizer makes itself, and `on_zero_grad` after its `zero_grad`.

    Neither may hold what is to go before the optimizer does: the optimizer keeps them.
    """
    zero_grad = optimizer.zero_grad

    def zeroed(set_to_none: bool = True) -> None:
        zero_grad(set_to_none=set_to_none)
        on_zero_grad()

    optimizer.register_step_post_hook(lambda *_: on_step())
    optimizer.zero_grad = zeroed  # type: ignore[method-assign]
