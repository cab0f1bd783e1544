"""Which learning rate does each strategy need, and how soon does it learn with it?

    python benchmarks/tune_learning_rates.py              # all: writes the table and results/learning_rates.md
    python benchmarks/tune_learning_rates.py asp dasp     # these only: replaces their entries of the table

Every strategy is tried on the same grid, a factor 2 apart, on both clusters and with the same seeds. A rate counts by
its time to the target: the median over the seeds, then the geometric mean of the two clusters; one missed target rules
it out. While the best rate lies on the edge of what was tried, the grid is extended there. A run that takes twice the
best median of its cluster so far ends as a miss: its rate cannot be the best unless the clusters want opposite ones.
Of rates within 5 % of the best the smallest is taken, since the next larger one often diverges. The times reported, and
the verdicts, are of other seeds than those the rate was chosen by.
"""

import argparse
import math
import statistics
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

import results
from learning_trials import KINDS, TRIALS, Kind, attempt, strategy_spec
from paceline.strategies import names, strategy_class
from paceline.tasks import learning_rates

SEEDS = (0, 1, 2)
FRESH_SEEDS = (3, 4, 5)  # of the reported times
TIE = 1.05  # scores this close say nothing, with three seeds
CENTRES = {"digits": 0.1, "linreg": 5e-4}  # the tasks' own defaults
START = (0, 1, -1)  # exponents of 2 that every strategy is tried at; the likeliest first sets the bar
PATIENCE = 2.0  # times the best median
SMALLEST = -8  # a strategy that learns at no rate of 1/256 of the default or more does not learn
TABLE = Path(__file__).parents[1] / "src/paceline/tasks/learning_rates.toml"
COMMAND = "python benchmarks/tune_learning_rates.py"


class Row(msgspec.Struct, frozen=True):
    """One run; times are virtual but for the CPU's."""

    task: str
    strategy: str
    cluster: Kind
    lr: float
    seed: int
    reached_s: float | None
    epochs: float
    versions: int
    staleness: float | None
    cpu_s: float


def measure(task: str, kind: Kind, spec: str, lr: float, seed: int, limit_s: float) -> Row:
    """Run one trial."""
    began = time.process_time()
    run = attempt(task, kind, spec, lr, seed, max_seconds=limit_s if limit_s < math.inf else None)
    summary = run.summary
    reached = summary.target.reached_at_seconds if run.ended == "target" and summary.target else None
    epochs = summary.samples_used / TRIALS[task].samples
    cpu_s = round(time.process_time() - began, 2)
    return Row(task, spec, kind, lr, seed, reached, epochs, summary.versions, summary.staleness.mean, cpu_s)


def try_rate(task: str, spec: str, lr: float, limits: dict[Kind, float]) -> list[Row]:
    """All seeds on both clusters, up to the first miss."""
    rows: list[Row] = []
    for seed in SEEDS:
        for kind in KINDS:
            rows.append(measure(task, kind, spec, lr, seed, limits[kind]))
            if rows[-1].reached_s is None:
                return rows
    return rows


def median_seconds(rows: Iterable[Row], kind: Kind) -> float:
    """Virtual seconds to the target on this cluster; infinite where a run missed it."""
    times = [math.inf if row.reached_s is None else row.reached_s for row in rows if row.cluster == kind]
    return statistics.median(times) if times and max(times) < math.inf else math.inf


def score(rows: list[Row]) -> float:
    """Smaller is better."""
    return math.sqrt(math.prod(median_seconds(rows, kind) for kind in KINDS))


def tune(task: str, spec: str) -> dict[float, list[Row]]:
    """Rows by rate, with the grid extended while the best of them is on its edge."""
    tried: dict[int, list[Row]] = {}

    def visit(exponent: int) -> None:
        lr = CENTRES[task] * 2.0**exponent
        limits = {
            kind: PATIENCE * min((median_seconds(rows, kind) for rows in tried.values()), default=math.inf)
            for kind in KINDS
        }
        tried[exponent] = try_rate(task, spec, lr, limits)
        print(f"{task:7} {spec:40} lr {lr:<9g} score {score(tried[exponent]):8.4g} s", flush=True)

    for exponent in START:
        visit(exponent)
    while True:
        best = min(tried, key=lambda exponent: score(tried[exponent]))
        if score(tried[best]) == math.inf:
            best = min(tried)
        if best == min(tried) and best > SMALLEST:
            visit(best - 1)
        elif best == max(tried):
            visit(best + 1)
        else:
            return {CENTRES[task] * 2.0**exponent: tried[exponent] for exponent in sorted(tried)}


def best_rate(by_rate: dict[float, list[Row]]) -> float | None:
    """The smallest rate whose score is as good as the best; None if every one missed the target."""
    best = min(score(rows) for rows in by_rate.values())
    return min(lr for lr, rows in by_rate.items() if score(rows) <= TIE * best) if best < math.inf else None


def check(task: str, spec: str, lr: float) -> list[Row]:
    """How a chosen rate does with other seeds than those it was chosen by."""
    return [measure(task, kind, spec, lr, seed, math.inf) for seed in FRESH_SEEDS for kind in KINDS]


def table_text(rates: dict[str, dict[str, float]]) -> str:
    """The committed table."""
    seeds = len(SEEDS)
    head = f"""\
# Learning rates per round (all workers' nominal work once), by task and strategy as tuned, options included.
# Made by `{COMMAND}`: the grid is 2^i times the task's default, extended while
# the best is on its edge; the best has the shortest virtual time to the target (geometric mean over an equal and a
# 4x-uneven cluster of the median over {seeds} seeds, none of which misses it); of rates within 5 % of it the smallest.
# Clusters and targets: benchmarks/learning_trials.py.
"""
    for task, by_spec in rates.items():
        head += f"\n[{task}]  # to {TRIALS[task].goal}, {len(TRIALS[task].speeds['equal'])} workers\n"
        head += "".join(f'"{spec}" = {lr:g}\n' for spec, lr in by_spec.items())
    return head


def times_table(task: str, tuned: dict[str, list[Row]]) -> str:
    """Virtual seconds to the target at the tuned rate, strategy by cluster."""
    lines = [
        f"**{task}**: virtual seconds to {TRIALS[task].goal}, median of {len(FRESH_SEEDS)} seeds (range)",
        "",
        "| strategy | lr | equal | uneven | epochs, equal | epochs, uneven | staleness, uneven |",
        "|---|---|---|---|---|---|---|",
    ]
    for spec, rows in tuned.items():
        of = {kind: [row for row in rows if row.cluster == kind] for kind in KINDS}
        seconds = [_range([row.reached_s or math.inf for row in of[kind]], "{:.4g}") for kind in KINDS]
        epochs = [f"{statistics.median(row.epochs for row in of[kind]):.1f}" for kind in KINDS]
        stale = statistics.median(row.staleness or 0.0 for row in of["uneven"])
        lines.append(f"| `{spec}` | {rows[0].lr:g} | {' | '.join(seconds)} | {' | '.join(epochs)} | {stale:.1f} |")
    return "\n".join(lines)


def _range(values: list[float], form: str) -> str:
    low, middle, high = (form.format(f(values)) for f in (min, statistics.median, max))
    return f"{middle} ({low} to {high})"


class Findings(msgspec.Struct):
    """What a dated result says."""

    rows: list[Row] = []
    notes: list[str] = []
    verdicts: list[results.Verdict] = []


def tune_task(task: str, chosen: list[str], found: Findings) -> dict[str, float]:
    """The task's entries of the table, those of strategies not chosen as they were."""
    entries = {} if chosen == names() else dict(learning_rates(task))
    checked: dict[str, list[Row]] = {}
    for name in chosen:
        spec = strategy_spec(task, name)
        by_rate = tune(task, spec)
        found.rows += [row for tried in by_rate.values() for row in tried]
        entries = {key: lr for key, lr in entries.items() if _name(key) != name}
        best = best_rate(by_rate)
        if best is not None:
            entries[spec] = best
            checked[spec] = check(task, spec, best)
            found.rows += checked[spec]
        found.verdicts.append(verdict(task, spec, checked.get(spec, [])))
    found.notes.append(times_table(task, checked))
    return dict(sorted(entries.items(), key=lambda entry: names().index(_name(entry[0]))))


def verdict(task: str, spec: str, rows: list[Row]) -> results.Verdict:
    """Whether the strategy learned with every seed on both clusters."""
    learned, runs = sum(row.reached_s is not None for row in rows), len(FRESH_SEEDS) * len(KINDS)
    value = f"{learned} of {runs} runs" if rows else "at no learning rate"
    return results.Verdict(f"{task}, {spec}:", value, f"{TRIALS[task].goal} in every run", learned == runs)


def _name(spec: str) -> str:
    return spec.partition(":")[0]


def main() -> None:
    """Tune, print as it goes, write."""
    parser = argparse.ArgumentParser(description="Tune a learning rate for each strategy.")
    parser.add_argument("strategies", nargs="*", help="all, if none is named")
    chosen = [strategy_class(name).name for name in parser.parse_args().strategies] or names()
    found = Findings()
    rates = {task: tune_task(task, chosen, found) for task in TRIALS}
    TABLE.write_text(table_text(rates), encoding="utf-8")
    print("\n\n".join(found.notes))
    if chosen == names():
        seeds = f"Learning rates were chosen by seeds {SEEDS}; times and verdicts are of seeds {FRESH_SEEDS}."
        notes = "\n\n".join([seeds, *found.notes])
        results.write("learning_rates", COMMAND, found.verdicts, msgspec.to_builtins(found.rows), notes)


if __name__ == "__main__":
    main()
