"""Strategies by name, and the written form `name:option=value,option=value`.

There are two kinds: central ones, which a server runs, and peers, of which every node of a run without a server has its
own. Both are written and described alike; `build` and `build_peer` each refuse the other kind.
A class is imported when it is first used, so that naming one strategy does not load the others. `sources` says what
may take the place of the name.
"""

import random
from typing import Any

import msgspec

from paceline.core.errors import OptionError
from paceline.core.values import bounds_text, description_text, nearest, read, shown, to_text, type_text
from paceline.strategies import sources
from paceline.strategies.base import DEFAULTS, Machine, Options, Strategy
from paceline.strategies.peers.base import Peer
from paceline.strategies.peers.members import Members

EXAMPLES = {"k": "4"}  # values for the error message about a missing option


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
    """Return the names of all central strategies, baselines first."""
    return list(sources.CENTRAL)


def peer_names() -> list[str]:
    """Return the names of all strategies that need no server, baselines first."""
    return list(sources.PEERS)


def other_names() -> list[str]:
    """Return the names of strategies that other installed packages provide."""
    return list(sources.installed())


def machine_class(spec: str) -> type[Machine]:
    """Return the class of a strategy, of either `kind`; options in `spec` are ignored."""
    return sources.find(sources.split(spec)[0])


def strategy_class(name: str) -> type[Strategy]:
    """Return the class of a central strategy."""
    return _central(machine_class(name))


def peer_class(name: str) -> type[Peer]:
    """Return the class of a strategy that needs no server."""
    return _peer(machine_class(name))


def parse(spec: str) -> tuple[type[Machine], Options]:
    """Return the class, of either kind, and the options of `name:option=value,option=value`.

    Errors that an Options class raises in its `__post_init__` are prefixed with the strategy's name.
    """
    name, text = sources.split(spec)
    cls = sources.find(name)
    fields = _fields(cls)
    values: dict[str, Any] = {}
    if text is not None and not text.strip():
        raise OptionError(
            f"{name}: nothing follows the colon in {shown(spec)}; write {name} alone or {name}:option=value"
        )
    for item in text.split(",") if text is not None else ():
        option, equals, value = (part.strip() for part in item.partition("="))
        if option not in fields:
            advice = nearest(option, fields) if fields else "it has no options"
            raise OptionError(f"{name} has no option {shown(option)}; {advice}")
        if not equals:
            raise OptionError(f"{name}: {option} has no value; write {name}:{option}=value")
        if option in values:
            raise OptionError(f"{name}: {option} is given twice in {shown(spec)}; give it once")
        values[option] = read(value, fields[option].type, f"{name}: {option}")
    for option, field in fields.items():
        if field.required and option not in values:
            raise OptionError(f"{name} needs {option}, for example {name}:{option}={EXAMPLES.get(option, '1')}")
    try:
        return cls, cls.Options(**values)
    except OptionError as error:
        raise OptionError(f"{name}: {error}") from error


def as_then(spec: str, defaults: int) -> str:
    """Return the strategy of a journal with the defaults that it had then spelled out, where they have changed."""
    name, text = sources.split(spec)
    former = {} if defaults >= DEFAULTS else sources.find(name).former
    given = {item.partition("=")[0].strip() for item in text.split(",")} if text is not None else set()
    missing = [f"{option}={value}" for option, value in former.items() if option not in given]
    return f"{name}:{','.join([*([text] if text else []), *missing])}" if missing else spec


def build(spec: str, seed: int) -> Strategy:
    """Make a central strategy; its randomness comes from the seed alone."""
    cls, options = parse(spec)
    return _central(cls)(options, random.Random(f"{seed}:strategy"))


def build_peer(spec: str, seed: int, node: int) -> Peer:
    """Make a node's machine; its randomness comes from the seed and the node's number."""
    cls, options = parse(spec)
    return _peer(cls)(options, random.Random(f"{seed}:peer:{node}"))


def is_peer(spec: str) -> bool:
    """Whether this strategy trains without a server."""
    return machine_class(spec).kind == "peer"


def build_central(spec: str, seed: int) -> Strategy:
    """Make the coordinator's strategy: the one given or, in a run without a server, `Members`."""
    return Members(Members.Options(), random.Random(0)) if is_peer(spec) else build(spec, seed)


def checked(spec: str, seed: int, workers: int) -> str:
    """Return the strategy as a journal writes it; refuse options that so many workers cannot meet."""
    if is_peer(spec):
        return canonical(build_peer(spec, seed, 0))
    strategy = build(spec, seed)
    strategy.check(workers)
    return canonical(strategy)


def canonical(strategy: Machine) -> str:
    """Return the shortest text from which `build` makes an equal strategy."""
    given = []
    for option, field in _fields(type(strategy)).items():
        value = getattr(strategy.options, option)
        if field.required or value != field.default:
            given.append(f"{option}={to_text(value)}")
    name = sources.origin(type(strategy))
    return f"{name}:{','.join(given)}" if given else name


def written(strategy: str | Machine | type[Machine]) -> str:
    """Return the strategy given to `launch` in the form that `parse` reads."""
    if isinstance(strategy, Machine):
        return canonical(strategy)
    return sources.origin(strategy) if isinstance(strategy, type) else strategy


def require_findable(spec: str) -> None:
    """Refuse a strategy whose class no other process can find."""
    sources.require_findable(sources.split(spec)[0])


def describe(cls: type[Machine]) -> Description:
    """Return what `paceline strategies` shows about a strategy."""
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


def _central(cls: type[Machine]) -> type[Strategy]:
    if not issubclass(cls, Strategy):
        raise OptionError(
            f"{cls.name} trains without a server, which this engine cannot do; choose from {', '.join(names())}"
        )
    return cls


def _peer(cls: type[Machine]) -> type[Peer]:
    if not issubclass(cls, Peer):
        choices = ", ".join(peer_names())
        raise OptionError(f"{cls.name} trains with a server, and there is none here; choose from {choices}")
    return cls


def _fields(cls: type[Machine]) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.name: field for field in msgspec.structs.fields(cls.Options)}
