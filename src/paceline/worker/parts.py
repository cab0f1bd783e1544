"""Several models and optimizers of one script as one: the run trains them together.

Parameters of several models have the name of their class before their own; a model that is prepared with a
second optimizer keeps its plain names. What was prepared first comes first, so positions stay as they are.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from paceline.core.errors import OptionError, UserError
from paceline.model.measuring import Evaluate


class Prepared(NamedTuple):
    """What one call of `prepare` was given."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer


class JointModule(torch.nn.Module):
    """Holds several models."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        names = [type(model).__name__ for model in models]
        for place, (name, model) in enumerate(zip(names, models, strict=True)):
            self.add_module(f"{name}{place}" if names.count(name) > 1 else name, model)

    def part(self, place: int) -> torch.nn.Module:
        """Return one of the models."""
        return list(self.children())[place]


class AllGroups:
    """The parameter groups of several optimizers, as they are now."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]


class Parts:
    """All that a script has prepared."""

    def __init__(self, *, alone: bool) -> None:
        """`alone`: the script's optimizers step themselves, and may share parameters."""
        self.prepared: list[Prepared] = []
        self.several = False
        self._alone = alone
        self._evaluated = False

    def add(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, evaluated: bool) -> None:
        """Add a pair; refuse what the run cannot tell apart. `evaluated`: with a function that measures all so far."""
        if self._evaluated:
            raise UserError("evaluate was given to an earlier prepare(): give it to the last one")
        if any(optimizer is other.optimizer for other in self.prepared):
            raise OptionError("prepare() was called twice with the same optimizer: once for each is enough")
        taken = {id(p) for other in self.prepared for p in _parameters_of(other.optimizer)}
        if not self._alone and any(id(parameter) in taken for parameter in _parameters_of(optimizer)):
            raise OptionError(
                f"a parameter of this {type(optimizer).__name__} belongs to an optimizer that is prepared already: a "
                "parameter is stepped by one optimizer"
            )
        self.prepared.append(Prepared(model, optimizer))
        self.several = len(self.prepared) > 1
        self._evaluated = evaluated

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [each.optimizer for each in self.prepared]

    @property
    def models(self) -> list[torch.nn.Module]:
        """Each model once."""
        return list({id(each.model): each.model for each in self.prepared}.values())

    def whole(self) -> tuple[torch.nn.Module, Any]:
        """Return a module of all models, and all optimizers' groups."""
        models = self.models
        model = models[0] if len(models) == 1 else JointModule(models)
        return model, AllGroups(self.optimizers) if self.several else self.prepared[0].optimizer

    def measured(self, evaluate: Evaluate) -> Evaluate:
        """Return the function of the last prepared model as one of all models."""
        if len(self.models) == 1:
            return evaluate
        place = next(place for place, model in enumerate(self.models) if model is self.prepared[-1].model)

        def of_joint(joint: Any) -> Mapping[str, float]:
            return evaluate(joint.part(place))

        return of_joint

    def places_of(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Return where the optimizer's parameters stand among all."""
        own = {id(parameter) for parameter in _parameters_of(optimizer)}
        return [place for place, parameter in enumerate(parameters) if id(parameter) in own]

    def ownerless(self) -> list[str]:
        """Return the names of parameters that are to be trained and that no optimizer has."""
        owned = {id(p) for each in self.prepared for p in _parameters_of(each.optimizer)}
        named = self.whole()[0].named_parameters()
        return [name for name, p in named if p.requires_grad and id(p) not in owned]


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
