"""Strategies by name, and the written form `name:option=value,option=value`.

Classes are imported when first asked for, so that naming one strategy does not load the others.
"""

import difflib
import importlib
import random
from typing import Any

import msgspec

from paceline.errors import OptionError
from paceline.strategies.base import Options, Strategy
from paceline.strategies.option_values import bounds_text, description_text, from_text, to_text, type_text

CLASSES = {
    "bsp": "bsp:Bsp",
    "asp": "asp:Asp",
    "ssp": "ssp:Ssp",
    "dssp": "dssp:Dssp",
    "adaptive_sync": "adaptive_sync:AdaptiveSync",
    "dasp": "dasp:Dasp",
    "fastest_k": "fastest_k:FastestK",
    "k_async": "k_async:KAsync",
    "adaptive_k": "adaptive_k:AdaptiveK",
    "adaptive_k_load": "adaptive_k_load:AdaptiveKLoad",
    "balanced": "balanced:Balanced",
}
EXAMPLES = {"k": "4"}  # values for the message that asks for a required option


class OptionDescription(msgspec.Struct, frozen=True):
    """One option, in words."""

    name: str
    type: str
    description: str
    default: str | None  # None: it must be given
    bounds: str


class Description(msgspec.Struct, frozen=True):
    """One strategy, in words."""

    name: str
    rule: str
    citation: str
    options: list[OptionDescription]


def names() -> list[str]:
    """Every strategy, baselines first."""
    return list(CLASSES)


def strategy_class(name: str) -> type[Strategy]:
    """The class of that name."""
    if name not in CLASSES:
        raise OptionError(f"unknown strategy {name!r}{_nearest(name, names())}")
    module, _, cls = CLASSES[name].partition(":")
    found: type[Strategy] = getattr(importlib.import_module(f"{__package__}.{module}"), cls)
    return found


def parse(spec: str) -> tuple[type[Strategy], Options]:
    """The class and the options that `name:option=value,option=value` stands for.

    What an Options class says in its `__post_init__` gets the strategy's name in front.
    """
    name, colon, text = spec.strip().partition(":")
    cls = strategy_class(name.strip())
    fields = _fields(cls)
    values: dict[str, Any] = {}
    if colon and not text.strip():
        raise OptionError(f"{name}: nothing follows the colon in {spec!r}; write {name} alone or {name}:option=value")
    for item in text.split(",") if colon else ():
        option, equals, value = (part.strip() for part in item.partition("="))
        if option not in fields:
            raise OptionError(f"{name} has no option {option!r}{_nearest(option, list(fields))}")
        if not equals:
            raise OptionError(f"{name}: {option} has no value; write {name}:{option}=value")
        if option in values:
            raise OptionError(f"{name}: {option} is given twice in {spec!r}; give it once")
        values[option] = from_text(value, fields[option].type, f"{name}: {option}")
    for option, field in fields.items():
        if field.required and option not in values:
            raise OptionError(f"{name} needs {option}, for example {name}:{option}={EXAMPLES.get(option, '1')}")
    try:
        return cls, cls.Options(**values)
    except OptionError as error:
        raise OptionError(f"{name}: {error}") from error


def build(spec: str, seed: int) -> Strategy:
    """A fresh strategy; its chance comes from the seed alone."""
    cls, options = parse(spec)
    return cls(options, random.Random(f"{seed}:strategy"))


def canonical(strategy: Strategy) -> str:
    """The shortest text that `build` makes an equal strategy from."""
    given = []
    for option, field in _fields(type(strategy)).items():
        value = getattr(strategy.options, option)
        if field.required or value != field.default:
            given.append(f"{option}={to_text(value)}")
    return f"{strategy.name}:{','.join(given)}" if given else strategy.name


def describe(cls: type[Strategy]) -> Description:
    """What `paceline strategies` says about one of them."""
    options = []
    for option, field in _fields(cls).items():
        info = msgspec.inspect.type_info(field.type)
        options.append(
            OptionDescription(
                name=option,
                type=type_text(info),
                description=description_text(info),
                default=None if field.required else to_text(field.default),
                bounds=bounds_text(info),
            )
        )
    return Description(cls.name, cls.rule, cls.citation, options)


def _fields(cls: type[Strategy]) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.name: field for field in msgspec.structs.fields(cls.Options)}


def _nearest(word: str, valid: list[str]) -> str:
    if not valid:
        return "; it has no options"
    close = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; choose from {', '.join(valid)}"
