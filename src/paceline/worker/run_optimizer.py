"""A script's optimizer shows the state of the run's, and takes a state over into it.

Steps are made where the weights are, so the moments and counts of an optimizer are there too. `state_dict()` fetches
them when it is called. `load_state_dict()` sends what it has loaded; since all workers run the same script, worker 0's
counts. Between two calls the script's own optimizer holds no state, which would be a copy in every worker.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.transport.messages import Number, OptimizerHeld
from paceline.worker.state import WorkerState

Load = Callable[[dict[str, torch.Tensor], dict[str, Number]], None]
STEP = "step"  # torch keeps it in main memory


class RunOptimizer:
    """Takes the place of an optimizer's `state_dict` and `load_state_dict`."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Callable[[], Sequence[torch.Tensor]], state: WorkerState,
        ask: Callable[[], OptimizerHeld], load: Load, check: Callable[[], None],
    ) -> None:  # fmt: skip
        """`parameters` returns all of the run's, in its order; `check` raises where a load has no meaning."""
        self._optimizer = optimizer
        self._parameters = parameters
        self._state = state
        self._ask, self._load, self._check = ask, load, check
        self._own_state_dict, self._own_load = optimizer.state_dict, optimizer.load_state_dict
        optimizer.state_dict = self.state_dict  # type: ignore[method-assign]
        optimizer.load_state_dict = self.load_state_dict  # type: ignore[method-assign]

    def state_dict(self) -> dict[str, Any]:
        """Return what torch's does, with the state of the run's optimizer."""
        if self._state.busy:  # a checkpoint has that state already, and wants the options
            return self._own_state_dict()
        held, parameters = self._ask(), self._parameters()
        own = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        for key, value in [*held.tensors.items(), *held.numbers.items()]:
            position, _, name = key.partition(".")
            parameter = parameters[int(position)]
            if id(parameter) not in own:
                continue  # another optimizer's
            if isinstance(value, torch.Tensor):
                value = value.to("cpu" if name == STEP else parameter.device, copy=True)
            self._optimizer.state[parameter][name] = value
        found = self._own_state_dict()
        self._optimizer.state.clear()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load it as torch does, and have the run's optimizer go on from there."""
        if not self._state.busy:
            self._check()
        self._own_load(state_dict)
        if not self._state.busy:
            self.hand_over()

    def hand_over(self) -> None:
        """Send the state that the script's optimizer has, and forget it here."""
        tensors: dict[str, torch.Tensor] = {}
        numbers: dict[str, Number] = {}
        for position, parameter in enumerate(self._parameters()):
            for name, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{position}.{name}"] = value.detach().to("cpu", copy=True)
                else:
                    numbers[f"{position}.{name}"] = value
        self._optimizer.state.clear()
        self._load(tensors, numbers)
