"""When the model is evaluated, and when its target is met.

A target is met by the mean of three evaluations in a row, at the middle one's time, so that one lucky draw does not end
a run. Evaluations come at even distances of the run's own measure, whatever number of versions a strategy makes of it.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.core.errors import OptionError, ScriptError
from paceline.core.settings import Every, Target
from paceline.model.store import Store

IN_A_ROW = 3
Evaluate = Callable[[Any], Mapping[str, float]]


class TargetWatch:
    """The last three evaluations of the target's metric."""

    def __init__(self, target: Target | None) -> None:
        self.target = target
        self.reached_at: float | None = None
        self._recent: deque[tuple[float, float]] = deque(maxlen=IN_A_ROW)

    def snapshot(self) -> dict[str, Any]:
        """The evaluations that still count, as plain data."""
        return {"reached_at": self.reached_at, "recent": [list(pair) for pair in self._recent]}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Go on from a snapshot."""
        self.reached_at = data["reached_at"]
        self._recent.extend((at, float(value)) for at, value in data["recent"])

    def record(self, at: float, metrics: Mapping[str, float]) -> bool:
        """Take an evaluation in; True if it completes the target."""
        if self.target is None or self.reached_at is not None:
            return False
        if self.target.metric not in metrics:
            names = ", ".join(sorted(metrics)) or "nothing"
            raise OptionError(f"the target is {self.target}, but evaluate() returns {names}")
        self._recent.append((at, metrics[self.target.metric]))
        if len(self._recent) < IN_A_ROW:
            return False
        mean = math.fsum(value for _, value in self._recent) / IN_A_ROW
        if not self.target.met(mean):
            return False
        self.reached_at = self._recent[IN_A_ROW // 2][0]
        return True


class Schedule:
    """Evaluations that are due by versions or epochs; those by seconds are the engine's to call."""

    def __init__(self, every: Every | None) -> None:
        self.every = every
        self._next = every.amount if every is not None else math.inf

    def catch_up(self, version: int, epochs: float) -> None:
        """Go on from this point of a run: what fell due before it was done."""
        self.due(version, epochs)

    def due(self, version: int, epochs: float) -> bool:
        """Whether an evaluation falls due at this version."""
        if self.every is None or self.every.unit == "s":
            return False
        done = version if self.every.unit == "v" else epochs
        if done + 1e-9 < self._next:
            return False
        self._next = (math.floor(done / self.every.amount + 1e-9) + 1) * self.every.amount
        return True


class Evaluator:
    """The user's evaluate function on a module of its own."""

    def __init__(self, module: torch.nn.Module, evaluate: Evaluate) -> None:
        self._module = module
        self._evaluate = evaluate
        self._parameters = [p.data for _, p in module.named_parameters()]
        self._buffers = [b for _, b in module.named_buffers()]

    def __call__(self, store: Store) -> dict[str, float]:
        """Numbers of the store's current version."""
        version = store.read()
        with torch.no_grad():
            for parameter, value in zip(self._parameters, store.layout.views(version.flat), strict=True):
                parameter.copy_(value)
            for buffer, value in zip(self._buffers, version.buffers, strict=True):
                buffer.copy_(value)
        return measure(self._evaluate, self._module)


def measure(evaluate: Evaluate, module: torch.nn.Module) -> dict[str, float]:
    """What the user's function makes of the module in eval mode, as numbers by name."""
    module.eval()
    try:
        with torch.no_grad():
            measured = evaluate(module)
        if not isinstance(measured, Mapping):
            raise TypeError(f'it must return numbers by name, such as {{"accuracy": 0.9}}, not {measured!r}')
        return {name: float(value) for name, value in measured.items()}
    except (Exception, SystemExit) as error:
        raise ScriptError(f"evaluate() raised {type(error).__name__}: {error}") from error
