"""paceline trains PyTorch models on uneven clusters: one pure strategy decides who waits for whom.

Public, beside the names of this module: `paceline.strategies`, `paceline.strategies.peers`, `paceline.records`,
`paceline.scenario`, `paceline.tasks`, `paceline.transport.memory` and `paceline.engines.sim.light`. Every other package
says that it is not, and may change in any release.
"""

from typing import TYPE_CHECKING, Any

from paceline import _moved
from paceline._version import __version__

if TYPE_CHECKING:
    from paceline.comparison.calls import compare
    from paceline.comparison.outcome import Comparison
    from paceline.core.errors import (
        CheckpointError,
        DataError,
        DivergenceError,
        InternalError,
        JournalError,
        OptionError,
        PacelineError,
        PeerError,
        ScenarioError,
        ScriptError,
        StorageError,
        UserError,
    )
    from paceline.launching import Run, launch
    from paceline.records.report import Report
    from paceline.session import Session, init

__all__ = [
    "CheckpointError",
    "Comparison",
    "DataError",
    "DivergenceError",
    "InternalError",
    "JournalError",
    "OptionError",
    "PacelineError",
    "PeerError",
    "Report",
    "Run",
    "ScenarioError",
    "ScriptError",
    "Session",
    "StorageError",
    "UserError",
    "__version__",
    "compare",
    "init",
    "launch",
]

_HOMES = {
    **{name: "paceline.core.errors" for name in __all__ if name.endswith("Error")},
    "Comparison": "paceline.comparison.outcome",
    "Report": "paceline.records.report",
    "Run": "paceline.launching",
    "Session": "paceline.session",
    "compare": "paceline.comparison.calls",
    "init": "paceline.session",
    "launch": "paceline.launching",
}
_moved.install()


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that torch is loaded only when something needs it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
