"""What a bound on staleness buys and costs, on tables and on models with a cache, and whether theory holds.

    python benchmarks/bench_ssp.py                         # every part: writes results/ssp.md and .json
    python benchmarks/bench_ssp.py --part lasso            # one part, kept for the run that writes the result
    python benchmarks/bench_ssp.py --quick --json          # one task, few bounds, writes nothing

Parts: four tasks on tables and `digits`, a model with a cache, each with every bound of a list and without one; and
`theory`, the bytes of equal workers and the regret. A part is measured once for the same sources: one that was measured
with `--part`, or before the command was broken off, is not measured again. Each line gets the best learning rate of one
grid on tuning seeds, where the task has a rate; the best bound is picked there, too. Fresh seeds judge.
"""

import argparse
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import statistics
import subprocess
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

import bench_staleness as staleness
import results
import sources
from bench_staleness import Application, Curve, Job
from contenders import bars, regret
from contenders.bars import Bar
from contenders.strategy_code import codes_of
from paceline.core.errors import UserError

A9A = staleness.CORPUS.parent / "libsvm"
TABLES = ("lasso", "factorize", "logreg", "topics")
MODEL = "digits"
THEORY = "theory"
PARTS = (*TABLES, MODEL, THEORY)
TASKS = {
    **staleness.APPLICATIONS,
    "logreg": Application({"clocks": 150, "batch": 100}, 100, 0.45, A9A),
    "digits": Application({"epochs": 20, "momentum": 0}, 16, 6.2, length="epochs"),
}
BOUNDS = (0, 1, 2, 4, 8, 16)
LASTING = (0, 2, 8)  # bounds under a lasting straggler, which no bound helps against: enough to show it
UNCACHED = (2, 8)  # bounds that a model has without a cache as well
FREE = "asp"
RATES = {"factorize": (0.025, 0.05, 0.1), "logreg": (0.1, 0.2, 0.4), "digits": (0.2, 0.4, 0.8)}  # extended at an edge
MOST_RATES = 8
TUNING_SEEDS = (100, 101)
EQUAL = ("even", "jitter")  # clusters of equal workers, on which bytes are counted
STRETCH = 1.6  # of bound 0's clocks: what is stale needs more of them to the same level
LEVEL = 0.98  # of what bound 0 gains with the same seed
SOONER = 0.95  # the best bound's time over asp's
T_90 = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132, 6: 2.015, 7: 1.943, 8: 1.895, 9: 1.860, 10: 1.833}  # by the number


class Size(msgspec.Struct, frozen=True):
    """How much is measured."""

    parts: tuple[str, ...] = PARTS
    bounds: tuple[int, ...] = BOUNDS
    lasting: tuple[int, ...] = LASTING
    seeds: int = 5
    tuning: tuple[int, ...] = TUNING_SEEDS
    share: float = 1.0  # of a run's length
    regret_clocks: int = 400


QUICK = Size(("lasso", MODEL, THEORY), (0, 2), (0,), 2, (100,), 0.1, 40)


def line_of(part: str, bound: int) -> str:
    """The strategy of a bound: models with a cache, and without one where it would never serve."""
    cached = ",cache=true" if part == MODEL and bound else ""
    return f"ssp:staleness={bound}{cached}"


def lines_of(part: str, bounds: Sequence[int]) -> list[str]:
    """Every bound, on a model some without a cache as well, and none."""
    plain = [f"ssp:staleness={bound}" for bound in bounds if bound in UNCACHED] if part == MODEL else []
    return [*(line_of(part, bound) for bound in bounds), *plain, FREE]


def tried(job: Job) -> Curve | None:
    """A run; None if its numbers are not finite."""
    try:
        longer = 1.0 if job.strategy == line_of(job.application, 0) else STRETCH
        return staleness.run_of(TASKS[job.application], msgspec.structs.replace(job, share=job.share * longer))
    except UserError:
        return None


def level_of(first: Curve) -> float:
    """The loss at which this run has gained its share."""
    return first.losses[0] - LEVEL * (first.losses[0] - min(first.losses))


def seconds_to(curve: Curve | None, level: float) -> float:
    """When the run is at that loss; infinity if never."""
    return math.inf if curve is None else staleness.reached(curve, curve.seconds, level)


class Tuned(msgspec.Struct, frozen=True):
    """A line with its best rate, and its median seconds on the tuning seeds."""

    line: str
    changed: dict[str, float]
    seconds: float | None


def tune(part: str, size: Size, pool: Executor) -> list[Tuned]:
    """Find every line's rate: bound 0's by the lowest loss, which sets the level, and the others' by their times."""
    lines = lines_of(part, size.bounds)
    first = search(part, lines[0], size, pool, None)
    levels = [level_of(curve) for curve in first[1] if curve is not None]
    return [search(part, line, size, pool, levels)[0] for line in lines]


def search(
    part: str, line: str, size: Size, pool: Executor, levels: Sequence[float] | None
) -> tuple[Tuned, list[Curve | None]]:
    """Try the grid of rates, extended while the best lies on its edge."""
    found: dict[float, tuple[float, list[Curve | None]]] = {}
    rates = list(RATES.get(part, (math.nan,)))
    while rates and len(found) < MOST_RATES:
        jobs = [Job(part, line, seed, size.share, "stragglers", changed_by(rate))
                for rate in rates for seed in size.tuning]  # fmt: skip
        made = list(pool.map(tried, jobs))
        for place, rate in enumerate(rates):
            curves = made[place * len(size.tuning) : (place + 1) * len(size.tuning)]
            found[rate] = score_of(curves, levels), curves
        best = min(found, key=lambda rate: found[rate][0])
        edge = {max(found): 2 * best, min(found): best / 2}.get(best) if part in RATES else None
        rates = [] if edge is None or edge in found else [edge]
    score, curves = found[best]
    return Tuned(line, changed_by(best), score if levels is not None and score < math.inf else None), curves


def score_of(curves: Sequence[Curve | None], levels: Sequence[float] | None) -> float:
    """The median seconds to each seed's level; without levels the median of the lowest losses."""
    if levels is None:
        return statistics.median(math.inf if curve is None else min(curve.losses) for curve in curves)
    return statistics.median(map(seconds_to, curves, levels))


def changed_by(rate: float) -> dict[str, float]:
    return {} if math.isnan(rate) else {"lr": rate}


def measure(part: str, size: Size, pool: Executor) -> dict[str, Any]:
    """One task: its rows, and the times of the bound that tuning picks over asp's, seed by seed."""
    tuned = tune(part, size, pool)
    bounded = [each for each in tuned if each.line != FREE]
    picked = min(bounded, key=lambda each: math.inf if each.seconds is None else each.seconds)
    few = set(lines_of(part, size.lasting))
    keys = [(each, "stragglers") for each in tuned] + [(each, "lasting") for each in tuned if each.line in few]
    jobs = {
        (each.line, kind): [Job(part, each.line, seed, size.share, kind, each.changed) for seed in range(size.seeds)]
        for each, kind in keys
    }
    made = iter(list(pool.map(tried, itertools.chain(*jobs.values()))))
    curves = {key: list(itertools.islice(made, len(each))) for key, each in jobs.items()}
    levels = {kind: [level_of(curve) if curve is not None else -math.inf for curve in curves[bounded[0].line, kind]]
              for kind in ("stragglers", "lasting")}  # fmt: skip
    rows = [row_of(part, each, kind, curves[each.line, kind], levels[kind]) for each, kind in keys]
    times = {
        line: list(map(seconds_to, curves[line, "stragglers"], levels["stragglers"])) for line in (picked.line, FREE)
    }
    pairs = [ratio(ours, theirs) for ours, theirs in zip(times[picked.line], times[FREE], strict=True)]
    return {"part": part, "picked": picked.line, "ratios": pairs, "rows": rows}


def ratio(ours: float, theirs: float) -> float | None:
    """Our time over theirs; None if neither gets there, 0 if only we do, infinity if only they do."""
    if ours == theirs == math.inf:
        return None
    return 0.0 if theirs == math.inf else ours / theirs


def row_of(
    part: str, tuned: Tuned, kind: str, curves: Sequence[Curve | None], levels: Sequence[float]
) -> dict[str, Any]:
    """The medians over the seeds of one line."""
    found = [curve for curve in curves if curve is not None]
    times = [seconds_to(curve, level) for curve, level in zip(curves, levels, strict=True)]
    clocks = [math.inf if curve is None else staleness.reached(curve, curve.clocks, level)
              for curve, level in zip(curves, levels, strict=True)]  # fmt: skip

    def middle(numbers: Sequence[float]) -> float | None:
        return statistics.median(numbers) if numbers else None

    return {
        "task": part, "cluster": kind, "strategy": tuned.line, **tuned.changed,
        "waiting": middle([curve.wait for curve in found]),
        "mean_age": middle([curve.age for curve in found]) if part != MODEL else None,
        "staleness": middle([curve.staleness for curve in found]) if part == MODEL else None,
        "bytes_per_clock": middle([curve.bytes_per_clock for curve in found]),
        "clocks_to_level": staleness.middle(clocks), "seconds_to_level": staleness.middle(times),
        "reached": f"{sum(time < math.inf for time in times)} of {len(times)}",
    }  # fmt: skip


def theory(size: Size, pool: Executor) -> dict[str, Any]:
    """What equal workers pull of a model, and the regret over its bound, by bound."""
    rows: list[dict[str, Any]] = []
    for kind in EQUAL:
        rows += bytes_of(size, kind)
    asked = [(bound, more, seed) for bound in size.bounds for more in ("", ",cache=true") for seed in range(size.seeds)]
    found = list(pool.map(regret_of, asked, itertools.repeat(size.regret_clocks)))
    for (bound, more), group in itertools.groupby(zip(asked, found, strict=True), key=lambda pair: pair[0][:2]):
        shares = [each.share for _, each in group]
        rows.append({"task": "regret", "bound": bound, "cache": bool(more), "share": max(shares)})
    return {"part": THEORY, "rows": rows}


def bytes_of(size: Size, kind: str) -> list[dict[str, Any]]:
    """How often equal workers pull the model, and how much longer they need than without a cache, by bound."""
    rows = []
    full = tried(Job(MODEL, FREE, 0, size.share, kind))
    for bound in size.bounds:
        cached, plain = (tried(Job(MODEL, line, 0, size.share, kind))
                         for line in (line_of(MODEL, bound), f"ssp:staleness={bound}"))  # fmt: skip
        if full is not None and cached is not None and plain is not None:
            pulled = cached.bytes_per_clock / full.bytes_per_clock
            longer = cached.total_s / plain.total_s
            rows.append({"task": "bytes", "cluster": kind, "bound": bound, "pulls_per_clock": pulled,
                         "over": pulled * (bound + 1), "time_over_no_cache": longer})  # fmt: skip
    return rows


def regret_of(asked: tuple[int, str, int], clocks: int) -> regret.Regret:
    """One run on the convex problem, with stragglers by turns."""
    bound, more, seed = asked
    app = Application({}, 1, 0.05)
    given = staleness.cluster(app, seed, "stragglers")
    return regret.measure(regret.Descent(clocks, bound), f"ssp:staleness={bound}{more}", given, seed)


# -- judging -----------------------------------------------------------------------------------------------------------


def mean_and_interval(ratios: Sequence[float | None]) -> tuple[float | None, tuple[float, float] | None]:
    """The geometric mean of the seeds' ratios and its 90 % interval; None if a seed has no finite one."""
    finite = [math.log(each) for each in ratios if each is not None and 0 < each < math.inf]
    if len(finite) < len(ratios) or not finite:
        return None, None
    mean = statistics.fmean(finite)
    if len(finite) < 2:
        return math.exp(mean), None
    half = T_90[min(len(finite), 10)] * statistics.stdev(finite) / math.sqrt(len(finite))
    return math.exp(mean), (math.exp(mean - half), math.exp(mean + half))


def judge(found: Sequence[dict[str, Any]]) -> list[Bar]:
    """What has to be shown, of the parts that were measured."""
    tables = [each for each in found if each["part"] in TABLES]
    made = [bar for each in found if each["part"] != THEORY for bar in judge_task(each)]
    if tables:
        sooner = sum((mean_and_interval(each["ratios"])[0] or math.inf) <= SOONER for each in tables)
        made.append(Bar("tables_sooner_than_asp", float(sooner), 3.0, True,
                        f"table tasks of {len(tables)} where the best bound needs at most {SOONER} of asp's time to "
                        f"{LEVEL:.0%} of bound 0's gain"))  # fmt: skip
    for each in found:
        if each["part"] == THEORY:
            made += judge_theory(each["rows"])
    return made


def judge_task(found: dict[str, Any]) -> list[Bar]:
    """One task under transient stragglers."""
    name, rows = found["part"], [row for row in found["rows"] if row["cluster"] == "stragglers"]
    bounded = [row for row in rows if row["strategy"] != FREE and (name != MODEL or is_cached(row["strategy"]))]
    waits = [row["waiting"] for row in bounded if row["waiting"] is not None]
    times = {row["strategy"]: row["seconds_to_level"] or math.inf for row in bounded}
    order = [row["strategy"] for row in bounded]
    best = min(times, key=lambda line: times[line])
    mean, interval = mean_and_interval(found["ratios"])
    within = f", 90 % interval {interval[0]:.3f} to {interval[1]:.3f}" if interval else ""
    return [
        Bar(f"{name}_waiting_rises", max((b - a for a, b in itertools.pairwise(waits)), default=0.0), 0.01, False,
            f"{name}: waiting falls as the bound grows; largest rise"),
        Bar(f"{name}_interior", float(best in order[1:-1]), 1.0, True,
            f"{name}: an inner bound is first at the level (it is {best})"),
        Bar(f"{name}_over_asp", mean, SOONER, False,
            f"{name}: seconds of {found['picked']}, picked on tuning seeds, over asp's{within}",
            "a seed of one side or both never came to the level"),
    ]  # fmt: skip


def is_cached(line: str) -> bool:
    return "cache" in line or line.endswith("=0")


def judge_theory(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    """The bytes of equal workers and the regret."""
    bytes_over = max((row["over"] for row in rows if row["task"] == "bytes"), default=math.inf)
    share = max((row["share"] for row in rows if row["task"] == "regret"), default=math.inf)
    return [
        Bar("model_bytes", bytes_over, 1.25, False,
            "equal workers, without jitter and with 10 %, pull the model once for bound + 1 clocks; most pulls per "
            "clock times bound + 1"),
        Bar("regret", share, 1.0, False,
            "the regret of all reads over 4 F L sqrt(2 (s + 1) P T); largest over bounds and seeds"),
    ]  # fmt: skip


# -- parts that were measured before -----------------------------------------------------------------------------------


class Kept:
    """Parts of the same sources that were measured before; of an unclean tree none is kept."""

    def __init__(self, folder: Path, sources_of: str | None) -> None:
        self._folder = folder if sources_of is not None else None
        self._sources = sources_of

    def get(self, part: str) -> dict[str, Any] | None:
        """Return a part, if it was measured to its end."""
        path = self._path(part)
        found: dict[str, Any] | None = json.loads(path.read_text()) if path is not None and path.exists() else None
        return found

    def put(self, part: str, found: dict[str, Any]) -> None:
        """Keep a part."""
        path = self._path(part)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found))

    def _path(self, part: str) -> Path | None:
        return None if self._folder is None else self._folder / f"{self._sources}-{part}.json"


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    parser = bars.parser("what a bound on staleness buys and costs, on tables and on models")
    parser.add_argument("--part", dest="only", nargs="+", choices=PARTS, help="measure these; writes only with --out")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; their seconds are virtual")
    parser.add_argument("--kept", type=Path, default=results.FOLDER.parents[1] / "build" / "bench_ssp",
                        help="folder of measured parts, by their sources")  # fmt: skip
    given: argparse.Namespace = parser.parse_args(arguments)
    size = QUICK if given.quick else Size()
    options = bars.asked(given, size.seeds)
    size = msgspec.structs.replace(size, parts=tuple(given.only or size.parts), seeds=options.repeats)
    for part in size.parts:
        folder = TASKS[part].folder if part in TASKS else None
        if folder is not None and not folder.is_dir():
            raise SystemExit(f"{part} needs {folder}, which is missing: give --part with the others")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    full = not given.quick and size.seeds == Size().seeds
    kept = Kept(given.kept, contents() if full and sources.look().clean else None)
    found = []
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        for part in size.parts:
            made = kept.get(part) or (theory(size, pool) if part == THEORY else measure(part, size, pool))
            kept.put(part, made)
            found.append(made)
    rows = [row for each in found for row in each["rows"]]
    bars.tell("ssp", options, judge(found), rows, NOTES, ("numba",), code=codes_of(["ssp", FREE]))


def contents() -> str:
    """Name what is measured: whatever a commit changes elsewhere, the same sources have the same name."""
    command = ["git", "ls-tree", "-r", "HEAD", "--", *sources.MEASURED]
    listed = subprocess.run(command, cwd=sources.ROOT, capture_output=True, text=True, check=True).stdout
    measured = [line for line in listed.splitlines() if sources.WRITTEN not in line]
    return hashlib.sha256("\n".join(measured).encode()).hexdigest()[:12]


NOTES = f"""
Eight virtual workers, {staleness.CLOCK_S:g} s of computing a clock with some jitter, behind a line that needs about as
long for what all pull in a clock as they compute. `stragglers`: every {staleness.EVERY_CLOCKS} clocks another one,
drawn by chance, is {staleness.SLOWER:g} times slower for {staleness.SLOW_CLOCKS} clocks; `lasting`: a quarter of the
workers has half the speed all the time. `bytes` are counted on equal workers and a line that takes no time, `even` with
clocks that are all equally long and `jitter` with lognormal jitter of 0.1; `time_over_no_cache` is what the cache's
waiting costs there. Lines but bound 0's run {STRETCH:g} times its clocks. Medians over five fresh
seeds; each line has the rate that is best on the
tuning seeds. The level is the loss at which bound 0 has made {LEVEL:.0%} of its way with the same seed. `mean_age` is
of rows that were read, in clocks; `staleness` of a model's pushes, in versions.

| | the publication (Ho et al., NIPS 2013) | here |
|---|---|---|
| tasks | topic model, matrix factorization, Lasso | these, logistic regression on a9a, and an MLP with a cache |
| staleness | the sweet spot is an interior one | `*_interior` |
| time | sooner than BSP and than full asynchrony | `*_over_asp`, and the rows |
| theory | regret at most 4 F L sqrt(2 (s + 1) P T) | `regret` |
| traffic | a pull serves s + 1 clocks | `model_bytes` |

`digits` has two bounds without the cache as well, where every clock pulls.
"""

if __name__ == "__main__":
    main()
