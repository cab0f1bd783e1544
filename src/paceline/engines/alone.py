"""`python train.py` without a launcher: one worker in its own process, on the wall's clock.

The same coordinator and store as everywhere, driven from inside the worker's own calls: what the session sends is dealt
with when it waits for the answer. Evaluation runs inline; warnings, and at level info
evaluations, go to the logger `paceline`.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from paceline.core.errors import InternalError
from paceline.core.settings import RunConfig
from paceline.model.regions import Region
from paceline.model.store import ModelSpec
from paceline.records.journal import Header
from paceline.records.logs import Log
from paceline.server.coordinator import Coordinator
from paceline.server.phases import Phases
from paceline.server.run_control import Conduct
from paceline.server.workers import GrantOrder, PushArrival
from paceline.strategies import build
from paceline.tables.messages import Measures, TableToServer, TableToWorker, Tick
from paceline.tables.traffic import Traffic
from paceline.transport.messages import (
    Done,
    Extra,
    Hello,
    More,
    Over,
    Push,
    Ready,
    Remark,
    Stop,
    ToServer,
    ToWorker,
    Welcome,
    Work,
)
from paceline.worker.context import Shared, WorkerContext

WORKER = 0


class Alone:
    """Server and link of the only worker."""

    def __init__(self, config: RunConfig) -> None:
        self._began = time.monotonic()
        self.phases = Phases()
        self.phases.alive.add(WORKER)
        self.answers: deque[ToWorker] = deque()
        self._granted_at = 0.0
        strategy = build("bsp", config.seed)
        log = Log()
        self.conduct = Conduct(config, strategy, log, Header(engine="alone", strategy="bsp", seed=0, workers=1))
        self._coordinator = Coordinator(strategy, self, log)
        self.conduct.take_charge(self._coordinator, _go_on)
        self._coordinator.seat(WORKER, 0)
        self._tables = AloneTables(self)

    # -- the worker's end --------------------------------------------------------------------------------------------

    def send(self, message: ToServer) -> None:
        match message:
            case Push():
                self._push(message)
            case Ready():
                self._ready(message)
            case Hello():
                self.answers.append(Welcome(self.conduct.welcome(WORKER, message)))
            case More():
                work = self.phases.current.batch_size if self.phases.current is not None else 1
                self.answers.append(Extra(self._coordinator.more(WORKER, 0, message.ticket, work)))
            case Done() | Stop():
                self._leave_phase(out_of_loop=isinstance(message, Done))
            case Remark():
                self.conduct.remark(message.text)
            case _ if isinstance(message, TableToServer):
                self._tables.hear(WORKER, message)

    def receive(self) -> ToWorker:
        if not self.answers:
            raise InternalError("the only worker waits for an answer that nobody can give")
        return self.answers.popleft()

    def poll(self, seconds: float = 0.0) -> bool:  # noqa: ARG002 - nobody else could answer meanwhile
        return bool(self.answers)

    def adopt(self, spec: ModelSpec) -> Region | None:  # noqa: ARG002 - tensors are passed by reference
        return None

    def reconnect(self) -> None:
        raise InternalError("the only worker lost itself")

    # -- the engine's end --------------------------------------------------------------------------------------------

    def order(self, order: GrantOrder) -> None:
        if self._tables.in_use:
            self._tables.order(order)
            return
        self._granted_at = self.now()
        version = self.conduct.store.read() if order.fresh else None
        self.answers.append(Work(order.ticket, order.allotment, version, order.position, phase=self.phases.number))

    def cancel(self, worker: int, ticket: int) -> None:
        """Nobody cancels the only worker while it computes."""

    def timer(self, name: str, at: float | None, generation: int) -> None:
        """The only worker waits for nobody, so no timer matters."""

    def now(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def _ready(self, message: Ready) -> None:
        self.phases.ready(WORKER, message)
        ledger = self.phases.begin(self.conduct.config.seed, 1)
        self._coordinator.now = self.now()
        self.conduct.phase_begins(ledger, message.size, message.batch_size)
        self._coordinator.join(WORKER, message.batch_size, self.now())
        self._tables.settle()

    def _push(self, message: Push) -> None:
        now = self.now()
        arrival = PushArrival(
            WORKER, 0, message.ticket, message.samples, now - self._granted_at, 0.0,
            gradient=message.gradient, kept=message.kept, nominal=message.nominal,
        )  # fmt: skip
        self._coordinator.arrive(now, arrival)
        if self._coordinator.phase_over or self.conduct.phase_stopped:
            self._leave_phase(out_of_loop=False)

    def _leave_phase(self, *, out_of_loop: bool) -> None:
        if out_of_loop:
            self.answers.clear()
        if not self.phases.running:
            return
        self._coordinator.close(self.now())
        self.phases.end()
        self.answers.clear()
        if not out_of_loop:
            final = self.conduct.store.read() if self.conduct.store_or_none is not None else None
            self.answers.append(Over(self.phases.number, final, self._coordinator.position))


class AloneTables(Traffic):
    """Tables of the only worker: every message is there at once."""

    def __init__(self, alone: Alone) -> None:
        super().__init__(alone.conduct, alone.phases, None)
        self._alone = alone

    def now(self) -> float:
        return self._alone.now()

    def at(self, moment: float, call: Callable[[Any], None], argument: Any) -> None:
        raise InternalError(f"nothing of a worker alone waits for a moment such as {moment}: {call} {argument}")

    def incarnation(self, worker: int) -> int | None:
        return 0 if worker == WORKER else None

    def tell(self, worker: int, message: TableToWorker) -> None:  # noqa: ARG002 - there is one
        self._alone.answers.append(message)

    def on_tick(self, worker: int, incarnation: int, tick: Tick) -> None:
        self.ship(worker, incarnation, 0, tick, self.now(), tick.compute_s)

    def on_measures(self, worker: int, message: Measures) -> None:  # noqa: ARG002
        evaluate = message.evaluate
        if evaluate is not None and not self.conduct.can_evaluate:
            self.conduct.evaluate_with(lambda _: self.host.measured(evaluate))


def _go_on() -> None:
    """There is no loop to stop: the worker's own calls drive everything."""


def start() -> WorkerContext:
    """The context of a script that runs by itself."""
    alone = Alone(RunConfig())
    return WorkerContext(worker=WORKER, workers=1, endpoint=alone, shared=Shared(), evaluates=True, device="cpu")
