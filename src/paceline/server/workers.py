"""Workers as the server knows them: the one table of workers, and what passes between coordinator and engine."""

from typing import Any, Protocol

import msgspec

from paceline.core.actions import Apply
from paceline.core.events import Cause
from paceline.core.ledger import Allotment
from paceline.core.updates import PushRef
from paceline.server.emulation import Timing
from paceline.transport.messages import Hello, OwnUpdate, Ready


class GrantOrder(msgspec.Struct, frozen=True, gc=False):
    """A grant on its way to a worker."""

    worker: int
    incarnation: int
    ticket: int
    allotment: Allotment
    fresh: bool  # False: compute on the version that the worker has, which is that of the push that is extended
    rounds_done: float  # by the run, in nominal rounds
    at: float
    own: OwnUpdate | None = None  # first add this to it: the worker's last push, as it was applied


class Carrier(Protocol):
    """Carries grants to workers: the exchange in use, or a cost-only simulation."""

    def grant(self, order: GrantOrder) -> None: ...

    def cancel(self, worker: int, ticket: int) -> None: ...


class Effects(Protocol):
    """The other effects of decisions, carried out by a run or a cost-only simulation."""

    def set_timer(self, name: str, at: float | None, generation: int) -> None: ...

    def on_work_used_up(self) -> None:
        """Called when the phase's data or the run's versions are used up."""

    def on_divergence(self, text: str) -> None:
        """Called when the guard sees the loss or the norm diverge."""

    def on_nonfinite(self, worker: int) -> None:
        """Called when a worker's push that is not finite was refused."""


class ScriptState:
    """The state of a worker's process and script; cost-only workers have none."""

    __slots__ = (
        "asked_for_state", "bytes_down", "came", "computing", "ended", "gone", "hello", "left", "meant_to_die", "order",
        "pushed", "silent", "timing",
    )  # fmt: skip

    def __init__(self) -> None:
        self.came = False  # the script has said what it works on
        self.hello: Hello | None = None  # received, and not yet answered
        self.ended = False  # the script came to its end
        self.gone = False  # the process has ended, or was told to leave
        self.left = False  # without a crash
        self.order: GrantOrder | None = None  # the grant it computes
        self.timing: Timing | None = None  # of that grant, where a scenario is in force
        self.bytes_down = 0
        self.pushed = False
        self.computing = False  # has a grant and has not pushed since, so it may read messages late
        self.asked_for_state: int | None = None
        self.silent = False  # taken out of the run because it sent nothing; it may come back
        self.meant_to_die = False  # killed by the scenario, which alone brings it back

    @property
    def at_its_end(self) -> bool:
        """Whether the script ended by itself, or its worker was told to leave."""
        return self.ended or self.left


class WorkerRecord:
    """One worker: its process, whether it is present or idle to the strategy, and its grant."""

    __slots__ = (
        "allotments", "applied", "cancelled", "delivered", "extends", "free_at", "fresh", "granted_at", "idle",
        "incarnation", "present", "read_version", "refusals", "script", "through", "ticket", "work", "worker",
    )  # fmt: skip

    def __init__(self, worker: int, incarnation: int, script: ScriptState | None = None) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.script = script or NO_SCRIPT
        self.present = False
        self.idle = False
        self.work = 0
        self.ticket = 0  # 0: nothing granted
        self.delivered = 0  # the ticket of its last push
        self.applied: Apply | None = None  # that push alone, if the worker could add it itself to what it read
        self.fresh = True  # its grant brought the model
        self.cancelled = 0  # the ticket taken back last, whose push may still be on its way
        self.free_at = 0.0
        self.granted_at = 0.0
        self.through = 0
        self.read_version = 0
        self.refusals = 0  # pushes in a row that were not finite
        self.extends: int | None = None
        self.allotments: tuple[Allotment, ...] = ()


NO_SCRIPT = ScriptState()  # of cost-only workers: shared, and never written to


def turned_away(message: PushRef, record: WorkerRecord | None) -> tuple[str, dict[str, Any]]:
    """Return the observation of a push that nobody waits for: it crossed its own cancellation, or is unexpected."""
    if record is not None and message.ticket == record.cancelled and message.incarnation == record.incarnation:
        record.cancelled = 0
        seconds = message.compute_s + message.transfer_s
        return "dropped", {"samples": message.samples, "seconds": seconds, "bytes_up": message.bytes_up}
    known = (
        "no such worker" if record is None else f"incarnation {record.incarnation}, ticket {record.ticket or 'none'}"
    )
    reason = f"incarnation {message.incarnation}, ticket {message.ticket} is not expected ({known})"
    return "refused", {"reason": reason, "samples": 0, "push": None}


class Workers:
    """All workers: whose script runs, who waits for a phase or is inside it, who is present, idle or computing."""

    def __init__(self) -> None:
        self.records: dict[int, WorkerRecord] = {}
        self.idle: set[int] = set()
        self.alive: set[int] = set()  # whose scripts run, or are expected to
        self.waiting: dict[int, Ready] = {}  # who has called `batches` for a phase that has not begun
        self.in_phase: set[int] = set()  # inside the running phase's loop
        self.done: dict[int, bytes] = {}  # whose streams have ended and who wait for the phase's end: their states
        self.late: set[int] = set()  # who came to the running phase after its beginning
        self.starting: dict[int, int] = {}  # incarnations whose scripts have sent nothing yet
        self.incarnations: dict[int, int] = {}  # the latest of each
        self._in_vain: dict[int, int] = {}  # processes in a row that died without a push

    def admit(self, worker: int, incarnation: int, script: ScriptState | None = None) -> WorkerRecord:
        """Add a record for a worker's new process; it takes work once it has joined."""
        record = self.records[worker] = WorkerRecord(worker, incarnation, script)
        if script is not None:
            self.incarnations[worker] = incarnation
        return record

    def next_incarnation(self, worker: int) -> int:
        """Return the number of the worker's next process."""
        number = self.incarnations[worker] = self.incarnations.get(worker, -1) + 1
        return number

    def died(self, record: WorkerRecord) -> int:
        """Count a killed process; return how many of its worker's died in a row without a push."""
        vain = self._in_vain[record.worker] = 0 if record.script.pushed else self._in_vain.get(record.worker, 0) + 1
        return vain

    def get(self, worker: int, incarnation: int | None) -> WorkerRecord | None:
        """Return the record of that incarnation, or None if its process is gone."""
        record = self.records.get(worker)
        if record is None or record.incarnation != incarnation or record.script.gone:
            return None
        return record

    def incarnation(self, worker: int) -> int | None:
        """Return the incarnation of the worker's process; None if there is none."""
        record = self.records.get(worker)
        return None if record is None or record.script.gone else record.incarnation

    def has_started(self, record: WorkerRecord) -> None:
        """Mark a worker as no longer starting: its script has sent something, or never will."""
        if self.starting.get(record.worker) == record.incarnation:
            del self.starting[record.worker]

    def script_gone(self, worker: int) -> None:
        """Remove a worker whose script or process has ended."""
        self.alive.discard(worker)
        self.waiting.pop(worker, None)
        self.in_phase.discard(worker)
        self.done.pop(worker, None)

    def occupy(self, record: WorkerRecord, work: int, at: float) -> None:
        """Mark the worker as present with this nominal work, whether it was present before or not."""
        self.idle.discard(record.worker)
        if not record.present:
            record.free_at = at
        record.present, record.idle, record.work = True, False, work

    def vacate(self, record: WorkerRecord, cause: Cause) -> None:
        """Mark the worker as idle or gone."""
        record.present, record.idle = False, cause == "idle"
        if record.idle:
            self.idle.add(record.worker)
        else:
            self.idle.discard(record.worker)

    def present(self) -> list[WorkerRecord]:
        """Return the workers that are present, in worker order."""
        return [record for _, record in sorted(self.records.items()) if record.present]

    def computing(self) -> list[WorkerRecord]:
        """Return the workers that have a grant, in worker order."""
        return [record for _, record in sorted(self.records.items()) if record.ticket]

    def running(self) -> list[WorkerRecord]:
        """Return the workers that have a process, in worker order."""
        return [record for _, record in sorted(self.records.items()) if not record.script.gone]
