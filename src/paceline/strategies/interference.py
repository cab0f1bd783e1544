"""The part of the performance monitor that tells nodes disturbed by unrelated tasks from nodes that became slow.

A push that is overdue by `max(gamma deviations, T / 4)`, beyond what it waited for others on the server's line, stays
out of the node's estimate. Eight in a row are a lasting level and replace the estimate; a push in time ends the
suspicion. Where the host of the node says that others load it more than usual, overdue pushes count towards no level
before there are 32 in a row: a load that stays so long is a level, whatever its cause. While most nodes are disturbed,
or have become slower since the first of them was, hosts are not asked: what disturbs everybody is how the cluster is,
and whoever is held apart for it only spoils the others' steps.
"""

from typing import Literal

import msgspec
from msgspec import field

from paceline.core.events import HostLoad, Pushed
from paceline.strategies.monitor import SMOOTHING, Measured, Monitor

LEVEL_PUSHES = 8  # overdue pushes in a row that are a lasting level
LOADED_PUSHES = 4 * LEVEL_PUSHES  # the same on a host that others load, where most interference is over before
GRACE = 0.25  # share of its usual time by which a node may always be late
BUSY = 0.5  # load per core above what the node's pushes in time had: another job for every second core
TAKEN = 0.05  # share of time, stolen or throttled, that a machine of one's own does not lose
JUDGED_SHARE = 0.5  # of nominal work; shorter pushes, as at the end of an epoch, are mostly fixed cost

Verdict = Literal["in time", "overdue", "level", "too short to judge"]


class Interference(msgspec.Struct):
    """Estimates of every node, and the disturbed nodes."""

    monitor: Monitor = field(default_factory=Monitor)
    suspected: Monitor = field(default_factory=Monitor)  # overdue pushes, until they are a level
    overdue: Monitor = field(default_factory=Monitor)  # with those of loaded hosts
    disturbed: dict[int, bool] = {}
    slower: dict[int, bool] = {}  # nodes with a level of their own since anybody is disturbed
    usual_load: dict[int, float] = {}  # of a node's host, while the node is in time

    def judge(self, event: Pushed, samples: int, nominal: int, gamma: float, present: int) -> Verdict:
        """Record a push, or these samples that it added to one, of one of so many nodes.

        The verdict sets whether the node is disturbed.
        """
        worker, known = event.worker, self.monitor.nodes.get(event.worker)
        piece = (worker, samples, nominal, event.compute_s, event.transfer_s)
        if samples <= 0 or (known is not None and samples < JUDGED_SHARE * nominal):
            self.monitor.record(*piece)
            return "too short to judge"
        scaled = event.compute_s * nominal / samples + event.transfer_s
        queued = (event.queued_down_s or 0.0) + (event.queued_up_s or 0.0)  # behind others on the server's line
        if known is None or scaled - queued <= limit(known, gamma):
            self.monitor.record(*piece)
            self.calm(worker)
            if event.host:
                before = self.usual_load.get(worker, event.host.load)
                self.usual_load[worker] = before + SMOOTHING * (event.host.load - before)
            return "in time"
        self.disturbed[worker] = True
        self.slower.pop(worker, None)
        self.overdue.record(*piece)
        if not event.host or self.most_are_slow(present) or not self.loaded_by_others(worker, event.host):
            self.suspected.record(*piece)
        for found, least in ((self.suspected, LEVEL_PUSHES), (self.overdue, LOADED_PUSHES)):
            level = found.nodes.get(worker)
            if level is not None and level.pushes >= least:
                self.monitor.nodes[worker], self.slower[worker] = level, True
                self.calm(worker)
                return "level"
        return "overdue"

    def overdue_in_a_row(self, worker: int) -> int:
        """Return how many pushes of a node in a row are overdue."""
        known = self.overdue.nodes.get(worker)
        return 0 if known is None else known.pushes

    def most_are_slow(self, present: int) -> bool:
        """Return whether more than half are disturbed, or were until their times became their level."""
        return 2 * (len(self.disturbed) + len(self.slower)) > present

    def loaded_by_others(self, worker: int, host: HostLoad) -> bool:
        """Return whether the node's host has more to do than while the node was in time, or is held back."""
        busy = worker in self.usual_load and host.load > self.usual_load[worker] + BUSY
        return busy or host.steal > TAKEN or host.throttled > TAKEN

    def calm(self, worker: int) -> None:
        """Note that the node is not disturbed."""
        self.suspected.forget(worker)
        self.overdue.forget(worker)
        self.pause(worker)

    def pause(self, worker: int) -> None:
        """Count a node that waits for data among the disturbed no longer; its overdue pushes go on being in a row."""
        self.disturbed.pop(worker, None)
        if not self.disturbed:
            self.slower = {}

    def forget(self, worker: int) -> None:
        """Drop all that is known of a node that is gone; its successor is measured again."""
        self.slower.pop(worker, None)
        self.calm(worker)
        self.monitor.forget(worker)
        self.usual_load.pop(worker, None)


def limit(node: Measured, gamma: float) -> float:
    """Return the seconds for nominal work after which the node is overdue."""
    return node.time + max(gamma * node.deviation, GRACE * node.time)
