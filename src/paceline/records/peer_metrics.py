"""What the journal of a run without a server says of its nodes' exchanges."""

import statistics

from paceline.core.actions import Track
from paceline.core.peer_actions import Ask, Average, Exchange, Send
from paceline.core.peer_events import Sent, Stepped
from paceline.records.journal import Observation, PeerDecision
from paceline.records.report import PeerPoint, PeerReport


class PeerMetrics:
    """Totals of the nodes' exchanges, over the run and between two measurements of the models."""

    def __init__(self) -> None:
        self.exchanges: int | None = None  # None: a run with a server
        self._steps = 0  # of all nodes
        self._begun = 0  # exchanges begun after a step: neither answers nor the last messages of a leaving node
        self._sending_s = 0.0
        self._gathered_bytes = 0
        self._thresholds: dict[int, float] = {}  # latest of each node that has one
        self._stepped: set[int] = set()  # nodes that have stepped since the models were last measured
        self._before = (0, 0)  # steps and exchanges begun by the last measurement
        self._course: list[PeerPoint] = []

    def decided(self, line: PeerDecision) -> int:
        """Count a node's decision; return the bytes it sent, counted once a message has left the node."""
        self.exchanges = self.exchanges or 0
        for action in line.actions:
            if isinstance(action, Track) and action.name == "threshold":
                self._thresholds[line.node] = action.value
        if isinstance(line.event, Stepped):
            self._steps += 1
            self._stepped.add(line.node)
            self._begun += sum(isinstance(action, Send | Ask | Exchange | Average) for action in line.actions)
        elif isinstance(line.event, Sent):
            self.exchanges += 1
            self._sending_s += line.event.seconds
            return line.event.bytes
        return 0

    def exchanged(self) -> None:
        """Count an exchange with the centre or in an average."""
        self.exchanges = (self.exchanges or 0) + 1

    def measured(self, line: Observation) -> None:
        """Add a point to the course: all models were collected and measured."""
        steps, begun = self._before
        self._before = self._steps, self._begun
        thresholds = [self._thresholds[node] for node in sorted(self._stepped & set(self._thresholds))]
        self._course.append(PeerPoint(
            line.at,
            _mean_interval(self._steps - steps, self._begun - begun),
            statistics.fmean(thresholds) if thresholds else None,
            float(line.data["distance"]),
        ))  # fmt: skip
        self._stepped.clear()
        self._gathered_bytes += line.data.get("bytes", 0)

    def report(self) -> PeerReport | None:
        """Return the totals; None for a run with a server."""
        if self.exchanges is None:
            return None
        last = self._course[-1].consensus if self._course else None
        interval = _mean_interval(self._steps, self._begun)
        return PeerReport(interval, self._sending_s, last, self._gathered_bytes, list(self._course))


def _mean_interval(steps: int, begun: int) -> float | None:
    return steps / begun if begun else None
