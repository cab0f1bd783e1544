"""The part of the performance monitor that tells nodes disturbed by unrelated tasks from nodes that became slow.

A push that is overdue by `max(gamma deviations, T / 4)` stays out of the node's estimate. Eight in a row are a lasting
level and replace the estimate; a push in time ends the suspicion. Where the host of the node says that others load it
more than usual, an overdue push is interference however many there are, and counts towards no level.
"""

from typing import Literal

import msgspec
from msgspec import field

from paceline.core.events import HostLoad, Pushed
from paceline.strategies.monitor import SMOOTHING, Measured, Monitor

LEVEL_PUSHES = 8  # overdue pushes in a row that are a lasting level
GRACE = 0.25  # share of its usual time by which a node may always be late
BUSY = 0.5  # load per core above what the node's pushes in time had: another job for every second core
TAKEN = 0.05  # share of time, stolen or throttled, that a machine of one's own does not lose
JUDGED_SHARE = 0.5  # of nominal work; shorter pushes, as at the end of an epoch, are mostly fixed cost

Verdict = Literal["in time", "overdue", "level", "too short to judge"]


class Interference(msgspec.Struct):
    """Estimates of every node, and the disturbed nodes."""

    monitor: Monitor = field(default_factory=Monitor)
    suspected: Monitor = field(default_factory=Monitor)  # overdue pushes, until they are a level
    disturbed: dict[int, bool] = {}
    usual_load: dict[int, float] = {}  # of a node's host, while the node is in time

    def judge(self, event: Pushed, nominal: int, gamma: float) -> Verdict:
        """Record a push and return the verdict, which sets whether the node is disturbed."""
        worker, known = event.worker, self.monitor.nodes.get(event.worker)
        piece = (worker, event.samples, nominal, event.compute_s, event.transfer_s)
        if event.samples == 0 or (known is not None and event.samples < JUDGED_SHARE * nominal):
            self.monitor.record(*piece)
            return "too short to judge"
        scaled = event.compute_s * nominal / event.samples + event.transfer_s
        if known is None or scaled <= limit(known, gamma):
            self.monitor.record(*piece)
            self.calm(worker)
            if event.host:
                before = self.usual_load.get(worker, event.host.load)
                self.usual_load[worker] = before + SMOOTHING * (event.host.load - before)
            return "in time"
        if event.host and self.loaded_by_others(worker, event.host):
            self.disturbed[worker] = True
            return "overdue"
        self.suspected.record(*piece)
        if self.suspected.nodes[worker].pushes < LEVEL_PUSHES:
            self.disturbed[worker] = True
            return "overdue"
        self.monitor.nodes[worker] = self.suspected.nodes[worker]
        self.calm(worker)
        return "level"

    def loaded_by_others(self, worker: int, host: HostLoad) -> bool:
        """Return whether the node's host has more to do than while the node was in time, or is held back."""
        busy = worker in self.usual_load and host.load > self.usual_load[worker] + BUSY
        return busy or host.steal > TAKEN or host.throttled > TAKEN

    def calm(self, worker: int) -> None:
        """Note that the node is not disturbed."""
        self.suspected.forget(worker)
        self.disturbed.pop(worker, None)

    def forget(self, worker: int) -> None:
        """Drop all that is known of a node that is gone; its successor is measured again."""
        self.calm(worker)
        self.monitor.forget(worker)
        self.usual_load.pop(worker, None)


def limit(node: Measured, gamma: float) -> float:
    """Return the seconds for nominal work after which the node is overdue."""
    return node.time + max(gamma * node.deviation, GRACE * node.time)
