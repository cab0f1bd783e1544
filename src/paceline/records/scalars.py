"""The numbers of a journal that other tools plot: metrics, loss, what scripts report, and what strategies track."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from paceline.core.actions import Apply, Track
from paceline.records.journal import Decision, Line, Observation
from paceline.records.metrics import Metrics


class Moment(NamedTuple):
    """Numbers of one moment, by name."""

    at: float  # seconds of the run's clock
    version: int
    values: dict[str, float]


class Scalars:
    """Finds the numbers of a journal, line by line."""

    def __init__(self) -> None:
        self._metrics = Metrics()

    def of(self, line: Line) -> Moment | None:
        """Return the numbers of this line, the next of the journal; None if it has none."""
        metrics = self._metrics
        metrics.write(line)
        at, version, values = 0.0, metrics.versions, {}
        if isinstance(line, Observation) and line.what == "evaluation":
            at, version = line.at, int(line.data["version"])
            values = {name: float(value) for name, value in line.data["metrics"].items()}
        elif isinstance(line, Observation) and line.what == "report":
            at, values = line.at, {f"report/{line.data['name']}": float(line.data["value"])}
        elif isinstance(line, Decision):
            at = line.event.at
            for action in line.actions:
                if isinstance(action, Track):
                    whose = "" if action.worker is None else f"/worker {action.worker}"
                    values[f"track/{action.name}{whose}"] = float(action.value)
                elif isinstance(action, Apply) and "loss" not in metrics.evaluation:
                    loss = metrics.loss()
                    values |= {"loss": loss} if loss is not None else {}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        return Moment(at, version, finite) if finite else None


def points(lines: Iterable[Line]) -> Iterator[Moment]:
    """Yield the numbers of a journal."""
    scalars = Scalars()
    for line in lines:
        point = scalars.of(line)
        if point is not None:
            yield point
