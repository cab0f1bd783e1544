"""Scenario files: `load` one by its path or built-in name, `parse` one from text, describe one in words."""

from paceline.core.scenario.file import (
    Compute,
    Network,
    Scenario,
    ScenarioEvent,
    WorkerSpec,
    as_data,
    builtin_names,
    builtin_text,
    describe,
    from_data,
    load,
    parse,
)

__all__ = [
    "Compute", "Network", "Scenario", "ScenarioEvent", "WorkerSpec", "as_data", "builtin_names", "builtin_text",
    "describe", "from_data", "load", "parse",
]  # fmt: skip
