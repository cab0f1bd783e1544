"""Where a run stands, as workers are told with every grant and at the end of a phase.

A worker that starts late or again runs its script from the beginning and passes through the finished phases. It is told
how each of them ended, so that what its script derives from that is the same as on the other workers.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.transport.messages import Standing

if TYPE_CHECKING:
    from paceline.server.run import ServerRun


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


def standing(run: "ServerRun") -> Standing:
    """Return where the run stands."""
    c, record = run.coordinator, run.phases.records.get(run.phases.number)
    ledger, evaluations = c.ledger, run.evaluations
    fraction = 1.0 if ledger is None else min(1.0, (ledger.used + ledger.lost) / ledger.total)
    record = record or PhaseRecord(0.0)
    return Standing(
        c.used, evaluations.epochs, fraction, record.began, record.stepped, len(evaluations.history), record.followed,
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
