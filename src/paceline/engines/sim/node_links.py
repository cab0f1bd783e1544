"""The links of virtual nodes: each is serial on its way out, and a message takes latency, and bytes over bandwidth."""

import math

from paceline.core.scenario.costs import Times


class NodeLinks:
    """When what leaves, and when a node may go on."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._free_at: dict[int, float] = {}
        self._out_at: dict[int, list[float]] = {}  # when each message of a node is out

    def latency_s(self, one: int, other: int) -> float:
        """Between two nodes: the mean of the one-way latencies that the scenario gives them."""
        return (self._times.latency_s(one, 0, True) + self._times.latency_s(other, 0, True)) / 2

    def seconds(self, node: int, nbytes: int) -> float:
        """On its own link."""
        bandwidth = min(self._times.bandwidth(node), self._times.server_bandwidth)
        return 0.0 if bandwidth == math.inf else nbytes / bandwidth

    def send(self, node: int, nbytes: int, now: float) -> float:
        """When the last byte is out."""
        out = self._free_at[node] = max(now, self._free_at.get(node, 0.0)) + self.seconds(node, nbytes)
        self._out_at.setdefault(node, []).append(out)
        return out

    def can_compute_at(self, node: int, now: float, *, overlaps: bool) -> float:
        """When the node may begin its next step, as far as its messages are concerned."""
        pending = self._out_at[node] = sorted(at for at in self._out_at.get(node, ()) if at > now)
        if not overlaps:
            return pending[-1] if pending else now
        return pending[-2] if len(pending) > 1 else now

    def forget(self, node: int) -> None:
        """It is gone."""
        self._free_at.pop(node, None)
        self._out_at.pop(node, None)
