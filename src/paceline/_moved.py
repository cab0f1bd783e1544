"""Modules that have moved: importing one by its old name works for one release, and warns.

Not public: a table of old names and a finder for them, which Python asks only when no file has that name.
"""

import importlib
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType

# Old module: the module itself, and the public home of its names.
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
    """A finder and loader that returns the moved module itself for its old name, so that classes stay the same."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG004
        return ModuleSpec(name, MovedModules) if name in MOVED else None  # type: ignore[arg-type]  # needs no base

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:  # noqa: ARG004 - Python's own empty module, until it is replaced
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        place, home = MOVED[module.__name__]
        text = f"{module.__name__} will be removed in the next release: import its names from {home}"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        sys.modules[module.__name__] = importlib.import_module(place)


def install() -> None:
    """Register the finder after all others."""
    if MovedModules not in sys.meta_path:
        sys.meta_path.append(MovedModules)
