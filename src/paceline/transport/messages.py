"""What a worker and its server say to each other, each message declared once.

The declaration is also the wire form: fields in their order, without names, each checked against its type when it
arrives. `registered` gives a message the number that it travels under. Whoever exchanges more than gradients registers
messages of its own in the same way, so a process knows those kinds whose modules it has imported. A message that is not
registered never leaves its process.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import numpy as np
import torch

from paceline.core.errors import InternalError
from paceline.core.ledger import Allotment, Indices, Sampling
from paceline.model.spec import Gradient, ModelSpec, Parameters

if TYPE_CHECKING:  # inside one process a field may hold what can become an array: rows yet to be copied, tensors
    Array = Any
    RawBytes = Any
else:  # what arrives from another process
    Array = np.ndarray[Any, np.dtype[Any]]
    RawBytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class ToServer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a worker sends."""


class ToWorker(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the server sends."""


class Kind(msgspec.Struct, frozen=True):
    """How one class of messages travels."""

    type: type[Any]
    number: int
    to_worker: bool
    local: tuple[str, ...]  # fields that stay in the sender's process: None arrives in their place
    in_place: bool  # its arrays may be views of memory that the sender uses again after the next `receive`
    name: str
    prefix: bytes


KINDS: dict[type[Any], Kind] = {}
KIND_OF_NUMBER: dict[int, Kind] = {}
TO_WORKER = 64  # kinds above it go to a worker, so that neither end is taken for the other
LAST_KIND = 127
_M = TypeVar("_M", bound=type[ToServer] | type[ToWorker])


def registered(number: int, *, local: tuple[str, ...] = (), in_place: bool = False) -> Callable[[_M], _M]:
    """Give a class of messages its number. A number once given stays its own."""

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
            kind, number, to_worker, local, in_place, kind.__name__, bytes([number])
        )
        return kind

    return register


# -- to the server -----------------------------------------------------------------------------------------------------


@registered(1, local=("evaluator",))
class Hello(ToServer, frozen=True):
    """A worker has prepared this model. `evaluator` is a module of its own and a function, both of this process."""

    spec: ModelSpec
    values: list[torch.Tensor]
    buffers: list[torch.Tensor]
    evaluator: tuple[Any, Callable[[Any], Mapping[str, float]]] | None = None
    reads: bool = False  # the worker copies versions elsewhere: it could do so from the server's own memory
    in_region: bool = False  # on a wire: values and buffers lie in the worker's region


@registered(2)
class Ready(ToServer, frozen=True):
    """A worker has called `batches` for the phase with this number."""

    phase: int
    size: int
    batch_size: int
    epochs: float
    sampling: Sampling
    least: int  # samples of the smallest piece the model can be trained on


@registered(3)
class Push(ToServer, frozen=True):
    """The gradient of one grant."""

    ticket: int
    samples: int
    gradient: Gradient | None
    kept: list[Indices] | None = None
    nominal: int | None = None
    compute_s: float = 0.0  # by the worker's own clock, an emulated wait included; engines of virtual time know better
    overrun_s: float = 0.0  # by which the computation took longer than the scenario has it


@registered(4)
class More(ToServer, frozen=True):
    """Another `batch_size` on the same grant, please: the script accumulates gradients."""

    ticket: int


@registered(5)
class Done(ToServer, frozen=True):
    """The script left the loop: this worker takes no more work in this phase."""

    phase: int


@registered(6)
class Stop(ToServer, frozen=True):
    """The script ends the phase for all."""

    reason: str


@registered(7)
class Note(ToServer, frozen=True):
    """A number of the user's own."""

    name: str
    value: float


@registered(8)
class Remark(ToServer, frozen=True):
    """Something about the script that its user should know."""

    text: str


@registered(9)
class OptionAsked(ToServer, frozen=True):
    """The script asked for the option of this name."""

    name: str


@registered(10)
class SavedState(ToServer, frozen=True):
    """What a worker needs to go on as if never interrupted, as of the Work or Over that asked for it by number."""

    number: int
    data: bytes


@registered(11)
class Evaluated(ToServer, frozen=True):
    """The evaluator's answer."""

    number: int
    metrics: dict[str, float]


@registered(12)
class Failed(ToServer, frozen=True):
    """The script raised; `blame` is whose fault it is: the input's, the script's, ours."""

    blame: Literal["user", "script", "internal"]
    text: str
    traceback: str


@registered(13)
class Ended(ToServer, frozen=True):
    """The script came to its end."""


# -- to a worker -------------------------------------------------------------------------------------------------------


@registered(65)
class Welcome(ToWorker, frozen=True):
    """The answer to Hello: the model everybody starts from."""

    parameters: Parameters
    state: bytes | None = None  # of this worker, where the run goes on from a checkpoint


@registered(66)
class Work(ToWorker, frozen=True):
    """A grant, delivered."""

    ticket: int
    allotment: Allotment
    parameters: Parameters | None  # None: go on with what you have
    rounds_done: float
    slot: int = 0  # where the push is to lie, of the worker's region
    delay_s: float = 0.0  # emulation: the model is there in so long; below zero, it has been there for so long
    compute_s: float | None = None  # emulation: the computation is to take so long; None: as long as it takes
    save: int | None = None  # send your SavedState under this number before you compute
    phase: int | None = None  # that it belongs to: one of an earlier phase crossed the word that its script had left
    step: int = 0  # of a node in a run without a server: the one that it makes with this


@registered(67)
class Extra(ToWorker, frozen=True):
    """The answer to More; None if there is nothing left to be had."""

    allotment: Allotment | None
    compute_s: float | None = None


@registered(68)
class Over(ToWorker, frozen=True):
    """The phase has ended; the model is its final version."""

    phase: int
    parameters: Parameters | None
    rounds_done: float
    run_over: bool = False
    save: int | None = None


@registered(69)
class Cancelled(ToWorker, frozen=True):
    """The grant is void: drop what was computed for it and wait for the next."""

    ticket: int


@registered(70)
class Evaluate(ToWorker, frozen=True):
    """To the evaluator: measure this version."""

    number: int
    parameters: Parameters


@registered(71)
class Bye(ToWorker, frozen=True):
    """Nothing more will come: the link closes, and not by accident."""
