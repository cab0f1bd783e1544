"""Values of options between their text and their declared type, and the words that describe the type.

Known types: int, float, bool, str, Literal, a tuple of one type (written `5/10/20`) and any of them with None.
"""

import math
import operator
from typing import Any

from msgspec import inspect

from paceline.core.errors import OptionError

BOUNDS = {
    "ge": (operator.ge, ">="),
    "gt": (operator.gt, ">"),
    "le": (operator.le, "<="),
    "lt": (operator.lt, "<"),
}


def from_text(text: str, declared: Any, what: str) -> Any:
    """The value that `text` stands for; `what` names the option in errors."""
    return _value(text, inspect.type_info(declared), what)


def to_text(value: Any) -> str:
    """The text that `from_text` turns into the value."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "/".join(to_text(item) for item in value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


def type_text(info: inspect.Type) -> str:
    """The type in a user's words."""
    match info:
        case inspect.Metadata():
            return type_text(info.type)
        case inspect.UnionType():
            return " or ".join(type_text(t) for t in info.types)
        case inspect.VarTupleType():
            return f"list of {type_text(info.item_type)}s such as 5/10/20"
        case inspect.LiteralType():
            return " | ".join(str(value) for value in info.values)
        case inspect.IntType():
            return "whole number"
        case inspect.FloatType():
            return "number"
        case inspect.BoolType():
            return "true or false"
        case inspect.NoneType():
            return "none"
        case _:
            return "text"


def bounds_text(info: inspect.Type) -> str:
    """The bounds as `>= 0, < 1`; empty if there are none."""
    match info:
        case inspect.Metadata():
            return bounds_text(info.type)
        case inspect.UnionType():
            return ", ".join(filter(None, (bounds_text(t) for t in info.types)))
        case inspect.VarTupleType():
            return bounds_text(info.item_type)
        case inspect.IntType() | inspect.FloatType():
            return ", ".join(f"{sign} {to_text(bound)}" for _, sign, bound in _bounds(info))
        case _:
            return ""


def description_text(info: inspect.Type) -> str:
    """The description in the type's Meta, wherever in a union it stands."""
    match info:
        case inspect.Metadata():
            return str((info.extra_json_schema or {}).get("description", "")) or description_text(info.type)
        case inspect.UnionType():
            return next(filter(None, (description_text(t) for t in info.types)), "")
        case _:
            return ""


def _bounds(info: inspect.IntType | inspect.FloatType) -> list[tuple[Any, str, float]]:
    return [(*BOUNDS[key], getattr(info, key)) for key in BOUNDS if getattr(info, key) is not None]


def _value(text: str, info: inspect.Type, what: str) -> Any:
    match info:
        case inspect.Metadata():
            return _value(text, info.type, what)
        case inspect.UnionType():
            return _one_of(text, info, what)
        case inspect.VarTupleType():
            return tuple(_value(item.strip(), info.item_type, what) for item in text.split("/"))
        case inspect.LiteralType():
            choices = {str(value): value for value in info.values}
            if text not in choices:
                raise OptionError(f"{what} must be one of {', '.join(sorted(choices))}, not {text!r}")
            return choices[text]
        case inspect.BoolType():
            if text.lower() not in ("true", "false"):
                raise OptionError(f"{what} must be true or false, not {text!r}")
            return text.lower() == "true"
        case inspect.IntType() | inspect.FloatType():
            return _number(text, info, what)
        case _:
            return text


def _one_of(text: str, info: inspect.UnionType, what: str) -> Any:
    if text.lower() == "none" and any(isinstance(t, inspect.NoneType) for t in info.types):
        return None
    kinds = [t for t in info.types if not isinstance(t, inspect.NoneType)]
    for kind in kinds[:-1]:
        try:
            return _value(text, kind, what)
        except OptionError:
            continue
    return _value(text, kinds[-1], what)


def _number(text: str, info: inspect.IntType | inspect.FloatType, what: str) -> int | float:
    whole = isinstance(info, inspect.IntType)
    try:
        value: int | float = int(text) if whole else float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise OptionError(f"{what} must be a {type_text(info)}, not {text!r}; {_allowed(info)}")
    for holds, sign, bound in _bounds(info):
        if not holds(value, bound):
            raise OptionError(f"{what} must be {sign} {to_text(bound)}, not {text}; {_allowed(info)}")
    return value


def _allowed(info: inspect.IntType | inspect.FloatType) -> str:
    bounds = bounds_text(info)
    return f"give a {type_text(info)}{' ' + bounds if bounds else ''}"
