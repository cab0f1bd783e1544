"""A model that all workers share: they start from worker 0's, and the store holds what is measured and saved."""

from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import CheckpointError, InternalError, OptionError
from paceline.core.settings import rate_factor
from paceline.core.updates import Contents
from paceline.model.measuring import Evaluator
from paceline.model.spec import ModelSpec
from paceline.model.store import Parameters, Store, model_state, spec_of_contents, store_of
from paceline.server.engine import EVALUATOR
from paceline.server.exchange import Result, RunExchange
from paceline.server.workers import WorkerRecord
from paceline.transport.messages import Evaluate, Hello, Welcome

if TYPE_CHECKING:
    from paceline.server.run import ServerRun

LOST_SHARE = 0.01  # of the samples; a script that skips more on purpose knows it


class ModelExchange(RunExchange):
    """What exchanges of gradients and of whole models have in common."""

    def __init__(self, run: "ServerRun") -> None:
        super().__init__(run)
        self.store_or_none: Store | None = None
        self._spec_saved: ModelSpec | None = None  # of the checkpoint that the run continues from
        self._states: dict[int, bytes] = {}  # of workers, from that checkpoint
        self._evaluator: Hello | None = None  # received from the evaluator's process, and not yet answered
        self._answering = False  # `look_at_waiting` is under way
        self._look_again = False  # somebody came meanwhile

    @property
    def in_use(self) -> bool:
        return self.store_or_none is not None

    @property
    def store(self) -> Store:
        if self.store_or_none is None:
            raise InternalError("there is no model yet")
        return self.store_or_none

    # -- the handshake -----------------------------------------------------------------------------------------------

    def on_hello(self, worker: int, hello: Hello, at: float) -> None:
        if worker == EVALUATOR:
            self._evaluator = hello
        else:
            self.run.workers.records[worker].script.hello = hello
        self.look_at_waiting(at)

    def look_at_waiting(self, at: float) -> None:
        """Answer workers that have prepared a model; the first time wait for all, since worker 0's is taken. The same
        goes for each further one that scripts prepare.

        In virtual time a script goes on while it is answered, and so calls this again. That is put off until all have
        their answers: answers inside of answers would be as deep as there are workers.
        """
        self._look_again = True
        if self._answering:
            return
        self._answering = True
        try:
            while self._look_again:
                self._look_again = False
                self._answer_waiting(at)
        finally:
            self._answering = False

    def _answer_waiting(self, at: float) -> None:
        workers = self.run.workers
        waiting = {record.worker: record.script.hello.spec.calls for record in workers.running() if record.script.hello}
        known = 0 if self.store_or_none is None else self.store.spec.calls
        most = max(waiting.values(), default=0)
        if not known and not waiting:
            return
        if most > known and any(waiting.get(worker) != most for worker in workers.alive):
            self._require_more(most, known)
            return
        for worker in waiting:
            self._welcome(workers.records[worker], at)
        if self.store_or_none is not None and self._evaluator is not None and self._measures_all():
            difference = self.store.spec.difference(self._evaluator.spec, "worker 0", "the evaluator")
            if difference is not None:
                raise OptionError(difference)
            self._evaluator = None
            self.run.evaluations.by_process()
            self.run.begin_phase_if_ready(at)

    def _measures_all(self) -> bool:
        """Return whether the evaluator has prepared all that is trained; it may be ahead of the workers."""
        return self._evaluator is not None and self._evaluator.spec.calls <= self.store.spec.calls

    def _require_more(self, most: int, known: int) -> None:
        """Refuse to wait for a worker that trains already with less than others have prepared."""
        early = min(self.run.workers.waiting, default=None)
        if known and early is not None:
            raise OptionError(
                f"worker {early} began its loop after {known} of the {most} calls of prepare() that others made: make "
                "the same calls in every worker, before the loop"
            )

    def waits_for_all(self, worker: int) -> str | None:
        hello = self.run.workers.records[worker].script.hello
        known = 0 if self.store_or_none is None else self.store.spec.calls
        return "prepare()" if hello is not None and hello.spec.calls > known else None

    def _welcome(self, record: WorkerRecord, at: float) -> None:
        hello, record.script.hello = record.script.hello, None
        if hello is None:  # answered while another worker was
            return
        store = self.store_or_none
        if store is not None and hello.spec.calls < store.spec.calls:  # of a script that comes later
            self.run.engine.send(record.worker, Welcome(None))
            return
        if self._spec_saved is not None:
            self._require_saved(self._spec_saved, hello.spec)
        if store is None or hello.spec.calls > store.spec.calls:
            values, buffers = [v.clone() for v in hello.values], [b.clone() for b in hello.buffers]
            engine, statistics = self.run.engine, self.run.coordinator.strategy.needs_applied
            made = engine.make_store(hello, values, buffers, statistics=statistics)
            if store is not None and not hello.spec.steps_itself:
                made.optimizer.load(*store.optimizer.state())
            self.adopt(made, at)
        self.store.spec.require_same(hello.spec, record.worker)
        if hello.evaluator is not None and not self.run.evaluations.possible:
            measure = Evaluator(*hello.evaluator)
            self.run.evaluations.inline(lambda: measure(self.store))
        state = self._states.pop(record.worker, None)
        self.run.engine.send(record.worker, Welcome(self.first_model(record, hello), state))

    def _require_saved(self, saved: ModelSpec, given: ModelSpec) -> None:
        """Refuse a model that is not the one in the checkpoint."""
        difference = saved.difference(given, "the checkpoint", "the script")
        if difference is not None and self.run.resumption is not None:
            raise CheckpointError(f"{self.run.resumption.found.path} is of another model: {difference}")

    def adopt(self, store: Store, at: float) -> None:
        """Train the model in this store."""
        self.store_or_none = store
        factor = rate_factor(self.run.plan.config.scale_lr, self.run.plan.workers)
        if factor != 1.0:
            store.optimizer.scale_rate(factor)
        if store.notice is not None:
            self.run.coordinator.observe(at, "warning", {"text": store.notice})

    def first_model(self, record: WorkerRecord, hello: Hello) -> Parameters:
        """Return the model that a worker starts from."""
        return self.run.engine.publish(record.worker, self.store, waits=False, reads=hello.reads)

    def final(self, worker: int) -> Parameters | None:
        if self.store_or_none is None:
            return None
        return self.run.engine.publish(worker, self.store, waits=False)

    # -- evaluations, checkpoints, results ---------------------------------------------------------------------------

    @property
    def measurable(self) -> bool:
        return self.store_or_none is not None

    def evaluation(self, number: int) -> Evaluate:
        return Evaluate(number, self.run.engine.publish(EVALUATOR, self.store, waits=False))

    def contents(self) -> Contents | None:
        return None if self.store_or_none is None else self.store.contents()

    def restore(self, contents: Contents, version: int, states: dict[int, bytes], extra: dict[str, Any]) -> None:
        del extra
        self._spec_saved = spec_of_contents(contents)
        if self._spec_saved is None:
            raise CheckpointError("the checkpoint is of tables, and the strategy works on a model")
        self._states = states
        engine, statistics = self.run.engine, self.run.coordinator.strategy.needs_applied

        def make(spec: ModelSpec, values: list[torch.Tensor], buffers: list[torch.Tensor], statistics: bool) -> Store:
            return engine.make_store(Hello(spec, [], []), values, buffers, statistics=statistics)

        self.adopt(store_of(contents, version, statistics, make), self.run.moment())

    def came_to_nothing(self) -> str | None:
        c = self.run.coordinator
        if not self.run.phases.begun:
            return "no worker called session.batches(): nothing was trained"
        if not c.version:
            return (
                "no gradient was ever pushed: does the script call loss.backward() and optimizer.step() for each batch?"
            )
        if c.lost > LOST_SHARE * (c.used + c.lost):
            return f"{c.lost} of {c.used + c.lost} samples were lost: skipped by the script, or refused"
        return None

    def result(self) -> Result:
        return Result(None if self.store_or_none is None else model_state(self.store))
