"""What workers share through a run: gradients, tables, or models between peers. One exchange is in use at a time.

A run owns time, workers, phases, evaluations and checkpoints; an exchange owns what travels and where the weights are.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from paceline.core.events import Cause as LeaveCause
from paceline.core.updates import Contents
from paceline.model.spec import Parameters
from paceline.records.report import Report
from paceline.server.plan import Cause
from paceline.server.workers import WorkerRecord
from paceline.transport.messages import Hello, More, Push

if TYPE_CHECKING:
    from paceline.server.run import ServerRun


class Result(msgspec.Struct, frozen=True):
    """What a run leaves: a trained model, or tables, and each node's own model where nodes have some."""

    model: dict[str, Any] | None = None
    tables: dict[str, Any] | None = None
    nodes: dict[int, dict[str, Any]] = {}


class Launched(msgspec.Struct, frozen=True):
    """A run that an engine has carried to its end."""

    report: Report
    cause: Cause
    left: Result


class RunExchange:
    """One way of sharing; subclasses override what they do otherwise than nothing."""

    messages: ClassVar[Any] = ()  # the kinds of messages that are its own, as `isinstance` takes them
    counts_rounds: ClassVar[bool] = False  # there is no data whose passes could be counted

    def __init__(self, run: "ServerRun") -> None:
        self.run = run

    @property
    def in_use(self) -> bool:
        """Whether workers share something by it already; then no other exchange can take its place."""
        return False

    @classmethod
    def restores(cls, contents: Contents) -> bool:
        """Whether a checkpoint's weights are of this exchange."""
        del contents
        return False

    def make_way(self) -> None:
        """Another exchange takes its place; one that must not be left refuses."""

    # -- what workers say --------------------------------------------------------------------------------------------

    def on_hello(self, worker: int, hello: Hello, at: float) -> None:
        """A worker, or the evaluator, has prepared a model."""

    def on_message(self, record: WorkerRecord | None, message: Any, at: float) -> None:
        """One of its own messages; without a record it comes from the evaluator."""

    def on_push(self, record: WorkerRecord, message: Push, at: float) -> None:
        """A worker has computed what it was granted."""

    def on_more(self, record: WorkerRecord, message: More, at: float) -> None:
        """A worker wants further samples on its grant."""

    def on_script_end(self, record: WorkerRecord, then: Callable[[], None]) -> None:
        """The worker's script came to its end: go on once all that it sent has been taken in."""
        del record
        then()

    def is_parting(self, worker: int) -> bool:
        """Whether something of an ended script is still under way."""
        del worker
        return False

    # -- phases and workers ------------------------------------------------------------------------------------------

    def begin_phase(self, members: Sequence[int], at: float) -> None:
        """A phase begins with these workers."""

    def can_end_phase(self, at: float) -> bool:
        """Whether a phase whose work is done can be closed; what is lacking for that is asked for here."""
        del at
        return True

    def phase_over(self, at: float) -> None:
        """Everybody leaves the loop."""

    def look_at_waiting(self, at: float) -> None:
        """Somebody came, waits or left: others may have waited for that alone."""

    def left(self, worker: int, cause: LeaveCause, at: float) -> None:
        """The worker takes no more part."""

    def ask_to_leave(self, record: WorkerRecord, then: Callable[[], None]) -> None:
        """A scenario sends the worker away: let it hand on what others must not lose, then go on."""
        del record
        then()

    def settle(self, at: float) -> None:
        """Send what is due after a decision."""

    def final(self, worker: int) -> Parameters | None:
        """The model a worker leaves a phase with."""
        del worker
        return None

    # -- evaluations, checkpoints, results ---------------------------------------------------------------------------

    @property
    def measurable(self) -> bool:
        """Whether there is something to evaluate."""
        return False

    def refresh(self, then: Callable[[], None]) -> None:
        """See to it that what is to be measured or saved is in one place, then go on."""
        then()

    def evaluation(self, number: int) -> Any:
        """What the evaluator's process is sent to measure."""
        raise AssertionError(f"evaluation {number}: there is nothing to measure")

    def contents(self) -> Contents | None:
        """What a checkpoint holds; None if there is nothing yet."""
        return None

    def extra(self) -> dict[str, Any]:
        """What a checkpoint's head says of this exchange beside that."""
        return {}

    def restore(self, contents: Contents, version: int, states: dict[int, bytes], extra: dict[str, Any]) -> None:
        """Go on from a checkpoint; `states` are those of its workers."""

    def came_to_nothing(self) -> str | None:
        """What to say of a run that made no version."""
        return None

    def result(self) -> Result:
        """What the run leaves."""
        return Result()
