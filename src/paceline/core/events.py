"""Events: the inputs of a strategy.

Frozen values, each stamped with `at` (seconds since the run began, virtual in `sim`, wall-clock elsewhere). The journal
holds them unchanged, so a strategy that is fed a journal's events decides exactly as it did in the run.
"""

from typing import Literal

import msgspec

Cause = Literal["idle", "done", "crash", "leave", "timeout"]


class Joined(msgspec.Struct, frozen=True, gc=False, tag="joined", tag_field="kind"):
    """`worker` is ready for work. For a worker already present, it only corrects the nominal work."""

    at: float
    worker: int
    work: int  # nominal samples per push
    whole: bool | msgspec.UnsetType = msgspec.UNSET  # its pushes are clocks of tables: no Grant extends one


class Left(msgspec.Struct, frozen=True, gc=False, tag="left", tag_field="kind"):
    """`worker` no longer takes work: if `idle`, until there is data again; with any other cause it is gone."""

    at: float
    worker: int
    cause: Cause


class HostLoad(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What went on on a worker's host when it pushed, besides the push: what others do there makes its times longer."""

    load: float  # load average of a minute, per core that the process may use
    steal: float = 0.0  # share of the CPUs' time that the hypervisor gave to others
    throttled: float = 0.0  # share of the time for which the process's group was held back at its limit of the CPU


class Pushed(msgspec.Struct, frozen=True, gc=False, tag="pushed", tag_field="kind"):
    """A gradient arrived; `samples` is 0 if it was refused. An extended push repeats its id with the new total."""

    at: float
    worker: int
    push: int
    clock: int  # the grant's `through`
    read_version: int
    samples: int
    compute_s: float  # of this piece
    transfer_s: float  # of this piece, both directions
    wait_s: float  # before the grant of this piece
    bytes_up: int
    bytes_down: int
    norm: float | None = None
    loss: float | None = None
    queued_down_s: float | None = None  # of `transfer_s`: the model waited until the server's line had carried others
    queued_up_s: float | None = None  # likewise the gradient; None: not at all, or the engine cannot tell
    host: HostLoad | msgspec.UnsetType = msgspec.UNSET  # absent in virtual time, and where a system does not tell


class Applied(msgspec.Struct, frozen=True, gc=False, tag="applied", tag_field="kind"):
    """The result of an Apply, for strategies with `needs_applied`."""

    at: float
    version: int
    pushes: tuple[int, ...]
    mass: float
    inner_product: float | None = None  # with the previously applied gradient
    norm: float | None = None
    loss: float | None = None


class TimerFired(msgspec.Struct, frozen=True, gc=False, tag="timer", tag_field="kind"):
    """A timer that the strategy set, and neither replaced nor cleared, has run out."""

    at: float
    name: str


Event = Joined | Left | Pushed | Applied | TimerFired
