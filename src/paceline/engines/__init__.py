"""The engines: where processes run and what a second is. An engine's module is imported when a run asks for it by name.

Each has `launch(train, plan, sink, progress)`, which carries one run and returns its `Launched`.

Not public: `paceline.launch(engine=...)` chooses one. Only `paceline.engines.sim.light` is public.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from paceline.core.settings import Capabilities, RunConfig

_ENGINES: dict[str, tuple[Capabilities, str]] = {
    "local": (Capabilities(own_processes=True, restarts_server=True), "paceline.engines.local.launcher"),
    "hosts": (
        Capabilities(own_processes=True, restarts_server=True, open_to_joiners=True),
        "paceline.engines.hosts.serving",
    ),
    "ray": (
        Capabilities(own_processes=True, restarts_server=True, open_to_joiners=True, asks_a_cluster=True),
        "paceline.engines.ray.driver",
    ),
    "sim": (Capabilities(virtual_time=True, restarts_server=True), "paceline.engines.sim.virtual_engine"),
}


def simulator() -> str:
    """Return the name of the engine of virtual time."""
    return next(name for name, (can, _) in _ENGINES.items() if can.virtual_time)


def capabilities(name: str) -> Capabilities:
    """Return what the engine of that name can do."""
    return _ENGINES[name][0]


def load(name: str) -> Any:
    """Import the engine's module."""
    return importlib.import_module(_ENGINES[name][1])


def fitness() -> Any:
    """Import what tries out whether this machine can carry the processes of a run; it loads no torch."""
    return importlib.import_module("paceline.engines.local.fitness")


@contextlib.contextmanager
def prepared(config: RunConfig) -> Iterator[None]:
    """Start a nursery ahead of the launch, so that it imports torch while this process does the same."""
    from paceline.engines.local import nursery

    elsewhere = capabilities(config.engine).asks_a_cluster
    if config.start == "fresh" or elsewhere or not nursery.possible():
        yield
        return
    with nursery.kept():
        nursery.prepare()
        yield


def start_alone() -> Any:
    """Return the context of a script that runs without a launcher."""
    return importlib.import_module("paceline.engines.alone").start()
