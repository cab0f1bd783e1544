"""Stock torch optimizers under the mass rule.

An Apply of mass m is a fractional optimizer step: it advances the optimizer's own time by m rounds. The learning rate
is multiplied by m and every per-step decay is raised to the power m, so that a learning rate and a momentum mean the
same thing whether a round is one step of mass 1 or n steps of mass 1/n. With momentum mu the exact form is
`v <- mu^m v + a g`, `a = (1 - mu^m) / (1 - mu)`, `w <- w - lr m v`, which stock SGD performs when gradient and weight
decay are multiplied by `a`; its dampening is left unchanged, since torch ignores it on the first step and refuses it
with Nesterov. Adam's bias correction counts mass instead of steps: its `step` is set to M/m - 1, M being the mass so
far.
"""

import contextlib
import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import torch

from paceline.core.errors import OptionError
from paceline.model.own_optimizer import OWN, build_own, name_of, require_plain

Gradients = Sequence[torch.Tensor | None]  # by position; None: skip this parameter
EXACT = ("SGD", "Adam", "AdamW")  # the mass rule in full
SCALED = (  # the learning rate times m
    "Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
)  # fmt: skip
REFUSED = {
    "LBFGS": "evaluates the loss several times in one step, and a push is one gradient",
    "SparseAdam": "takes sparse gradients only, and gradients are sent dense",
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
Scalar = bool | int | float | str | None
GroupOptions = dict[str, Scalar | tuple[Scalar, ...]]
JOIN = "+"  # between the names of several optimizers' classes
_SERVERS_OWN = ("fused", "foreach")  # the server chooses how a step is executed


MOST_GROUPS = 4_096  # of parameters; from another host they take memory before they can be judged


class KernelGroup:
    """Parameters of one group and one dtype, for one call of torch's fused CPU kernels without its bookkeeping.

    `torch.optim.Optimizer.step` takes several times as long as the arithmetic of a small model. The kernels get the
    same tensors, options and state as from there, in the same order, so results are bitwise equal; state stays in the
    torch optimizer's own `state`, under torch's names. Gradients are arguments: a push is read where it lies, and
    `parameter.grad` is never set.
    """

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


class OptimizerSpec(msgspec.Struct, frozen=True):
    """An optimizer as sent to the server: its class, and the options and parameters of each group.

    The class is one of torch.optim by its name, or `module:Class`. Several optimizers are one spec: their classes with
    a plus sign between them, and `counts` says how many of the groups are each one's.
    """

    name: str
    groups: Annotated[tuple[GroupOptions, ...], msgspec.Meta(max_length=MOST_GROUPS)]
    members: Annotated[
        tuple[tuple[int, ...], ...], msgspec.Meta(max_length=MOST_GROUPS)
    ]  # positions in the model's list of parameters, per group
    counts: tuple[int, ...] = ()  # empty: one optimizer has all groups

    def with_tuples(self) -> "OptimizerSpec":
        """Turn lists back into tuples (such as betas), which JSON and msgpack do not have."""
        groups = tuple({key: _tuples(value) for key, value in group.items()} for group in self.groups)
        return OptimizerSpec(self.name, groups, self.members, self.counts)

    def split(self) -> "list[OptimizerSpec]":
        """Return the spec of each optimizer."""
        if not self.counts:
            return [self]
        ends = list(itertools.accumulate(self.counts))
        parts = zip(self.name.split(JOIN), [0, *ends], ends, strict=False)
        return [OptimizerSpec(name, self.groups[i:j], self.members[i:j]) for name, i, j in parts]


NO_OPTIMIZER = OptimizerSpec("", (), ())


def joined(specs: "Sequence[OptimizerSpec]") -> OptimizerSpec:
    """Return one spec of several optimizers."""
    if len(specs) == 1:
        return specs[0]
    groups, members = (sum((getattr(spec, field) for spec in specs), ()) for field in ("groups", "members"))
    return OptimizerSpec(JOIN.join(spec.name for spec in specs), groups, members, tuple(len(s.groups) for s in specs))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def describe(optimizer: torch.optim.Optimizer, positions: dict[int, int]) -> OptimizerSpec:
    """Return the spec of a user's optimizer; `positions` maps a parameter's id to its index in the model."""
    name = _class_name(type(optimizer))
    members = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in positions:
                raise OptionError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's; give "
                    "prepare() a module that contains it"
                )
        members.append(tuple(positions[id(parameter)] for parameter in group["params"]))
    options = group_options(optimizer)
    if OWN in name:
        require_plain(name, options)
    return OptimizerSpec(name, tuple(options), tuple(members))


def _class_name(kind: type[torch.optim.Optimizer]) -> str:
    """Return which of torch's optimizers this is, or where its own class is found.

    A class that adds nothing to a step is the one it derives from.
    """
    stock = next((base for base in kind.__mro__ if getattr(torch.optim, base.__name__, None) is base), None)
    if (
        stock is None
        or stock is torch.optim.Optimizer
        or (_unhooked(kind.step) is not _unhooked(stock.step) and stock is not kind)
    ):
        refused = next((base.__name__ for base in kind.__mro__ if base.__name__ in REFUSED), None)
        if refused is None:
            return name_of(kind)
        stock = getattr(torch.optim, refused)
    name = str(stock.__name__)
    if name in EXACT + SCALED:
        return name
    why = REFUSED.get(name, "is not known to the server")
    usable = ", ".join(EXACT + SCALED)
    raise OptionError(f"optimizer {kind.__module__}.{kind.__name__} {why}; use one of torch.optim: {usable}")


def _unhooked(step: Any) -> Any:
    """Return a class's step without the profiling that torch wraps around it, on the class of the first instance."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def group_options(optimizer: Any) -> list[GroupOptions]:
    """Return the options of each group as plain data."""
    return [{key: _plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def build(spec: OptimizerSpec, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """Build the server's optimizer over its own parameters, fused where torch supports it."""
    if OWN in spec.name:
        return build_own(spec.name, spec.groups, [[parameters[i] for i in members] for members in spec.members])
    cls = getattr(torch.optim, spec.name)
    accepted = set(inspect.signature(cls).parameters)
    groups = []
    for options, members in zip(spec.groups, spec.members, strict=True):
        known = {key: value for key, value in options.items() if key in accepted}
        known.pop("differentiable", None)  # the server never differentiates through its step
        known.pop("foreach", None)
        known.pop("fused", None)
        if spec.name in FUSED:
            known["fused"] = True
        groups.append({"params": [parameters[i] for i in members], **known})
    optimizer: torch.optim.Optimizer = cls(groups)
    return optimizer


def mean_options(options: Sequence[Sequence[GroupOptions]], samples: Sequence[int]) -> Sequence[GroupOptions]:
    """Merge the group options of several pushes: numbers averaged by samples."""
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


_AS_IT_IS = contextlib.nullcontext()


def is_plain(spec: OptimizerSpec, options: Sequence[GroupOptions]) -> bool:
    """Return whether a step's change follows from the gradient and the options alone: SGD without momentum, whose
    change depends on earlier steps, and without weight decay, whose change depends on the parameters."""
    return set(spec.name.split(JOIN)) == {"SGD"} and not any(
        group.get("momentum") or group.get("weight_decay") for group in options
    )


class MassOptimizer:
    """A torch optimizer that takes fractional steps on weighted mean gradients."""

    def __init__(self, spec: OptimizerSpec, parameters: Sequence[torch.Tensor]) -> None:
        self.spec = spec
        self.torch = build(spec, parameters)
        self.notice: str | None = None
        if spec.name not in EXACT:
            name = spec.name if OWN in spec.name else f"torch.optim.{spec.name}"
            self.notice = (
                f"{name}: an update of mass m scales the learning rate by m; its per-step decays are not adjusted, so "
                "tune its rate per strategy"
            )
            if any("lr" not in group for group in self.torch.param_groups):
                self.notice = f"{name} has no learning rate: every update is a whole step, whatever its mass"
        self._parameters = list(parameters)
        self._rate_factor = 1.0
        self._mass: dict[int, float] = {}  # Adam: mass so far, by the parameter's position
        self._fractional = False  # false: all steps so far were whole, and torch's step count is right
        self._in_force: tuple[float, bool, list[GroupOptions]] = (math.nan, False, [])  # mass, stock, options
        self._gains: list[float] = []  # factor on each group's gradients, under the options in force
        self._fuses = spec.name in KERNELS
        self._kernels = [
            _kernels(spec.name, self.torch, members, self._parameters) if self._fuses else []
            for members in spec.members
        ]

    def scale_rate(self, factor: float) -> None:
        """Multiply every learning rate that pushes bring by this factor, whatever their schedulers do."""
        self._rate_factor = factor
        self._in_force = (math.nan, False, [])

    def multiplies_gradients(self, mass: float, options: Sequence[GroupOptions], *, stock: bool) -> bool:
        """Return whether `step` writes to its gradients; if so, the caller must pass a copy."""
        if mass == 1.0 or self.spec.name != "SGD":
            return False
        return stock or any(group["momentum"] for group in options)

    def step(
        self, mass: float, options: Sequence[GroupOptions], *, stock: bool, gradients: Gradients | None = None
    ) -> None:
        """Advance the optimizer's time by `mass` rounds; `stock` takes one whole step on the gradient times mass.

        `gradients` are in the order of the parameters; None takes those in `parameter.grad`.
        """
        groups = self.torch.param_groups
        if len(options) != len(groups):
            raise OptionError(
                f"the optimizer has {len(options)} parameter groups and had {len(groups)} when it was prepared: add "
                "them before prepare()"
            )
        if gradients is None:
            gradients = [parameter.grad for parameter in self._parameters]
        with torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS:
            if not (mass == self._in_force[0] and stock is self._in_force[1] and options == self._in_force[2]):
                self._set_options(mass, options, stock)
            if mass != 1.0 and self.spec.name == "SGD":
                for gain, members in zip(self._gains, self.spec.members, strict=True):
                    _multiply(gradients, members, gain)
            if self.spec.name in ("Adam", "AdamW"):
                for members in self.spec.members:
                    self._set_time(members, gradients, 1.0 if stock else mass)
            self._take(gradients)

    def _set_options(self, mass: float, options: Sequence[GroupOptions], stock: bool) -> None:
        """Set the groups' options, scaled. They stay in force, as most versions have the same."""
        self._gains = []
        for group, wanted in zip(self.torch.param_groups, options, strict=True):
            for key, value in wanted.items():
                if key in group and key not in _SERVERS_OWN:
                    group[key] = value
            if self._rate_factor != 1.0 and "lr" in group:
                group["lr"] *= self._rate_factor
            self._gains.append(self._scale(group, mass, stock) if mass != 1.0 else 1.0)
        self._in_force = (mass, stock, [dict(wanted) for wanted in options])

    def _take(self, gradients: Gradients) -> None:
        if self._fuses:
            for group, kernels in zip(self.torch.param_groups, self._kernels, strict=True):
                for kernel in kernels:
                    kernel(group, gradients)
            return
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self.torch.step()
        for parameter in self._parameters:
            parameter.grad = None  # a push's memory is reused for the next one

    def _scale(self, group: dict[str, Any], mass: float, stock: bool) -> float:
        """Scale a group's options to a step of this mass; return the factor for SGD's gradients."""
        gain = 1.0
        if stock and self.spec.name == "SGD":
            return mass
        if not stock and self.spec.name == "SGD":
            momentum = group["momentum"]
            gain = mass if momentum == 1 else (1 - momentum**mass) / (1 - momentum)
            group["momentum"] = momentum**mass if momentum else 0.0
            group["weight_decay"] *= gain
        elif not stock and self.spec.name in ("Adam", "AdamW"):
            group["betas"] = tuple(beta**mass for beta in group["betas"])
            if self.spec.name == "AdamW" or group.get("decoupled_weight_decay"):
                lr, decay = group["lr"], group["weight_decay"]
                group["weight_decay"] = (1 - max(0.0, 1 - lr * decay) ** mass) / (lr * mass) if lr else decay
        if "lr" in group:
            group["lr"] *= mass
        return gain

    def _set_time(self, members: Sequence[int], gradients: Gradients, mass: float) -> None:
        self._fractional = self._fractional or mass != 1.0
        for position in members:
            if gradients[position] is None:
                continue
            total = self._mass.get(position, 0.0) + mass
            self._mass[position] = total
            if self._fractional:
                state = self.torch.state.get(self._parameters[position])
                if state:
                    state["step"].fill_(total / mass - 1)

    # -- the script's own copy ---------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the state as a script sees it: tensors, not copied, and numbers, by position and torch's name."""
        tensors, data = self.snapshot()
        if self._fractional:  # torch's count is of steps as large as the last one
            for position, total in self._mass.items():
                tensors[f"{position}.step"] = torch.tensor(total)
        return tensors, data["numbers"]

    def load(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Continue from a state that a script has loaded; take over its tensors without a copy."""
        steps = {key.partition(".")[0]: float(value) for key, value in tensors.items() if key.endswith(".step")}
        mass = steps if self.spec.name in ("Adam", "AdamW") else {}
        fractional = any(not total.is_integer() for total in mass.values())
        self.restore(tensors, {"name": self.spec.name, "mass": mass, "fractional": fractional, "numbers": numbers})

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the state's tensors, not copied, by position and torch's name, and the rest as plain data."""
        tensors: dict[str, torch.Tensor] = {}
        numbers: dict[str, Any] = {}
        for position, parameter in enumerate(self._parameters):
            for name, value in self.torch.state.get(parameter, {}).items():
                home = tensors if isinstance(value, torch.Tensor) else numbers
                home[f"{position}.{name}"] = value
        mass = {str(position): total for position, total in self._mass.items()}
        return tensors, {"name": self.spec.name, "mass": mass, "fractional": self._fractional, "numbers": numbers}

    def restore(self, tensors: Mapping[str, torch.Tensor], data: Mapping[str, Any]) -> None:
        """Continue from a snapshot of an optimizer over the same parameters; takes over the tensors without a copy."""
        if data["name"] != self.spec.name:
            raise OptionError(
                f"the checkpoint's optimizer is torch.optim.{data['name']}, the script's torch.optim.{self.spec.name}: "
                "resume with the optimizer the run was started with"
            )
        self.torch.state.clear()
        self._in_force = (math.nan, False, [])
        for key, value in [*tensors.items(), *data["numbers"].items()]:
            position, _, name = key.partition(".")
            self.torch.state[self._parameters[int(position)]][name] = value
        self._mass = {int(position): total for position, total in data["mass"].items()}
        self._fractional = data["fractional"]
        for kernel in itertools.chain(*self._kernels):
            kernel.states.clear()


def _kernels(
    name: str, optimizer: torch.optim.Optimizer, members: Sequence[int], parameters: Sequence[torch.Tensor]
) -> list[FusedSgd | FusedAdam]:
    """Make one kernel per dtype of the group."""
    dtypes = dict.fromkeys(parameters[i].dtype for i in members)
    alike = [[i for i in members if parameters[i].dtype == dtype] for dtype in dtypes]
    return [KERNELS[name](optimizer, places, [parameters[i] for i in places]) for places in alike]


def _multiply(gradients: Gradients, members: Sequence[int], factor: float) -> None:
    if factor == 1.0:
        return
    present = [gradient for position in members if (gradient := gradients[position]) is not None]
    if present:
        torch._foreach_mul_(present, factor)
