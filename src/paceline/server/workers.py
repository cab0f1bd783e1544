"""Workers as the coordinator knows them, and what travels between it and an engine."""

from typing import Protocol

import msgspec

from paceline.core.events import Cause
from paceline.core.ledger import Allotment, Indices
from paceline.model.store import Gradient, extend


class GrantOrder(msgspec.Struct, frozen=True, gc=False):
    """A grant on its way to a worker."""

    worker: int
    incarnation: int
    ticket: int
    allotment: Allotment
    fresh: bool  # False: go on from the version of the push that is extended
    position: float  # of the run, in nominal rounds
    at: float


class PushArrival(msgspec.Struct, gc=False):
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


class Effects(Protocol):
    """What an engine carries out."""

    def order(self, order: GrantOrder) -> None: ...

    def cancel(self, worker: int, ticket: int) -> None: ...

    def timer(self, name: str, at: float | None, generation: int) -> None: ...


class WorkerRecord:
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


def why_unexpected(message: PushArrival, seat: WorkerRecord | None) -> str:
    """In what the message differs from what its worker's seat is waiting for."""
    known = "no such worker" if seat is None else f"incarnation {seat.incarnation}, ticket {seat.ticket or 'none'}"
    return f"incarnation {message.incarnation}, ticket {message.ticket} is not expected ({known})"


class Workers:
    """Who is present, who is idle, and the nominal round they make up."""

    def __init__(self) -> None:
        self.seats: dict[int, WorkerRecord] = {}
        self.idle: set[int] = set()
        self.round_samples = 0

    def occupy(self, seat: WorkerRecord, work: int, at: float) -> None:
        """The worker is ready for work; one that was present is so with another nominal work."""
        if seat.present or seat.idle:
            self.round_samples -= seat.work
        self.idle.discard(seat.worker)
        if not seat.present:
            seat.free_at = at
        seat.present, seat.idle, seat.work = True, False, work
        self.round_samples += work

    def vacate(self, seat: WorkerRecord, cause: Cause) -> None:
        """The worker takes no more work; an idle one still counts in the nominal round."""
        seat.present, seat.idle = False, cause == "idle"
        if seat.idle:
            self.idle.add(seat.worker)
        else:
            self.idle.discard(seat.worker)
            self.round_samples -= seat.work

    def present(self) -> list[WorkerRecord]:
        """In worker order."""
        return [seat for _, seat in sorted(self.seats.items()) if seat.present]

    def computing(self) -> list[WorkerRecord]:
        """Whoever has a grant, in worker order."""
        return [seat for _, seat in sorted(self.seats.items()) if seat.ticket]


class Held(msgspec.Struct, gc=False):
    """A delivered push that is neither applied nor discarded."""

    worker: int
    samples: int
    read_version: int
    allotments: tuple[Allotment, ...]
    gradient: Gradient | None

    def extend(self, samples: int, allotments: tuple[Allotment, ...], gradient: Gradient | None) -> int:
        """Add a piece; the push's total of samples."""
        if gradient is not None:
            known = self.gradient
            self.gradient = gradient if known is None else extend(known, self.samples, gradient, samples)
        self.samples += samples
        self.allotments += allotments
        return self.samples
