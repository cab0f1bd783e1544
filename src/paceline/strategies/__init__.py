"""The strategies: pure state machines, one rule and one citation per file, and their registry."""

from paceline.strategies.base import Kind, Machine, Options, State, Strategy
from paceline.strategies.peers.base import Peer
from paceline.strategies.registry import (
    Description,
    OptionDescription,
    build,
    build_central,
    build_peer,
    canonical,
    checked,
    describe,
    is_peer,
    machine_class,
    names,
    parse,
    peer_class,
    peer_names,
    strategy_class,
)

__all__ = [
    "Description",
    "Kind",
    "Machine",
    "OptionDescription",
    "Options",
    "Peer",
    "State",
    "Strategy",
    "build",
    "build_central",
    "build_peer",
    "canonical",
    "checked",
    "describe",
    "is_peer",
    "machine_class",
    "names",
    "parse",
    "peer_class",
    "peer_names",
    "strategy_class",
]
