"""Parse user input into declared types, and suggest names ("did you mean").

Settings, options of strategies and `--set` values all pass through `read`. The input is text, or already a value, as
from TOML and Python. Known types: int, float, bool, str, Literal, Path, classes with a `parse`, a tuple
of one type (written `5/10/20`), a dict of strings (`a=1,b=2`) and any of them with None.
"""

import operator
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import inspect

from paceline.core.errors import OptionError

BOUNDS = {"ge": (operator.ge, ">="), "gt": (operator.gt, ">"), "le": (operator.le, "<="), "lt": (operator.lt, "<")}
FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
FINITE = sys.float_info.max  # `Meta(le=FINITE)` declares a finite number; msgspec has no other notation for it
INT64 = 2**63  # bound of whole numbers in journals, messages and torch's generators
SHOWN = 200  # most characters of a refused value in a one-line message
CHOICES = 40  # most names that a message lists


def read(value: Any, declared: Any, what: str, *, none: str | None = "none") -> Any:
    """Convert a value to the declared type; `what` names it in errors, `none` is the word for None."""
    try:
        return _value(value, inspect.type_info(declared), none)
    except OptionError as error:
        raise OptionError(f"{what} {error}") from None


def to_text(value: Any) -> str:
    """Return the text that `read` converts to the value."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "/".join(map(to_text, value))
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


def shown(value: Any) -> str:
    """Return a short one-line repr for a message, even of a value that cannot be printed."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or more digits than Python prints
        text = f"a {type(value).__name__} too large to print"
    return shortened(text)


def shortened(text: str) -> str:
    """Cut the text to the length that a one-line message can hold."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def visible(text: str) -> str:
    """Escape line ends, control characters and characters that cannot be encoded: a terminal may obey them."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return the hint that follows an unknown name in an error: the likeliest valid name, or all of them."""
    names = list(valid)
    close = closest(name, names)
    if close is not None:
        return f"did you mean {close!r}?"
    more = f" and {len(names) - CHOICES} more" if len(names) > CHOICES else ""
    return f"choose from {', '.join(names[:CHOICES])}{more}" if names else "there are none"


def closest(name: str, valid: Iterable[str], share: float = 0.4) -> str | None:
    """Return the valid name with the smallest edit distance, if that is at most `share` of its letters."""
    best: tuple[int, bool, bool, str] | None = None
    for known in valid:
        most = max(1, int(share * len(known)))
        if name and known and abs(len(name) - len(known)) <= most:
            slips = _slips(name.lower(), known.lower())
            # At equal distance, prefer swapped letters and an equal first letter: both are likelier typos.
            found = (slips, sorted(name) != sorted(known), name[0] != known[0], known)
            if slips <= most and (best is None or found[:3] < best[:3]):
                best = found
    return None if best is None else best[3]


def _slips(one: str, other: str) -> int:
    """Count letters to insert, drop, replace or swap with their neighbour (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        last_but_one, before, row = before, row, [i]
        for j, wanted in enumerate(other, 1):
            slips = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                slips = min(slips, last_but_one[j - 2] + 1)
            row.append(slips)
    return row[-1]


def type_text(info: inspect.Type) -> str:
    """Describe the type in a user's words."""
    match info:
        case inspect.Metadata():
            return type_text(info.type)
        case inspect.UnionType():
            return " or ".join(map(type_text, info.types))
        case inspect.VarTupleType():
            return f"list of {type_text(info.item_type)}s such as 5/10/20"
        case inspect.LiteralType():
            return " | ".join(map(str, info.values))
        case inspect.IntType():
            return "whole number"
        case inspect.FloatType():
            return "finite number" if info.le == FINITE else "number"
        case inspect.BoolType():
            return "true or false"
        case inspect.NoneType():
            return "none"
        case inspect.CustomType() if info.cls is Path:
            return "path"
        case _:
            return "text"


def bounds_text(info: inspect.Type) -> str:
    """Return the bounds as `>= 0, < 1`; empty if there are none."""
    found = [_bounds(part) for part in _parts(info) if isinstance(part, inspect.IntType | inspect.FloatType)]
    return ", ".join(f"{sign} {to_text(bound)}" for bounds in found for _, sign, bound in bounds if bound != FINITE)


def description_text(info: inspect.Type) -> str:
    """Return the description in the type's Meta, wherever in a union it is."""
    extras = (part.extra_json_schema or {} for part in _parts(info) if isinstance(part, inspect.Metadata))
    return next((str(extra["description"]) for extra in extras if "description" in extra), "")


def _parts(info: inspect.Type) -> Iterator[inspect.Type]:
    """Yield the type and its component types."""
    yield info
    inner = getattr(info, "types", None) or [getattr(info, key) for key in ("type", "item_type") if hasattr(info, key)]
    for part in inner:
        yield from _parts(part)


def _bounds(info: inspect.IntType | inspect.FloatType) -> list[tuple[Any, str, float]]:
    return [(*BOUNDS[key], getattr(info, key)) for key in BOUNDS if getattr(info, key) is not None]


def _refusal(wanted: str, value: Any) -> OptionError:
    return OptionError(f"must be {wanted}, not {shown(value)}")


def _value(value: Any, info: inspect.Type, none: str | None) -> Any:
    match info:
        case inspect.Metadata():
            return _value(value, info.type, none)
        case inspect.UnionType():
            return _one_of(value, info, none)
        case inspect.VarTupleType():
            items = value.split("/") if isinstance(value, str) else value
            if not isinstance(items, list | tuple):
                raise _refusal(f"a {type_text(info)}", value)
            return tuple(_value(item, info.item_type, none) for item in items)
        case inspect.LiteralType():
            choices = {to_text(choice): choice for choice in info.values}
            text = (_as_text(value) or "").strip()
            if text not in choices:
                raise _refusal(f"one of {', '.join(choices)}", value)
            return choices[text]
        case inspect.BoolType():
            text = (_as_text(value) or "").strip().lower()
            if text not in FLAGS:
                raise _refusal("true or false", value)
            return FLAGS[text]
        case inspect.IntType() | inspect.FloatType():
            return _number(value, info)
        case inspect.DictType():
            return _pairs(value)
        case inspect.CustomType() | inspect.StructType():
            return _parsed(value, info.cls)
        case _:
            return _text(value, "a name")


def _one_of(value: Any, info: inspect.UnionType, none: str | None) -> Any:
    if value is None or (none is not None and isinstance(value, str) and value.strip().lower() == none):
        return None
    kinds = [kind for kind in info.types if not isinstance(kind, inspect.NoneType)]
    for kind in kinds[:-1]:
        try:
            return _value(value, kind, none)
        except OptionError:
            continue
    return _value(value, kinds[-1], none)


def _number(value: Any, info: inspect.IntType | inspect.FloatType) -> int | float:
    whole = isinstance(info, inspect.IntType)
    wanted = f"a {type_text(info)} {bounds_text(info)}".rstrip()
    try:
        number: int | float = int(str(value)) if whole else float(value)
    except (TypeError, ValueError, OverflowError):
        raise _refusal(wanted, _stripped(value)) from None
    # `number != number` finds NaN. A bool is an int to Python but never meant as a number.
    within = all(holds(number, bound) for holds, _, bound in _bounds(info))
    if isinstance(value, bool) or number != number or not within:
        raise _refusal(wanted, _stripped(value))
    if whole and not -INT64 <= number < INT64:
        raise _refusal(f"{wanted} of at most 64 bits", _stripped(value))
    return number


def _stripped(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _text(value: Any, wanted: str) -> str:
    if not isinstance(value, str | Path) or not str(value).strip():
        raise _refusal(wanted, value)
    text = str(value)
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise _refusal(f"{wanted} in UTF-8 without NUL", value)
    return text


def _parsed(value: Any, cls: Any) -> Any:
    if isinstance(value, cls) and not isinstance(value, Path):
        return value
    if cls is not Path:
        if getattr(cls, "from_numbers", False) and isinstance(value, int | float) and not isinstance(value, bool):
            value = f"{value:g}" if abs(value) < sys.maxsize else "a number too large"
        return cls.parse(_text(value, "text"))
    try:
        return Path(_text(value, "a path")).expanduser()
    except RuntimeError:
        raise _refusal("a path in a home folder that exists", value) from None


def _pairs(value: Any) -> dict[str, str]:
    wanted = "name=value, such as lr=0.1"
    items: list[Any] = list(value.items()) if isinstance(value, Mapping) else []
    if not isinstance(value, Mapping):
        listed = value.split(",") if isinstance(value, str) else value
        for pair in listed if isinstance(listed, list | tuple) else [listed]:
            name, sign, given = str(pair).partition("=") if isinstance(pair, str) else ("", "", "")
            if not sign or not name.strip():
                raise _refusal(wanted, pair)
            items.append((name, given.strip()))
    pairs = {}
    for name, given in items:
        text = _as_text(given)
        if text is None:
            raise _refusal(f"{wanted}: text, a number, true or false", given)
        pairs[_text(name, wanted).strip()] = text and _text(text, wanted)
    return pairs


def _as_text(value: Any) -> str | None:
    """Return text, a number or a flag as text; None for anything else and for integers too long for Python to print."""
    try:
        return to_text(value) if isinstance(value, str | int | float) else None
    except ValueError:
        return None
