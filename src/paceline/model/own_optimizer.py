"""Optimizers of a user's own class: found by name where the steps are made, and built from the script's options.

A class goes by `module:Class`. Inside one process the class itself is known; another process imports it.
"""

import importlib
import inspect
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import torch

from paceline.core.errors import OptionError

OWN = ":"  # in the name of a class that is not torch's
MAIN = "__main__"
_known: dict[str, type[torch.optim.Optimizer]] = {}  # that scripts of this process have prepared
_importable: set[str] | None = None  # names that may be imported; None: any, as every worker is a process of this host


def name_of(kind: type[torch.optim.Optimizer]) -> str:
    """Return the name under which the class is found."""
    needed = list(inspect.signature(kind.step).parameters.values())[1:]
    if any(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in needed):
        raise OptionError(
            f"optimizer {kind.__module__}.{kind.__name__} needs a closure at every step, and a push is one gradient"
        )
    name = f"{kind.__module__}{OWN}{kind.__qualname__}"
    _known[name] = kind
    return name


def handed_over(kinds: Sequence[type[torch.optim.Optimizer]]) -> bytes:
    """Pack classes for a process that cannot import them; empty if there are none."""
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise OptionError(f"optimizers must be classes of torch optimizers, and {kind!r} is none")
    return cloudpickle.dumps({name_of(kind): kind for kind in kinds}) if kinds else b""


def take(packed: bytes) -> None:
    """Know the classes that were handed over, also by the names that they have after it, as on workers."""
    if packed:
        known: dict[str, type[torch.optim.Optimizer]] = pickle.loads(packed)
        _known.update({**known, **{name_of(kind): kind for kind in known.values()}})


def import_only(names: Sequence[str]) -> None:
    """Import no other classes in this process: its workers are of other hosts, and importing a module runs it."""
    global _importable
    _importable = set(names)


def class_of(name: str) -> type[torch.optim.Optimizer]:
    """Return the class of that name: one that a script of this process has, or an imported one."""
    if name in _known:
        return _known[name]
    module, _, path = name.partition(OWN)
    if _importable is not None and name not in _importable:
        raise OptionError(
            f"the server does not import the optimizer {name} because a worker names it: if it is your own, give "
            f"--own-optimizers {name} to `paceline serve`, or the class to launch(optimizers=[...])"
        )
    try:
        if module == MAIN:
            raise ImportError("it is in the script itself, which the server does not run")
        found: Any = importlib.import_module(module)
        for attribute in path.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        raise OptionError(
            f"the server cannot import the optimizer {name} ({error}): define it at the top of a module beside the "
            "script, and import it from there, or give it to launch(optimizers=[...])"
        ) from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise OptionError(f"{name} is not an optimizer class: {type(found).__name__}")
    return found


def build_own(
    name: str, options: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[torch.Tensor]]
) -> torch.optim.Optimizer:
    """Build an optimizer of that class over these parameters, with the options that its constructor takes."""
    kind = class_of(name)
    accepted = inspect.signature(kind).parameters
    first = {key: value for key, value in options[0].items() if key in accepted}
    given = [{"params": list(params), **known} for params, known in zip(groups, options, strict=True)]
    try:
        return kind(given, **first)
    except Exception as error:
        raise OptionError(
            f"the server could not make the optimizer {name} from its groups and the options "
            f"{', '.join(first) or 'none'}: {type(error).__name__}: {error}; its constructor must take the parameters "
            "first, and what else it needs must be options of its groups"
        ) from error


def require_plain(name: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse options that cannot be sent."""
    for key, value in (item for group in groups for item in group.items()):
        for part in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(part, bool | int | float | str | None):
                raise OptionError(
                    f"option {key} of {name} is a {type(part).__name__}: options travel with each push, and only "
                    "numbers, text and tuples of them can"
                )
