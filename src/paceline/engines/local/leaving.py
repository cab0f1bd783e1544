"""How a process forked from a nursery exits: it finishes what its script has, and leaves the rest to the kernel.

Python would free every object of torch and of the other modules that the nursery had imported, and so copy most of the
memory that all processes share: 0.2 s of a core for each of them. Python's own `multiprocessing` leaves its forked
processes in the same way.
"""

import atexit
import contextlib
import gc
import os
import sys
import sysconfig
import threading
from collections.abc import Iterable
from types import ModuleType
from typing import NoReturn

INSTALLED = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib")})  # noqa: PTH118


def leave(code: int, known: Iterable[str]) -> NoReturn:
    """Exit with the code. `known` are the names of the modules that the nursery had imported.

    Threads are waited for and exit handlers run, as ever. Then the script's own modules are emptied: a file that it
    never closed is written, and whatever else it holds ends as it would with the interpreter.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for module in _own_modules(known):
        module.__dict__.clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed or replaced by the script
            stream.flush()
    os._exit(code)


def _own_modules(known: Iterable[str]) -> list[ModuleType]:
    """Return `__main__` and the modules that the script imported, without those of installed packages."""
    names = [name for name in sys.modules if name not in set(known)]
    found = [sys.modules[name] for name in names if isinstance(sys.modules[name], ModuleType)]
    own = [each for each in found if (file := getattr(each, "__file__", None)) and not str(file).startswith(INSTALLED)]
    main = sys.modules.get("__main__")
    return own if main is None else [main, *own]
