"""The strategies: pure state machines, one rule and one citation per file, and their registry."""

from paceline.strategies.base import Options, State, Strategy
from paceline.strategies.registry import (
    Description,
    OptionDescription,
    build,
    canonical,
    describe,
    names,
    parse,
    strategy_class,
)

__all__ = [
    "Description",
    "OptionDescription",
    "Options",
    "State",
    "Strategy",
    "build",
    "canonical",
    "describe",
    "names",
    "parse",
    "strategy_class",
]
