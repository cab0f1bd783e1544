"""The messages between a worker and its server, each declared once.

The declaration is also the wire form: fields in order, without names, each checked against its type on arrival.
`registered` gives a message class its number on the wire. Other modules (tables, peers) register their own messages in
the same way, so a process knows only the kinds whose modules it has imported. Unregistered messages cannot be sent to
another process.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import torch

from paceline.core.errors import InternalError
from paceline.core.events import HostLoad
from paceline.core.ledger import Allotment, Indices, Sampling
from paceline.model.spec import ModelSpec
from paceline.model.store import Gradient, Parameters

if TYPE_CHECKING:  # inside one process a field may hold anything that can become an array: lazy rows, tensors
    Array = Any
    RawBytes = Any
else:  # from another process only arrays arrive
    Array = np.ndarray[Any, np.dtype[Any]]
    RawBytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


Number = int | float | bool | None
Collective = Literal["mean", "gather", "barrier"]  # calls that all workers make together


class ToServer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message from a worker to the server."""

    def announced_bytes(self) -> int:
        """Return the size of the model or table whose tensors this message and later ones may bring."""
        return 0


class ToWorker(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message from the server to a worker."""


class Kind(msgspec.Struct, frozen=True):
    """The wire properties of one message class."""

    type: type[Any]
    number: int
    to_worker: bool
    local: tuple[str, ...]  # fields that are not sent: the receiver gets None
    in_place: bool  # its arrays may be views of memory that the sender reuses after the next `receive`
    name: str
    prefix: bytes
    longest: int  # bytes from another host, tensors aside
    holds_state: bool  # its bytes may hold as much again as the model
    announces: bool  # a model or table


KINDS: dict[type[Any], Kind] = {}
KIND_OF_NUMBER: dict[int, Kind] = {}
TO_WORKER = 64  # numbers above it go to workers, so that a message at the wrong end is recognized
LAST_KIND = 127
CONTROL_BYTES = (
    512 << 10
)  # of most kinds; the longest that occur list samples or rows, of which long lists go as tensors
MODEL_BYTES = 2 << 20  # of a Hello: 100 bytes for each of 20,000 parameters
STATE_BYTES = 32 << 20  # of kinds with bytes of the script's own
MOST_WORKERS = 4_096  # of a list with one entry for each worker
_M = TypeVar("_M", bound=type[ToServer] | type[ToWorker])


def registered(
    number: int, *, local: tuple[str, ...] = (), in_place: bool = False, longest: int = CONTROL_BYTES,
    holds_state: bool = False,
) -> Callable[[_M], _M]:  # fmt: skip
    """Register a message class under this number. Never reuse a number for another class."""

    def register(kind: _M) -> _M:
        to_worker = issubclass(kind, ToWorker)
        first, last = (TO_WORKER + 1, LAST_KIND) if to_worker else (1, TO_WORKER - 1)
        if not first <= number <= last:
            raise InternalError(f"{kind.__name__}'s number must be {first} to {last}, not {number}")
        if number in KIND_OF_NUMBER:
            raise InternalError(
                f"{kind.__name__} has number {number}, which is {KIND_OF_NUMBER[number].type.__name__}'s"
            )
        KINDS[kind] = KIND_OF_NUMBER[number] = Kind(
            kind,
            number,
            to_worker,
            local,
            in_place,
            kind.__name__,
            bytes([number]),
            longest,
            holds_state,
            "announced_bytes" in vars(kind),
        )
        return kind

    return register


# -- to the server -----------------------------------------------------------------------------------------------------


@registered(1, local=("evaluator",), longest=MODEL_BYTES)
class Hello(ToServer, frozen=True):
    """A worker has prepared this model. `evaluator` is a copy of the module and a function, for use in this process."""

    spec: ModelSpec
    values: list[torch.Tensor]
    buffers: list[torch.Tensor]
    evaluator: tuple[Any, Callable[[Any], Mapping[str, float]]] | None = None
    reads: bool = False  # the worker copies versions to a device, so it can read them from the server's own memory
    in_region: bool = False  # on a wire: values and buffers are in the worker's region

    def announced_bytes(self) -> int:
        return self.spec.nbytes


class EpochMark(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One epoch of a `session.epochs` loop: which of the script's such loops, and its epoch."""

    loop: int
    epoch: int


@registered(2)
class Ready(ToServer, frozen=True):
    """A worker has called `batches` for the phase with this number."""

    phase: int
    size: int
    batch_size: int
    epochs: float
    sampling: Sampling
    least: int  # fewest samples in a piece that the model can be trained on
    spent: float | None = None  # of --epochs, by earlier phases; None: this phase is in no loop of the script's
    mark: EpochMark | None = None  # the `session.epochs` loop that it is in
    calls: int = 0  # collective ones that the script has made
    between: dict[str, int] = {}  # steps that its schedulers have made between loops, by their names


@registered(3)
class Push(ToServer, frozen=True):
    """The gradient of one grant."""

    ticket: int
    samples: int
    gradient: Gradient | None
    kept: list[Indices] | None = None
    nominal: int | None = None
    compute_s: float = 0.0  # by the worker's clock, emulated waiting included; virtual-time engines use their own
    overrun_s: float = 0.0  # by which the computation exceeded the scenario's time
    host: HostLoad | None = None  # of the worker's host; virtual-time engines have none


@registered(4)
class More(ToServer, frozen=True):
    """A request for another `batch_size` samples on the same grant: the script accumulates gradients."""

    ticket: int


@registered(5, longest=STATE_BYTES, holds_state=True)
class Done(ToServer, frozen=True):
    """This worker takes no more work in this phase: the script left the loop, or its stream has ended."""

    phase: int
    state: bytes | None = None  # of a worker whose stream has ended: its script waits in the loop for the phase's end


@registered(6)
class Stop(ToServer, frozen=True):
    """The script ends the phase for all workers."""

    reason: str


@registered(7)
class Note(ToServer, frozen=True):
    """A number that the user reports."""

    name: str
    value: float


@registered(8)
class Remark(ToServer, frozen=True):
    """A warning about the script for its user."""

    text: str


@registered(9)
class OptionAsked(ToServer, frozen=True):
    """The script asked for the option of this name."""

    name: str


@registered(10, longest=STATE_BYTES, holds_state=True)
class SavedState(ToServer, frozen=True):
    """A worker's state for a checkpoint, as of the `Work` or `Over` whose `save` has this number."""

    number: int
    data: bytes


@registered(11)
class Evaluated(ToServer, frozen=True):
    """The evaluator's answer."""

    number: int
    metrics: dict[str, float]


@registered(12)
class Failed(ToServer, frozen=True):
    """The script raised; `blame` says whether the input, the script or paceline is at fault."""

    blame: Literal["storage", "user", "script", "internal"]
    text: str
    traceback: str


@registered(13)
class Ended(ToServer, frozen=True):
    """The script has ended; `in_loop`: by `sys.exit()` inside a loop, which may be that of its batches."""

    in_loop: bool = False


@registered(28)
class OptimizerAsked(ToServer, frozen=True):
    """A script asks for the state of the run's optimizer."""


@registered(29)
class OptimizerLoaded(ToServer, frozen=True):
    """A script has loaded a state into its optimizer; keys are a parameter's position, a dot and torch's name."""

    phase: int  # that the script comes to next
    tensors: dict[str, torch.Tensor]
    numbers: dict[str, Number]


@registered(30)
class ModelLoaded(ToServer, frozen=True):
    """Between two phases a script has changed the model that it had prepared."""

    phase: int  # that the script comes to next
    values: list[torch.Tensor]
    buffers: list[torch.Tensor]


@registered(40, longest=STATE_BYTES, holds_state=True)
class CollectiveCall(ToServer, frozen=True):
    """A script has made its collective call of this number, with a value as `pack_value` encodes it."""

    number: int
    call: Collective
    value: bytes
    tensors: list[torch.Tensor]


@registered(41, longest=STATE_BYTES, holds_state=True)
class CollectiveKept(ToServer, frozen=True):
    """To a restarted server: the last `CollectiveAnswer` that this worker got, which others may still lack."""

    number: int
    call: Collective
    values: Annotated[list[bytes], msgspec.Meta(max_length=MOST_WORKERS)]
    tensors: Annotated[list[list[torch.Tensor]], msgspec.Meta(max_length=MOST_WORKERS)]


@registered(42)
class SchedulerStepped(ToServer, frozen=True):
    """A script has stepped the scheduler of this name inside the loop of this phase, for the first time in it."""

    phase: int
    name: str


@registered(43)
class EvaluationsAsked(ToServer, frozen=True):
    """A worker asks for the run's evaluations from this number on."""

    start: int
    metric: str | None  # None: the first number that evaluate() returns


@registered(31)
class EpochAsked(ToServer, frozen=True):
    """A script begins the `session.epochs` loop of this number and asks where the run stands in it."""

    loop: int


@registered(32)
class Fewer(ToServer, frozen=True):
    """A worker's stream has ended: it returns the last so many samples of its grant."""

    ticket: int
    samples: int


# -- to a worker -------------------------------------------------------------------------------------------------------


class Standing(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Where the run stands, beside its rounds: what schedulers follow and a script is shown."""

    samples: int = 0  # used by the run
    epochs: float = 0.0  # passes over the data, of all phases
    fraction: float = 0.0  # of the phase's planned samples that are settled
    began: float = 0.0  # rounds done when the phase began
    stepped: tuple[str, ...] = ()  # schedulers that were stepped inside this phase's loop
    evaluations: int = 0  # made so far
    followed: dict[str, float] = {}  # rounds of earlier phases in whose loops each scheduler was stepped
    between: dict[str, int] = {}  # steps that schedulers had made between loops when the phase began


@registered(65)
class Welcome(ToWorker, frozen=True):
    """The answer to `Hello`: the model that all workers start from."""

    parameters: Parameters | None  # None: the run trains more than this script has prepared so far
    state: bytes | None = None  # of this worker, if the run resumes from a checkpoint


class OwnUpdate(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """How the server applied a worker's last push: the worker does the same to the version that it has."""

    mass: float  # 0: not at all
    stock: bool  # one unscaled step on the gradient times the mass, instead of the mass rule
    rate_factor: float = 1.0  # on the learning rate that the push brought


@registered(66)
class Work(ToWorker, frozen=True):
    """A grant, as sent to the worker."""

    ticket: int
    allotment: Allotment
    parameters: Parameters | None  # None: keep the current ones, and add `own` if it is given
    rounds_done: float
    slot: int = 0  # of the worker's region, to write the push to
    delay_s: float = 0.0  # emulation: seconds until the model arrives; negative: it arrived that long ago
    compute_s: float | None = None  # emulation: how long the computation takes; None: as long as it really does
    save: int | None = None  # send SavedState with this number before computing
    phase: int | None = None  # of the grant; an earlier one crossed the worker's `Done` on the way
    step: int = 0  # in a run without a server: the number of the step that the node makes with this grant
    standing: Standing = Standing()
    own: OwnUpdate | None = None


@registered(67)
class Extra(ToWorker, frozen=True):
    """The answer to `More`; None if no samples are left."""

    allotment: Allotment | None
    compute_s: float | None = None


@registered(68)
class Over(ToWorker, frozen=True):
    """The phase has ended; `parameters` are its final version."""

    phase: int
    parameters: Parameters | None
    rounds_done: float  # when the phase that the worker asked for had ended
    run_over: bool = False
    save: int | None = None
    standing: Standing = Standing(fraction=1.0)  # likewise
    late: bool = False  # this worker came to it after its beginning, or after its end
    killers: tuple[int, ...] = ()  # samples that kill the process which computes them: not to be shown, either


@registered(69)
class Cancelled(ToWorker, frozen=True):
    """The grant is void: the worker drops what it computed for it and waits for the next.

    `again`: the run went on without the worker, which had been silent; it answers with its `Ready`.
    """

    ticket: int
    again: bool = False


@registered(70)
class Evaluate(ToWorker, frozen=True):
    """A request to the evaluator to measure this version."""

    number: int
    parameters: Parameters


@registered(85)
class OptimizerHeld(ToWorker, frozen=True):
    """The answer to `OptimizerAsked`; keys are those of `OptimizerLoaded`."""

    tensors: dict[str, torch.Tensor]
    numbers: dict[str, Number]


@registered(104)
class CollectiveAnswer(ToWorker, frozen=True):
    """The answer to `CollectiveCall`: the mean alone, or the values of all workers, in worker order."""

    number: int
    call: Collective
    values: list[bytes]
    tensors: list[list[torch.Tensor]]  # of each value


@registered(95)
class EvaluationsHeld(ToWorker, frozen=True):
    """The answer to `EvaluationsAsked`: one number of each evaluation."""

    values: list[float]


@registered(86)
class EpochHeld(ToWorker, frozen=True):
    """The answer to `EpochAsked`: the loop's latest epoch that has begun; None if none has."""

    epoch: int | None
    phase: int = 0  # the epoch's first
    spent: float | None = None  # as that phase's `Ready` said
    calls: int | None = None  # likewise; None: of the run before a checkpoint, whose scripts make them again


@registered(71)
class Bye(ToWorker, frozen=True):
    """The last message: the server closes the link on purpose."""
