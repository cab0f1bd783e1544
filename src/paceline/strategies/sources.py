"""Where a strategy's class comes from: this package, a file, a module, or an entry point of another package.

Written `name`, `FILE.py:CLASS` or `MODULE:CLASS`, followed by `:option=value,option=value` where options are given. A
registered name always means that strategy; for a module of the same name, give its file.
Journals and server processes get `origin`, which is enough to find the class again from anywhere.
Finding a class reads files and runs its module: the rule that strategies are pure does not apply to this file.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import zlib
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.core.errors import OptionError
from paceline.core.values import nearest, shortened, shown
from paceline.strategies.base import Machine


def _places(folder: str, *names: str) -> dict[str, str]:
    """Return where strategies of this package are: each in a module of its name, its class that name in CamelCase."""
    return {name: f"{folder}{name}:{name.title().replace('_', '')}" for name in names}


CENTRAL = _places(
    "", "bsp", "asp", "ssp", "dssp", "adaptive_sync", "dasp", "fastest_k", "k_async", "adaptive_k", "adaptive_k_load",
    "balanced",
)  # fmt: skip
PEERS = _places("peers.", "gossip", "elastic", "local_sgd", "adaptive_gossip", "adaptive_elastic")
GROUP = "paceline.strategies"  # of entry points
HERE = "__main__"  # module of a notebook, an interactive session, or the program that was started

_CLASS = re.compile(r"(?P<place>.+?\.py|[A-Za-z_][\w.]*)\s*:\s*(?P<name>[A-Za-z_][\w.]*)\s*(?::(?P<options>.*))?", re.S)
_given: dict[str, type[Machine]] = {}  # classes given to this process as objects, by their origin
_loading: list[str] = []  # files under way


def installed() -> dict[str, Any]:
    """Return the entry points of other packages by name, except names of this package's own strategies."""
    found = importlib.metadata.entry_points(group=GROUP)
    return {point.name: point for point in found if point.name not in CENTRAL and point.name not in PEERS}


def split(spec: str) -> tuple[str, str | None]:
    """Return the strategy's name or place, and its options as text, None if there are none."""
    name, colon, options = spec.strip().partition(":")
    written = _CLASS.fullmatch(spec.strip())
    if written is None or name.strip() in (*CENTRAL, *PEERS) or (name.strip() in installed()):
        return name.strip(), options if colon else None
    return f"{written['place']}:{written['name']}", written["options"]


def file_of(spec: str) -> str | None:
    """Return the file of a user's own strategy; None if it is given in another way."""
    place = split(spec)[0].rpartition(":")[0]
    return place if place.endswith(".py") else None


def find(who: str) -> type[Machine]:
    """Return the class for the name or place that `split` returns."""
    place = CENTRAL.get(who) or PEERS.get(who)
    if place is not None:
        module, _, name = place.partition(":")
        return getattr(importlib.import_module(f"{__package__}.{module}"), name)  # type: ignore[no-any-return]
    if who in _given:
        return _given[who]
    if ":" in who:
        place, _, name = who.rpartition(":")
        return _class_in(_module(place, who), name, who)
    if who.endswith(".py"):
        raise OptionError(f"{shown(who)} names no class: write {who}:CLASS")
    points = installed()
    if who not in points:
        raise OptionError(f"unknown strategy {shown(who)}; {nearest(who, [*CENTRAL, *PEERS, *points])}")
    try:
        found = points[who].load()
    except (Exception, SystemExit) as error:
        raise _unloadable(f"the entry point {who} ({points[who].value})", error) from error
    return _class_in(found, "", who)


def origin(cls: type[Machine]) -> str:
    """Return how any process finds the class; remember one that this process was given, to not load it again."""
    for name, place in {**CENTRAL, **PEERS}.items():
        if f"{__package__}.{place.replace(':', '.')}" == f"{cls.__module__}.{cls.__qualname__}":
            return name
    if "<locals>" in cls.__qualname__:
        raise OptionError(
            f"the strategy {cls.__name__} is defined inside a function, where no other process finds it: move it to "
            "the top level of a file"
        )
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    loaded_here = getattr(module, "__paceline_file__", False)
    by_path = file is not None and (loaded_here or cls.__module__ == HERE)
    found = f"{Path(file or '').resolve() if by_path else cls.__module__}:{cls.__qualname__}"
    if not loaded_here:
        _given[found] = cls
    return found


def require_findable(who: str) -> None:
    """Refuse a class that only this process can find."""
    if who.startswith(f"{HERE}:"):
        name = who.partition(":")[2]
        raise OptionError(
            f"the strategy {name} is defined in a notebook or an interactive session, where the server process does "
            f"not find it: save it to a file and give strategy='FILE.py:{name}', or use engine='sim'"
        )


def require_not_loading(what: str) -> None:
    """Refuse to start a run from a file that is being loaded for its strategy: the run would load it again."""
    if _loading:
        raise OptionError(f"{what} stands at its top level: put it under `if __name__ == '__main__':`")


def _module(place: str, who: str) -> ModuleType:
    if place.endswith(".py"):
        try:
            path = Path(place).expanduser().resolve()
            stamp = path.stat().st_mtime_ns
        except (OSError, ValueError, RuntimeError) as error:  # an impossible file name, or an unknown home folder
            reason = error.strerror if isinstance(error, OSError) else error
            raise OptionError(f"cannot read the file of strategy {shown(who)}: {reason}") from None
        return _from_file(str(path), stamp)
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # as with `python -m`; children get this process's path
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise _unloadable(f"the module {place}", error) from error
        names = [*CENTRAL, *PEERS]
        raise OptionError(f"unknown strategy {shown(who)}: no module {shown(place)}; {nearest(place, names)}") from None
    except (Exception, SystemExit) as error:
        raise _unloadable(f"the module {place}", error) from error


@lru_cache(maxsize=64)
def _from_file(path: str, stamp: int) -> ModuleType:  # noqa: ARG001 - a changed file is loaded again
    name = f"paceline_strategy_{zlib.crc32(path.encode()):08x}_{re.sub(r'[^0-9A-Za-z_]', '_', Path(path).stem)}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"{path} is no Python file")
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    module.__paceline_file__ = True  # type: ignore[attr-defined]
    sys.modules[name] = module  # so that its annotations can be resolved
    folder = str(Path(path).parent)
    _loading.append(path)
    sys.path.insert(0, folder)  # it can import modules beside it, as a script can
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _unloadable(path, error) from error
    finally:
        sys.path.remove(folder)
        _loading.remove(path)
    return module


def _unloadable(what: str, error: BaseException) -> OptionError:
    """Make an option error: the user's code failed, not ours."""
    return OptionError(f"{what} cannot be loaded as a strategy: {shortened(f'{type(error).__name__}: {error}')}")


def _class_in(found: Any, name: str, who: str) -> type[Machine]:
    for part in name.split(".") if name else ():
        if not hasattr(found, part):
            classes = [
                key for key, value in vars(found).items() if _is_machine(value) and not inspect.isabstract(value)
            ]
            raise OptionError(f"{shown(who)}: there is no {shown(part)} in it; {nearest(part, classes)}")
        found = getattr(found, part)
    if not _is_machine(found):
        raise OptionError(f"{shown(who)} is no strategy: derive a class from paceline.strategies.Strategy")
    if inspect.isabstract(found):
        raise OptionError(f"{shown(who)} lacks {', '.join(sorted(found.__abstractmethods__))}")
    return found  # type: ignore[no-any-return]


def _is_machine(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Machine)
