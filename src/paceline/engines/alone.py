"""`python train.py` without a launcher: one worker in its own process, on the wall's clock.

The same coordinator and store as everywhere, driven from inside the worker's own calls: what the session sends is dealt
with when it waits for the answer. Evaluation runs inline; warnings, and at level info
evaluations, go to the logger `paceline`.
"""

import time
from collections import deque

from paceline.config import RunConfig
from paceline.context import Shared, WorkerContext
from paceline.coordinator import Coordinator
from paceline.errors import InternalError
from paceline.journal import Header
from paceline.logs import Log
from paceline.phases import Phases
from paceline.regions import Region
from paceline.running import Conduct
from paceline.seats import Arrival, Order
from paceline.store import ModelSpec
from paceline.strategies import build
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

WORKER = 0


class Alone:
    """Server and link of the only worker."""

    def __init__(self, config: RunConfig) -> None:
        self._began = time.monotonic()
        self._phases = Phases()
        self._phases.alive.add(WORKER)
        self._answers: deque[ToWorker] = deque()
        self._granted_at = 0.0
        strategy = build("bsp", config.seed)
        log = Log()
        self._conduct = Conduct(config, strategy, log, Header(engine="alone", strategy="bsp", seed=0, workers=1))
        self._coordinator = Coordinator(strategy, self, log)
        self._conduct.take_charge(self._coordinator, _go_on)
        self._coordinator.seat(WORKER, 0)

    # -- the worker's end --------------------------------------------------------------------------------------------

    def send(self, message: ToServer) -> None:
        match message:
            case Push():
                self._push(message)
            case Ready():
                self._ready(message)
            case Hello():
                self._answers.append(Welcome(self._conduct.welcome(WORKER, message)))
            case More():
                work = self._phases.current.batch_size if self._phases.current is not None else 1
                self._answers.append(Extra(self._coordinator.more(WORKER, 0, message.ticket, work)))
            case Done() | Stop():
                self._leave_phase(out_of_loop=isinstance(message, Done))
            case Remark():
                self._conduct.remark(message.text)
            case _:
                pass

    def receive(self) -> ToWorker:
        if not self._answers:
            raise InternalError("the only worker waits for an answer that nobody can give")
        return self._answers.popleft()

    def poll(self, seconds: float = 0.0) -> bool:  # noqa: ARG002 - nobody else could answer meanwhile
        return bool(self._answers)

    def adopt(self, spec: ModelSpec) -> Region | None:  # noqa: ARG002 - tensors are passed by reference
        return None

    def reconnect(self) -> None:
        raise InternalError("the only worker lost itself")

    # -- the engine's end --------------------------------------------------------------------------------------------

    def order(self, order: Order) -> None:
        self._granted_at = self._now()
        version = self._conduct.store.read() if order.fresh else None
        self._answers.append(Work(order.ticket, order.allotment, version, order.position, phase=self._phases.number))

    def cancel(self, worker: int, ticket: int) -> None:
        """Nobody cancels the only worker while it computes."""

    def timer(self, name: str, at: float | None, generation: int) -> None:
        """The only worker waits for nobody, so no timer matters."""

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _ready(self, message: Ready) -> None:
        self._phases.ready(WORKER, message)
        ledger = self._phases.begin(self._conduct.config.seed, 1)
        self._coordinator.now = self._now()
        self._conduct.phase_begins(ledger, message.size, message.batch_size)
        self._coordinator.join(WORKER, message.batch_size, self._now())

    def _push(self, message: Push) -> None:
        now = self._now()
        arrival = Arrival(
            WORKER, 0, message.ticket, message.samples, now - self._granted_at, 0.0,
            gradient=message.gradient, kept=message.kept, nominal=message.nominal,
        )  # fmt: skip
        self._coordinator.arrive(now, arrival)
        if self._coordinator.phase_over or self._conduct.phase_stopped:
            self._leave_phase(out_of_loop=False)

    def _leave_phase(self, *, out_of_loop: bool) -> None:
        if out_of_loop:
            self._answers.clear()
        if not self._phases.running:
            return
        self._coordinator.close(self._now())
        self._phases.end()
        self._answers.clear()
        if not out_of_loop:
            final = self._conduct.store.read()
            self._answers.append(Over(self._phases.number, final, self._coordinator.position))


def _go_on() -> None:
    """There is no loop to stop: the worker's own calls drive everything."""


def start() -> WorkerContext:
    """The context of a script that runs by itself."""
    alone = Alone(RunConfig())
    return WorkerContext(worker=WORKER, workers=1, endpoint=alone, shared=Shared(), evaluates=True, device="cpu")
