"""Run the user's evaluate function on a separate module in eval mode."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.core.errors import ScriptError
from paceline.model.store import Store

Evaluate = Callable[[Any], Mapping[str, float]]


class Evaluator:
    """Evaluates versions of a store inside this process."""

    def __init__(self, module: torch.nn.Module, evaluate: Evaluate) -> None:
        self._module = module
        self._evaluate = evaluate
        self._parameters = [p.data for _, p in module.named_parameters()]
        self._buffers = [b for _, b in module.named_buffers()]

    def __call__(self, store: Store) -> dict[str, float]:
        """Return the metrics of the store's current version."""
        version = store.read()
        with torch.no_grad():
            for parameter, value in zip(self._parameters, store.layout.views(version.flat), strict=True):
                parameter.copy_(value)
            for buffer, value in zip(self._buffers, version.buffers, strict=True):
                buffer.copy_(value)
        return measure(self._evaluate, self._module)


def measure(evaluate: Evaluate, module: torch.nn.Module) -> dict[str, float]:
    """Call the user's function on the module in eval mode; return its metrics by name."""
    module.eval()
    try:
        with torch.no_grad():
            measured = evaluate(module)
        if not isinstance(measured, Mapping):
            raise TypeError(f'it must return numbers by name, such as {{"accuracy": 0.9}}, not {measured!r}')
        return {name: float(value) for name, value in measured.items()}
    except (Exception, SystemExit) as error:
        raise ScriptError(f"evaluate() raised {type(error).__name__}: {error}") from error
