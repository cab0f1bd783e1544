"""Do adaptive k, and adaptive k and load, keep what their publications claim on the publications' own regression?

    python benchmarks/bench_fastest_k.py                 # writes results/fastest_k.md and .json
    python benchmarks/bench_fastest_k.py --quick --json  # tiny sizes, one JSON object, writes nothing
    python benchmarks/bench_fastest_k.py --keep runs.jsonl --minutes 9   # in pieces: again until it is done

Fifty virtual workers hold 40 rows each of a linear regression. Parts: `growth` (adaptive k against a fixed one), `load`
(k and load against k alone), `tuning` (the best learning rate and momentum of every side), `change` (how soon the
frontier follows when all computing gets four times slower or faster) and `cover` (some workers are lastingly slow).
"""

import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from contenders import bars
from contenders.bars import Bar
from contenders.fastest_k_runs import SHARD, SLOW_WORKERS, SLOWNESS, Job, Kept, Ran, ratio, run
from contenders.strategy_code import codes_of

PARTS = ("growth", "load", "change", "cover", "tuning")
FIXED = "fastest_k:k=40"
ADAPTIVE = "adaptive_k:start=10,stop=40,step=10"
K_ALONE = "adaptive_k:start=10,stop=40,step=10,test=trend"
K_LOAD = "adaptive_k_load:start=10,stop=40,step=10"
COMMUNICATIONS = (1.0, 0.2)
PLANTED = "fastest_k:k=7"
CONTESTS = (  # name, ours, theirs, communication, bar
    ("adaptive k over fixed k=40", ADAPTIVE, FIXED, 0.0, 0.5),
    *(
        (f"k and load over k alone, communication mean {mean:g}", K_LOAD, K_ALONE, mean, 0.75)
        for mean in COMMUNICATIONS
    ),
)
FORMS = {ADAPTIVE: (ADAPTIVE, f"{ADAPTIVE},test=trend")}  # what a side may choose from when it is tuned
TUNING_SEEDS = (100, 101, 102)
TUNING_SEED = TUNING_SEEDS[0]
CLOSE, CANDIDATES = 1.3, 4  # of the best on the first seed, and how many of them run on the others as well
RATES = {0.0: (5e-4, 2.5e-4), 0.9: (5e-5, 2.5e-5)}  # by momentum; extended while the best lies on their edge
PUBLISHED = (5e-4, 0.0)
CUT = 3.0  # times the best so far
FLOORS = 1.3  # of fixed k: the target
CHANGE_AT, CHANGED = 60.0, 4.0


class Size(msgspec.Struct, frozen=True):
    """How much is measured."""

    repeats: int = 5
    parts: tuple[str, ...] = PARTS
    floor_s: float = 7500.0
    longest_s: float = 25_000.0
    change_s: float = 80.0  # watched after the change
    planted_s: float = 6000.0
    target: float | None = None  # None: measured


QUICK = Size(1, ("growth", "load", "change", "cover"), 0.0, 300.0, 60.0, 300.0, 1e5)


Setting = tuple[str, float, float]  # a form of a side, its learning rate and momentum


class UnfinishedError(Exception):
    """The minutes given are over."""


class Bench:
    """Makes runs, or takes those that are kept."""

    def __init__(self, size: Size, kept: Kept, minutes: float) -> None:
        self.size = size
        self.rows: list[dict[str, Any]] = []
        self._kept = kept
        self._ends = time.monotonic() + 60 * minutes
        self.known_target = size.target

    def run(self, job: Job) -> Ran:
        """One run."""
        found = self._kept.get(job)
        if found is None:
            if time.monotonic() > self._ends:
                raise UnfinishedError
            found = self._kept.add(job, run(job))
        return found

    def target(self) -> float:
        """The error to be reached: a little above where fixed k ends."""
        if self.known_target is None:
            self.known_target = FLOORS * self.run(Job(FIXED, TUNING_SEED, self.size.floor_s)).level
        return self.known_target

    def job(self, strategy: str, seed: int, communication: float, setting: tuple[float, float]) -> Job:
        """A run to the target."""
        lr, momentum = setting
        return Job(strategy, seed, self.size.longest_s, self.target(), communication, lr=lr, momentum=momentum)

    def side(
        self, part: str, name: str, strategy: str, communication: float, setting: tuple[float, float]
    ) -> list[Ran]:
        """A side's runs on the fresh seeds."""
        made = [self.run(self.job(strategy, seed, communication, setting)) for seed in range(self.size.repeats)]
        for seed, ran in enumerate(made):
            self.rows.append(
                {
                    "part": part, "side": name, "communication": communication, "lr": setting[0],
                    "momentum": setting[1], "seed": seed, "seconds": ran.reached_s, "rounds": ran.versions,
                    "computed": ran.computed, "sent": ran.sent,
                }
            )  # fmt: skip
        return made

    def best(self, side: str, communication: float) -> Setting:
        """The form, learning rate and momentum that are soonest at the target on the tuning seeds."""
        times: dict[Setting, float] = {}
        for form in FORMS.get(side, (side,)):
            for momentum in RATES:
                self._search(form, momentum, communication, times)
        order = sorted(times, key=times.__getitem__)
        close = [each for each in order if times[each] <= CLOSE * times[order[0]] < math.inf][:CANDIDATES]
        scores = {each: self._score(each, communication, times[each]) for each in close}
        return min(scores, key=scores.__getitem__) if scores else order[0]

    def _search(self, form: str, momentum: float, communication: float, times: dict[Setting, float]) -> None:
        """Try rates on the first tuning seed, further out while the best lies on the edge."""
        waiting, tried = list(RATES[momentum]), dict[float, float]()
        while waiting:
            for rate in waiting:
                limit = CUT * min(times.values(), default=math.inf)
                tried[rate] = times[form, rate, momentum] = self._tried((form, rate, momentum), communication, limit)
            soonest = min(tried, key=tried.__getitem__)
            edge = tried[soonest] < math.inf
            waiting = [2 * soonest] * (edge and soonest == max(tried)) or [soonest / 2] * (
                edge and soonest == min(tried)
            )

    def _tried(self, setting: Setting, communication: float, limit: float, seed: int = TUNING_SEED) -> float:
        """The seconds to the target; infinity if that takes longer than the limit."""
        form, rate, momentum = setting
        job = self.job(form, seed, communication, (rate, momentum))
        reached = self.run(msgspec.structs.replace(job, until=min(job.until, limit))).reached_s
        self.rows.append(
            {
                "part": "tuning", "side": form, "communication": communication, "lr": rate, "momentum": momentum,
                "seed": seed, "seconds": reached,
            }
        )  # fmt: skip
        return math.inf if reached is None else reached

    def _score(self, setting: Setting, communication: float, first: float) -> float:
        """The geometric mean over the tuning seeds; infinity if the target is missed on one of them."""
        found = [first]
        for seed in TUNING_SEEDS[1:]:
            found.append(self._tried(setting, communication, CUT * first, seed))
            if found[-1] == math.inf:
                return math.inf
        return statistics.geometric_mean(found)


def compared(
    name: str, meaning: str, bound: float, ours: Sequence[float | None], theirs: Sequence[float | None]
) -> Bar:
    """A bar on the geometric mean of ratios of runs with equal seeds."""
    late = [seed for seed, pair in enumerate(zip(ours, theirs, strict=True)) if None in pair]
    if late:
        return Bar(name, None, bound, False, meaning, f"not at the target on seeds {', '.join(map(str, late))}")
    middle, low, high = ratio([one or 0.0 for one in ours], [one or 0.0 for one in theirs])
    return Bar(name, middle, bound, False, f"{meaning}; 90 % interval {low:.3g} to {high:.3g}")


def seconds(made: Sequence[Ran]) -> list[float | None]:
    return [ran.reached_s for ran in made]


def growth(bench: Bench) -> list[Bar]:
    """Adaptive k against fixed k, at the publication's learning rate."""
    fixed = bench.side("growth", "fixed k=40", FIXED, 0.0, PUBLISHED)
    adaptive = bench.side("growth", "adaptive k", ADAPTIVE, 0.0, PUBLISHED)
    told = "adaptive k: its time to the target over that of fixed k=40 (publication: about a third)"
    return [compared("adaptive_over_fixed", told, 0.5, seconds(adaptive), seconds(fixed))]


def load(bench: Bench) -> list[Bar]:
    """Adaptive k and load against adaptive k alone."""
    found = []
    for mean in COMMUNICATIONS:
        alone = bench.side("load", "k alone", K_ALONE, mean, PUBLISHED)
        both = bench.side("load", "k and load", K_LOAD, mean, PUBLISHED)
        about = f"k and load over k alone, communication mean {mean:g}"
        found += [
            compared(f"load_time_{mean:g}", f"{about}: time to the target (publication: faster)", 0.75,
                     seconds(both), seconds(alone)),
            compared(f"load_computed_{mean:g}", f"{about}: samples computed (publication: significantly fewer)", 0.5,
                     [ran.computed for ran in both], [ran.computed for ran in alone]),
            compared(f"load_sent_{mean:g}", f"{about}: gradients sent (publication: slightly more)", 1.1,
                     [ran.sent for ran in both], [ran.sent for ran in alone]),
        ]  # fmt: skip
    return found


def tuning(bench: Bench) -> list[Bar]:
    """The same comparisons, each side at the learning rate and momentum that were best for it."""
    found = []
    for name, ours, theirs, mean, bound in CONTESTS:
        made = []
        for side in (ours, theirs):
            form, *setting = bench.best(side, mean)
            made.append(bench.side("tuned", form, form, mean, (setting[0], setting[1])))
        found.append(compared(*tuned_bar(name, mean), bound, seconds(made[0]), seconds(made[1])))
    return found


def tuned_bar(name: str, mean: float) -> tuple[str, str]:
    """The name and the meaning of a tuned contest's bar."""
    word = "adaptive" if mean == 0.0 else f"load_{mean:g}"
    return f"tuned_{word}", f"both sides tuned, {name}: time to the target"


def unfinished(part: str) -> Bar:
    """What stands for the bars of a part of which runs are missing."""
    return Bar(f"{part}_unfinished", None, 0.0, False, f"the part {part}", "not all of its runs are made")


def true_seconds(k: int, load: int, communication: float, slowness: float, rounds: int = 4000) -> float:
    """The mean of the k-th of 50 responses on the cluster as it is."""
    chance, total = random.Random(0), 0.0
    way, sample = communication / 2, slowness / SHARD
    for _ in range(rounds):
        responses = sorted(
            way * (chance.expovariate(1) + chance.expovariate(1)) + load * sample * chance.expovariate(1)
            for _ in range(50)
        )
        total += responses[k - 1]
    return total / rounds


def change(bench: Bench) -> list[Bar]:
    """All computing gets slower or faster at once; when is there a frontier of the new times, and how true is it?"""
    rounds, errors, late = [], [], []
    for kind, slowness in (("slower", CHANGED), ("faster", 1.0)):
        for seed in range(bench.size.repeats):
            until = CHANGE_AT + bench.size.change_s
            ran = bench.run(Job(K_LOAD, seed, until, None, 0.2, kind, CHANGE_AT))
            row: dict[str, Any] = {"part": "change", "side": kind, "communication": 0.2, "seed": seed}
            if ran.refreshed:
                after, k, size, expected = ran.refreshed[0]
                true = true_seconds(k, size, 0.2, slowness)
                rounds.append(after)
                errors.append(max(expected / true, true / expected))
                row |= {"refreshed_after": after, "k": k, "load": size, "expected_s": expected, "true_s": true}
            else:
                late.append(f"{kind}, seed {seed}")
            bench.rows.append(row)
    why = f"no refresh: {'; '.join(late)}"
    told = "computing gets 4 times slower, or faster: rounds until the frontier is of the new times, the worst run"
    truth = "the frontier's first point after it: expected seconds of a step against the true ones, the worst ratio"
    return [
        Bar("change_rounds", None if late else float(max(rounds)), 50.0, False, told, why if late else ""),
        Bar("change_truth", None if late else max(errors), 1.5, False, truth, why if late else ""),
    ]


def cover(bench: Bench) -> list[Bar]:
    """Ten workers, three of them lastingly slow: what becomes of their rows."""
    found: dict[str, list[Ran]] = {}
    for name, strategy in (("without cover", PLANTED), ("with cover", f"{PLANTED},cover=true")):
        for seed in range(bench.size.repeats):
            ran = bench.run(Job(strategy, seed, bench.size.planted_s, kind="planted", workers=10))
            found.setdefault(name, []).append(ran)
            bench.rows.append(
                {
                    "part": "cover", "side": name, "seed": seed, "error_at_end": ran.level,
                    "least_share": min(ran.shares), "rounds": ran.versions,
                }
            )  # fmt: skip
    without, covered = found["without cover"], found["with cover"]
    told = f"{SLOW_WORKERS} of 10 workers {SLOWNESS:g} times slower, error at the end: with cover over without"
    share = "with cover, a worker's share of the steps' weights over the fair one: the least of all workers and seeds"
    return [
        compared("cover_error", told, 0.5, [ran.level for ran in covered], [ran.level for ran in without]),
        Bar("cover_share", min(min(ran.shares) for ran in covered), 0.5, True, share),
        Bar("cover_rounds", statistics.fmean(ran.versions for ran in covered)
            / statistics.fmean(ran.versions for ran in without), 0.99, True,
            "rounds in the same time, with cover over without"),
    ]  # fmt: skip


MEASURES = {"growth": growth, "load": load, "change": change, "cover": cover, "tuning": tuning}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    parser = bars.parser("what adapting k, and k and load, gains on the publications' regression")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts; writes only with --out")
    parser.add_argument("--keep", type=Path, help="file of runs that are made already; new ones are added")
    parser.add_argument("--partial", action="store_true", help="make no run: tell of the parts that --keep has all of")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after so long; needs --keep")
    given = parser.parse_args(arguments)
    size = QUICK if given.quick else Size()
    options = bars.asked(given, size.repeats)
    parts = tuple(given.only) if given.only else size.parts
    size = msgspec.structs.replace(size, repeats=options.repeats, parts=parts)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    bench = Bench(size, Kept(given.keep), 0.0 if given.partial else given.minutes)
    verdicts: list[Bar] = []
    for part in size.parts:
        rows = len(bench.rows)
        try:
            verdicts += MEASURES[part](bench)
        except UnfinishedError:
            if not given.partial:
                raise SystemExit(f"not done after {given.minutes:g} minutes: give the same command again") from None
            del bench.rows[rows:]
            verdicts.append(unfinished(part))
    facts = {} if bench.known_target is None else {"target_error": bench.known_target}
    bars.tell("fastest_k", options, verdicts, bench.rows, NOTES, facts=facts, code=codes_of((FIXED, ADAPTIVE, K_LOAD)))


NOTES = f"""
The publications' experiment (Kas Hanna et al. 2020 and 2022): 2000 rows of 100 integers 1..10, true weights 1..100,
unit noise, 50 workers with {SHARD} rows each, responses exponential with mean 1 for a whole shard. The learning rate is
theirs, {PUBLISHED[0]:g} without momentum; it is 0.75 of what is stable. The target is {FLOORS:g} times the error where
fixed k=40 ends (seed {TUNING_SEED}, not judged). Adaptive k goes from 10 to 40 in steps of 10; its test is Pflug's in
`growth` and the trend of the losses for both sides of `load`. In `load` communication is added, the sum of two
exponential latencies of equal mean, and loads are 5, 10, 20 and 40 rows (Egger et al. 2023). Samples computed count
cancelled grants whole, as the publications do. `tuning` gives every side the learning rate and momentum that are best
for it, and adaptive k its test as well: seed {TUNING_SEED} tries one grid, extended while the best lies on its edge, a
run being cut at {CUT:g} times the best so far; what comes within {CLOSE:g} of the best, {CANDIDATES} settings at most,
runs on seeds {TUNING_SEEDS[1]} and {TUNING_SEEDS[2]} too, and the geometric mean chooses. The workers are the
simulator's light ones, which here compute the gradients of the task `linreg`: the same numbers as a script's
(tests/unit/test_bench_fastest_k.py), in less time. All times are virtual. Ratios are geometric means over
seeds, of runs with the same seed.
"""

if __name__ == "__main__":
    main()
