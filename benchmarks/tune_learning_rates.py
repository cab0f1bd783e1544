"""Which learning rate does each strategy need, and how soon does it learn with it?

    python benchmarks/tune_learning_rates.py --jobs 2     # all: writes the table and results/learning_rates.md
    python benchmarks/tune_learning_rates.py asp dasp     # these only: replaces their entries of the table
    python benchmarks/tune_learning_rates.py asp bsp --task digits --seeds 1 --dry    # looks, and writes nothing

Every strategy is tried with and without momentum, those that can make a whole step of each push in both forms, all on
the same grid, a factor 2 apart, on both clusters and with the same seeds. A rate counts by its time to the target: the
median over the seeds, then the geometric mean of the two clusters; one missed target rules it out. While the best rate,
or the one taken, lies on the edge of what was tried, the grid is extended there. Of rates within 5 % of the best the
smallest is taken, since the next larger one often diverges.

No run is cut short because it is slow: with a median over seeds and a mean over clusters, a rate that is behind in one
run may still win. Only a miss ends the trials of a rate, and that is no loss: its score is infinite by then, whatever
the runs that are left would show. The times reported, and the verdicts, are of other seeds than those that the rate,
the form and the momentum were chosen by.

Times are virtual, so runs may share the machine: `--jobs` changes no number but the seconds of the processor.
"""

import argparse
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

import results
import sources
from learning_trials import KINDS, TRIALS, Kind, Variant, attempt, variants
from paceline.strategies import names, strategy_class
from paceline.tasks import learning_rates

SEEDS = (0, 1, 2)
FRESH_SEEDS = (3, 4, 5, 6, 7)  # of the reported times
TIE = 1.05  # scores this close say nothing, with three seeds
CENTRES = {"digits": 0.1, "linreg": 5e-4}  # the tasks' own defaults
START = (-1, 0, 1)  # exponents of 2 that every variant is tried at
SMALLEST = -8  # a strategy that learns at no rate of 1/256 of the default or more does not learn
LARGEST = 8
TABLE = Path(__file__).parents[1] / "src/paceline/tasks/learning_rates.toml"
COMMAND = "python benchmarks/tune_learning_rates.py"
WITHOUT = "_without_momentum"  # of the name of a task's second table


class Row(msgspec.Struct, frozen=True):
    """One run; times are virtual but for the CPU's."""

    task: str
    strategy: str
    momentum: float | None
    cluster: Kind
    lr: float
    seed: int
    tuning: bool
    reached_s: float | None
    epochs: float
    versions: int
    staleness: float | None
    cpu_s: float


class Tuned(msgspec.Struct, frozen=True):
    """What was found of one variant; `lr` None: it missed the target at every rate."""

    variant: Variant
    score: float
    lr: float | None
    rows: list[Row]  # of the rate that was taken, on fresh seeds


# -- one rate --------------------------------------------------------------------------------------------------------


def measure(task: str, kind: Kind, variant: Variant, lr: float, seed: int, tuning: bool) -> Row:
    """Run one trial; called in a process of the pool."""
    began = time.process_time()
    run = attempt(task, kind, variant.spec, lr, seed, momentum=variant.momentum)
    summary = run.summary
    reached = summary.target.reached_at_seconds if run.ended == "target" and summary.target else None
    return Row(
        task, variant.spec, variant.momentum, kind, lr, seed, tuning, reached,
        summary.samples_used / TRIALS[task].samples, summary.versions, summary.staleness.mean,
        round(time.process_time() - began, 2),
    )  # fmt: skip


def try_rate(task: str, variant: Variant, lr: float, seeds: Sequence[int], pool: Executor) -> list[Row]:
    """All seeds on both clusters, up to the first seed that misses."""
    rows: list[Row] = []
    for seed in seeds:
        runs = [pool.submit(measure, task, kind, variant, lr, seed, True) for kind in KINDS]
        rows += [run.result() for run in runs]
        if any(row.reached_s is None for row in rows):
            break
    return rows


def median_seconds(rows: Iterable[Row], kind: Kind) -> float:
    """Virtual seconds to the target on this cluster; infinite where a run missed it."""
    times = [math.inf if row.reached_s is None else row.reached_s for row in rows if row.cluster == kind]
    return statistics.median(times) if times and max(times) < math.inf else math.inf


def score(rows: list[Row]) -> float:
    """Smaller is better."""
    return math.sqrt(math.prod(median_seconds(rows, kind) for kind in KINDS))


# -- one variant -----------------------------------------------------------------------------------------------------


def tune(task: str, variant: Variant, seeds: Sequence[int], pool: Executor) -> dict[float, list[Row]]:
    """Rows by rate, with the grid extended while the best of them, or the one taken, is on its edge."""
    tried: dict[int, list[Row]] = {}

    def visit(exponents: Iterable[int]) -> None:
        wanted = [exponent for exponent in exponents if exponent not in tried]
        with ThreadPoolExecutor(len(wanted)) as at_once:
            found = at_once.map(lambda e: try_rate(task, variant, CENTRES[task] * 2.0**e, seeds, pool), wanted)
            tried.update(zip(wanted, found, strict=True))

    visit(START)
    while edge := beyond({exponent: score(rows) for exponent, rows in tried.items()}):
        visit(edge)
    return {CENTRES[task] * 2.0**exponent: tried[exponent] for exponent in sorted(tried)}


def beyond(scores: dict[int, float]) -> list[int]:
    """Exponents that are still to be tried; none once the best and the one taken lie inside the grid."""
    low, high, best = min(scores), max(scores), min(scores, key=lambda exponent: scores[exponent])
    if scores[best] == math.inf:
        return [low - 1] if low > SMALLEST else []
    found = []
    if _taken(scores) == low and low > SMALLEST:
        found.append(low - 1)
    if best == high and high < LARGEST:
        found.append(high + 1)
    return found


def best_rate(by_rate: dict[float, list[Row]]) -> float | None:
    """The smallest rate whose score is as good as the best; None if every one missed the target."""
    scores = {lr: score(rows) for lr, rows in by_rate.items()}
    return _taken(scores) if min(scores.values()) < math.inf else None


def _taken(scores: Mapping[float, float]) -> float:
    best = min(scores.values())
    return min(rate for rate, found in scores.items() if found <= TIE * best)


def search(
    task: str, variant: Variant, seeds: Sequence[int], fresh: Sequence[int], pool: Executor
) -> tuple[Tuned, list[Row]]:
    """Tune one variant and time it with other seeds; what was found, and every run."""
    by_rate = tune(task, variant, seeds, pool)
    lr, tried = best_rate(by_rate), [row for rows in by_rate.values() for row in rows]
    if lr is None:
        return Tuned(variant, math.inf, None, []), tried
    runs = [pool.submit(measure, task, kind, variant, lr, seed, False) for seed in fresh for kind in KINDS]
    checked = [run.result() for run in runs]
    tuned = Tuned(variant, score(by_rate[lr]), lr, checked)
    print(f"{task:7} {label(variant):52} lr {lr:<9g} score {tuned.score:8.4g} s", flush=True)
    return tuned, [*tried, *checked]


# -- everything ------------------------------------------------------------------------------------------------------


class Findings(msgspec.Struct):
    """What a dated result says."""

    tuned: dict[str, dict[str, list[Tuned]]] = {}  # by task and strategy, the best variant first
    rows: list[Row] = []


def tune_all(chosen: Sequence[str], tasks: Sequence[str], seeds: int, jobs: int) -> Findings:
    """Every variant of the strategies; each searches for itself, and all share the pool."""
    wanted = [(task, name, variant) for task in tasks for name in chosen for variant in variants(task, name)]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = Findings({task: {name: [] for name in chosen} for task in tasks})
    with (
        ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool,
        ThreadPoolExecutor(max(2 * jobs, 4)) as at_once,
    ):
        fresh = FRESH_SEEDS[: max(1, seeds * len(FRESH_SEEDS) // len(SEEDS))]
        searches = [at_once.submit(search, task, variant, SEEDS[:seeds], fresh, pool) for task, _, variant in wanted]
        for (task, name, _), running in zip(wanted, searches, strict=True):
            tuned, rows = running.result()
            found.tuned[task][name].append(tuned)
            found.rows += rows
    for by_name in found.tuned.values():
        for entries in by_name.values():
            entries.sort(key=lambda entry: entry.score)
    return found


def tables(found: Findings) -> dict[str, dict[str, float]]:
    """The entries of the committed table: the best form at the task's own momentum, and without momentum."""
    entries: dict[str, dict[str, float]] = {}
    for task, by_name in found.tuned.items():
        for momentum in TRIALS[task].momenta:
            key = task + WITHOUT * (momentum == 0.0)
            rated = [(e.variant, e.lr) for tuned in by_name.values() for e in first(tuned, momentum)]
            entries[key] = {variant.spec: lr for variant, lr in rated if lr is not None}
    return entries


def first(tuned: Sequence[Tuned], momentum: float | None) -> list[Tuned]:
    """The best variant with this momentum."""
    return [entry for entry in tuned if entry.variant.momentum == momentum][:1]


def merged(entries: dict[str, dict[str, float]], chosen: Sequence[str]) -> dict[str, dict[str, float]]:
    """The whole table, in the registry's order; strategies that were not chosen keep their entries."""
    whole: dict[str, dict[str, float]] = {}
    for key, new in entries.items():
        kept = {spec: lr for spec, lr in learning_rates(key).items() if _name(spec) not in chosen}
        whole[key] = dict(sorted({**kept, **new}.items(), key=lambda entry: names().index(_name(entry[0]))))
    return whole


def table_text(rates: dict[str, dict[str, float]]) -> str:
    """The committed table."""
    seeds = len(SEEDS)
    text = f"""\
# Learning rates per round (all workers' nominal work once), by task and strategy as tuned, options included.
# Made by `{COMMAND}`: the grid is 2^i times the task's default, extended while
# the best is on its edge; the best has the shortest virtual time to the target (geometric mean over an equal and a
# 4x-uneven cluster of the median over {seeds} seeds, none of which misses it); of rates within 5 % of it the smallest.
# A table named `*{WITHOUT}` is of the same task with --set momentum=0.
# Clusters and targets: benchmarks/learning_trials.py.
"""
    for key, by_spec in rates.items():
        trial = TRIALS[key.removesuffix(WITHOUT)]
        text += f"\n[{key}]  # to {trial.goal}, {len(trial.speeds['equal'])} workers\n"
        text += "".join(f'"{spec}" = {lr:g}\n' for spec, lr in by_spec.items())
    return text


# -- what the page says ----------------------------------------------------------------------------------------------


def label(variant: Variant) -> str:
    """The variant in words."""
    return variant.spec if variant.momentum is None else f"{variant.spec}, momentum {variant.momentum:g}"


def verdicts(task: str, by_name: dict[str, list[Tuned]]) -> list[results.Verdict]:
    """Whether each strategy's best variant learned with every fresh seed on both clusters."""
    found = []
    for name, tuned in by_name.items():
        rows = tuned[0].rows
        learned = sum(row.reached_s is not None for row in rows)
        value = f"{learned} of {len(rows)} runs" if rows else "at no learning rate"
        told = label(tuned[0].variant) if rows else name
        passed = bool(rows) and learned == len(rows)
        found.append(results.Verdict(f"{task}, {told}:", value, f"{TRIALS[task].goal} in every run", passed))
    return found


def read_rows(raw: Iterable[dict[str, Any]]) -> list[Row]:
    """Rows of a dated result; older ones had the task's own momentum and three seeds to tune by."""
    return [
        msgspec.convert({"momentum": TRIALS[row["task"]].momenta[0], "tuning": row["seed"] in SEEDS, **row}, Row)
        for row in raw
    ]


def timed(rows: Sequence[Row], task: str) -> dict[Variant, list[Row]]:
    """Runs on fresh seeds by variant: strategies in the registry's order, of each the best variant first."""
    fresh: dict[Variant, list[Row]] = {}
    tried: dict[tuple[Variant, float], list[Row]] = {}
    for row in rows:
        if row.task == task:
            variant = Variant(row.strategy, row.momentum)
            into = tried.setdefault((variant, row.lr), []) if row.tuning else fresh.setdefault(variant, [])
            into.append(row)

    def place(variant: Variant) -> tuple[int, float]:
        return names().index(_name(variant.spec)), score(tried[variant, fresh[variant][0].lr])

    return {variant: fresh[variant] for variant in sorted(fresh, key=place)}


def times_table(by_variant: Mapping[Variant, Sequence[Row]]) -> str:
    """Virtual seconds to the target at the tuned rate."""
    lines = [
        "| strategy | momentum | lr | equal | uneven | epochs, equal | epochs, uneven | staleness, uneven |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for variant, found in by_variant.items():
        of = {kind: [row for row in found if row.cluster == kind] for kind in KINDS}
        seconds = [_range([math.inf if row.reached_s is None else row.reached_s for row in of[kind]]) for kind in KINDS]
        epochs = [f"{statistics.median(row.epochs for row in of[kind]):.1f}" for kind in KINDS]
        stale = statistics.median(row.staleness or 0.0 for row in of["uneven"])
        told = "" if variant.momentum is None else f"{variant.momentum:g}"
        cells = [f"`{variant.spec}`", told, f"{found[0].lr:g}", *seconds, *epochs, f"{stale:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _range(values: list[float]) -> str:
    low, middle, high = (
        "missed" if math.isinf(f(values)) else f"{f(values):.4g}" for f in (min, statistics.median, max)
    )
    return f"{middle} ({low} to {high})"


def notes(found: Findings) -> str:
    """What the numbers mean."""
    chosen_by, fresh = (sorted({row.seed for row in found.rows if row.tuning == tuning}) for tuning in (True, False))
    parts = [
        f"Rate, form and momentum were chosen by seeds {chosen_by}; times and verdicts are of seeds {fresh}. Every "
        "variant that was tuned is shown, those of a strategy by their score on the first seeds: the first one counts."
    ]
    for task in found.tuned:
        parts.append(f"**{task}**: virtual seconds to {TRIALS[task].goal}, median of {len(fresh)} seeds (range)")
        parts.append(times_table(timed(found.rows, task)))
    return "\n\n".join(parts)


def _name(spec: str) -> str:
    return spec.partition(":")[0]


def main(arguments: list[str] | None = None) -> None:
    """Tune, print as it goes, write."""
    parser = argparse.ArgumentParser(description="Tune a learning rate for each strategy.")
    parser.add_argument("strategies", nargs="*", help="all, if none is named")
    parser.add_argument("--task", nargs="+", choices=list(TRIALS), default=list(TRIALS), help="all, if none is named")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; their seconds are virtual")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="fewer seeds, for a look; only with --dry")
    parser.add_argument("--dry", action="store_true", help="print, and write neither table nor result")
    parser.add_argument("--out", type=Path, help="folder of the result and the table, instead of their places")
    sources.add_options(parser)
    given = parser.parse_args(arguments)
    if not 1 <= given.seeds <= len(SEEDS) or (given.seeds < len(SEEDS) and not given.dry):
        parser.error(f"--seeds must be 1 to {len(SEEDS)}, and {len(SEEDS)} unless --dry is given; not {given.seeds}")
    of = None if given.dry else sources.checked(given)
    chosen = [strategy_class(name).name for name in given.strategies] or names()
    found = tune_all(chosen, given.task, given.seeds, given.jobs)
    print(notes(found))
    print(f"{sum(row.cpu_s for row in found.rows) / 60:.1f} minutes of processor time, {len(found.rows)} runs")
    if of is None:
        return
    if chosen == names() and given.task == list(TRIALS):
        judged = [verdict for task, by_name in found.tuned.items() for verdict in verdicts(task, by_name)]
        command = COMMAND + f" --jobs {given.jobs}"
        folder = given.out or results.FOLDER
        results.write("learning_rates", command, judged, msgspec.to_builtins(found.rows), notes(found), of, folder)
    table = TABLE if given.out is None else given.out / TABLE.name
    table.write_text(table_text(merged(tables(found), chosen)), encoding="utf-8")


if __name__ == "__main__":
    main()
