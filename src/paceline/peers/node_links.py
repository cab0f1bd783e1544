"""The outgoing links of virtual nodes."""

from paceline.core.scenario.costs import Times


class NodeLinks:
    """Nodes' outgoing links: when messages leave, and when a node may begin its next step."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._free_at: dict[int, float] = {}
        self._out_at: dict[int, list[float]] = {}  # when each message of a node has left

    def latency_s(self, one: int, other: int, at: float) -> float:
        """Return the latency between two nodes: the mean of their one-way latencies in the scenario at that time."""
        return (self._times.latency_s(one, 0, True, at) + self._times.latency_s(other, 0, True, at)) / 2

    def arrival(self, one: int, other: int, now: float, out: float) -> float:
        """Return when a message of this moment that has left at `out` arrives; a node that is cut off holds it back."""
        latency_s, left_at = self.latency_s(one, other, out), self._times.reachable_at(one, out)
        arrives_at = now + (out - now + latency_s) if left_at == out else left_at + latency_s
        return self._times.reachable_at(other, arrives_at)

    def seconds(self, node: int, nbytes: int, at: float) -> float:
        """Return the seconds that so many bytes take on a node's link from `at` on, without latency."""
        return self._times.way_s(node, nbytes, at)

    def send(self, node: int, nbytes: int, now: float) -> float:
        """Put a message on a node's link, and return when its last byte has left."""
        begin = max(now, self._free_at.get(node, 0.0))
        out = self._free_at[node] = begin + self.seconds(node, nbytes, begin)
        self._out_at.setdefault(node, []).append(out)
        return out

    def can_compute_at(self, node: int, now: float, *, overlaps: bool) -> float:
        """Return when a node's outgoing messages let it begin its next step."""
        pending = self._out_at[node] = sorted(at for at in self._out_at.get(node, ()) if at > now)
        if not overlaps:
            return pending[-1] if pending else now
        return pending[-2] if len(pending) > 1 else now

    def forget(self, node: int) -> None:
        """Drop the link of a node that left."""
        self._free_at.pop(node, None)
        self._out_at.pop(node, None)
