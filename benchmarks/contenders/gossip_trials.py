"""Contests between ways to exchange: each side gets the same number of trials on one seed, then all meet on fresh ones.

A side is a strategy with the settings that are tried of it. The baseline exchanges at every step. The others may spend
so much of its bytes; of the trials that do, each side's most accurate one goes on.
"""

import math
import statistics
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

import msgspec

from contenders.bars import Bar
from contenders.gossip_runs import PARTS, Job, Ran, Size, run

MOST_BYTES = 0.078  # of the baseline's in a trial: fresh seeds differ by a few per cent, and 0.08 is what must hold
TUNING_SEED = 100
FIRST_FRESH = 300  # seeds from here on are for comparing alone
CONTROLS = {"fixed": "a fixed period", "per_tensor": "a fixed period for each tensor"}


class Contest(msgspec.Struct, frozen=True):
    """Who meets whom on what."""

    name: str
    schedule: str
    size: Size
    sides: dict[str, list[str]]  # the baseline first
    rates: tuple[float, ...]
    most_rates: int = 8  # where the best lies on the edge


class Outcome(msgspec.Struct, frozen=True):
    """The chosen trial of each side, its runs on fresh seeds, and the rows of everything."""

    chosen: dict[str, Job]
    runs: dict[str, list[Ran]]
    rows: list[dict[str, Any]]


def hold(contest: Contest, repeats: int, pool: Executor) -> Outcome:
    """Tune every side, then run each on fresh seeds."""
    chosen, trials = tune(contest, pool)
    seeds = range(FIRST_FRESH, FIRST_FRESH + repeats)
    jobs = [msgspec.structs.replace(job, seed=seed) for job in chosen.values() for seed in seeds]
    made = list(pool.map(run, jobs))
    runs = {name: made[i * repeats : (i + 1) * repeats] for i, name in enumerate(chosen)}
    most = round(statistics.median(ran.bytes for ran in runs["baseline"]))
    rows = [row(contest.name, name, chosen[name], seed, ran, most)
            for name, each in runs.items() for seed, ran in zip(seeds, each, strict=True)]  # fmt: skip
    return Outcome(chosen, runs, rows + trials)


def tune(contest: Contest, pool: Executor) -> tuple[dict[str, Job], list[dict[str, Any]]]:
    """The best of each side's trials that spends no more than it may; and all trials.

    While anybody's best rate lies on the edge of those tried, everybody gets another one beyond it.
    """
    found: dict[Job, Ran] = {}
    rates, new = list(contest.rates), list(contest.rates)
    while new:
        jobs = [Job(spec, rate, contest.schedule, TUNING_SEED, contest.size)
                for specs in contest.sides.values() for spec in specs for rate in new]  # fmt: skip
        found.update(zip(jobs, pool.map(run, jobs), strict=True))
        chosen, most = choose(contest.sides, found)
        new = []
        if len(rates) < contest.most_rates and any(job.rate == max(rates) for job in chosen.values()):
            new.append(1.5 * max(rates))
        if len(rates) < contest.most_rates and any(job.rate == min(rates) for job in chosen.values()):
            new.append(min(rates) / 2)
        rates += new
    rows = [
        row(contest.name, name, job, TUNING_SEED, ran, most)
        for name, specs in contest.sides.items()
        for job, ran in found.items()
        if job.strategy in specs
    ]
    return chosen, rows


def choose(sides: dict[str, list[str]], found: dict[Job, Ran]) -> tuple[dict[str, Job], int]:
    """Of each side the most accurate trial that it may afford, and the bytes of the baseline's."""
    chosen: dict[str, Job] = {}
    most = 0
    for name, specs in sides.items():
        tried = [job for job in found if job.strategy in specs]
        allowed = [job for job in tried if name == "baseline" or found[job].bytes <= MOST_BYTES * most]
        chosen[name] = max(allowed or tried, key=lambda job: found[job].accuracy)
        most = most or found[chosen[name]].bytes
    return chosen, most


def row(contest: str, side: str, job: Job, seed: int, ran: Ran, most: int) -> dict[str, Any]:
    """A run as the table has it."""
    tenths = [sum(ran.course[i : i + PARTS // 10]) for i in range(0, PARTS, PARTS // 10)]
    return {
        "contest": contest, "side": side, "strategy": job.strategy, "lr": job.rate, "seed": seed,
        "accuracy": ran.accuracy, "loss": ran.loss, "bytes_share": ran.bytes / most, "exchanges": ran.exchanges,
        "consensus": ran.consensus, "kB_by_tenth": " ".join(f"{n / 1000:.0f}" for n in tenths),
    }  # fmt: skip


def judge(contest: Contest, runs: dict[str, list[Ran]]) -> list[Bar]:
    """What must hold of accuracy and bytes."""
    name, base, ours = contest.name, runs["baseline"], runs["adaptive"]
    saved = 1 - statistics.median(a.bytes / b.bytes for a, b in zip(ours, base, strict=True))
    behind = statistics.mean(b.accuracy - a.accuracy for a, b in zip(ours, base, strict=True))
    early, late = (statistics.mean(sum(r.course[part]) for r in ours)
                   for part in (slice(0, PARTS // 5), slice(-PARTS // 5, None)))  # fmt: skip
    bars = [
        Bar(f"{name}_bytes_saved", saved, 0.92, True, f"{name}: share of the baseline's bytes not sent"),
        Bar(f"{name}_behind", 100 * behind, 0.5, False, f"{name}: points of accuracy behind the baseline"),
    ]
    for side, words in CONTROLS.items():
        ahead = [a.accuracy - f.accuracy for a, f in zip(ours, runs[side], strict=True)]
        lower = [f.loss - a.loss for a, f in zip(ours, runs[side], strict=True)]
        bars += [
            Bar(f"{name}_ahead_of_{side}", over_spread(ahead), 1.0, True,
                f"{name}: accuracy ahead of {words} that may send as much, over the spread of the pairs"),
            Bar(f"{name}_loss_below_{side}", over_spread(lower), 1.0, True,
                f"{name}: loss below that of {words}, over the spread of the pairs"),
        ]  # fmt: skip
    bars.append(Bar(f"{name}_dense_early", early / max(1.0, late), 1.0, True,
                    f"{name}: bytes sent in the first fifth of the run over those of the last"))  # fmt: skip
    return bars + ([dense_after_fall(name, ours)] if contest.schedule == "step" else [])


def dense_after_fall(name: str, ours: Sequence[Ran]) -> Bar:
    """Of a rate that falls in the middle of the run: what is sent right after it, and at the same rate later."""
    half = PARTS // 2
    after = statistics.mean(ran.course[half] for ran in ours)
    later = statistics.mean(statistics.mean(ran.course[half + 1 :]) for ran in ours)
    meaning = f"{name}: bytes sent in the twentieth of the run after the rate's fall over those of a later one"
    return Bar(f"{name}_dense_after_fall", after / max(1.0, later), 1.0, True, meaning)


def over_spread(differences: Sequence[float]) -> float:
    """The mean in standard deviations of a pair."""
    spread = statistics.stdev(differences) if len(differences) > 1 else 0.0
    mean = statistics.mean(differences)
    return mean / spread if spread else math.copysign(math.inf, mean) if mean else 0.0
