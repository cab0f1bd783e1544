"""paceline trains PyTorch models on uneven clusters: one pure strategy decides who waits for whom."""

from typing import TYPE_CHECKING, Any

from paceline._version import __version__

if TYPE_CHECKING:
    from paceline.launching import Run, launch
    from paceline.records.report import Report
    from paceline.session import Session, init

__all__ = ["Report", "Run", "Session", "__version__", "init", "launch"]

_HOMES = {
    "Report": "paceline.records.report",
    "Run": "paceline.launching",
    "Session": "paceline.session",
    "init": "paceline.session",
    "launch": "paceline.launching",
}


def __getattr__(name: str) -> Any:
    """Load torch only when something that needs it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
