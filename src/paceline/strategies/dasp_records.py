"""What DASP's server records of every node, and how it decides the nodes' states from it.

A node belongs to the fast group if its time for nominal work is within `rho` of the group's reference, the lower
quartile of the present nodes' times. Nominal work, because a node that was given less would look fast and go in and
out; for the same reason a member leaves only when it is clearly outside. Reference and usual round are updated once a
round.
"""

from math import floor
from typing import Literal

import msgspec
from msgspec import field

from paceline.core.events import Pushed
from paceline.strategies.monitor import Monitor

Name = Literal["SYNC", "ASYNC", "WARMUP"]
Fit = Literal["merge", "join"]

HYSTERESIS = 1.15  # a member leaves beyond this many times the bound; averages of 10 % jitter vary by 3 %
WORTHWHILE = 4  # samples; a push of fewer costs more in transfer and noise than it brings


class Record(msgspec.Struct):
    """One node. Its times are the monitor's, its clock is among the clocks."""

    state: Name
    since: float  # time at which it entered this state
    sized: bool = False  # its work is cut to the usual round
    last: float = 0.0  # seconds of its last push, scaled to nominal work
    read_version: int = 0  # of its last push
    read_mass: float = 0.0  # mass applied when it was last granted work
    staleness: float = 0.0  # mass applied between read and arrival of its last push


class Records(msgspec.Struct):
    """Every node's record, the group's reference time and its usual round, in seconds."""

    nodes: dict[int, Record] = {}
    monitor: Monitor = field(default_factory=Monitor)
    reference: float | None = None  # None until the first round is over
    usual: float = 0.0

    def update(self, event: Pushed, nominal: int, mass: float) -> None:
        """Record the times and staleness of a push."""
        self.monitor.record(event.worker, event.samples, nominal, event.compute_s, event.transfer_s)
        record = self.nodes[event.worker]
        record.read_version = event.read_version
        if event.samples:
            record.last = event.compute_s * nominal / event.samples + event.transfer_s
        record.staleness = mass - record.read_mass

    def forget(self, worker: int) -> None:
        """Drop the record of a process that is gone; its successor warms up again."""
        self.nodes.pop(worker, None)
        self.monitor.forget(worker)

    def regroup(self, present: dict[int, int]) -> None:
        """Update the reference and the usual round; without any estimate keep both.

        The usual round is the longest time among members with full work: measured rounds contain the sized nodes, and
        would grow with them.
        """
        times = sorted(node.time for worker, node in self.monitor.nodes.items() if worker in present)
        if not times:
            return
        self.reference = times[(len(times) - 1) // 4]
        self.usual = max((self._full_time(worker) for worker in present), default=0.0) or self.reference

    def _full_time(self, worker: int) -> float:
        record = self.nodes[worker]
        member = record.state == "SYNC" and not record.sized
        return (self.monitor.time(worker) or 0.0) if member else 0.0

    def decide(self, worker: int, rho: float, fit: Fit) -> tuple[Name, bool, str]:
        """Return the node's next state, whether its work is sized, and why."""
        record, time = self.nodes[worker], self.monitor.time(worker)
        if time is None or self.reference is None:
            return "WARMUP", False, f"w{worker} has no estimate yet"
        full = record.state == "SYNC" and not record.sized
        bound = rho * self.reference * (HYSTERESIS if full else 1.0)
        if not full:
            time = max(time, record.last)  # an average that lags behind a slow-down must not readmit it
        compared = f"w{worker}: {time:.4g} s for nominal work, bound {bound:.4g} s"
        if time <= bound:
            return "SYNC", False, compared
        fitting = self.fitting(worker)
        if fitting < WORTHWHILE:
            return "ASYNC", False, f"{compared}, only {fitting} samples fit a round of {self.usual:.4g} s"
        return ("SYNC" if fit == "join" else "ASYNC"), True, f"{compared}, {fitting} samples fit {self.usual:.4g} s"

    def fitting(self, worker: int) -> int:
        """Return the samples that the node finishes in one usual round, at most its nominal work."""
        node = self.monitor.nodes[worker]
        return max(0, min(node.nominal, floor((self.usual - node.transfer) / node.per_sample)))

    def work(self, worker: int, nominal: int) -> tuple[int, str]:
        """Return the samples for the node's next push, and why."""
        record = self.nodes[worker]
        if not record.sized:
            return nominal, f"w{worker} {record.state}: full work of {nominal} samples"
        work = max(1, self.fitting(worker))
        return work, f"w{worker} {record.state}: {work} of {nominal} samples fit the usual round of {self.usual:.4g} s"
