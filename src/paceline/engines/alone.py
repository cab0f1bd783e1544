"""`python train.py` without a launcher: one worker in its own process, in wall-clock time.

The same run as under a launcher, driven from the worker's own calls: each message is handled as it is sent, and answers
queue up until the worker asks for them. Evaluation runs inline; warnings, and at level info evaluations, go to the
logger `paceline`. The script steps with its own optimizers, as it would without paceline.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from paceline.core.errors import InternalError
from paceline.core.settings import Capabilities, RunConfig
from paceline.engines.own_model import OwnReplica, OwnStore
from paceline.gradients.server import GradientExchange
from paceline.model.spec import ModelSpec
from paceline.model.store import Parameters, Store
from paceline.records.journal import Header
from paceline.records.logs import Log
from paceline.server.emulation import Timing
from paceline.server.engine import Call, Control, TensorsByReference
from paceline.server.plan import Plan
from paceline.server.run import ServerRun
from paceline.strategies import build
from paceline.tables.server import TableExchange
from paceline.transport.messages import Hello, ToServer, ToWorker, Work
from paceline.worker.context import Shared, WorkerContext

WORKER = 0


class Alone(TensorsByReference):
    """Engine and link of the only worker."""

    name = "alone"
    capabilities = Capabilities()

    def __init__(self, config: RunConfig) -> None:
        self._began = time.monotonic()
        self._answers: deque[ToWorker] = deque()
        self._replica: OwnReplica | None = None
        header = Header(engine="alone", strategy="bsp", seed=0, workers=1)
        plan = Plan(config=config, scenario=None, header=header, folder=None, journal=None)
        strategy = build("bsp", config.seed)
        self.run = ServerRun(self, plan, strategy, Log(), [GradientExchange, TableExchange])
        self.run.begin()
        self.run.on_start(WORKER, 0)

    # -- the worker's end --------------------------------------------------------------------------------------------

    def send_up(self, message: ToServer) -> None:
        """Handle a message of the worker at once."""
        self.run.on_message(WORKER, 0, message, self.now())
        self.run.attend(self.now())

    def receive(self) -> ToWorker:
        """Return the next answer."""
        if not self._answers:
            raise InternalError("the only worker waits for an answer that nobody can give")
        return self._answers.popleft()

    @property
    def has_answers(self) -> bool:
        return bool(self._answers)

    # -- the engine's end --------------------------------------------------------------------------------------------

    def now(self) -> float:
        return time.monotonic() - self._began

    def start_clock(self, at: float) -> None:
        """Do nothing: the clock has run since the script began."""

    def call_at(self, at: float, call: Call, argument: Any = None, *, keeps_alive: bool = True) -> None:
        """Drop the call: later calls end waits for others or emulate a scenario, and here there is neither."""
        del at, call, argument, keeps_alive

    def wake(self) -> None:
        """Do nothing: `send_up` attends to the run after each message."""

    def start(self, worker: int, incarnation: int) -> None:
        """Do nothing: the only worker is running."""

    def control(self, worker: int, what: Control) -> None:
        """Do nothing: without a scenario nobody pauses or kills the worker."""

    def crash_server(self, for_s: float | None) -> None:
        """Do nothing: without a scenario there is no such event."""

    def send(self, worker: int, message: ToWorker) -> None:
        del worker
        self._answers.append(message)

    def dispatch(self, worker: int, message: Any, timing: Timing | None) -> None:
        del worker, timing
        self._answers.append(message)

    def recall(self, worker: int, ticket: int) -> None:
        del worker
        self._answers = deque(m for m in self._answers if not (isinstance(m, Work) and m.ticket == ticket))

    def make_replica(self, model: torch.nn.Module, optimizer: Any, spec: ModelSpec) -> OwnReplica:
        """Make what counts the steps of the script's own optimizers."""
        self._replica = OwnReplica(model, optimizer, spec)
        return self._replica

    def make_store(self, hello: Hello, values: list[Any], buffers: list[Any], *, statistics: bool) -> Store:
        """Make one that leaves the weights where they are."""
        del hello, values, buffers, statistics
        if self._replica is None:
            raise InternalError("the only worker has no model")
        return OwnStore(self._replica)

    def publish(self, worker: int, store: Store, *, waits: bool, reads: bool = False) -> Parameters:
        """Return no tensors: the script has them."""
        del worker, waits, reads
        return Parameters(store.version, [], [])

    def measure(self, call: Callable[[], dict[str, float]]) -> dict[str, float]:
        return call()

    def effort(self) -> None:
        """Return None: script and server share one process."""


class AloneLink:
    """The worker's end of the link to its own process."""

    def __init__(self, alone: Alone) -> None:
        self._alone = alone

    def send(self, message: ToServer) -> None:
        self._alone.send_up(message)

    def receive(self) -> ToWorker:
        return self._alone.receive()

    def poll(self, seconds: float = 0.0) -> bool:  # noqa: ARG002 - nobody else could answer meanwhile
        return self._alone.has_answers

    def adopt(self, spec: ModelSpec) -> None:  # noqa: ARG002 - tensors are passed by reference
        return None

    def reconnect(self) -> None:
        raise InternalError("the only worker lost itself")


def start() -> WorkerContext:
    """Return the context of a script that runs without a launcher."""
    engine = Alone(RunConfig())
    return WorkerContext(
        worker=WORKER, workers=1, endpoint=AloneLink(engine), shared=Shared(), evaluates=True,
        make_replica=engine.make_replica, alone=True,
    )  # fmt: skip
