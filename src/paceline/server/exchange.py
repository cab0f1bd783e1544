"""What workers share through a run: gradients, tables, or models between peers. One exchange is in use at a time.

A run owns time, workers, phases, evaluations and checkpoints; an exchange owns what travels and where the weights are.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from paceline.core.events import Cause as LeaveCause
from paceline.core.updates import Contents
from paceline.model.store import Parameters
from paceline.records.report import Report
from paceline.server.plan import Cause
from paceline.server.workers import WorkerRecord
from paceline.transport.messages import Hello, More, Push

if TYPE_CHECKING:
    from paceline.server.run import ServerRun


class Result(msgspec.Struct, frozen=True):
    """What a run produces: a trained model or tables, and each node's own model in a run without a server."""

    model: dict[str, Any] | None = None
    tables: dict[str, Any] | None = None
    nodes: dict[int, dict[str, Any]] = {}


class Launched(msgspec.Struct, frozen=True):
    """A finished run, as an engine returns it."""

    report: Report
    cause: Cause
    left: Result


class RunExchange:
    """One way of sharing. By default every method does nothing; subclasses override those they need."""

    messages: ClassVar[Any] = ()  # its own message types, as `isinstance` takes them
    counts_rounds: ClassVar[bool] = False  # True: there is no data set whose passes could be counted
    needs_states: ClassVar[bool] = False  # True: a checkpoint is of one moment only with the states of all workers

    def __init__(self, run: "ServerRun") -> None:
        self.run = run

    @property
    def in_use(self) -> bool:
        """Whether workers already share something by it; then no other exchange can take its place."""
        return False

    @classmethod
    def restores(cls, contents: Contents) -> bool:
        """Return whether a checkpoint's weights belong to this exchange."""
        del contents
        return False

    def make_way(self) -> None:
        """Let another exchange take its place; raise if that is not possible."""

    # -- what workers say --------------------------------------------------------------------------------------------

    def on_hello(self, worker: int, hello: Hello, at: float) -> None:
        """Handle the model that a worker, or the evaluator, has prepared."""

    def on_message(self, record: WorkerRecord | None, message: Any, at: float) -> None:
        """Handle one of its own messages; without a record it comes from the evaluator."""

    def on_push(self, record: WorkerRecord, message: Push, at: float) -> None:
        """Handle a push."""

    def on_more(self, record: WorkerRecord, message: More, at: float) -> None:
        """Handle a request for further samples on a grant."""

    def on_script_end(self, record: WorkerRecord, then: Callable[[], None]) -> None:
        """Call `then` once everything that the ended script sent has been handled."""
        del record
        then()

    def is_parting(self, worker: int) -> bool:
        """Return whether messages of the worker's ended script are still on their way."""
        del worker
        return False

    # -- phases and workers ------------------------------------------------------------------------------------------

    def begin_phase(self, members: Sequence[int], at: float) -> None:
        """Begin a phase with these workers."""

    def can_end_phase(self, at: float) -> bool:
        """Return whether a phase whose work is done can be closed; ask for what is still missing."""
        del at
        return True

    def phase_over(self, at: float) -> None:
        """End the phase: all workers leave the loop."""

    def look_at_waiting(self, at: float) -> None:
        """Serve workers that were waiting for another one to come, wait or leave."""

    def waits_for_all(self, worker: int) -> str | None:
        """Return the call in which the worker waits until every other worker has made it; None if in none."""
        del worker
        return None

    # -- silence -----------------------------------------------------------------------------------------------------

    can_rejoin: ClassVar[bool] = True  # a worker that was taken out for its silence can go on in the same process
    answers_pings: ClassVar[bool] = False  # workers that wait for each other can be asked whether they are there

    steps_by: ClassVar[type] = Push  # the message that ends a worker's step

    def ping(self, worker: int) -> None:
        """Ask a worker whether it is there."""

    def excuses(self, worker: int) -> bool:
        """Return whether a worker with a grant waits for others."""
        del worker
        return False

    def owes(self, worker: int) -> float | None:
        """Return since when a worker without a grant owes an answer; None if it does not."""
        del worker
        return None

    def busy_until(self, worker: int) -> float | None:
        """Return when a virtual worker's computation is over; None if it is not known."""
        timing = self.run.workers.records[worker].script.timing
        return None if timing is None else timing.end

    # -- workers that leave ------------------------------------------------------------------------------------------

    def left(self, worker: int, cause: LeaveCause, at: float) -> None:
        """Handle a worker that takes no more part."""

    def ask_to_leave(self, record: WorkerRecord, then: Callable[[], None]) -> None:
        """Let a worker that the scenario removes hand over what others need, then call `then`."""
        del record
        then()

    def settle(self, at: float) -> None:
        """Send what is due after a decision."""

    def final(self, worker: int) -> Parameters | None:
        """Return the model that a worker leaves a phase with."""
        del worker
        return None

    # -- evaluations, checkpoints, results ---------------------------------------------------------------------------

    @property
    def measurable(self) -> bool:
        """Whether there is something to evaluate."""
        return False

    def refresh(self, then: Callable[[], None]) -> None:
        """Bring the weights to be measured or saved into one place, then call `then`."""
        then()

    def evaluation(self, number: int) -> Any:
        """Return the message that asks the evaluator's process to measure."""
        raise AssertionError(f"evaluation {number}: there is nothing to measure")

    @property
    def own_models(self) -> Sequence[int]:
        """Return the nodes whose own models at the end of the last phase can be measured, beside their average."""
        return ()

    def as_node(self, node: int) -> contextlib.AbstractContextManager[None]:
        """Have the store hold a node's own model, inside the `with` statement."""
        raise AssertionError(f"node {node} has no model of its own")

    def contents(self) -> Contents | None:
        """Return what a checkpoint holds; None if there is nothing yet."""
        return None

    def extra(self) -> dict[str, Any]:
        """Return what else a checkpoint's head records of this exchange."""
        return {}

    def checkpoint_begins(self) -> None:
        """Note that a checkpoint holds `contents` as they are now; workers' states follow."""

    def state_came(self, worker: int) -> None:
        """Note that the worker's state for the checkpoint under way has come, after all that it sent before."""

    def late_contents(self) -> Contents | None:
        """Return what the checkpoint under way holds beside `contents`, now that workers' states have come."""
        return None

    def checkpoint_written(self) -> None:
        """Note that the checkpoint under way is on disk."""

    def restore(self, contents: Contents, version: int, states: dict[int, bytes], extra: dict[str, Any]) -> None:
        """Continue from a checkpoint; `states` are those of its workers."""

    def came_to_nothing(self) -> str | None:
        """Return a warning for a run that trained nothing, or lost many samples."""
        return None

    def result(self) -> Result:
        """Return what the run produced."""
        return Result()
