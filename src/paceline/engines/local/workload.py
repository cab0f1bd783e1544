"""What workers run: a script by its path, or a function pickled and sent over their private socket.

A function of a module that a fresh interpreter can import is pickled by name. One of a notebook, of the program that
calls `launch`, or of a module loaded in some other way is pickled by value, with all that it refers to.
"""

import contextlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import cloudpickle
import msgspec

from paceline.core.errors import OptionError
from paceline.engines.local.control import Role
from paceline.worker.scripts import Script, load_script


class Workload(msgspec.Struct, frozen=True):
    """A script and its arguments, or a pickled function."""

    script: str | None = None
    arguments: list[str] = []
    function: bytes | None = None


def packed(train: Callable[[], None]) -> Workload:
    """Return the workload of this callable."""
    if isinstance(train, Script):
        return Workload(os.fspath(train.path), train.arguments)
    try:
        with _by_value_where_needed(train):
            return Workload(function=cloudpickle.dumps(train))
    except Exception as error:
        raise OptionError(
            f"launch() cannot hand {getattr(train, '__name__', train)!s} over to worker processes ({error}): make "
            "what it uses inside the function, or use engine='sim', whose workers share this process"
        ) from error


def unpacked(role: Role) -> Callable[[], None]:
    """Return the callable that this process runs; sets sys.path and the script's arguments."""
    sys.path[:] = role.sys_path
    if role.script is not None:
        return load_script(Path(role.script), role.arguments)
    try:
        train: Callable[[], None] = pickle.loads(role.function or b"")
    except Exception as error:
        raise OptionError(
            f"a worker process cannot load the function that launch() was given ({type(error).__name__}: {error}): "
            "define it, and what it uses, where a fresh interpreter can import it"
        ) from error
    return train


@contextlib.contextmanager
def _by_value_where_needed(train: Callable[[], None]) -> Iterator[None]:
    module = sys.modules.get(getattr(train, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or _can_be_imported(module):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _can_be_imported(module: ModuleType) -> bool:
    """Whether a fresh interpreter with this import path would find the same file under the same name."""
    top, _, rest = module.__name__.partition(".")
    found = PathFinder.find_spec(top)
    if found is None:
        return top in sys.builtin_module_names
    loaded = getattr(module if not rest else sys.modules.get(top), "__file__", None)
    return found.origin is None or loaded is None or Path(found.origin) == Path(loaded)
