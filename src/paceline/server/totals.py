"""The samples of a whole run: how many, and which of them kill the processes that compute them."""

from typing import TYPE_CHECKING

from paceline.server.workers import WorkerRecord

if TYPE_CHECKING:
    from paceline.server.coordinator import Coordinator


class Totals:
    """Counts over the whole run: grants, samples of finished phases, and nominal rounds, which schedulers follow."""

    def __init__(self) -> None:
        self.used_before = 0
        self.lost_before = 0
        self.tickets = 0  # grants
        self.rounds_done = 0.0
        self.killers: set[int] = set()  # samples of finished phases that killed their processes
        self.round_samples = 1  # of the phase, whose length is counted in it: not changed by joining and leaving


def accuse(coordinator: "Coordinator", record: WorkerRecord, at: float) -> bool:
    """Return to the ledger what a dead process had; name the samples that are given up because they kill.

    Return whether the process had samples that were suspected before.
    """
    ledger = coordinator.ledger
    if ledger is None:
        return False
    verdict = ledger.accuse(record.worker, record.allotments)
    if verdict.lost:
        coordinator.settle(0, lost=len(verdict.lost))
        which = f"sample{'s' * (len(verdict.lost) > 1)} {', '.join(map(str, verdict.lost))}"
        text = f"{which} killed each process that computed nothing else: left out of this epoch"
        data = {"samples": len(verdict.lost), "reason": text, "indices": list(verdict.lost)}
        coordinator.observe(at, "lost", data, record.worker)
        coordinator.observe(at, "warning", {"text": text})
    return verdict.tried
