"""What a contender can be asked, and what it answers: plain numbers, since they cross from one Python to another.

Only the standard library is used here: a rival may live in an environment that has nothing of paceline's.
"""

import dataclasses
from typing import Any, ClassVar


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """Seconds of every round after the warm-up, and how far the result is from torch's own.

    `copies` says how often the gradient and the parameters are copied within a round, each time whole.
    """

    round_s: list[float]
    worst_error: float | None
    facts: dict[str, float] = dataclasses.field(default_factory=dict)
    copies: str = ""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Push a gradient, apply it by plain SGD, pull the parameters, round after round.

    A round is timed from the gradient complete in `p.grad`, in ordinary memory of the worker's own, to the worker's
    model holding the next version. Whatever a contender copies in between is in it.
    """

    name: ClassVar[str] = "exchange"
    answer: ClassVar[type] = Exchanged
    parameters: int
    rounds: int
    warmup: int = 3
    workers: int = 1
    threads: int = 1
    transport: str = "shm"
    strategy: str = "asp"
    servers: int = 1  # processes that hold the weights; paceline's alone
    lr: float = 0.01


@dataclasses.dataclass(frozen=True)
class HostExchange:
    """The same between two hosts of a lab (tests/netlab), with or without encryption.

    A round is timed at the worker, from the first byte that it sends to the last that it has received.
    """

    name: ClassVar[str] = "host_exchange"
    answer: ClassVar[type] = Exchanged
    parameters: int
    rounds: int
    rate: str | None  # of both cables, such as `1gbit`; None: as fast as the machine copies
    curve: bool  # encrypt by ZeroMQ's CURVE
    apart: bool = False  # each host has processors of its own, as on two machines; else both share all
    servers: int = 1  # processes that hold the weights; paceline's alone
    idle: int = 0  # members on a third host that are connected and send nothing; paceline's alone, with CURVE
    warmup: int = 1
    threads: int = 1
    lr: float = 0.01


@dataclasses.dataclass(frozen=True)
class Updated:
    """Updates per second while all workers were pushing."""

    updates_per_s: float
    updates: int


@dataclasses.dataclass(frozen=True)
class Update:
    """Asynchronous workers that push ready-made gradients as fast as they are answered."""

    name: ClassVar[str] = "update"
    answer: ClassVar[type] = Updated
    parameters: int
    workers: int
    updates: int  # of each worker
    warmup: int = 20
    threads: int = 1
    lr: float = 0.001


@dataclasses.dataclass(frozen=True)
class Trained:
    """Samples per second of all workers together, and the seconds of each of worker 0's steps."""

    samples_per_s: float
    step_s: list[float]


@dataclasses.dataclass(frozen=True)
class Train:
    """An ordinary training loop over ordinary data."""

    name: ClassVar[str] = "train"
    answer: ClassVar[type] = Trained
    model: str
    batch_size: int  # of each worker
    steps: int
    warmup: int = 5
    workers: int = 1
    threads: int = 1
    lr: float = 0.01
    strategy: str = "bsp"  # paceline's own


@dataclasses.dataclass(frozen=True)
class Raced:
    """When the target was reached, if it was, and the samples used per second until the end."""

    reached_s: float | None
    samples_per_s: float
    seconds: float
    updates: int
    facts: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Race:
    """Training to a target on workers of unequal speed, each step slept out to its modelled seconds.

    A seed gives every contender the same first model; how each hands out its data is its own.
    """

    name: ClassVar[str] = "race"
    answer: ClassVar[type] = Raced
    data: str  # a file made by `digits.save`
    step_s: list[list[float]]  # of each worker, the modelled seconds of its batches one after the other
    lr: float
    seed: int
    batch_size: int
    target: float  # a loss on held-out data
    max_s: float
    momentum: float = 0.9
    threads: int = 1
    evaluate_every: int = 1  # rounds, each `workers * batch_size` samples
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # the contender's own

    @property
    def workers(self) -> int:
        return len(self.step_s)


@dataclasses.dataclass(frozen=True)
class Overlapped:
    """Seconds of every backward pass after the warm-up, and of the worker from a grant to its push."""

    backward_s: list[float]
    compute_s: list[float]


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Training on a device, with gradients sent while backward goes on or all in the end."""

    name: ClassVar[str] = "overlap"
    answer: ClassVar[type] = Overlapped
    early: bool
    layers: int
    width: int
    rows: int
    rounds: int
    warmup: int = 3
    threads: int = 1
    lr: float = 1e-6


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Seconds of every round after the warm-up, by what was done in it."""

    seconds: dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Gather:
    """Read and add to some rows of a table at random, from where they are at hand and from another process."""

    name: ClassVar[str] = "gather"
    answer: ClassVar[type] = Gathered
    table_rows: int
    width: int
    rows: int  # of each read or increment
    rounds: int
    warmup: int = 5
    threads: int = 1
    workers: int = 1


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Tokens sampled, and the processor seconds that it took, with those of a server beside them if there is one."""

    tokens: int
    cpu_s: float
    server_cpu_s: float
    loss: float


@dataclasses.dataclass(frozen=True)
class Sample:
    """A topic model by Gibbs sampling."""

    name: ClassVar[str] = "sample"
    answer: ClassVar[type] = Sampled
    folder: str | None  # of the corpus; None: a made one
    topics: int
    passes: int
    workers: int
    parts: int = 1  # clocks of a pass over a worker's documents
    staleness: int = 2
    threads: int = 1


Question = Exchange | HostExchange | Update | Train | Race | Overlap | Gather | Sample
QUESTIONS: dict[str, type[Question]] = {
    kind.name: kind for kind in (Exchange, HostExchange, Update, Train, Race, Overlap, Gather, Sample)
}
