"""What differs between engines, and nothing else: time, processes, and how a message reaches a worker."""

from collections.abc import Callable
from typing import Any, Literal, Protocol

from paceline.core.settings import Capabilities
from paceline.model.regions import Region
from paceline.model.store import Parameters, Store
from paceline.server.emulation import Timing
from paceline.transport.messages import Hello

EVALUATOR = -1  # the process that measures versions, where there is one; it trains nothing and is not a worker

Call = Callable[[Any], None]
Control = Literal["pause", "resume", "kill", "hang_up"]


class Engine(Protocol):
    """Where a run's processes and its time come from. Holds no training state."""

    name: str
    capabilities: Capabilities

    def now(self) -> float:
        """Return the seconds since the run began."""

    def start_clock(self, at: float) -> None:
        """Start the run's clock at this second: the first phase begins."""

    def call_at(self, at: float, call: Call, argument: Any = None, *, keeps_alive: bool = True) -> None:
        """Make the call at that second; `keeps_alive`: even if nothing else would keep the run going until then."""

    def wake(self) -> None:
        """Have `drive` attend to the run as soon as the call in progress is done."""

    def start(self, worker: int, incarnation: int) -> None:
        """Start a process for this worker."""

    def control(self, worker: int, what: Control) -> None:
        """Pause, resume, kill or disconnect the worker's process."""

    def crash_server(self, for_s: float | None) -> None:
        """Kill the server, as a scenario's `server_crash` asks; in virtual time it is back after `for_s` seconds."""

    def send(self, worker: int, message: Any) -> None:
        """Send a message to a worker that is there, or to the evaluator."""

    def dispatch(self, worker: int, message: Any, timing: Timing | None) -> None:
        """Send a worker its grant: on real processes at once, in virtual time when the grant is computed."""

    def recall(self, worker: int, ticket: int) -> None:
        """Cancel a grant; a push that is already on its way is refused on arrival."""

    def make_store(self, hello: Hello, values: list[Any], buffers: list[Any], *, statistics: bool) -> Store:
        """Make the store of the weights."""

    def region(self, worker: int) -> Region | None:
        """Return the memory shared with the worker; None if tensors go by reference or in messages."""

    def publish(self, worker: int, store: Store, *, waits: bool, reads: bool = False) -> Parameters:
        """Return the current version where this worker can read it. `waits`: it computes nothing meanwhile; `reads`: it
        has just said that it copies versions elsewhere, and could do so from the server's own memory."""

    def measure(self, call: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Evaluate inside this process, without changing any worker's random state."""

    def effort(self) -> dict[str, float] | None:
        """Return the processor seconds that the server spent; None if it has no process of its own."""


class TensorsByReference:
    """The half of an engine that moves tensors, for engines whose server and workers are one process."""

    def make_store(self, hello: Hello, values: list[Any], buffers: list[Any], *, statistics: bool) -> Store:
        """Make a store in main memory."""
        return Store(hello.spec, values, buffers, statistics)

    def region(self, worker: int) -> None:
        """Return None: tensors go by reference."""
        del worker

    def publish(self, worker: int, store: Store, *, waits: bool, reads: bool = False) -> Parameters:
        """Return one immutable copy for all workers."""
        del worker, waits, reads
        return store.read()
