"""What DASP's server records of every node, and how it decides the nodes' states from it.

A node belongs to the fast group if its time for nominal work is within `rho` of the group's reference, the lower
quartile of the present nodes' times. Nominal work, because a node that was given less would look fast and go in and
out; for the same reason a member leaves only when it is clearly outside. Time alone would readmit a node whose average
does not know yet that it became slow, so the read version decides as well: who comes back has to keep step, the
version that its last push read is at most one step of the group old, and the group's latest if that push was slow.
This, the versions missed, is the staleness that decides on states; the mass applied since the read decides on weights.
Reference and usual round are updated once a round.

An average follows a new level at once and ignores a single stall: a push far from it waits for the next one, which
confirms it or not. What is far depends on how much times vary, and so does what is late. The spread is the median of
the nodes' mean deviations, as a share of their times, so that neither few pushes nor one restless node set it.

The members' transfers show how busy the server's line is: in one round each is longer than the one before by what a
push takes on it. One that is far apart from all others is a slow link, which says nothing of the line.
If all pushes of a round would take a good part of it, the round is planned by turns on the line (dasp_shares.py), or
work is not cut.
"""

from itertools import pairwise
from math import floor
from typing import Literal

import msgspec
from msgspec import field

from paceline.core.events import Pushed
from paceline.strategies.dasp_shares import Shares
from paceline.strategies.monitor import SMOOTHING, Measured, Monitor

Name = Literal["SYNC", "ASYNC", "WARMUP"]
Fit = Literal["merge", "join", "none"]

HYSTERESIS = 1.15  # of the bound, to either side: beyond it a member leaves, within it others join; averages of
# 10 % jitter vary by 3 %
KEEPS_STEP = 1  # steps of the group that the last push of a node may have missed if it is to become a member
WORTHWHILE = 4  # samples; a push of fewer costs more in transfer and noise than it brings
ODD_SHARE, ODD_DEVIATIONS = 0.25, 5.0  # of the average; beyond both, up or down, a push is a stall or a new level
LATE_DEVIATIONS = 4.0  # of a member's time; under lognormal jitter of 0.3, one push in 60 is later
LONGEST_PATIENCE = 2.0  # usual rounds that deviations can make a barrier wait; a stalled member costs no more
LATE_STEPS = 2  # of the group, in a row, that a member is late for when it leaves; one may be chance
BUSY, CALM = 0.4, 0.3  # share of the usual round that all pushes take on the line: full work from here, to there


class Odd(msgspec.Struct, frozen=True):
    """A push far from the node's average, until the next one."""

    samples: int
    compute_s: float
    transfer_s: float
    seconds: float  # scaled to nominal work


class Record(msgspec.Struct):
    """One node. Its times are the monitor's, its clock is among the clocks."""

    state: Name
    since: float  # time at which it entered this state
    sized: bool = False  # its work is cut to the usual round
    read_version: int = 0  # of its last push
    behind: int = 0  # versions applied between read and arrival of its last push
    read_mass: float = 0.0  # mass applied when it was last granted work
    odd: Odd | None = None
    late: int = 0  # steps in a row that the group made without it, a member


class Records(msgspec.Struct):
    """Every node's record, the group's reference time and its usual round, in seconds."""

    nodes: dict[int, Record] = {}
    monitor: Monitor = field(default_factory=Monitor)
    reference: float | None = None  # None until the first round is over
    usual: float = 0.0
    spread: float = 0.0  # of times around their averages: mean deviation, as a share
    line: float = 0.0  # share of the usual round that a push of every node would take on the server's line
    busy: bool = False  # the line is
    shares: Shares = field(default_factory=Shares)  # of a round on a busy line

    def update(self, event: Pushed, nominal: int, version: int) -> None:
        """Record the times of a push and the versions that it missed."""
        record = self.nodes[event.worker]
        record.read_version = event.read_version
        record.behind = version - event.read_version
        if event.samples:
            self._measure(record, event, nominal)
            self.shares.measure(event)

    def _measure(self, record: Record, event: Pushed, nominal: int) -> None:
        """Enter the times into the node's average, or keep them until the next push confirms them."""
        worker, before, node = event.worker, record.odd, self.monitor.nodes.get(event.worker)
        seconds = event.compute_s * nominal / event.samples + event.transfer_s
        if node is None or not self._far(node, seconds):
            record.odd = None
        elif before is not None and (before.seconds > node.time) == (seconds > node.time):
            record.odd = None
            self.monitor.forget(worker)
            self.monitor.record(worker, before.samples, nominal, before.compute_s, before.transfer_s)
        else:
            record.odd = Odd(event.samples, event.compute_s, event.transfer_s, seconds)
            return
        self.monitor.record(worker, event.samples, nominal, event.compute_s, event.transfer_s)

    def _far(self, node: Measured, seconds: float) -> bool:
        """Whether times like this are not to be expected of the node."""
        ratio = 1 + max(ODD_SHARE, ODD_DEVIATIONS * max(self.spread, node.deviation / node.time))
        return seconds > ratio * node.time or seconds * ratio < node.time

    def patience(self, relax: float) -> float:
        """Return how many usual rounds a barrier waits for its last members: longer than `relax` where times vary."""
        return max(relax, min(LONGEST_PATIENCE, 1 + LATE_DEVIATIONS * self.spread))

    def forget(self, worker: int) -> None:
        """Drop the record of a process that is gone; its successor warms up again."""
        self.nodes.pop(worker, None)
        self.monitor.forget(worker)
        self.shares.forget(worker)

    def regroup(self, present: dict[int, int], fit: Fit) -> None:
        """Update the reference, the usual round and the line; without any estimate keep them.

        The usual round is the longest time among members with full work: measured rounds contain the sized nodes, and
        would grow with them.
        """
        times = sorted(self._expected_time(worker) for worker in self.monitor.nodes if worker in present)
        if not times:
            return
        self.reference = times[(len(times) - 1) // 4]
        measured = [self.monitor.nodes[worker] for worker in present if worker in self.monitor.nodes]
        spreads = sorted(_spread(node) for node in measured if node.pushes > 1)
        self.spread = spreads[len(spreads) // 2] if spreads else 0.0
        full = [self.monitor.nodes[worker] for worker in present if self._full_member(worker)]
        self.usual = max((node.time for node in full), default=0.0) or self.reference
        if len(full) > 1:
            slot = self.shares.line.each or _spacing([node.transfer for node in full])
            self.line = len(present) * slot / self.usual
            self.busy = self.line > (CALM if self.busy else BUSY)
        self.shares.drop()
        if fit == "join" and self.busy and self.shares.line.each:
            self.shares.plan(self.monitor, present, WORTHWHILE)
            self.usual = self.shares.span or self.usual

    def _expected_time(self, worker: int) -> float:
        """Return seconds for nominal work; what one push alone says counts if it is slower.

        So when all become slow, the reference has followed before the first average does.
        """
        time, odd = self.monitor.nodes[worker].time, self.nodes[worker].odd
        return time if odd is None else max(time, odd.seconds)

    def _full_member(self, worker: int) -> bool:
        record = self.nodes[worker]
        return record.state == "SYNC" and not record.sized and worker in self.monitor.nodes

    def decide(self, worker: int, rho: float, fit: Fit, grouped: bool) -> tuple[Name, bool, str]:
        """Return the node's next state, whether its work is sized, and why; `grouped`: there are members to join."""
        record, time = self.nodes[worker], self.monitor.time(worker)
        if time is None or self.reference is None:
            return "WARMUP", False, f"w{worker} has no estimate yet"
        bound = rho * self.reference
        if record.state == "SYNC" and not record.sized:
            bound *= HYSTERESIS
        elif record.state != "WARMUP":
            bound = max(self.reference, bound / HYSTERESIS)
        compared = f"w{worker}: {time:.4g} s for nominal work, bound {bound:.4g} s"
        slow = record.odd is not None and record.odd.seconds > time
        late = grouped and record.state != "SYNC" and record.behind > (0 if slow else KEEPS_STEP)
        if time <= bound and not late:
            return "SYNC", False, compared
        if late:
            compared += f", its push read version {record.read_version}, {record.behind} steps ago"
        if fit == "none":
            return "ASYNC", False, compared
        if self.busy:
            compared += f", all pushes take {self.line:.2g} of a round on the line"
            share = self.shares.of.get(worker)
            if share is None:
                return "ASYNC", False, f"{compared}: full work"
            return ("ASYNC" if late else "SYNC"), True, f"{compared}: {share} samples fit between its turns"
        fitting = self.fitting(worker)
        if fitting < WORTHWHILE:
            return "ASYNC", False, f"{compared}, only {fitting} samples fit a round of {self.usual:.4g} s"
        member = fit == "join" and not late
        return ("SYNC" if member else "ASYNC"), True, f"{compared}, {fitting} samples fit {self.usual:.4g} s"

    def fitting(self, worker: int) -> int:
        """Return the samples that the node finishes in one usual round, at most its nominal work.

        If its last push was much slower than its average, it is expected to stay so.
        """
        node, odd = self.monitor.nodes[worker], self.nodes[worker].odd
        per_sample, transfer = node.per_sample, node.transfer
        if odd is not None and odd.seconds > node.time:
            per_sample, transfer = odd.compute_s / odd.samples, odd.transfer_s
        if per_sample <= 0:
            return node.nominal
        return max(0, min(node.nominal, floor((self.usual - transfer) / per_sample)))

    def work(self, worker: int, nominal: int) -> tuple[int, str]:
        """Return the samples for the node's next push, and why."""
        record, share = self.nodes[worker], self.shares.of.get(worker)
        if share is not None and (record.sized or record.state == "SYNC"):
            round_ = f"a round of {self.usual:.4g} s, all pushes take {self.line:.2g} of it on the line"
            return share, f"w{worker} {record.state}: {share} samples of {round_}"
        if not record.sized:
            queue = f", all pushes take {self.line:.2g} of a round on the line" if self.busy else ""
            return nominal, f"w{worker} {record.state}: full work of {nominal} samples{queue}"
        work = max(1, self.fitting(worker))
        return work, f"w{worker} {record.state}: {work} of {nominal} samples fit the usual round of {self.usual:.4g} s"


def _spread(node: Measured) -> float:
    """Return the mean deviation of a node's times as a share; its average began at 0, which is made up for."""
    return node.deviation / node.time / (1 - (1 - SMOOTHING) ** (node.pushes - 1))


def _spacing(transfers: list[float]) -> float:
    """Return by how much each of the transfers is longer than the next shorter one, the median of that.

    It is what a push takes on the line, so it is no more than the shortest transfer.
    """
    ordered = sorted(transfers)
    apart = sorted(longer - shorter for shorter, longer in pairwise(ordered))
    return min(apart[(len(apart) - 1) // 2], ordered[0])
