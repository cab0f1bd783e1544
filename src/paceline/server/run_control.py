"""What a run does beside deciding: its store, evaluations, target, limits, divergence. Shared by the engines."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from paceline.core.errors import DivergenceError, InternalError, OptionError, UserError
from paceline.core.ledger import Ledger
from paceline.core.settings import RunConfig
from paceline.model.store import ModelSpec, Parameters, Store
from paceline.records.journal import Header, Sink
from paceline.server.coordinator import Coordinator
from paceline.server.evaluation_schedule import Evaluator, Schedule, TargetWatch
from paceline.server.workers import Held
from paceline.strategies import build, canonical, is_peer, names, strategy_class
from paceline.strategies.base import Strategy
from paceline.tables.spec import TableSpec
from paceline.transport.messages import Hello

Cause = Literal["done", "target", "limit", "stopped", "interrupted", "error", "divergence"]
LOST_SHARE = 0.01  # of the samples; what a script filters out on purpose is below or well known
ROUNDS_OF_AN_EPOCH = 10  # where there is no data: `0.1e`, the default, is then a round
PROGRESS_SECONDS = 0.1  # between two reports of progress, on the wall's clock


class Progress(msgspec.Struct, frozen=True):
    """How far a run has come."""

    seconds: float
    versions: int
    samples_used: int
    total_samples: int | None
    metrics: dict[str, float]
    loss: float | None


class Snapshot(msgspec.Struct, frozen=True):
    """What an evaluation measures."""

    number: int
    at: float
    version: int
    samples_used: int
    epoch: float


class Tables(Protocol):
    """A store of tables instead of a model."""

    def apply(self, gradients: Sequence[Any], weights: Sequence[float], samples: Sequence[int], *, stock: bool) -> Any:
        """Take in what pushes bring."""

    @property
    def specs(self) -> Sequence[TableSpec]: ...

    def shards(self) -> Mapping[str, Sequence[Any]]:
        """What a checkpoint holds."""

    def snapshot(self) -> dict[str, Any]:
        """Every table as an array, by name."""


NodeModel = tuple[Sequence[Any], Sequence[Any]]  # its parameters and buffers, as a store has them
Measure = Callable[[int], dict[str, float] | None]  # None: the answer comes later, through `Conduct.measured`


class Conduct:
    """One run, from its first evaluation to its end."""

    coordinator: Coordinator

    def __init__(
        self,
        config: RunConfig,
        strategy: Strategy,
        sink: Sink,
        header: Header,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.config = config
        self.strategy = strategy
        self.sink = sink
        self.header = header
        self.cause: Cause | None = None
        self.phase_stopped: str | None = None
        self.switch_to: str | None = None
        self.metrics: dict[str, float] = {}
        self.watch = TargetWatch(config.target)
        self.peer = config.strategy if is_peer(config.strategy) else None
        self.store_or_none: Store | None = None
        self.tables: Tables | None = None
        self.node_models: dict[int, NodeModel] = {}  # of a run without a server, at the end of its last phase
        self._progress = progress
        self._shown = time.monotonic()
        self._schedule = Schedule(config.evaluate_every)
        self._measure: Measure | None = None
        self._pending: Snapshot | None = None  # being measured
        self._due_again = False  # another evaluation fell due meanwhile
        self._evaluations = 0
        self._evaluated = self._evaluated_before = -1  # versions
        self._size = 0
        self._epochs_before = 0.0
        self._phases = 0
        self._by_rounds = False
        self._remarks: set[str] = set()
        self._verdict = "the run diverged and was stopped, as --on-divergence stop asks"
        self._options_checked = False
        self._stop: Callable[[], None] = lambda: None
        self._before_evaluation: Callable[[], None] = lambda: None

    def take_charge(
        self, coordinator: Coordinator, stop: Callable[[], None], before_evaluation: Callable[[], None] | None = None
    ) -> None:
        """Be told by the coordinator; `stop` makes the engine's loop look at what is to be done."""
        self.coordinator = coordinator
        coordinator.on_version = self._on_version
        coordinator.watch.on_divergence = self._on_divergence
        coordinator.watch.on_nonfinite = self._on_nonfinite
        coordinator.on_over = stop
        self._stop = stop
        self._before_evaluation = before_evaluation or self._before_evaluation
        self.sink.write(self.header)

    # -- the model ---------------------------------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        if self.store_or_none is None:
            raise InternalError("there is no model yet")
        return self.store_or_none

    @property
    def model_bytes(self) -> int:
        return self.store.nbytes

    @property
    def can_evaluate(self) -> bool:
        return self._measure is not None

    def evaluate_with(self, measure: Measure) -> None:
        """Have versions measured by that; the number it is given names the evaluation."""
        self._measure = measure

    @property
    def active(self) -> bool:
        return self.cause is None

    def welcome(self, worker: int, hello: Hello) -> Parameters:
        """The first worker's model is everybody's."""
        if self.store_or_none is None:
            self.adopt(Store(hello.spec, hello.values, hello.buffers, self.strategy.needs_applied))
        else:
            spec: ModelSpec = self.store.spec
            spec.require_same(hello.spec, worker)
        if hello.evaluator is not None and self._measure is None:
            evaluator = Evaluator(*hello.evaluator)
            self._measure = lambda _: evaluator(self.store)
        return self.store.read()

    def adopt(self, store: Store) -> None:
        """This is the model that the run trains."""
        self.store_or_none = self.coordinator.store = store
        self.coordinator.model_bytes = store.nbytes
        if store.optimizer.notice is not None and self.peer is None:
            self.coordinator.observe("warning", {"text": store.optimizer.notice})

    # -- phases ------------------------------------------------------------------------------------------------------

    def phase_begins(self, ledger: Ledger, size: int, round_samples: int) -> None:
        """There is data from here on."""
        self._size = size
        self._phases += 1
        self.phase_stopped = None
        self.coordinator.open(ledger, round_samples)
        if self.config.target is not None and self._measure is None:
            raise UserError(f"the target {self.config.target} needs prepare(..., evaluate=...) in the script")
        if self._evaluated < 0:
            self.evaluate(self.coordinator.now)

    def phase_ends(self) -> None:
        """All of the phase's data is settled, or the scripts had enough."""
        self._epochs_before = self._epochs
        self._size = 0
        self.phase_stopped = None

    def nobody_left(self) -> None:
        """Every script has left the loop: the phase is over, whatever data remains."""
        self.phase_stopped = "every worker has left the loop"
        self._stop()

    def remark(self, text: str) -> None:
        """Something about the script that its user should know, once."""
        if text not in self._remarks:
            self._remarks.add(text)
            self.coordinator.observe("warning", {"text": text})

    def keep_tables(self, tables: Tables) -> None:
        """The run works on these. There is no data whose passes could be counted: an epoch is so many rounds."""
        strategy = self.strategy
        if not strategy.serves_tables:
            serving = [name for name in names() if strategy_class(name).serves_tables]
            raise OptionError(f"{strategy.name} does not work on tables: choose {', '.join(serving)}")
        self._by_rounds = True
        self.tables = tables
        self.coordinator.keep_tables(tables)

    @property
    def _epochs(self) -> float:
        """BatchLoop over the data so far, each phase's over its own."""
        if self._by_rounds:
            return self.coordinator.position / ROUNDS_OF_AN_EPOCH
        ledger = self.coordinator.ledger
        return self._epochs_before + (ledger.used / self._size if ledger is not None and self._size else 0.0)

    def stop_phase(self, reason: str) -> None:
        """The script wants no more of this phase."""
        self.coordinator.observe("warning", {"text": f"the script ended the phase: {reason}"})
        self.phase_stopped = reason
        self._stop()

    def trust_options(self) -> None:
        """They were checked when the scripts began."""
        self._options_checked = True

    def check_options(self, asked: set[str]) -> None:
        """A `--set` name that no worker has asked for by the end of the first round is a slip of the pen."""
        if self._options_checked or (self.coordinator.position < 1 and self.active and not self.coordinator.phase_over):
            return
        self._options_checked = True
        unknown = sorted(set(self.config.options) - asked)
        if unknown:
            known = ", ".join(sorted(asked)) or "none"
            raise OptionError(f"--set {unknown[0]}: the script asks for no such option; it asks for: {known}")

    # -- versions ----------------------------------------------------------------------------------------------------

    def _on_version(self, version: int, _: list[Held]) -> None:
        coordinator = self.coordinator
        if self._schedule.due(version, self._epochs):
            self.evaluate(coordinator.now)
        if not self._options_checked and coordinator.position >= 1:
            self._stop()
        if self._progress is not None and time.monotonic() - self._shown > PROGRESS_SECONDS:
            self._shown = time.monotonic()
            self._progress(self.progress())

    def progress(self) -> Progress:
        """How far the run has come."""
        c = self.coordinator
        total = c.used_before + c.ledger.total if c.ledger is not None else None
        return Progress(c.now, c.version, c.used, total, dict(self.metrics), c.watch.loss)

    def evaluate(self, at: float) -> None:
        """Have the current version measured, between two events and one at a time."""
        if self._measure is None or self._evaluated == self.coordinator.version or self.cause is not None:
            return
        if self._pending is not None:
            self._due_again = True
            return
        self._ask(self._measure, at)

    def _ask(self, measure: Measure, at: float) -> None:
        c = self.coordinator
        self._evaluated_before, self._evaluated = self._evaluated, c.version
        self._evaluations += 1
        self._pending = Snapshot(self._evaluations, at, c.version, c.used, self._epochs)
        self._before_evaluation()
        metrics = measure(self._evaluations)
        if metrics is not None:
            self.measured(self._evaluations, metrics)

    def measured(self, number: int, metrics: dict[str, float]) -> None:
        """The numbers of an evaluation; they are those of the time when its snapshot was taken."""
        taken = self._pending
        if taken is None or taken.number != number:
            return  # an evaluation that a restored run knows nothing of
        self._pending = None
        self.metrics = metrics
        data = {
            "version": taken.version, "samples_used": taken.samples_used, "epoch": taken.epoch, "metrics": metrics
        }  # fmt: skip
        now, self.coordinator.now = self.coordinator.now, taken.at
        self.coordinator.observe("evaluation", data)
        self.coordinator.now = now
        if self.watch.record(taken.at, metrics) and self.cause is None:
            self.cause = "target"
            self._stop()
        elif self._due_again:
            self._due_again = False
            self.evaluate(now)

    @property
    def measuring(self) -> bool:
        """Whether an evaluation's numbers are still to come."""
        return self._pending is not None

    def give_up_measuring(self) -> None:
        """Nobody is left who could."""
        self._measure = self._pending = None

    @property
    def unmeasured(self) -> bool:
        """Whether there are no numbers of the current version, although they could be had."""
        something = self.store_or_none is not None or self.tables is not None
        return something and self._evaluated != self.coordinator.version and self._measure is not None

    def evaluate_last(self, at: float) -> None:
        """Have the final version measured, unless that was done or nothing can do it."""
        if self.unmeasured and self._measure is not None and self._pending is None:
            self._ask(self._measure, at)

    def snapshot(self) -> dict[str, Any]:
        """What a resumed run must know of the evaluations before it."""
        measured = self._evaluated if self._pending is None else self._evaluated_before
        return {
            "evaluated": measured, "evaluations": self._evaluations, "metrics": self.metrics,
            "epochs_before": self._epochs_before, "epochs": self._epochs, "phases": self._phases,
            "target": self.watch.snapshot(), "options_checked": self._options_checked,
        }  # fmt: skip

    def restore(self, data: Mapping[str, Any]) -> None:
        """Go on after those."""
        self._evaluated, self._evaluations = data["evaluated"], data["evaluations"]
        self.metrics = {name: float(value) for name, value in data["metrics"].items()}
        self._epochs_before, self._phases = data["epochs_before"], data["phases"]
        self._options_checked = data["options_checked"]
        self._schedule.catch_up(self.coordinator.version, data["epochs"])
        self.watch.restore(data["target"])

    # -- divergence --------------------------------------------------------------------------------------------------

    def _on_divergence(self) -> None:
        text, self.coordinator.watch.divergence = self.coordinator.watch.divergence, None
        action = self.config.on_divergence
        if action == "stop":
            self.cause = "divergence"
            self._stop()
        elif action == "bsp" and self.coordinator.strategy.name != "bsp":
            self.switch_to = text
            self._stop()

    def _on_nonfinite(self) -> None:
        if self.config.on_nonfinite == "stop" and self.cause is None:
            self.cause, self._verdict = "divergence", "a gradient was not finite, and --on-nonfinite stop was given"
            self._stop()

    def switch_strategy(self, at: float) -> None:
        """Go on under bsp, as `--on-divergence bsp` asks."""
        self.switch_to = None
        self.strategy = build("bsp", self.config.seed)
        self.coordinator.now = at
        self.coordinator.observe("warning", {"text": "going on under bsp, as --on-divergence asks"})
        spelled = canonical(self.strategy)
        self.sink.write(msgspec.structs.replace(self.header, strategy=spelled, snapshot=None, restored=None))
        self.coordinator.switch(self.strategy, at)

    def _say_what_came_to_nothing(self) -> None:
        c = self.coordinator
        if self.cause not in (None, "done"):
            return
        if not self._phases and self.tables is None:
            self.remark("no worker called session.batches(): nothing was trained")
        elif self.tables is not None:
            if not c.version:
                self.remark("no clock was ever completed: does the script call session.clock()?")
        elif not c.version:
            self.remark(
                "no gradient was ever pushed: does the script call loss.backward() and optimizer.step() for each batch?"
            )
        elif c.lost > LOST_SHARE * (c.used + c.lost):
            self.remark(f"{c.lost} of {c.used + c.lost} samples were lost: skipped by the script, or refused")

    def end(self, at: float) -> None:
        """The last evaluation and the last line."""
        self.coordinator.now = at
        self.evaluate_last(at)
        self._say_what_came_to_nothing()
        if self.watch.reached_at is not None and self.watch.target is not None:
            target = self.watch.target
            data = {"metric": target.metric, "value": target.value, "reached_at": self.watch.reached_at}
            self.coordinator.observe("target", data)
        self.coordinator.observe_end(self.cause or "done")
        if self.cause == "divergence":
            raise DivergenceError(self._verdict)
