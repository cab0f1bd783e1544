"""What held a run back, why, and what to try: read off its report and off who was waited for."""

from collections.abc import Sequence

import msgspec

from paceline.records.report import Report
from paceline.records.wait_attribution import Culprit

LITTLE = 0.05  # of the workers' time: waiting that is not worth a change
MUCH_LOST = 0.10  # of the computed samples
STALE = 2.0  # updates missed, from which on a rate or momentum for fresh gradients is too large
SENDING = 0.3  # of the workers' time in transfers
KEEPING = ("balanced", "dasp")  # workers in step, by the work that each gets
LEAVING = ("fastest_k", "k_async")
GOING_ON = ("dasp", "adaptive_sync", "fastest_k")
CAUSES = {
    "compute": "its computing takes longest",
    "transfer": "its transfers take longest",
    "partition": "it was cut off from the others",
    "pause": "it stood still for a while",
    "slow": "something else slowed it down for a while",
    "joined": "it had yet to join",
    "left": "it left",
}


class Diagnosis(msgspec.Struct, frozen=True):
    """Three short texts."""

    what: str
    why: str
    advice: str


def diagnose(report: Report, culprits: Sequence[Culprit]) -> Diagnosis:
    """Return what held the run back most."""
    computed = report.samples_used + report.samples_discarded
    lost = report.samples_discarded / computed if computed else 0.0
    waits = report.wait_fraction or 0.0
    if report.table_reads is None and report.exchanges is None and lost > max(MUCH_LOST, waits):
        return Diagnosis(
            f"{lost:.0%} of the computed samples were discarded.",
            "Work was taken back or came too late: cancelled grants, crashes, or a restart of the server.",
            "Let slow workers finish smaller pieces (`balanced`), or lengthen `--worker-timeout`.",
        )
    if waits > LITTLE:
        return _of_waiting(report, culprits, waits)
    busy = sum(worker.compute_s + worker.transfer_s for worker in report.per_worker)
    sending = sum(worker.transfer_s for worker in report.per_worker) / busy if busy else 0.0
    if sending > SENDING:
        return Diagnosis(
            f"Workers spent {sending:.0%} of their busy time in transfers.",
            "Gradients and models take long to travel beside what a batch takes to compute.",
            "Compute more between two transfers: a larger `--batch-size`, `local_sgd`, or `adaptive_gossip`.",
        )
    if (report.staleness.mean or 0.0) > STALE:
        return Diagnosis(
            f"Nobody waited, but a gradient missed {report.staleness.mean:.1f} updates on average.",
            "Stale gradients point where the model no longer is, so each sample teaches less.",
            f"A smaller learning rate and no momentum, or a strategy that keeps in step: {_others(report, KEEPING)}.",
        )
    return Diagnosis(
        f"Little: workers waited {waits:.0%} of their time.",
        "They were busy nearly all the time, and their gradients were fresh.",
        "More workers; `paceline compare` tells whether another strategy needs fewer samples.",
    )


def _of_waiting(report: Report, culprits: Sequence[Culprit], waits: float) -> Diagnosis:
    what = f"Workers waited {waits:.0%} of their time."
    waiting = sum(each.seconds for each in culprits)
    worst = next((each for each in culprits if each.worker is not None), None)
    if worst is None or not waiting:
        return Diagnosis(
            what, "No single worker was waited for: the run ended, or a timer decided.", "More data for each worker."
        )
    cause = max(worst.causes, key=worst.causes.__getitem__)
    share = worst.seconds / waiting
    known = {worker.worker: worker for worker in report.per_worker}
    score = known[worst.worker].score if worst.worker in known else None
    slow = f", at {score:.0%} of the fastest worker's speed" if score is not None and score < 1 - LITTLE else ""
    why = f"{share:.0%} of that was for worker {worst.worker}{slow}: {CAUSES.get(cause, cause)}."
    disturbed = f"Go on without whoever is disturbed: {_others(report, GOING_ON)}, or wait for fewer workers."
    advice = {
        "compute": f"Give each worker what it can do ({_others(report, KEEPING)}), or leave out the slowest "
                   f"({_others(report, LEAVING)}).",
        "transfer": "Send less or less often: a larger `--batch-size`, `adaptive_gossip`, `local_sgd`.",
    }.get(cause, disturbed)  # fmt: skip
    return Diagnosis(what, why, advice)


def _others(report: Report, names: Sequence[str]) -> str:
    """Return strategies to try, without the one that the run had."""
    return ", ".join(f"`{name}`" for name in names if name != report.strategy.partition(":")[0])
