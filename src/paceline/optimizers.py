"""Stock torch optimizers under the mass rule.

An Apply of mass m is a fractional optimizer step: it advances the optimizer's own time by m rounds. The learning rate
is multiplied by m and every per-step decay is raised to the power m, so that a learning rate and a momentum mean the
same thing whether a round is one step of mass 1 or n steps of mass 1/n. With momentum mu the exact form is
`v <- mu^m v + a g`, `a = (1 - mu^m) / (1 - mu)`, `w <- w - lr m v`, which stock SGD performs when gradient and weight
decay are multiplied by `a`; its dampening is left alone, since torch ignores it on the first step and refuses it with
Nesterov. Adam's bias correction counts mass instead of steps: its `step` is set to M/m - 1, M being the mass so far.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from paceline.errors import OptionError

EXACT = ("SGD", "Adam", "AdamW")  # the mass rule in full
SCALED = ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")  # element-wise: lr times m
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
GroupOptions = dict[str, Any]


class OptimizerSpec(msgspec.Struct, frozen=True):
    """An optimizer as it travels: its class name in torch.optim, and the options and parameters of each group."""

    name: str
    groups: tuple[GroupOptions, ...]
    members: tuple[tuple[int, ...], ...]  # positions in the model's list of parameters, per group


def describe(optimizer: torch.optim.Optimizer, positions: dict[int, int]) -> OptimizerSpec:
    """The spec of a user's optimizer; `positions` maps a parameter's id to its place in the model."""
    name = type(optimizer).__name__
    if getattr(torch.optim, name, None) is not type(optimizer) or name not in EXACT + SCALED:
        usable = ", ".join(EXACT + SCALED)
        raise OptionError(
            f"optimizer {type(optimizer).__module__}.{name} cannot run on a parameter server; use one of torch.optim's "
            f"element-wise ones: {usable}"
        )
    members = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in positions:
                raise OptionError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's; give "
                    "prepare() a module that contains it"
                )
        members.append(tuple(positions[id(parameter)] for parameter in group["params"]))
    return OptimizerSpec(name, tuple(group_options(optimizer)), tuple(members))


def group_options(optimizer: torch.optim.Optimizer) -> list[GroupOptions]:
    """The options of each group as plain data."""
    return [{key: _plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def build(spec: OptimizerSpec, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """The server's own optimizer over its own parameters, fused where torch can."""
    cls = getattr(torch.optim, spec.name)
    accepted = set(inspect.signature(cls).parameters)
    groups = []
    for options, members in zip(spec.groups, spec.members, strict=True):
        known = {key: value for key, value in options.items() if key in accepted}
        known.pop("foreach", None)
        known.pop("differentiable", None)  # nobody differentiates through the server's step
        known.pop("fused", None)
        if spec.name in FUSED:
            known["fused"] = True
        groups.append({"params": [parameters[i] for i in members], **known})
    optimizer: torch.optim.Optimizer = cls(groups)
    return optimizer


def mean_options(options: Sequence[Sequence[GroupOptions]], samples: Sequence[int]) -> Sequence[GroupOptions]:
    """The groups' options of several pushes, numbers averaged by samples."""
    first = options[0]
    if all(other is first or other == first for other in options[1:]):
        return first
    total = sum(samples)
    if not total:
        return first
    shares = [count / total for count in samples]
    return [{key: _mean([push[g][key] for push in options], shares) for key in first[g]} for g in range(len(first))]


def _mean(values: list[Any], shares: list[float]) -> Any:
    first = values[0]
    if all(value == first for value in values):
        return first
    if isinstance(first, int | float) and not isinstance(first, bool):
        return sum(value * share for value, share in zip(values, shares, strict=True))
    if isinstance(first, tuple):
        return tuple(_mean(list(column), shares) for column in zip(*values, strict=True))
    return first


class MassOptimizer:
    """A torch optimizer that can take fractional steps. Gradients lie in `parameter.grad` as weighted means."""

    def __init__(self, spec: OptimizerSpec, parameters: Sequence[torch.Tensor]) -> None:
        self.spec = spec
        self.torch = build(spec, parameters)
        self.notice: str | None = None
        if spec.name in SCALED:
            self.notice = (
                f"torch.optim.{spec.name}: an update of mass m scales the learning rate by m; its per-step decays are "
                "not adjusted, so tune its rate per strategy"
            )
        self._mass: dict[torch.Tensor, float] = {}  # Adam's own time, per parameter
        self._fractional = False  # whole steps from the start leave torch's own counting as it is

    def step(self, mass: float, options: Sequence[GroupOptions], *, stock: bool) -> None:
        """Advance the optimizer's time by `mass` rounds; `stock` takes one whole step on the gradient times mass."""
        if len(options) != len(self.torch.param_groups):
            raise OptionError(
                f"the optimizer has {len(options)} parameter groups and had {len(self.torch.param_groups)} when it was "
                "prepared: add them before prepare()"
            )
        for group, wanted in zip(self.torch.param_groups, options, strict=True):
            for key, value in wanted.items():
                if key in group and key not in ("fused", "foreach"):
                    group[key] = value
            if mass != 1.0:
                self._scale(group, mass, stock)
            if self.spec.name in ("Adam", "AdamW"):
                self._set_time(group, 1.0 if stock else mass)
        self.torch.step()

    def _scale(self, group: dict[str, Any], mass: float, stock: bool) -> None:
        if stock and self.spec.name == "SGD":
            _multiply_gradients(group, mass)
            return
        if not stock and self.spec.name == "SGD":
            momentum = group["momentum"]
            gain = mass if momentum == 1 else (1 - momentum**mass) / (1 - momentum)
            group["momentum"] = momentum**mass if momentum else 0.0
            group["weight_decay"] *= gain
            _multiply_gradients(group, gain)
        elif not stock and self.spec.name in ("Adam", "AdamW"):
            group["betas"] = tuple(beta**mass for beta in group["betas"])
            if self.spec.name == "AdamW" or group.get("decoupled_weight_decay"):
                lr, decay = group["lr"], group["weight_decay"]
                group["weight_decay"] = (1 - max(0.0, 1 - lr * decay) ** mass) / (lr * mass) if lr else decay
        group["lr"] *= mass

    def _set_time(self, group: dict[str, Any], mass: float) -> None:
        self._fractional = self._fractional or mass != 1.0
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            total = self._mass.get(parameter, 0.0) + mass
            self._mass[parameter] = total
            state = self.torch.state.get(parameter)
            if state and self._fractional:
                state["step"].fill_(total / mass - 1)


def _multiply_gradients(group: dict[str, Any], factor: float) -> None:
    if factor != 1.0:
        torch._foreach_mul_([p.grad for p in group["params"] if p.grad is not None], factor)
