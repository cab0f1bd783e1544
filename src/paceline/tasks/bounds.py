"""Checks of task options, so that an impossible value is named before training starts."""

from collections.abc import Sequence
from typing import TypeVar

from paceline.core.errors import OptionError
from paceline.core.values import closest, shown

Number = TypeVar("Number", int, float)


def within(name: str, value: Number, low: Number, high: Number | None = None) -> Number:
    """`value` if it lies in [low, high]."""
    if high is None and not value >= low:
        raise OptionError(f"{name} must be >= {low}, not {value}; give --set {name}={low} or more")
    if high is not None and not low <= value <= high:
        raise OptionError(f"{name} must lie between {low} and {high}, not {value}; give --set {name}={high} or less")
    return value


def one_of(name: str, value: str, choices: Sequence[str]) -> str:
    """`value` if it is one of the choices."""
    if value in choices:
        return value
    near = closest(value, choices) or choices[0]
    raise OptionError(f"{name} must be one of {', '.join(choices)}, not {shown(value)}; give --set {name}={near}")
