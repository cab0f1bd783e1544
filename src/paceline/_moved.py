"""Modules whose documented place has changed: the old import works for one release, and warns.

Not public: a table of old places and a finder for them, which Python asks only when no file has that name.
"""

import importlib
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType

# Old module: where it is, and where its public names are.
MOVED = {
    "paceline.actions": ("paceline.core.actions", "paceline.strategies"),
    "paceline.blame": ("paceline.records.wait_attribution", "paceline.records"),
    "paceline.errors": ("paceline.core.errors", "paceline"),
    "paceline.events": ("paceline.core.events", "paceline.strategies"),
    "paceline.journal": ("paceline.records.journal", "paceline.records"),
    "paceline.metrics": ("paceline.records.metrics", "paceline.records"),
    "paceline.peer_actions": ("paceline.core.peer_actions", "paceline.strategies.peers"),
    "paceline.peer_events": ("paceline.core.peer_events", "paceline.strategies.peers"),
}


class MovedModules:
    """A finder and loader that answers an old name with the module itself, so that its classes stay the same."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG004
        return ModuleSpec(name, MovedModules) if name in MOVED else None  # type: ignore[arg-type]  # needs no base

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:  # noqa: ARG004 - Python's own empty module, until it is exchanged
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        place, home = MOVED[module.__name__]
        text = f"{module.__name__} goes with the next release: import what it has from {home}"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        sys.modules[module.__name__] = importlib.import_module(place)


def install() -> None:
    """Have Python ask for moved modules last."""
    if MovedModules not in sys.meta_path:
        sys.meta_path.append(MovedModules)
