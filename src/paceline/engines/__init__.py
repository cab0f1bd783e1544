"""The engines: where processes run and what a second is. One is loaded when a run asks for it by its name.

A module of an engine has `launch(train, plan, sink, progress)`, which carries one run and gives its `Launched` back.

Not public: `paceline.launch(engine=...)` chooses one; only `paceline.engines.sim.light` is.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from paceline.core.settings import Capabilities, RunConfig

_ENGINES: dict[str, tuple[Capabilities, str]] = {
    "local": (Capabilities(own_processes=True, restarts_server=True), "paceline.engines.local.launcher"),
    "sim": (Capabilities(virtual_time=True), "paceline.engines.sim.virtual_engine"),
}


def capabilities(name: str) -> Capabilities:
    """What the engine of that name can do."""
    return _ENGINES[name][0]


def load(name: str) -> Any:
    """Its module."""
    return importlib.import_module(_ENGINES[name][1])


@contextlib.contextmanager
def prepared(config: RunConfig) -> Iterator[None]:
    """Begin with what takes long before a launch: a nursery imports torch while this process does the same."""
    from paceline.engines.local import nursery

    if config.start == "fresh" or not nursery.possible():
        yield
        return
    with nursery.kept():
        nursery.prepare()
        yield


def start_alone() -> Any:
    """The context of a script that runs by itself."""
    return importlib.import_module("paceline.engines.alone").start()
