"""What a worker and its server say to each other. Typed values; nothing on a wire is ever unpickled."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from paceline.core.ledger import Allotment, Indices, Sampling
from paceline.model.store import Gradient, ModelSpec, Parameters
from paceline.tables.messages import TableToServer, TableToWorker


class Hello(msgspec.Struct):
    """A worker has prepared this model. `evaluator` is a module of its own and a function, both of this process."""

    spec: ModelSpec
    values: list[Any]
    buffers: list[Any]
    evaluator: tuple[Any, Callable[[Any], Mapping[str, float]]] | None = None
    reads: bool = False  # the worker copies versions elsewhere: it could do so from the server's own memory


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
    compute_s: float = 0.0  # by the worker's own clock, an emulated wait included; engines of virtual time know better
    overrun_s: float = 0.0  # by which the computation took longer than the scenario has it


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


class Asked(msgspec.Struct, frozen=True):
    """The script asked for the option of this name."""

    name: str


class State(msgspec.Struct, frozen=True):
    """What a worker needs to go on as if never interrupted, as of the Work or Over that asked for it by number."""

    number: int
    data: bytes


class Evaluated(msgspec.Struct, frozen=True):
    """The evaluator's answer."""

    number: int
    metrics: dict[str, float]


class Failed(msgspec.Struct, frozen=True):
    """The script raised; `blame` is whose fault it is: the input's, the script's, ours."""

    blame: Literal["user", "script", "internal"]
    text: str
    traceback: str


class Ended(msgspec.Struct, frozen=True):
    """The script came to its end."""


ToServer = (
    Hello | Ready | Push | More | Done | Stop | Note | Remark | Asked | State | Evaluated | Failed | Ended
    | TableToServer
)  # fmt: skip


class Welcome(msgspec.Struct, frozen=True):
    """The answer to Hello: the model everybody starts from."""

    parameters: Parameters
    state: bytes | None = None  # of this worker, where the run goes on from a checkpoint


class Work(msgspec.Struct, frozen=True):
    """A grant, delivered."""

    ticket: int
    allotment: Allotment
    parameters: Parameters | None  # None: go on with what you have
    position: float
    slot: int = 0  # where the push is to lie, of the worker's region
    delay_s: float = 0.0  # emulation: the model is still on its way for so long
    compute_s: float | None = None  # emulation: the computation is to take so long; None: as long as it takes
    save: int | None = None  # send your State under this number before you compute
    sent_at: float | None = None  # emulation: from when these times count, by the host's monotonic clock
    phase: int | None = None  # that it belongs to: one of an earlier phase crossed the word that its script had left
    step: int = 0  # of a node in a run without a server: the one that it makes with this


class Extra(msgspec.Struct, frozen=True):
    """The answer to More; None if there is nothing left to be had."""

    allotment: Allotment | None
    compute_s: float | None = None


class Over(msgspec.Struct, frozen=True):
    """The phase has ended; the model is its final version."""

    phase: int
    parameters: Parameters | None
    position: float
    run_over: bool = False
    save: int | None = None


class Cancelled(msgspec.Struct, frozen=True):
    """The grant is void: drop what was computed for it and wait for the next."""

    ticket: int


class Evaluate(msgspec.Struct, frozen=True):
    """To the evaluator: measure this version."""

    number: int
    parameters: Parameters


class Bye(msgspec.Struct, frozen=True):
    """Nothing more will come: the link closes, and not by accident."""


ToWorker = Welcome | Work | Extra | Over | Cancelled | Evaluate | Bye | TableToWorker
