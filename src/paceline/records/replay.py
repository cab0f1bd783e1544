"""Replay: feed a journal's events to a fresh strategy and compare its decisions with those of the run.

A strategy is pure, so a difference means that the journal was altered, that the strategy has changed since, or that
something outside its events leaked into a decision.
"""

import math
from pathlib import Path
from typing import Any

import msgspec

from paceline import strategies
from paceline.core.actions import Action
from paceline.core.errors import JournalError, OptionError
from paceline.core.events import Event
from paceline.core.peer_actions import PeerAction
from paceline.core.peer_events import PeerEvent
from paceline.records import journal
from paceline.records.journal import Decision, Header, Observation, PeerDecision
from paceline.strategies.base import Strategy
from paceline.strategies.peers.base import Peer
from paceline.strategies.registry import as_then


class Difference(msgspec.Struct, frozen=True):
    """The first action that differs; None stands for an action that one side does not have."""

    line: int
    event: Event | PeerEvent
    position: int  # of the action within its decision, from 1
    expected: Action | PeerAction | None
    got: Action | PeerAction | None
    error: str | None = None  # what the strategy raised instead of deciding

    def __str__(self) -> str:
        got = f"the strategy raised {self.error}" if self.error else _worded(self.got)
        return (
            f"line {self.line}, action {self.position} differs\n"
            f"  event:    {_worded(self.event)}\n"
            f"  expected: {_worded(self.expected)}\n"
            f"  got:      {got}"
        )


class Replay(msgspec.Struct, frozen=True):
    """How many decisions were compared, and the first difference, if any; the replay stops there."""

    decisions: int
    difference: Difference | None
    complete: bool = True  # False: the journal ends before the run did


def replay(path: Path, strategy_now: str | None = None) -> Replay:
    """Compare every decision of the journal with what a fresh strategy decides.

    `strategy_now` locates the strategy if it is no longer where the journal's header says.
    """
    strategy: Strategy | None = None
    header: Header | None = None
    nodes: dict[tuple[int, int], Peer] = {}
    decisions, complete = 0, False
    for number, line in enumerate(journal.read(path), 1):
        complete = isinstance(line, Observation) and line.what == "end"
        if isinstance(line, Header):
            header = msgspec.structs.replace(line, strategy=strategy_now or _as_then(line))
            strategy, nodes = _found(header, path), {}
        elif isinstance(line, Decision | PeerDecision):
            if strategy is None or header is None:
                raise JournalError(f"{path}, line {number}: a decision before any header; the file's start is missing")
            machine: Strategy | Peer = strategy
            if isinstance(line, PeerDecision):
                place = (line.node, line.life)
                if place not in nodes:
                    nodes[place] = strategies.build_peer(header.strategy, header.seed, line.node)
                machine = nodes[place]
            decisions += 1
            difference = _difference(number, line, machine)
            if difference is not None:
                return Replay(decisions, difference)
    if strategy is None:
        raise JournalError(f"{path} holds no header, so there is no strategy to replay; is it a journal?")
    return Replay(decisions, None, complete)


def _as_then(header: Header) -> str:
    """The strategy with the defaults of its time; one that cannot be found is told of later."""
    try:
        return as_then(header.strategy, header.defaults)
    except OptionError:
        return header.strategy


def _found(header: Header, path: Path) -> Strategy:
    try:
        return started(header)
    except OptionError as error:
        if header.strategy.partition(":")[0] in (*strategies.names(), *strategies.peer_names()):
            raise
        raise JournalError(
            f"the strategy of {path} cannot be built here: {error} (if it has moved, give --strategy "
            "FILE.py:CLASS[:OPTION=VALUE,...])"
        ) from error


def started(header: Header) -> Strategy:
    """Build the central strategy of a run; without a server it is one that only tracks the members."""
    strategy = strategies.build_central(header.strategy, header.seed)
    if header.snapshot is None:
        return strategy
    try:
        return strategy.restore(header.snapshot)
    except (ValueError, TypeError, KeyError, OverflowError) as error:  # what a state of another shape raises
        raise JournalError(f"the header's snapshot is not a state of {header.strategy}: {error}") from error


def _difference(number: int, line: Decision | PeerDecision, strategy: Any) -> Difference | None:
    expected: list[Any] = list(line.actions)
    try:
        got = strategy.handle(line.event)
    except Exception as error:  # noqa: BLE001 - any exception is a difference
        first = expected[0] if expected else None
        return Difference(number, line.event, 1, first, None, f"{type(error).__name__}: {error}")
    if got == expected:
        return None
    for index in range(max(len(got), len(expected))):
        wanted = expected[index] if index < len(expected) else None
        made = got[index] if index < len(got) else None
        if type(wanted) is not type(made) or not _same(msgspec.to_builtins(wanted), msgspec.to_builtins(made)):
            return Difference(number, line.event, index + 1, wanted, made)
    return None


def _same(one: Any, other: Any) -> bool:
    """Compare plain data, where NaN equals NaN and a tuple equals a list."""
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    return bool(one == other)


def _worded(value: Event | PeerEvent | Action | PeerAction | None) -> str:
    if value is None:
        return "no action"
    fields = ", ".join(f"{name}={getattr(value, name)!r}" for name in value.__struct_fields__)
    return f"{type(value).__name__}({fields})"
