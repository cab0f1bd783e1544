"""A child's start without torch's compiler.

Torch marks two methods of its optimizers as not to be compiled, and the mark imports the whole compiler when an
optimizer is made: 2.3 s of processor time in each of a run's processes, beside 2.0 s for torch itself. Without the mark
the methods are the same; a script that compiles its model imports the compiler then. Inside a compiled function, where
the mark would matter, nobody adds parameter groups or zeroes gradients of an optimizer that a parameter server steps.
"""

import torch

MARKED = ("add_param_group", "zero_grad")


def leave_compiler_out() -> None:
    """Take the marks off."""
    for name in MARKED:
        method = getattr(torch.optim.Optimizer, name)
        setattr(torch.optim.Optimizer, name, getattr(method, "__wrapped__", method))
