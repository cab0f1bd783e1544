"""What differs between the engines, and nothing else: time, processes, and how a message reaches a worker."""

from collections.abc import Callable
from typing import Any, Literal, Protocol

from paceline.core.settings import Capabilities
from paceline.model.regions import Region
from paceline.model.spec import Parameters
from paceline.model.store import Store
from paceline.server.emulation import Timing
from paceline.transport.messages import Hello

EVALUATOR = -1  # the process that measures versions, where there is one: it trains nothing and is no worker

Call = Callable[[Any], None]
Control = Literal["pause", "resume", "kill", "hang_up"]


class Engine(Protocol):
    """Carries a run. Holds no training state."""

    name: str
    capabilities: Capabilities

    def now(self) -> float:
        """Seconds into the run."""

    def start_clock(self, at: float) -> None:
        """The first phase begins: the run's seconds count from here on."""

    def call_at(self, at: float, call: Call, argument: Any = None, *, keeps_alive: bool = True) -> None:
        """Make the call at that second; `keeps_alive`: a run in which nothing else happens may go on because of it."""

    def wake(self) -> None:
        """Let `drive` look after the run as soon as the call in progress is done."""

    def start(self, worker: int, incarnation: int) -> None:
        """Start a process for this worker."""

    def control(self, worker: int, what: Control) -> None:
        """Do this to the worker's process."""

    def crash_server(self) -> None:
        """Die, as a scenario's `server_crash` asks."""

    def send(self, worker: int, message: Any) -> None:
        """Hand a message to a worker that is there, or to the evaluator."""

    def dispatch(self, worker: int, message: Any, timing: Timing | None) -> None:
        """Send what the worker is to compute: at once on real processes, in virtual time when it is computed."""

    def recall(self, worker: int, ticket: int) -> None:
        """The grant is void; a push that already set out crosses this and is refused on arrival."""

    def make_store(self, hello: Hello, values: list[Any], buffers: list[Any], *, statistics: bool) -> Store:
        """Where the weights are to live."""

    def region(self, worker: int) -> Region | None:
        """Memory that the worker shares with the server; None: tensors go by reference, or travel."""

    def publish(self, worker: int, store: Store, *, waits: bool, reads: bool = False) -> Parameters:
        """The current version where this worker finds it. `waits`: it computes nothing meanwhile; `reads`: it has just
        said that it copies versions elsewhere, and could do so from the server's own memory."""

    def measure(self, call: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Evaluate inside this process, without touching any worker's random numbers."""

    def effort(self) -> dict[str, float] | None:
        """Processor seconds that the server spent, where it has a process of its own."""


class TensorsByReference:
    """The half of an engine that moves tensors, where server and workers are one process."""

    def make_store(self, hello: Hello, values: list[Any], buffers: list[Any], *, statistics: bool) -> Store:
        """In main memory."""
        return Store(hello.spec, values, buffers, statistics)

    def region(self, worker: int) -> None:
        """Nothing is shared by address."""
        del worker

    def publish(self, worker: int, store: Store, *, waits: bool, reads: bool = False) -> Parameters:
        """One immutable copy for everybody."""
        del worker, waits, reads
        return store.read()
