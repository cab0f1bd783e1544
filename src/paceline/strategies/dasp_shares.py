"""Shares of a DASP round on a busy line: our addition to the states.

Where all pushes of a round take a good part of it on the server's line, members that push at the same time queue, and
cut work gains nothing, because a push of few samples occupies the line like a full one. So the round is made as long as
a nominal round of samples takes, and each member's share is what fits between its model's turn on the line and its
push's turn (balanced_line.py). Known only where pushes say how long they waited for others.
"""

from collections.abc import Mapping

import msgspec
from msgspec import field

from paceline.core.events import Pushed
from paceline.strategies.balanced_line import Line
from paceline.strategies.balanced_pace import Pace, seconds_for
from paceline.strategies.monitor import SMOOTHING, Monitor


class Shares(msgspec.Struct):
    """The line, what each node's transfers take without waiting, and the round that is planned."""

    line: Line = field(default_factory=Line)
    crossing: dict[int, float] = {}  # seconds of a node's transfers when nobody is ahead
    of: dict[int, int] = {}  # samples of a member in the planned round; empty: none is planned
    span: float = 0.0  # of that round, in seconds

    def measure(self, event: Pushed) -> None:
        """Take from a push how long it and its model waited for others."""
        self.line.measure(event)
        own = event.transfer_s - (event.queued_down_s or 0.0) - (event.queued_up_s or 0.0)
        before = self.crossing.get(event.worker, own)
        self.crossing[event.worker] = before + SMOOTHING * (own - before)

    def forget(self, worker: int) -> None:
        """Drop what is known of a node."""
        self.line.forget(worker)
        self.crossing.pop(worker, None)
        self.of.pop(worker, None)

    def plan(self, monitor: Monitor, present: Mapping[int, int], least: int) -> None:
        """Plan a round of everybody's nominal work, without those for whom fewer than `least` samples fit."""
        members = [worker for worker in sorted(present) if worker in monitor.nodes and worker in self.crossing]
        samples = sum(present.values())
        while members:
            paces = self._paces(members, monitor)
            self.line.sharing = len(members)
            paces = self._delayed(paces, monitor)
            self.span = seconds_for(samples, paces.values())
            self.of = {worker: pace.fitting(self.span) for worker, pace in paces.items()}
            fitting = [worker for worker in members if self.of[worker] >= least]
            if len(fitting) == len(members):
                return
            members = fitting
        self.drop()

    def drop(self) -> None:
        """Plan no round."""
        self.of, self.span = {}, 0.0
        self.line.place, self.line.sharing = {}, 0

    def _paces(self, members: list[int], monitor: Monitor) -> dict[int, Pace]:
        self.line.place = {}
        paces = {worker: Pace(self.crossing[worker], monitor.nodes[worker].per_sample) for worker in members}
        self.line.line_up(paces)
        return paces

    def _delayed(self, paces: Mapping[int, Pace], monitor: Monitor) -> dict[int, Pace]:
        nodes = monitor.nodes
        return {
            worker: self.line.delayed(worker, pace, nodes[worker].deviation / nodes[worker].time, goes_on=False)
            for worker, pace in paces.items()
        }
