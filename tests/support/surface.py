"""Names, fields and signatures of modules as text, the same under every version of Python."""

import importlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import msgspec


def module_surface(name: str) -> Iterator[str]:
    """The module and all that its `__all__` names."""
    module = importlib.import_module(name)
    yield name
    for public in module.__all__:
        yield from (f"  {line}" for line in described(public, getattr(module, public)))


def described(name: str, value: Any) -> Iterator[str]:
    """One name; a class goes on with its members."""
    if inspect.isclass(value) and not typing.get_origin(value):
        yield f"class {name}{_made_from(value)}"
        yield from (f"  {line}" for line in _members(value))
    elif callable(value) and not typing.get_origin(value):
        yield f"{name}{signature(value)}"
    elif typing.get_origin(value):
        yield f"{name} = {annotation(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def fields(cls: type[msgspec.Struct]) -> Iterator[str]:
    """Each field of a struct with its type and default."""
    for field in msgspec.structs.fields(cls):
        if field.default is not msgspec.NODEFAULT:
            default = f" = {shown(field.default)}"
        elif field.default_factory is not msgspec.NODEFAULT:
            default = f" = {field.default_factory.__name__}()"
        else:
            default = ""
        yield f"{field.name}: {annotation(field.type)}{default}"


def signature(function: Callable[..., Any], *, bound: bool = False) -> str:
    """Parameters with their types and defaults, and what comes back."""
    found = inspect.signature(function)
    parts, star = [], False
    for parameter in list(found.parameters.values())[int(bound) :]:
        kind = parameter.kind
        if kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
        star = star or kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        text = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(kind, "") + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {shown(parameter.default)}"
        parts.append(text)
    returned = found.return_annotation
    back = "" if returned is found.empty else f" -> {annotation(returned)}"
    return f"({', '.join(parts)}){back}"


def annotation(value: Any) -> str:
    """A type as the source writes it."""
    origin, inner = typing.get_origin(value), typing.get_args(value)
    if isinstance(value, str):
        return value
    if value is None or value is types.NoneType:
        return "None"
    if value is ...:
        return "..."
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(annotation, value))}]"
    if origin is typing.Annotated:
        return " ".join(filter(None, [annotation(inner[0]), *map(shown, inner[1:])]))
    if origin in (types.UnionType, typing.Union):
        return " | ".join(map(annotation, inner))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, inner))}]"
    if origin is not None:
        return f"{annotation(origin)}[{', '.join(map(annotation, inner))}]"
    if isinstance(value, TypeVar):
        return value.__name__
    return str(getattr(value, "__qualname__", value))


def shown(value: Any) -> str:
    """A default; what a bound of an option says is part of it, an address in memory is not."""
    if isinstance(value, msgspec.Meta):
        bounds = {name: getattr(value, name) for name in ("gt", "ge", "lt", "le") if getattr(value, name) is not None}
        return " ".join(f"{name} {bound!r}" for name, bound in bounds.items())
    return value.__qualname__ if inspect.isclass(value) or inspect.isfunction(value) else repr(value)


def _made_from(cls: type) -> str:
    bases = [base.__name__ for base in cls.__bases__ if base is not object and not _is_part(base)]
    return f"({', '.join(bases)})" if bases else ""


def _members(cls: type) -> Iterator[str]:
    if issubclass(cls, msgspec.Struct):
        yield from fields(cls)
    elif "__init__" in vars(cls) and not vars(cls)["__init__"].__qualname__.startswith("_no_init"):
        yield f"__init__{signature(vars(cls)['__init__'], bound=True)}"
    taken, annotations = set(getattr(cls, "__struct_fields__", ())), inspect.get_annotations(cls)
    members = {name: value for part in _parts(cls) for name, value in vars(part).items()} | dict(vars(cls))
    for name, value in sorted(members.items()):
        if not name.startswith("_") and name not in taken:
            yield _member(name, value, annotations)
    for name, type_ in annotations.items():
        if not name.startswith("_") and name not in vars(cls) and name not in taken:
            yield f"{name}: {annotation(type_)}"


def _parts(cls: type) -> list[type]:
    """The bases that nobody is to know of, the farthest first: what they bring is the class's own."""
    return [base for base in reversed(cls.__mro__[1:]) if _is_part(base)]


def _is_part(base: type) -> bool:
    ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "paceline"]
    named = any(base.__name__ in getattr(module, "__all__", ()) for module in ours)
    return base.__module__.startswith("paceline.") and not named


def _member(name: str, value: Any, annotations: dict[str, Any]) -> str:
    if isinstance(value, property):
        return f"{name}{signature(value.fget, bound=True)} [property]" if value.fget else name
    if isinstance(value, staticmethod | classmethod):
        return f"{name}{signature(value.__func__, bound=isinstance(value, classmethod))} [{type(value).__name__}]"
    if inspect.isfunction(value):
        return f"{name}{signature(value, bound=True)}"
    type_ = f": {annotation(annotations[name])}" if name in annotations else ""
    return f"{name}{type_} = {shown(value)}"
