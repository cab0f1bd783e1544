"""Workers as the coordinator knows them, and what travels between it and an engine."""

from typing import Protocol

import msgspec

from paceline.ledger import Allotment, Indices
from paceline.store import Gradient


class Order(msgspec.Struct, frozen=True, gc=False):
    """A grant on its way to a worker."""

    worker: int
    incarnation: int
    ticket: int
    allotment: Allotment
    fresh: bool  # False: go on from the version of the push that is extended
    position: float  # of the run, in nominal rounds
    at: float


class Arrival(msgspec.Struct, gc=False):
    """A push as it comes in."""

    worker: int
    incarnation: int
    ticket: int
    samples: int
    compute_s: float
    transfer_s: float
    bytes_up: int = 0
    bytes_down: int = 0
    gradient: Gradient | None = None
    kept: list[Indices] | None = None  # per allotment, if the script skipped any of its samples
    nominal: int | None = None  # samples per push of a script that accumulates gradients


class Outbox(Protocol):
    """What an engine carries out."""

    def order(self, order: Order) -> None: ...

    def cancel(self, worker: int, ticket: int) -> None: ...

    def timer(self, name: str, at: float | None, generation: int) -> None: ...


class Seat:
    """What is known of one worker."""

    __slots__ = (
        "allotments", "cancelled", "extends", "free_at", "granted_at", "idle", "incarnation", "present", "read_version",
        "through", "ticket", "work", "worker",
    )  # fmt: skip

    def __init__(self, worker: int, incarnation: int) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.present = False
        self.idle = False
        self.work = 0
        self.ticket = 0  # 0: nothing granted
        self.cancelled = 0  # the ticket taken back last: its push may still be on its way
        self.free_at = 0.0
        self.granted_at = 0.0
        self.through = 0
        self.read_version = 0
        self.extends: int | None = None
        self.allotments: tuple[Allotment, ...] = ()


class Held(msgspec.Struct, gc=False):
    """A delivered push that is neither applied nor discarded."""

    worker: int
    samples: int
    read_version: int
    allotments: tuple[Allotment, ...]
    gradient: Gradient | None
