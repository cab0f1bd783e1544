"""Phases: the k-th `batches` call is phase k on every worker, and starts once every worker has called it.

Workers are told where the run stands with every grant and at the end of a phase. One that starts late or again runs its
script from the beginning and passes through the finished phases. It is told how each of them ended, so that what its
script derives from that is the same as on the other workers.
"""

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from paceline.core.errors import OptionError
from paceline.core.ledger import ENDLESS, Ledger, make_ledger
from paceline.server.workers import Workers
from paceline.transport.messages import EpochHeld, EpochMark, Ready, Standing

if TYPE_CHECKING:
    from paceline.server.run import ServerRun

Answer = Literal["wait", "join", "over"]
ROUNDS_OF_AN_EPOCH = 10  # where there is no data, so that the default of `0.1e` is one round


class PhaseRecord(msgspec.Struct):
    """One phase: the run's rounds at its two ends, and what else workers are told when it has ended."""

    began: float
    ended: float | None = None
    samples: int = 0
    epochs: float = 0.0
    stepped: tuple[str, ...] = ()  # names of schedulers that were stepped inside its loop
    followed: dict[str, float] = {}  # rounds of earlier phases in whose loops each was stepped
    between: dict[str, int] = {}  # steps that each had made between loops when it began


class PhaseRecords:
    """The phases of a run so far, before a checkpoint too."""

    def __init__(self) -> None:
        self._of: dict[int, PhaseRecord] = {}

    def get(self, phase: int) -> PhaseRecord | None:
        return self._of.get(phase)

    def begin(self, phase: int, rounds: float, between: dict[str, int]) -> None:
        """Note a phase's start; a resumed phase has begun before."""
        if phase in self._of:
            return
        followed: dict[str, float] = {}
        for record in self._of.values():
            for name in record.stepped:
                followed[name] = followed.get(name, 0.0) + (record.ended or record.began) - record.began
        self._of[phase] = PhaseRecord(rounds, followed=followed, between=between)

    def end(self, phase: int, rounds: float, samples: int, epochs: float) -> None:
        """Note a phase's end."""
        record = self._of[phase]
        record.ended, record.samples, record.epochs = rounds, samples, epochs

    def stepped(self, phase: int, name: str) -> None:
        """Note that a script has stepped a scheduler inside the phase's loop."""
        record = self._of.get(phase)
        if record is not None and name not in record.stepped:
            record.stepped = tuple(sorted({*record.stepped, name}))

    def snapshot(self) -> list[Any]:
        """Return them as plain data."""
        return [[phase, *msgspec.structs.astuple(record)] for phase, record in self._of.items()]

    def restore(self, data: Sequence[Any]) -> None:
        """Continue from a snapshot."""
        for phase, began, ended, samples, epochs, stepped, *more in data:
            self._of[phase] = PhaseRecord(began, ended, samples, epochs, tuple(stepped), *more)
        self._complete_last()

    def _complete_last(self) -> None:
        """Take over the names of the phase before if the last one was a single round.

        A phase's end is saved before its last round's scheduler steps are made, which here were all.
        """
        ended = sorted(phase for phase, record in self._of.items() if record.ended is not None)
        if len(ended) < 2:
            return
        before, last = self._of[ended[-2]], self._of[ended[-1]]
        if last.ended is not None and last.ended - last.began <= 1.0 + 1e-9 and not last.stepped:
            last.stepped = before.stepped


def epochs_done(run: "ServerRun") -> float:
    """Return the passes over the data so far; each phase counts passes over its own."""
    c, phases = run.coordinator, run.phases
    if run.exchange.counts_rounds:
        return c.totals.rounds_done / ROUNDS_OF_AN_EPOCH
    return phases.epochs_before + (c.ledger.used / phases.size if c.ledger is not None and phases.size else 0.0)


def standing(run: "ServerRun") -> Standing:
    """Return where the run stands."""
    c, record = run.coordinator, run.phases.records.get(run.phases.number)
    ledger = c.ledger
    fraction = 1.0 if ledger is None else min(1.0, (ledger.used + ledger.lost) / ledger.total)
    used = c.totals.used_before + (0 if ledger is None else ledger.used)
    record = record or PhaseRecord(0.0)
    return Standing(
        used, epochs_done(run), fraction, record.began, record.stepped, len(run.evaluations.history), record.followed,
        record.between,
    )  # fmt: skip


def standing_after(run: "ServerRun", phase: int) -> tuple[float, Standing]:
    """Return the run's rounds and where it stood when this phase had ended; if it has not ended, where it stands."""
    record = run.phases.records.get(phase)
    if record is None or record.ended is None:
        return run.coordinator.totals.rounds_done, standing(run)
    count = len(run.evaluations.history)
    return record.ended, Standing(
        record.samples, record.epochs, 1.0, record.began, record.stepped, count, record.followed, record.between
    )  # fmt: skip


class Phases:
    """Which phase is running; `Workers` knows who takes part in it."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.number = -1  # of the phase begun last
        self.begun = 0  # by this run and those it was resumed from
        self.running = False
        self.stopped: str | None = None  # why it is to end early
        self.current: Ready | None = None
        self.size = 0  # of the running phase's data
        self.epochs_before = 0.0  # made by the phases before
        self.records = PhaseRecords()
        self.spent = 0.0  # of --epochs, by the phases inside loops of the script's own
        self._epochs: dict[int, EpochHeld] = {}  # the latest epoch of each `session.epochs` loop

    def ready(self, worker: int, message: Ready) -> Answer:
        """Handle a worker's call of `batches`: it waits, joins the running phase, or is told that its phase is over."""
        if message.phase < self.number or (message.phase == self.number and not self.running):
            return "over"
        if message.phase == self.number:
            self._require_same(worker, message)
            self._workers.in_phase.add(worker)
            self._workers.late.add(worker)
            return "join"
        self._workers.waiting[worker] = message
        return "wait"

    def can_begin(self, left: Set[int] = frozenset()) -> bool:
        """Return whether every worker whose script is running has called `batches`, but for those that have left it."""
        waiting = self._workers.waiting
        return not self.running and bool(waiting) and self._workers.alive <= waiting.keys() | left

    def begin(self, seed: int, workers: int) -> tuple[Ready, Ledger]:
        """Start the phase that all workers wait for."""
        waiting = self._workers.waiting
        self.current = current = waiting[min(waiting)]
        for worker, message in waiting.items():
            self._require_same(worker, message)
        self.number = current.phase
        self.begun += 1
        self.running = True
        if current.spent is not None:
            self.spent = current.spent + current.epochs
        if current.mark is not None:
            self._note_epoch(current.mark, current)
        self._workers.in_phase = set(waiting)
        self._workers.waiting, self._workers.done, self._workers.late = {}, {}, set()
        return current, make_ledger(
            current.sampling, current.size, current.epochs, seed, workers, self.number, current.least,
            current.batch_size,
        )  # fmt: skip

    def _note_epoch(self, mark: EpochMark, first: Ready) -> None:
        known = self._epochs.get(mark.loop)
        if known is None or known.epoch != mark.epoch:
            self._epochs[mark.loop] = EpochHeld(mark.epoch, self.number, first.spent, first.calls)

    def epoch(self, loop: int) -> EpochHeld:
        """Return where the run stands in a `session.epochs` loop.

        An epoch whose phases are over counts as the latest until the next begins: what the script does after its inner
        loop is still to come for a worker that joins, or that is resumed from the checkpoint at the phase's end.
        """
        return self._epochs.get(loop, EpochHeld(None))

    def snapshot(self) -> dict[str, Any]:
        """Return what a resumed run must know of the phases before it."""
        epochs = {str(loop): [held.epoch, held.phase, held.spent] for loop, held in self._epochs.items()}
        return {"phases": self.begun, "spent": self.spent, "epochs_begun": epochs}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Continue from a snapshot; older ones know of no epochs."""
        self.begun, self.spent = data["phases"], data.get("spent", 0.0)
        self._epochs = {int(loop): EpochHeld(*held) for loop, held in data.get("epochs_begun", {}).items()}

    @property
    def last_over(self) -> int:
        """The number of the last phase that is over."""
        return self.number - 1 if self.running else self.number

    def end(self) -> list[int]:
        """End the phase; return the workers inside its loop, with those that take no more work there."""
        workers = self._workers
        inside = sorted({*workers.in_phase, *workers.done})
        workers.in_phase, workers.done = set(), {}
        self.running = False
        return inside

    def _require_same(self, worker: int, message: Ready) -> None:
        if self.current is None:
            return
        for name in ("size", "batch_size", "epochs", "sampling"):
            mine, theirs = getattr(self.current, name), getattr(message, name)
            if mine != theirs:
                raise OptionError(
                    f"batches() of worker {worker} has {name} {theirs}, the others have {mine}: give all the same"
                )


def as_data(ready: Ready, rounds: int) -> dict[str, object]:
    """Return a phase as the journal records it."""
    data: dict[str, object] = msgspec.structs.asdict(ready)
    for name in ("least", "spent", "mark", "calls", "between"):
        data.pop(name)
    if ready.sampling == "stream" and ready.size == ENDLESS:
        return {**data, "size": None, "rounds": None}
    return {**data, "rounds": rounds}
