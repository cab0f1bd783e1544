"""Contests between ways to exchange: sides are tuned over one grid on one seed, then all meet on fresh ones, paired.

A side is a strategy with the settings that are tried of it. The baseline exchanges at every step. The controls may send
so much of its bytes, and of their trials that do, the most accurate one goes on. `adaptive` is what somebody gets who
types its name, whatever that sends. Partners are chosen in one way on all sides of a contest.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from contenders.bars import Bar
from contenders.gossip_runs import PARTS, Job, Ran, Size, run
from contenders.kept_runs import KeptRuns

MOST_BYTES = 0.08  # of the baseline's in a trial of a control: what the adaptive side must not exceed either
TUNING_SEED = 100
FIRST_FRESH = 400  # seeds from here on are for comparing alone
CONTROLS = {"fixed": "a fixed period", "per_tensor": "a fixed period for each tensor"}
MOMENTA = (0.0, 0.9)
STEP = 1.5  # between neighbouring rates
# Two-sided 90 % quantiles of Student's t, by the number of differences.
STUDENT = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132, 6: 2.015, 7: 1.943, 8: 1.895, 9: 1.860, 10: 1.833}


class Contest(msgspec.Struct, frozen=True):
    """Who meets whom on what."""

    name: str
    schedule: str
    size: Size
    sides: dict[str, list[str]]  # the baseline first
    rates: tuple[float, ...]  # of the whole steps that momentum makes of single ones: lr = rate * (1 - momentum)
    momenta: tuple[float, ...] = MOMENTA
    most_rates: int = 6  # at each momentum; more are tried while the best lies on the edge
    peers: str = "random"  # as in the published baseline
    limited: tuple[str, ...] = tuple(CONTROLS)  # sides whose trials may send no more than MOST_BYTES


class Outcome(msgspec.Struct, frozen=True):
    """The chosen trial of each side, its runs on fresh seeds, and the rows of everything."""

    chosen: dict[str, Job]
    runs: dict[str, list[Ran]]
    rows: list[dict[str, Any]]


def hold(contest: Contest, repeats: int, kept: KeptRuns) -> Outcome:
    """Tune every side, then run each on fresh seeds."""
    chosen, trials = tune(contest, kept)
    return meet(contest, chosen, repeats, kept, trials)


def meet(
    contest: Contest, chosen: dict[str, Job], repeats: int, kept: KeptRuns, trials: Sequence[dict[str, Any]] = ()
) -> Outcome:
    """Run each side on fresh seeds."""
    seeds = range(FIRST_FRESH, FIRST_FRESH + repeats)
    jobs = [msgspec.structs.replace(job, seed=seed) for job in chosen.values() for seed in seeds]
    made = kept.make(run, Ran, jobs)
    runs = {name: made[i * repeats : (i + 1) * repeats] for i, name in enumerate(chosen)}
    most = round(statistics.median(ran.bytes for ran in runs["baseline"]))
    rows = [row(contest.name, name, chosen[name], seed, ran, most)
            for name, each in runs.items() for seed, ran in zip(seeds, each, strict=True)]  # fmt: skip
    return Outcome(chosen, runs, [*rows, *trials])


def tune(contest: Contest, kept: KeptRuns) -> tuple[dict[str, Job], list[dict[str, Any]]]:
    """The best of each side's trials that sends no more than it may; and all trials.

    While anybody's best rate lies on the edge of those tried at its momentum, everybody gets another one beyond it.
    """
    found: dict[Job, Ran] = {}
    rates = {momentum: list(contest.rates) for momentum in contest.momenta}
    new = [(rate, momentum) for momentum, each in rates.items() for rate in each]
    while new:
        jobs = [Job(spec, rate * (1 - momentum), contest.schedule, TUNING_SEED, contest.size, momentum)
                for specs in contest.sides.values() for spec in specs for rate, momentum in new]  # fmt: skip
        found.update(zip(jobs, kept.make(run, Ran, jobs), strict=True))
        chosen, most = choose(contest.sides, found, contest.limited)
        new = [(rate, momentum) for momentum, each in rates.items() if len(each) < contest.most_rates
               for rate in beyond(each, [job.rate / (1 - momentum) for job in chosen.values()
                                         if job.momentum == momentum])]  # fmt: skip
        for rate, momentum in new:
            rates[momentum].append(rate)
    rows = [
        row(contest.name, name, job, TUNING_SEED, ran, most)
        for name, specs in contest.sides.items()
        for job, ran in found.items()
        if job.strategy in specs
    ]
    return chosen, rows


def beyond(tried: Sequence[float], best: Sequence[float]) -> list[float]:
    """The rates to try next: one beyond each edge on which somebody's best lies."""
    least, most = min(tried), max(tried)
    return [
        *([least / STEP] if any(math.isclose(rate, least) for rate in best) else []),
        *([most * STEP] if any(math.isclose(rate, most) for rate in best) else []),
    ]


def choose(
    sides: dict[str, list[str]], found: dict[Job, Ran], limited: Sequence[str] = tuple(CONTROLS)
) -> tuple[dict[str, Job], int]:
    """Of each side the most accurate trial, of some among those that they may afford; and the baseline's bytes."""
    chosen: dict[str, Job] = {}
    most = 0
    for name, specs in sides.items():
        tried = [job for job in found if job.strategy in specs]
        allowed = [job for job in tried if name not in limited or found[job].bytes <= MOST_BYTES * most]
        chosen[name] = max(allowed or tried, key=lambda job: found[job].accuracy)
        most = most or found[chosen[name]].bytes
    return chosen, most


def row(contest: str, side: str, job: Job, seed: int, ran: Ran, most: int) -> dict[str, Any]:
    """A run as the table has it."""
    tenths = [sum(ran.course[i : i + PARTS // 10]) for i in range(0, PARTS, PARTS // 10)]
    return {
        "contest": contest, "side": side, "strategy": job.strategy, "lr": job.rate, "momentum": job.momentum,
        "seed": seed, "accuracy": ran.accuracy, "nodes": ran.nodes, "worst_node": ran.worst, "loss": ran.loss,
        "bytes_share": ran.bytes / most, "exchanges": ran.exchanges, "consensus": ran.consensus,
        "kB_by_tenth": " ".join(f"{n / 1000:.0f}" for n in tenths),
    }  # fmt: skip


def judge(contest: Contest, runs: dict[str, list[Ran]]) -> list[Bar]:
    """What must hold of accuracy and bytes."""
    name, base, ours = contest.name, runs["baseline"], runs["adaptive"]
    ratios = [math.log(a.bytes / b.bytes) for a, b in zip(ours, base, strict=True)]
    behind = [100 * (b.accuracy - a.accuracy) for a, b in zip(ours, base, strict=True)]
    of_nodes = [100 * (b.nodes - a.nodes) for a, b in zip(ours, base, strict=True)]
    early, late = (statistics.mean(sum(r.course[part]) for r in ours)
                   for part in (slice(0, PARTS // 5), slice(-PARTS // 5, None)))  # fmt: skip
    low, high = (1 - math.exp(edge) for edge in reversed(within(ratios)))
    bars = [
        Bar(f"{name}_bytes_saved", 1 - math.exp(statistics.mean(ratios)), 0.92, True,
            f"{name}: share of the baseline's bytes not sent, 90 % within {low:.4f} to {high:.4f}"),
        Bar(f"{name}_behind", statistics.mean(behind), 0.5, False,
            f"{name}: points of accuracy behind the baseline, average of the models, {told(behind)}"),
        Bar(f"{name}_nodes_behind", statistics.mean(of_nodes), 0.5, False,
            f"{name}: points of accuracy behind the baseline's, mean over the nodes' own models, {told(of_nodes)}"),
    ]  # fmt: skip
    for side, words in CONTROLS.items():
        ahead = [a.accuracy - f.accuracy for a, f in zip(ours, runs[side], strict=True)]
        lower = [f.loss - a.loss for a, f in zip(ours, runs[side], strict=True)]
        bars += [
            Bar(f"{name}_ahead_of_{side}", over_spread(ahead), 1.0, True,
                f"{name}: accuracy ahead of {words} that may send as much, over the spread of the pairs; "
                f"in points {told([100 * each for each in ahead], mean=True)}"),
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


def within(values: Sequence[float]) -> tuple[float, float]:
    """The 90 % interval of the mean; of one value, itself."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, mean
    off = STUDENT.get(len(values), STUDENT[10]) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - off, mean + off


def told(values: Sequence[float], *, mean: bool = False) -> str:
    """The 90 % interval, in words."""
    low, high = within(values)
    return (f"{statistics.mean(values):.2f}, " if mean else "") + f"90 % within {low:.2f} to {high:.2f}"


def of_partners(contest: Contest, peers: str) -> Contest:
    """The same contest with other partners on every side."""
    sides = {name: [with_option(spec, f"peers={peers}") for spec in specs] for name, specs in contest.sides.items()}
    return msgspec.structs.replace(contest, name=f"{contest.name}_{peers}", sides=sides, peers=peers)


def with_option(spec: str, option: str) -> str:
    """A strategy with one more option."""
    return f"{spec}{',' if ':' in spec else ':'}{option}"
