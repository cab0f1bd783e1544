"""A worker as the tables' host knows it, and what it brings."""

from collections import deque

import msgspec

from paceline.core.updates import PushRef
from paceline.server.workers import GrantOrder
from paceline.tables import messages as t
from paceline.tables.table_spec import Array


class OpLogs(msgspec.Struct):
    """The increments of one clock of one worker: what a push of tables brings."""

    worker: int
    incarnation: int
    through: int
    logs: list[t.TableLog]


class Reader:
    """One worker as its tables know it."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.first = 0  # the first clock that it completes
        self.order: GrantOrder | None = None  # the grant of the clock it is in
        self.granted = 0  # the clock that the grant goes through
        self.received = 0  # clocks that were delivered, those before its time counted in
        self.applied = 0  # and are in the tables
        self.told = 0
        self.offset = 0  # of its clocks to those that the strategy counts
        self.aside = False  # kept waiting by a table's own staleness, and away for the strategy
        self.returns = False  # from there
        self.entered = False
        self.era = 0  # barriers that it has passed: each may set its clock back
        self.overtaking: dict[int, tuple[t.Tick, PushRef]] = {}  # ticks that came before an earlier one
        self.early: deque[tuple[t.Tick, PushRef]] = deque()  # ticks that came before their grant
        self.parked: list[t.Fetch] = []
        self.parked_since: float | None = None  # by a table's own staleness, although its clock was granted
        self.barrier: t.AtBarrier | None = None
        self.rests_since = 0.0  # at the barrier
        self.passing: t.AtBarrier | None = None  # a barrier that is open
        self.kept: dict[int, tuple[Array, int]] = {}  # of eager tables: which rows it has, and as of which change

    def waits_for(self, read: t.Fetch) -> bool:
        """Whether the worker can be waiting for this: not for what it has asked for ahead of time."""
        return read.clock <= self.received
