"""What the runs on clusters of unequal workers say: bars, and a row for every side of every cell.

Of two sides the times of the same fresh seeds are compared, and the geometric mean of their ratios counts. The rival of
a bar, the best of several sides, is picked on the tuning seeds.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from contenders import uneven_growth
from contenders.bars import Bar
from contenders.uneven_cells import CELLS, JUDGED, RESAMPLED
from contenders.uneven_growth import Throughput
from contenders.uneven_parts import AGAIN, FREE, SPREAD, Found, How, Task
from contenders.uneven_tuning import RIVALS, Ratio, ratio, seconds_of

Results = Mapping[Task, Found]
SOONER, FAR_SOONER = 1 - 0.169, 1 - 0.30  # of the rival's time
UNEVEN = tuple(cell.name for cell in JUDGED if min(cell.speeds) < 1)
ALL = tuple(cell.name for cell in JUDGED)
NEW = tuple(cell.name for cell in RESAMPLED)
AGAIN_NAMES = tuple(cell.name for cell in AGAIN)
NEW_UNEVEN = tuple(cell.name for cell in RESAMPLED if min(cell.speeds) < 1)


class Compared(msgspec.Struct, frozen=True):
    """A side's time over its rival's in a cell."""

    cell: str
    rival: str
    ratio: Ratio


def compared(found: Results, how: How, cell: str, side: str, rivals: Sequence[str]) -> Compared | None:
    """A side and the rival that was best on the tuning seeds; None if one of them has no runs."""
    ours = found.get(Task(how, cell, side))
    others = {name: found.get(Task(how, cell, name)) for name in rivals}
    if ours is None or not ours.outcomes or any(other is None for other in others.values()):
        return None
    scores = {name: other.choice.score for name, other in others.items() if other is not None and other.choice}
    if not scores:
        return None
    best = min(scores, key=lambda name: scores[name])
    rival = others[best]
    if rival is None or not rival.outcomes:
        return None
    pairs = list(zip(map(seconds_of, ours.outcomes), map(seconds_of, rival.outcomes), strict=False))
    return Compared(cell, best, ratio([a for a, _ in pairs], [b for _, b in pairs]))


def bar(name: str, number: float | None, bound: float, at_least: bool, meaning: str, why: str) -> Bar:
    """A bar; `why` is said where there is no number."""
    return Bar(name, number, bound, at_least, meaning, why if number is None else "")


class Field(msgspec.Struct, frozen=True):
    """One side against the best of its rivals in several cells; `why` if it could not be compared in one of them."""

    cells: list[Compared]
    why: str = ""

    def bar(self, name: str, number: float | None, bound: float, at_least: bool, meaning: str) -> Bar:
        """A bar on these cells."""
        return bar(name, None if self.why else number, bound, at_least, meaning, self.why or "no cells")

    @property
    def ratios(self) -> list[float]:
        """By cell."""
        return [each.ratio.mean for each in self.cells]

    def share(self, most: float, strictly: bool = False) -> float | None:
        """Of the cells in which the ratio is at most that, or below it."""
        met = sum(found < most if strictly else found <= most for found in self.ratios)
        return met / len(self.cells) if self.cells else None

    @property
    def worst(self) -> float | None:
        """The largest ratio."""
        return max(self.ratios, default=None)


def field(found: Results, how: How, cells: Iterable[str], side: str, rivals: Sequence[str] = RIVALS) -> Field:
    """Compare in all these cells."""
    made = {cell: compared(found, how, cell, side, rivals) for cell in cells}
    missing = [cell for cell, each in made.items() if each is None]
    why = f"no runs of {side} or a rival in {', '.join(missing)}" if missing else ""
    return Field([each for each in made.values() if each is not None], why)


def judge(found: Results, cells: Sequence[str], uneven: Sequence[str], prefix: str = "") -> list[Bar]:
    """The bars on time to the target that every set of cells is held to."""
    dasp, states = field(found, "fresh", uneven, "dasp"), field(found, "fresh", cells, "dasp_states")
    pace = field(found, "fresh", uneven, "adaptive_sync", ("bsp", "asp"))
    of = "the best of bsp, asp, ssp and dssp"
    return [
        dasp.bar(f"{prefix}dasp_sooner", dasp.share(SOONER), 0.75, True,
                 f"dasp: share of the cells of unequal speeds in which it is 16.9 % sooner than {of}"),
        dasp.bar(f"{prefix}dasp_far_sooner", dasp.share(FAR_SOONER), 0.25, True,
                 "dasp: share of them in which it is 30 % sooner"),
        dasp.bar(f"{prefix}dasp_behind", dasp.worst, 1.0, False,
                 "dasp: its largest time over the rival's, in them"),
        states.bar(f"{prefix}states_behind", states.worst, 1.1, False,
                   "states alone: largest time over the rival's, all cells"),
        states.bar(f"{prefix}states_ahead", states.share(1.0, strictly=True), 1 / 3, True,
                   "states alone: share of all cells in which it is ahead"),
        pace.bar(f"{prefix}adaptive_sync_behind", pace.worst, 1.05, False,
                 "adaptive_sync: largest time over the best of bsp and asp, unequal speeds"),
    ]  # fmt: skip


def judge_interference(found: Results) -> list[Bar]:
    """What an unrelated task on one of equal nodes costs adaptive_sync."""
    calm, busy, bsp = (found.get(Task("fresh", cell, side)) for cell, side in (
        ("equal", "adaptive_sync"), ("interference", "adaptive_sync"), ("interference", "bsp")))  # fmt: skip

    def over(ours: Found | None, theirs: Found | None) -> float | None:
        if ours is None or theirs is None or not ours.outcomes or not theirs.outcomes:
            return None
        return ratio([*map(seconds_of, ours.outcomes)], [*map(seconds_of, theirs.outcomes)]).mean

    why = "its runs are not there"
    return [
        bar("adaptive_sync_interference", over(busy, calm), 1.25, False,
            "adaptive_sync: time under interference over its undisturbed time", why),
        bar("adaptive_sync_over_bsp", over(busy, bsp), 0.7, False,
            "adaptive_sync: time under interference over that of bsp", why),
    ]  # fmt: skip


def judge_again(found: Results) -> Bar:
    """The bar of adaptive_sync on mixes that were drawn when its rule was done."""
    pace = field(found, "fresh", AGAIN_NAMES, "adaptive_sync", ("bsp", "asp"))
    return pace.bar("again_adaptive_sync_behind", pace.worst, 1.05, False,
                    "adaptive_sync: the same on mixes that were drawn when its rule was done")  # fmt: skip


def judge_batches(found: Results) -> list[Bar]:
    """Whether a lead is the batch's alone."""
    free = field(found, "free", [cell for cell in FREE if min(CELLS[cell].speeds) < 1], "dasp")
    every = field(found, "free", FREE, "dasp")
    return [
        free.bar("dasp_free_batch", free.worst, SOONER, False,
                 "dasp: largest time over the rival's where every side's batch is free, unequal speeds"),
        every.bar("dasp_free_batch_behind", every.worst, 1.1, False,
                  "dasp: the same, on equal nodes and under interference as well"),
    ]  # fmt: skip


def judge_spread(found: Results) -> list[Bar]:
    """Final accuracies after equal times."""
    logs = []
    for cell in SPREAD:
        both = [found.get(Task("spread", cell, side)) for side in ("dasp", "asp")]
        if any(each is None or len(each.outcomes) < 2 for each in both):
            return [Bar("dasp_spread", None, 1.0, False, SPREAD_MEANS, f"no runs in {cell}")]
        ours, theirs = (deviation(each) for each in both if each is not None)
        logs.append(math.log(ours / theirs))
    return [Bar("dasp_spread", math.exp(statistics.fmean(logs)), 1.0, False, SPREAD_MEANS)]


SPREAD_MEANS = "dasp: spread of the final accuracy over seeds, over that of asp"


def deviation(found: Found) -> float:
    """Standard deviation of the last accuracies."""
    return statistics.stdev(outcome.accuracy for outcome in found.outcomes) or 1e-9


def judge_growth(found: Sequence[Throughput], lost: Mapping[str, Mapping[str, float]]) -> list[Bar]:
    """Throughput from 8 to 64 workers, and partitions."""

    def among(name: str, line: bool, jitter: bool | None, least: int = 0) -> list[Throughput]:
        return [f for f in found if f.strategy == name and f.line == line and jitter in (None, f.jitter)
                and f.workers >= least]  # fmt: skip

    def least(cases: list[Throughput], over_rounds: bool = False) -> float | None:
        return min((f.per_s / f.synchronous_per_s if over_rounds else f.share for f in cases), default=None)

    most = uneven_growth.SIZES[-1]
    why = "no throughputs"
    return [
        bar("adaptive_sync_64", least(among("adaptive_sync", False, None, most)), 0.85, True,
            f"adaptive_sync: least share of the sum of speeds, {most} workers", why),
        bar("balanced_speeds", least(among("balanced", False, False)), 0.95, True,
            "balanced: least share of the sum of speeds without jitter", why),
        bar("balanced_jitter", least(among("balanced", False, True)), 0.9, True,
            "balanced: the same with jitter", why),
        bar("balanced_line", least(among("balanced", True, None, most), True), 0.9, True,
            f"balanced: least share of what synchronous rounds can reach, {most} workers on 1 Gbit/s", why),
        bar("balanced_partition", max(lost.get("balanced", {}).values(), default=None), 1.2, False,
            f"balanced: rounds lost to a partition of {uneven_growth.CUT_S:g} s, at most",
            why),
    ]  # fmt: skip


def bars_of(found: Results, growth: Sequence[Throughput], lost: Mapping[str, Mapping[str, float]]) -> list[Bar]:
    """All of them; those on resampled clusters are the same ones again."""
    return [
        *judge(found, ALL, UNEVEN), *judge_interference(found), *judge_batches(found), *judge_spread(found),
        *judge_growth(growth, lost), *judge(found, NEW, NEW_UNEVEN, "resampled_"), judge_again(found),
    ]  # fmt: skip


# -- rows ------------------------------------------------------------------------------------------------------------


def table(found: Results) -> list[dict[str, Any]]:
    """A row for every side in every cell, with what explains its time: its pace, and the samples that it needs."""
    return [row_of(task, each, found) for task, each in found.items() if each.choice is not None]


def row_of(task: Task, found: Found, every: Results) -> dict[str, Any]:
    """One of them."""
    choice = found.choice
    if choice is None:
        return {}
    trial = choice.trial
    part = "resampled" if task.cell in NEW else "again" if task.cell in AGAIN_NAMES else task.how
    row: dict[str, Any] = {
        "part": part, "cell": task.cell, "side": task.side,
        "strategy": trial.strategy, "rate": trial.rate, "momentum": trial.momentum, "batch": trial.batch,
        "tuned_s": choice.score,
    }  # fmt: skip
    runs = found.outcomes
    if not runs:
        return row
    times = sorted(map(seconds_of, runs))
    row |= {
        "to_target_s": statistics.geometric_mean(times), "from_s": times[0], "to_s": times[-1],
        "missed": sum(run.reached_s is None for run in runs),
        "samples_per_s": pace(found), "samples": used(found),
        "staleness": statistics.median(run.staleness for run in runs),
        "staleness_p95": statistics.median(run.staleness_p95 for run in runs),
        "waiting": statistics.median(run.waiting for run in runs),
        "changes": statistics.median(run.changes for run in runs),
        "states": ", ".join(f"{state} {share:.0%}" for state, share in states_of(found).items()),
    }  # fmt: skip
    if task.how == "spread":
        return {**{key: row[key] for key in ("part", "cell", "side", "strategy", "rate", "momentum", "batch")},
                "accuracy": statistics.fmean(run.accuracy for run in runs), "deviation": deviation(found)}  # fmt: skip
    rivals = ("bsp", "asp") if task.cell in AGAIN_NAMES else RIVALS
    against = compared(every, task.how, task.cell, task.side, rivals)
    if against is not None:
        rival = every[Task(task.how, task.cell, against.rival)]
        row |= {"rival": against.rival, "over_rival": against.ratio.mean,
                "over_rival_low": against.ratio.low, "over_rival_high": against.ratio.high,
                "pace_over_rival": pace(found) / pace(rival),
                "samples_over_rival": used(found) / used(rival)}  # fmt: skip
    return row


def pace(found: Found) -> float:
    """Samples per second, of a middling run."""
    return statistics.median(run.samples / run.seconds for run in found.outcomes) or math.nan


def used(found: Found) -> float:
    """Samples until the target, of a middling run."""
    return statistics.median(run.samples for run in found.outcomes) or math.nan


def states_of(found: Found) -> dict[str, float]:
    """Mean share of the nodes' time in each state."""
    names = sorted({state for run in found.outcomes for state in run.states})
    return {name: statistics.fmean(run.states.get(name, 0.0) for run in found.outcomes) for name in names}


def growth_table(found: Sequence[Throughput], lost: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Throughputs and partitions as rows."""
    rows: list[dict[str, Any]] = [
        {"part": "growth", "strategy": f.strategy, "workers": f.workers, "line": f.line, "jitter": f.jitter,
         "of_speeds": f.share, "of_rounds": f.per_s / f.synchronous_per_s}
        for f in found
    ]  # fmt: skip
    return rows + [
        {"part": "partition", "strategy": name, "cut_off": who, "rounds_lost": rounds}
        for name, by_worker in lost.items()
        for who, rounds in by_worker.items()
    ]
