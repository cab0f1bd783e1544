"""The performance monitor: how long every node takes for its nominal work, measured from its pushes.

After Zhang et al., IEEE Access 2018: per node a moving average of the compute time and of the transfer time and their
deviation, and a score in (0, 1], the fastest node's time over this node's. Compute time is scaled to nominal work, so a
node that is given less does not look fast; transfer time is per push, whatever its size.
"""

import msgspec

SMOOTHING = 0.2  # weight of the latest push: a lasting change is followed within about ten
FULL_SHARE = 0.25  # a push of less than this share of nominal work is mostly fixed cost, so it weighs less

SHORTEST = 1e-12  # seconds per sample, even if the clock measured none


class Measured(msgspec.Struct):
    """Averages of one node, in seconds."""

    nominal: int  # samples
    per_sample: float  # compute
    transfer: float  # per push, both directions
    deviation: float = 0.0  # mean distance of a push's time from the average before it
    pushes: int = 1

    @property
    def compute(self) -> float:
        """Seconds of computing for nominal work."""
        return self.per_sample * self.nominal

    @property
    def time(self) -> float:
        """Seconds for nominal work, transfer included."""
        return self.per_sample * self.nominal + self.transfer


class Monitor(msgspec.Struct):
    """The averages of every measured node."""

    nodes: dict[int, Measured] = {}

    def record(self, worker: int, samples: int, nominal: int, compute_s: float, transfer_s: float) -> None:
        """Record one push, or one piece of it; ignore a refused one (no samples)."""
        if samples <= 0:
            return
        per_sample = max(compute_s / samples, SHORTEST)
        node = self.nodes.get(worker)
        if node is None:
            self.nodes[worker] = Measured(nominal, per_sample, transfer_s)
            return
        node.nominal = nominal
        weight = SMOOTHING * min(1.0, samples / (FULL_SHARE * nominal))
        node.deviation += weight * (abs(per_sample * nominal + transfer_s - node.time) - node.deviation)
        node.per_sample += weight * (per_sample - node.per_sample)
        node.transfer += weight * (transfer_s - node.transfer)
        node.pushes += 1

    def forget(self, worker: int) -> None:
        """Drop the averages of a node that is gone or has changed."""
        self.nodes.pop(worker, None)

    def time(self, worker: int) -> float | None:
        """Return seconds for nominal work, transfer included; None before the first push."""
        node = self.nodes.get(worker)
        return None if node is None else node.time

    def fastest(self) -> float | None:
        """Return the shortest time of all measured nodes."""
        return min((node.time for node in self.nodes.values()), default=None)

    def score(self, worker: int) -> float | None:
        """Return the fastest node's time over this node's: 1 for the fastest, 0.25 for one four times slower."""
        node, fastest = self.nodes.get(worker), self.fastest()
        return None if node is None or fastest is None else fastest / node.time
