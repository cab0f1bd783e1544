"""What was tried for `dasp`: rules and powers of the damping, on a few clusters of unequal workers.

    python benchmarks/dasp_trials.py                          # writes results/dasp_trials.md and .json
    python benchmarks/dasp_trials.py --cells w8_4x            # adds to what there is of the same commit
    python benchmarks/dasp_trials.py --cells w8_4x --quick    # one rate and seed, prints, writes nothing

Every variant has momentum 0.9 and the same rates; its time in a cell is the geometric mean over the tuning seeds of
bench_unevenness.py at its best rate. No seeds of that benchmark's verdicts are used. `asp` and `bsp` are there for the
scale, with the momentum that suits them; how they stand to `dasp` when all are tuned alike is bench_unevenness.py's
question. A run ends at 3 times the variant's best so far.
"""

import argparse
import json
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

import results
import sources
from contenders.uneven_cells import CELLS, Outcome, Trial, run
from contenders.uneven_tuning import CUT, FEW
from contenders.uneven_tuning import TUNING_SEEDS as ALL_SEEDS

VARIANTS = "contenders.dasp_variants"
RATES = (0.28, 0.4, 0.57)
TRIED: dict[str, tuple[str, float, tuple[float, ...]]] = {  # strategy, momentum, rates
    "merge": ("dasp:fit=merge", 0.9, RATES),
    "join": ("dasp", 0.9, RATES),
    "none": ("dasp:fit=none", 0.9, RATES),
    "none, goes on at once": (f"{VARIANTS}:Onward:fit=none", 0.9, RATES),
    "none, root": (f"{VARIANTS}:Root:fit=none", 0.9, RATES),
    "none, power 1": (f"{VARIANTS}:Plain:fit=none", 0.9, RATES),
    "none, no momentum": ("dasp:fit=none", 0.0, (1.4, 2.0, 2.8)),
    "asp, no momentum": ("asp", 0.0, (1.0, 1.4, 2.0)),
    "bsp": ("bsp", 0.9, RATES),
}
SHOWN = ("w8_4x", "w16_8x", "w8_4x_line10", "whole", "stalls")
LIMIT_S = 150.0  # virtual
TUNING_SEEDS = ALL_SEEDS[:FEW]


class Row(msgspec.Struct, frozen=True):
    """A variant at one rate in a cell; seconds are virtual, None where the target was missed."""

    cell: str
    variant: str
    strategy: str
    momentum: float
    rate: float
    seconds: list[float | None]  # by seed
    staleness: float | None
    waiting: float | None
    changes: int
    asynchronous: float  # share of the nodes' time


def measure(cell: str, variant: str, rates: Iterable[float], seeds: Iterable[int]) -> list[Row]:
    """Run a variant at all rates."""
    strategy, momentum, _ = TRIED[variant]
    rows: list[Row] = []
    best = math.inf
    for rate in rates:
        found: list[Outcome] = []
        for seed in seeds:
            limit = min(LIMIT_S, CUT * best)
            found.append(run(Trial(cell, strategy, rate, momentum, seed, limit_s=limit)))
            if found[-1].reached_s is None:
                break
        times = [outcome.reached_s for outcome in found]
        best = min(best, mean(times))
        first = found[0]
        rows.append(
            Row(cell, variant, strategy, momentum, rate, times, first.staleness, first.waiting, first.changes,
                first.states.get("ASYNC", 0.0))
        )  # fmt: skip
    return rows


def mean(times: Iterable[float | None]) -> float:
    """The geometric mean; infinite where one missed."""
    known = [math.inf if seconds is None else seconds for seconds in times]
    return math.inf if math.inf in known else math.exp(math.fsum(map(math.log, known)) / len(known))


def summary(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """One line per variant: its best time in each cell, with the rate of that."""
    lines: dict[str, dict[str, Any]] = {}
    for name in TRIED:
        for cell in CELLS:
            there = [row for row in rows if row.variant == name and row.cell == cell]
            if there:
                best = min(there, key=lambda row: mean(row.seconds))
                seconds = mean(best.seconds)
                text = "missed" if seconds == math.inf else f"{seconds:.1f} at {best.rate:g}"
                lines.setdefault(name, {"variant": name})[cell] = text
    return list(lines.values())


def earlier(commit: str, cells: Sequence[str], variants: Sequence[str]) -> list[Row]:
    """Rows of other cells and variants that were measured on this commit."""
    kept = results.FOLDER / "dasp_trials.json"
    found = json.loads(kept.read_text()) if kept.exists() else {"commit": None}
    if found["commit"] != commit:
        return []
    rows = msgspec.convert(found["trials"], list[Row])
    return [row for row in rows if row.cell not in cells or row.variant not in variants]


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(description="what was tried for dasp")
    found.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(SHOWN))
    found.add_argument("--variants", nargs="+", choices=list(TRIED), default=list(TRIED))
    found.add_argument("--quick", action="store_true", help="one rate and one seed; writes nothing")
    sources.add_options(found)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    given = parser().parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    of = None if given.quick else sources.checked(given)
    rows = [] if of is None else earlier(of.commit, given.cells, given.variants)
    for cell in given.cells:
        for variant in given.variants:
            rates = TRIED[variant][2]
            some = slice(1 if given.quick else None)
            rows += measure(cell, variant, rates[some], TUNING_SEEDS[some])
    lines = summary(rows)
    print(results.table(lines))
    if of is None:
        return
    notes = (__doc__ or "").split("\n\n", 2)[2]
    command = "python benchmarks/dasp_trials.py"
    if {row.cell for row in rows} != set(SHOWN):
        command += " --cells " + " ".join(dict.fromkeys(row.cell for row in rows))
    details = {"trials": [msgspec.to_builtins(row) for row in rows], "seeds": list(TUNING_SEEDS)}
    print(results.write("dasp_trials", command, [], lines, notes, of, details=details))


if __name__ == "__main__":
    main()
