"""When the model is evaluated, and when its target is met.

A target is met by the mean of three evaluations in a row, at the middle one's time, so that one lucky draw does not end
a run. Evaluations are evenly spaced in the unit of `--evaluate-every`; epochs, the default, mean the same under every
strategy, however many versions it makes.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.core.errors import OptionError, PeerError
from paceline.core.settings import Every, Target
from paceline.server.engine import EVALUATOR
from paceline.server.phases import epochs_done

if TYPE_CHECKING:
    from paceline.server.run import ServerRun

IN_A_ROW = 3

Measure = Callable[[int], dict[str, float] | None]  # None: the answer comes later, through `Evaluations.measured`


class TargetWatch:
    """The last three evaluations of the target's metric."""

    def __init__(self, target: Target | None) -> None:
        self.target = target
        self.reached_at: float | None = None
        self._recent: deque[tuple[float, float]] = deque(maxlen=IN_A_ROW)

    def snapshot(self) -> dict[str, Any]:
        """The evaluations that still count, as plain data."""
        return {"reached_at": self.reached_at, "recent": [list(pair) for pair in self._recent]}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Continue from a snapshot."""
        self.reached_at = data["reached_at"]
        self._recent.extend((at, float(value)) for at, value in data["recent"])

    def record(self, at: float, metrics: Mapping[str, float]) -> bool:
        """Add an evaluation; return True if it completes the target."""
        if self.target is None or self.reached_at is not None:
            return False
        if self.target.metric not in metrics:
            names = ", ".join(sorted(metrics)) or "nothing"
            raise OptionError(f"the target is {self.target}, but evaluate() returns {names}")
        self._recent.append((at, metrics[self.target.metric]))
        if len(self._recent) < IN_A_ROW:
            return False
        mean = math.fsum(value for _, value in self._recent) / IN_A_ROW
        if not self.target.met(mean):
            return False
        self.reached_at = self._recent[IN_A_ROW // 2][0]
        return True


class Schedule:
    """Evaluations that are due by versions or epochs; the engine's clock calls those by seconds."""

    def __init__(self, every: Every | None) -> None:
        self.every = every
        self._next = every.amount if every is not None else math.inf

    @property
    def by_versions(self) -> bool:
        """Whether a new version may make an evaluation due."""
        return self.every is not None and self.every.unit != "s"

    def catch_up(self, version: int, epochs: float) -> None:
        """Continue from this point of a run: what was due before it has been done."""
        self.due(version, epochs)

    def due(self, version: int, epochs: float) -> bool:
        """Return whether an evaluation is due at this version, and advance to the next."""
        if self.every is None or not self.by_versions:
            return False
        done = version if self.every.unit == "v" else epochs
        if done + 1e-9 < self._next:
            return False
        self._next = (math.floor(done / self.every.amount + 1e-9) + 1) * self.every.amount
        return True


class _Pending(msgspec.Struct, frozen=True):
    """An evaluation whose result has not arrived."""

    number: int
    at: float
    version: int
    samples_used: int
    epoch: float


class NodesMeasured:
    """Measurements of nodes' own final models: what has been measured, and the one under way."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self.left = list(nodes)
        self.metrics: dict[int, dict[str, float]] = {}
        self.asked: tuple[int, int] | None = None  # the evaluation's number and the node, while it is under way
        self.told = False


class Evaluations:
    """Measures versions between two events, one at a time: inline, or in a process of its own."""

    def __init__(self, run: "ServerRun", *, awaited: bool) -> None:
        config = run.plan.config
        self._run = run
        self.awaited = awaited  # the first phase waits for the evaluator's process
        self.metrics: dict[str, float] = {}
        self.history: list[dict[str, float]] = []  # the metrics of every evaluation
        self.watch = TargetWatch(config.target)
        self._schedule = Schedule(config.evaluate_every)
        self._measure: Measure | None = None
        self._pending: _Pending | None = None
        self._due_again = False  # another evaluation fell due meanwhile
        self._count = 0
        self._inline: Callable[[], dict[str, float]] | None = None  # measures what is in the store, in this process
        self._of_nodes: NodesMeasured | None = None  # begun when the final version is measured
        self._measured = self._measured_before = -1  # versions
        self._followed = False  # a scheduler follows the evaluations: checkpoints need all of them

    # -- who measures ------------------------------------------------------------------------------------------------

    @property
    def possible(self) -> bool:
        return self._measure is not None

    def inline(self, measure: Callable[[], dict[str, float]]) -> None:
        """Measure inside this process."""
        engine, run = self._run.engine, self._run

        def measured(_: int) -> dict[str, float]:
            run.exchange.refresh(_nothing)
            return engine.measure(measure)

        self._inline = lambda: engine.measure(measure)
        self._measure_by(measured)

    def by_process(self) -> None:
        """Measure in the evaluator's process, which is ready."""
        self.awaited = False
        self._measure_by(self._ask_process)

    def _measure_by(self, measure: Measure) -> None:
        self._measure = measure
        listeners = self._run.on_version
        if self._schedule.by_versions and self.on_version not in listeners:
            listeners.insert(0, self.on_version)  # before checkpoints, which save the version's metrics

    def _ask_process(self, number: int) -> None:
        run = self._run

        def ask() -> None:
            if self._measure is None:  # the process ended while models were gathered, with a warning then
                self.give_up()
            else:
                run.engine.send(EVALUATOR, run.exchange.evaluation(number))

        run.exchange.refresh(ask)

    def process_gone(self, code: int, how: str, at: float) -> None:
        """Handle the exit of the evaluator's process."""
        run = self._run
        if code != 0 and (run.active or self.measuring):
            text = f"the evaluator's process {how}: the model is not evaluated any more"
            if self.watch.target is not None and run.active:
                raise PeerError(f"{text}, and the target {self.watch.target} can no longer be checked")
            run.remark(text, at)
        self.give_up()

    def give_up(self) -> None:
        """Stop measuring versions, and stop waiting for a process that would."""
        self._measure = self._pending = self._inline = None
        self.awaited = False
        if self._of_nodes is not None:
            self._of_nodes.left, self._of_nodes.asked = [], None

    # -- phases ------------------------------------------------------------------------------------------------------

    def phase_begins(self, at: float) -> None:
        """Measure the first version if none was."""
        if self.watch.target is not None and self._measure is None:
            raise OptionError(f"the target {self.watch.target} needs prepare(..., evaluate=...) in the script")
        if self._measured < 0:
            self.evaluate(at)

    # -- measuring ---------------------------------------------------------------------------------------------------

    def on_version(self, version: int, at: float) -> None:
        """Measure the new version if that is due."""
        if self._schedule.due(version, epochs_done(self._run)):
            self.evaluate(at)

    def evaluate(self, at: float) -> None:
        """Measure the current version, or once the evaluation under way is done."""
        run = self._run
        if self._measure is None or self._measured == run.coordinator.version or not run.active:
            return
        if self._pending is not None:
            self._due_again = True
            return
        self._ask(self._measure, at)

    def _ask(self, measure: Measure, at: float) -> None:
        c = self._run.coordinator
        self._measured_before, self._measured = self._measured, c.version
        self._count += 1
        self._pending = _Pending(self._count, at, c.version, c.used, epochs_done(self._run))
        metrics = measure(self._count)
        if metrics is not None:
            self.measured(self._count, metrics, at)

    def measured(self, number: int, metrics: dict[str, float], at: float) -> None:
        """Record an evaluation's metrics, at the time when its snapshot was taken."""
        nodes, taken = self._of_nodes, self._pending
        if nodes is not None and nodes.asked is not None and nodes.asked[0] == number:
            nodes.metrics[nodes.asked[1]], nodes.asked = metrics, None
            return
        if taken is None or taken.number != number:
            return  # asked for before the run was restored
        self._pending = None
        self.metrics = metrics
        self.history.append(metrics)
        data = {
            "version": taken.version, "samples_used": taken.samples_used, "epoch": taken.epoch, "metrics": metrics
        }  # fmt: skip
        run = self._run
        run.coordinator.observe(taken.at, "evaluation", data)
        if self.watch.record(taken.at, metrics) and run.active:
            run.end("target")
        elif self._due_again:
            self._due_again = False
            self.evaluate(at)

    def values(self, start: int, metric: str | None) -> list[float]:
        """Return one metric of the evaluations from this number on; by default the first that evaluate() returns."""
        self._followed = True
        found = []
        for metrics in self.history[start:]:
            name = next(iter(metrics), "") if metric is None else metric
            if name not in metrics:
                names = ", ".join(metrics) or "nothing"
                wanted = "ReduceLROnPlateau follows evaluate()" if metric is None else f"plateau={metric!r}"
                raise OptionError(f"{wanted}, but evaluate() returns {names}: name one of its numbers")
            found.append(metrics[name])
        return found

    @property
    def measuring(self) -> bool:
        """Whether an evaluation's result has not arrived."""
        return self._pending is not None

    def measure_last(self, at: float) -> bool:
        """Measure the final version if that is possible and not done; return whether no result is outstanding."""
        c = self._run.coordinator
        lacking = self._run.exchange.measurable and self._measured != c.version
        if lacking and self._measure is not None and self._pending is None:
            self._ask(self._measure, at)
        return self._pending is None

    def measure_nodes(self, at: float) -> bool:
        """Measure the nodes' own final models, one after another, where there are any; return whether that is done."""
        if self._of_nodes is None:
            self._of_nodes = NodesMeasured(self._run.exchange.own_models if self._measure is not None else ())
        nodes = self._of_nodes
        while nodes.left and nodes.asked is None:
            self._ask_node(nodes, nodes.left.pop(0))
        if nodes.asked is not None:
            return False
        if nodes.metrics and not nodes.told:
            nodes.told = True
            data = {"nodes": list(nodes.metrics), "metrics": list(nodes.metrics.values())}
            self._run.coordinator.observe(at, "evaluation_nodes", data)
        return True

    def _ask_node(self, nodes: NodesMeasured, node: int) -> None:
        exchange = self._run.exchange
        with exchange.as_node(node):
            if self._inline is not None:
                nodes.metrics[node] = self._inline()
            else:
                self._count += 1
                nodes.asked = self._count, node
                self._run.engine.send(EVALUATOR, exchange.evaluation(self._count))

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Return what a resumed run must know of the evaluations before it."""
        measured = self._measured if self._pending is None else self._measured_before
        return {
            "evaluated": measured, "evaluations": self._count, "metrics": self.metrics,
            "epochs_before": self._run.phases.epochs_before, "epochs": epochs_done(self._run),
            "target": self.watch.snapshot(), **({"history": self.history} if self._followed else {}),
        }  # fmt: skip

    def restore(self, data: Mapping[str, Any]) -> None:
        """Continue after those evaluations."""
        self._measured, self._count = data["evaluated"], data["evaluations"]
        self.metrics = {name: float(value) for name, value in data["metrics"].items()}
        self._run.phases.epochs_before = data["epochs_before"]
        self._schedule.catch_up(self._run.coordinator.version, data["epochs"])
        self.watch.restore(data["target"])
        self._followed = "history" in data
        self.history = [dict(metrics) for metrics in data.get("history", [])]


def _nothing() -> None:
    """Do nothing: inline, `refresh` completes before it returns."""
