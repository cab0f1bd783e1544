"""The strategies: pure state machines, one rule and one citation per file, and their registry.

The names of this module are public, and so is each strategy's class with its options: `paceline.strategies.asp.Asp`.
What an author of a strategy needs is here, too: `Strategy`, `Options` and `State` to derive from, the events that
`handle` gets, the actions that it returns, and the bookkeeping of workers and held pushes (see docs/howto).
"""

from paceline.core.actions import Action, Apply, Cancel, Discard, Grant, Mark, SetTimer, Track
from paceline.core.errors import OptionError
from paceline.core.events import Applied, Event, Joined, Left, Pushed, TimerFired
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
    other_names,
    parse,
    peer_class,
    peer_names,
    require_findable,
    strategy_class,
    written,
)
from paceline.strategies.roster import Roster, in_worker_order, whole_step

__all__ = [
    "Action", "Applied", "Apply", "Cancel", "Description", "Discard", "Event", "Grant", "Joined", "Kind",
    "Left", "Machine", "Mark", "OptionDescription", "OptionError", "Options", "Peer", "Pushed", "Roster", "SetTimer",
    "State", "Strategy", "TimerFired", "Track", "build", "build_central", "build_peer", "canonical", "checked",
    "describe", "in_worker_order", "is_peer", "machine_class", "names", "other_names", "parse", "peer_class",
    "peer_names", "require_findable", "strategy_class", "whole_step", "written",
]  # fmt: skip
