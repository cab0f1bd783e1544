"""A run whose engine is the test: no process, no thread, and a clock that goes only when the test moves it.

The run is the real one, with real strategy, store and exchanges. What it wants of its engine is noted, calls at later
moments are made when the clock gets there, and what workers say is whatever a test lets them say. `Workers` that are
scripted have the model `y = w` of one number, so that every version can be worked out by hand.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.core.settings import RunConfig
from paceline.gradients.server import GradientExchange
from paceline.model.flat import Layout
from paceline.model.mass_optimizer import describe
from paceline.model.spec import ModelSpec
from paceline.model.store import Gradient, Parameters, Store
from paceline.records.journal import Decision, Header, Lines, Observation
from paceline.scenario import Scenario
from paceline.server.checkpoint.schedule import Resumption
from paceline.server.emulation import Timing
from paceline.server.engine import Call, Capabilities, Control
from paceline.server.exchange import RunExchange
from paceline.server.plan import Plan
from paceline.server.run import ServerRun
from paceline.strategies import build_central
from paceline.tables.server import TableExchange
from paceline.transport.messages import Done, Ended, Hello, Over, Push, Ready, ToServer, Welcome, Work

SIZE = 8
BATCH = 2
LR = 0.5
FIRST = 10.0  # the model's only number


class HandDrivenEngine:
    """Notes what it is asked for; `advance` makes the calls whose moment has come."""

    name = "by hand"
    run: ServerRun

    def __init__(self, **capabilities: bool) -> None:
        self.capabilities = Capabilities(**capabilities)
        self.time = 0.0
        self.clock_started: list[float] = []
        self.started: list[tuple[int, int]] = []
        self.controlled: list[tuple[int, Control]] = []
        self.recalled: list[tuple[int, int]] = []
        self.sent: defaultdict[int, list[Any]] = defaultdict(list)
        self.published: list[tuple[int, bool]] = []  # to whom, and whether it computed nothing meanwhile
        self.timings: dict[int, Timing | None] = {}  # of what each worker was last told to compute
        self._calls: list[tuple[float, int, Call, Any, bool]] = []
        self._numbers = itertools.count()

    # -- time --------------------------------------------------------------------------------------------------------

    def now(self) -> float:
        return self.time

    def start_clock(self, at: float) -> None:
        self.clock_started.append(at)

    def call_at(self, at: float, call: Call, argument: Any = None, *, keeps_alive: bool = True) -> None:
        heapq.heappush(self._calls, (at, next(self._numbers), call, argument, keeps_alive))

    def wake(self) -> None:
        """The test lets the run look after itself after everything that it does."""

    def advance(self, to: float) -> None:
        """Let time pass, and all happen that is due meanwhile."""
        while self._calls and self._calls[0][0] <= to:
            at, _, call, argument, _ = heapq.heappop(self._calls)
            self.time = max(self.time, at)
            call(argument)
            self.run.attend(self.time)
        self.time = to
        self.run.attend(to)

    @property
    def pending(self) -> list[float]:
        """The moments of calls that are still to come, without those that only look after the run."""
        return sorted(at for at, *_, keeps_alive in self._calls if keeps_alive)

    # -- workers -----------------------------------------------------------------------------------------------------

    def start(self, worker: int, incarnation: int) -> None:
        self.started.append((worker, incarnation))

    def control(self, worker: int, what: Control) -> None:
        self.controlled.append((worker, what))

    def crash_server(self, for_s: float | None) -> None:
        raise AssertionError("nobody asked for that")

    def send(self, worker: int, message: Any) -> None:
        self.sent[worker].append(message)

    def dispatch(self, worker: int, message: Any, timing: Timing | None) -> None:
        self.timings[worker] = timing
        self.sent[worker].append(message)

    def recall(self, worker: int, ticket: int) -> None:
        self.recalled.append((worker, ticket))

    # -- the model ---------------------------------------------------------------------------------------------------

    def make_store(
        self, hello: Hello, values: list[torch.Tensor], buffers: list[torch.Tensor], *, statistics: bool
    ) -> Store:  # fmt: skip
        return Store(hello.spec, values, buffers, statistics)

    def region(self, worker: int) -> None:
        del worker

    def publish(self, worker: int, store: Store, *, waits: bool, reads: bool = False) -> Parameters:
        del reads
        self.published.append((worker, waits))
        return store.read()

    def measure(self, call: Callable[[], dict[str, float]]) -> dict[str, float]:
        return call()

    def effort(self) -> None:
        """There is no server process."""


class HandDrivenRun:
    """A run on that engine, and words to drive it with."""

    def __init__(
        self, strategy: str = "bsp", workers: int = 2, *, scenario: Scenario | None = None, folder: Path | None = None,
        exchanges: Sequence[type[RunExchange]] = (GradientExchange, TableExchange), resume: Path | None = None,
        own_processes: bool = False, restarted_at: float | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        """`restarted_at`: workers lived on while the server was started again, at that moment."""
        settings = {"evaluate_every": None, "strategy": strategy, **settings}
        header = Header(engine="by hand", strategy=strategy, seed=0, workers=workers)
        config = RunConfig(workers=workers, **settings)
        plan = Plan(config=config, scenario=scenario, header=header, folder=folder, journal=None)
        self.lines = Lines()
        self.engine = HandDrivenEngine(own_processes=own_processes)
        self.run = self.engine.run = ServerRun(
            self.engine, plan, build_central(strategy, 0), self.lines, list(exchanges)
        )  # fmt: skip
        self.run.begin(None if resume is None else Resumption(resume), restarted_at)
        self.incarnations: dict[int, int] = {}
        for worker in range(workers):
            self.run.start(worker)
            self.comes(worker)

    # -- what workers do ---------------------------------------------------------------------------------------------

    def comes(self, worker: int) -> None:
        """The process that the run asked for last is there."""
        incarnation = self.incarnations[worker] = dict(self.engine.started)[worker]
        self.run.on_start(worker, incarnation)

    def says(self, worker: int, message: ToServer, incarnation: int | None = None) -> None:
        given = self.incarnations[worker] if incarnation is None else incarnation
        self.run.on_message(worker, given, message, self.engine.time)
        self.run.attend(self.engine.time)

    def exits(self, worker: int, code: int = 0, incarnation: int | None = None) -> None:
        given = self.incarnations[worker] if incarnation is None else incarnation
        self.run.on_exit(worker, given, code, self.engine.time)
        self.run.attend(self.engine.time)

    def prepares(self, worker: int) -> None:
        self.says(worker, hello())

    def is_ready(self, worker: int, phase: int = 0) -> None:
        self.says(worker, Ready(phase, SIZE, BATCH, 1, "epoch", 1))

    def pushes(self, worker: int, value: float = 1.0, *, ticket: int | None = None, compute_s: float = 0.0) -> None:
        """The gradient of what it was granted last."""
        work = self.last(worker, Work)
        flat = Layout.of([torch.zeros(1)]).pack([torch.tensor([value])])
        gradient = Gradient(flat, frozenset(), list(hello().spec.optimizer.groups), loss=value)
        given = work.ticket if ticket is None else ticket
        self.says(worker, Push(given, work.allotment.samples, gradient, compute_s=compute_s))

    def leaves_the_loop(self, worker: int, phase: int = 0) -> None:
        self.says(worker, Done(phase))

    def ends(self, worker: int) -> None:
        """Its script comes to its end, and then its process does."""
        self.says(worker, Ended())
        self.exits(worker)

    # -- what came of it ---------------------------------------------------------------------------------------------

    def last(self, worker: int, kind: type[Any]) -> Any:
        """The last message of that kind that the worker was sent."""
        return [message for message in self.engine.sent[worker] if isinstance(message, kind)][-1]

    def count(self, worker: int, kind: type[Any]) -> int:
        return sum(isinstance(message, kind) for message in self.engine.sent[worker])

    @property
    def model(self) -> float:
        """The only number of the current version."""
        result = self.run.result().model
        assert result is not None
        return float(result["w"])

    @property
    def events(self) -> list[Any]:
        return [line.event for line in self.lines if isinstance(line, Decision)]

    def observed(self, what: str) -> list[Observation]:
        return [line for line in self.lines if isinstance(line, Observation) and line.what == what]

    def train(self) -> "HandDrivenRun":
        """Everybody prepares its model and calls `batches`."""
        for worker in sorted(self.incarnations):
            self.prepares(worker)
        for worker in sorted(self.incarnations):
            assert self.count(worker, Welcome) == 1
            self.is_ready(worker)
        return self

    def over_for(self, worker: int) -> Over | None:
        return self.last(worker, Over) if self.count(worker, Over) else None


def hello() -> Hello:
    """One number, and plain gradient descent."""
    parameter = torch.nn.Parameter(torch.tensor([FIRST]))
    optimizer = describe(torch.optim.SGD([parameter], lr=LR), {id(parameter): 0})
    spec = ModelSpec((("w", (1,), "torch.float32"),), (), optimizer, (("w", 0),))
    return Hello(spec, [parameter.detach()], [])
