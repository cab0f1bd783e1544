"""A child's start without torch's compiler.

Torch marks some methods of its optimizers as not to be compiled, and the mark imports the whole compiler when an
optimizer is made or saved: 2.3 s of processor time in each of a run's processes, beside 2.0 s for torch itself. Without
the mark the methods are the same; a script that compiles its model imports the compiler then. Inside a compiled
function, where the mark would matter, nobody adds parameter groups or zeroes gradients of an optimizer that a parameter
server steps.

A node of a run without a server makes its steps itself, and there the wrapper of every optimizer's `step` does the
same. It turns gradients off, which stays, and tells the compiler to break its graph, which matters to a compiled
`step()` alone.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

MARKED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
LEFT = "LBFGS"  # has another wrapper


def leave_compiler_out() -> None:
    """Take the marks off."""
    for name in MARKED:
        method = getattr(torch.optim.Optimizer, name)
        setattr(torch.optim.Optimizer, name, getattr(method, "__wrapped__", method))
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind.__name__ != LEFT:
            inner = getattr(vars(kind).get("step"), "__wrapped__", None)
            if inner is not None:
                kind.step = _without_gradients(inner)  # type: ignore[method-assign]


def _without_gradients(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def plain(self: torch.optim.Optimizer, *given: Any, **named: Any) -> Any:
        with torch.set_grad_enabled(bool(self.defaults["differentiable"])):
            return step(self, *given, **named)

    return plain
