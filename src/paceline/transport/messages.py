"""What a worker and its server say to each other. Typed values; nothing on a wire is ever unpickled."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from paceline.ledger import Allotment, Indices, Sampling
from paceline.store import Gradient, ModelSpec, Parameters


class Hello(msgspec.Struct):
    """A worker has prepared this model. `evaluator` is a module of its own and a function, both of this process."""

    spec: ModelSpec
    values: list[Any]
    buffers: list[Any]
    evaluator: tuple[Any, Callable[[Any], Mapping[str, float]]] | None = None


class Ready(msgspec.Struct, frozen=True):
    """A worker has called `batches` for the phase with this number."""

    phase: int
    size: int
    batch_size: int
    epochs: float
    sampling: Sampling
    least: int  # samples of the smallest piece the model can be trained on


class Push(msgspec.Struct):
    """The gradient of one grant."""

    ticket: int
    samples: int
    gradient: Gradient | None
    kept: list[Indices] | None = None
    nominal: int | None = None


class More(msgspec.Struct, frozen=True):
    """Another `batch_size` on the same grant, please: the script accumulates gradients."""

    ticket: int


class Done(msgspec.Struct, frozen=True):
    """The script left the loop: this worker takes no more work in this phase."""

    phase: int


class Stop(msgspec.Struct, frozen=True):
    """The script ends the phase for all."""

    reason: str


class Note(msgspec.Struct, frozen=True):
    """A number of the user's own."""

    name: str
    value: float


class Remark(msgspec.Struct, frozen=True):
    """Something about the script that its user should know."""

    text: str


ToServer = Hello | Ready | Push | More | Done | Stop | Note | Remark


class Welcome(msgspec.Struct, frozen=True):
    """The answer to Hello: the model everybody starts from."""

    parameters: Parameters


class Work(msgspec.Struct, frozen=True):
    """A grant, delivered."""

    ticket: int
    allotment: Allotment
    parameters: Parameters | None  # None: go on with what you have
    position: float


class Extra(msgspec.Struct, frozen=True):
    """The answer to More; None if there is nothing left to be had."""

    allotment: Allotment | None


class Over(msgspec.Struct, frozen=True):
    """The phase has ended; the model is its final version."""

    phase: int
    parameters: Parameters | None
    position: float
    run_over: bool = False


ToWorker = Welcome | Work | Extra | Over
