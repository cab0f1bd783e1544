"""Who is at the target first on clusters of unequal workers?

    python benchmarks/bench_unevenness.py                     # all parts that are not there yet; then writes the result
    python benchmarks/bench_unevenness.py --part cells        # one part: rows are kept, no result is written
    python benchmarks/bench_unevenness.py --part cells --only w8_4x stalls --sides bsp asp --minutes 9
    python benchmarks/bench_unevenness.py --quick --json      # a tiny cell, writes nothing
    python benchmarks/bench_unevenness.py --try dasp --cell w8_4x --lr 0.2 0.3 --momentum 0.9 --seed 0 1

Strategies train an MLP on virtual clusters of unequal workers, behind slow lines, and under interference, stalls and
recorded times (contenders/uneven_cells.py). Rate, momentum and form of each are tuned in each cell
(contenders/uneven_tuning.py) and timed on fresh seeds. What needs no training, throughput up to 64 workers, is measured
with cost-only workers (contenders/uneven_growth.py). Every run is kept in results/unevenness_rows.jsonl(.gz) and used
again as long as the sources it depends on are the same (contenders/uneven_rows.py).
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from threading import Lock

import msgspec

import results
import sources
from contenders import bars, uneven_cells
from contenders.uneven_cells import BATCH, CELLS, Outcome, Trial
from contenders.uneven_parts import PARTS, Task
from contenders.uneven_rows import Rows
from contenders.uneven_tuning import SIDES
from paceline.core.errors import UserError
from paceline.strategies import checked

ROWS = "unevenness_rows.jsonl"


class OutOfTimeError(Exception):
    """The minutes are over; what was made is kept."""


class Maker:
    """Makes runs in processes, or finds them among the rows."""

    def __init__(self, rows: Rows, jobs: int, minutes: float | None) -> None:
        self.rows, self.made = rows, 0
        self._until = None if minutes is None else time.monotonic() + 60 * minutes
        self._pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
        self._lock = Lock()

    def __call__(self, trial: Trial) -> Outcome:
        with self._lock:
            known = self.rows.get(trial)
        if known is not None:
            return known
        with self._lock:
            self.rows.settle((trial.cell, trial.strategy), self._make)
            known = self.rows.get(trial)
        if known is not None:
            return known
        outcome = self._make(trial)
        with self._lock:
            self.rows.add(trial, outcome)
            self.made += 1
        return outcome

    def _make(self, trial: Trial) -> Outcome:
        if self._until is not None and time.monotonic() > self._until:
            raise OutOfTimeError
        return self._pool.submit(uneven_cells.run, trial).result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def exists(side: str) -> bool:
    """Whether the strategy has the options of that side."""
    try:
        checked(SIDES[side][0], 0, 8)
    except UserError:
        return False
    return True


def measure(tasks: Iterable[Task], maker: Maker, jobs: int) -> bool:
    """Carry the tasks out; whether all were."""
    missing = sorted({task.side for task in tasks if not exists(task.side)})
    for side in missing:
        print(f"{side}: {SIDES[side][0]} is not there", flush=True)
    going = [task for task in tasks if task.side not in missing]

    def one(task: Task) -> bool:
        try:
            done = task.carry_out(maker)
        except OutOfTimeError:
            return False
        print(f"{task.told}: {done}", flush=True)
        return True

    with ThreadPoolExecutor(2 * jobs if jobs > 1 else 1) as at_once:
        return all(list(at_once.map(one, going)))


def attempt(given: argparse.Namespace) -> None:
    """Single runs, told one per line as JSON."""
    for name in given.cell:
        for lr in given.lr:
            for seed in given.seed:
                trial = Trial(name, given.attempt, lr, given.momentum, seed, given.batch, given.limit)
                found = msgspec.to_builtins(uneven_cells.run(trial))
                short = {key: float(f"{v:.4g}") if isinstance(v, float) else v for key, v in found.items()}
                run = {"cell": name, "strategy": given.attempt, "lr": lr, "momentum": given.momentum, "seed": seed}
                print(json.dumps({**run, **short}), flush=True)


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = bars.parser("strategies on clusters of unequal workers")
    found.add_argument("--jobs", type=int, default=2, help="runs at a time; their seconds are virtual")
    found.add_argument("--part", dest="only", nargs="+", choices=list(PARTS), help="these alone, without a result")
    found.add_argument("--only", dest="cells", nargs="+", help="cells of these parts")
    found.add_argument("--sides", nargs="+", choices=list(SIDES), help="of these parts")
    found.add_argument("--minutes", type=float, help="stop after so long; a later call goes on there")
    single = found.add_argument_group("single runs")
    single.add_argument("--try", dest="attempt", metavar="STRATEGY", help="make single runs, print them, keep nothing")
    single.add_argument("--cell", nargs="+", choices=list(CELLS), default=["w8_4x"])
    single.add_argument("--lr", type=float, nargs="+", default=[0.2])
    single.add_argument("--momentum", type=float, default=0.9)
    single.add_argument("--seed", type=int, nargs="+", default=[0])
    single.add_argument("--batch", type=int, default=BATCH)
    single.add_argument("--limit", type=float, default=300.0, help="virtual seconds")
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    given = parser().parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if given.attempt:
        attempt(given)
        return
    options = bars.asked(given, 1)
    of = options.of or sources.checked(given)
    rows = Rows((given.out or results.FOLDER) / ROWS, of.commit)
    maker = Maker(rows, given.jobs, given.minutes)
    names = given.only or list(PARTS)
    every = [task for name in names for task in PARTS[name]()]
    tasks = [t for t in every if t.cell in (given.cells or [t.cell]) and t.side in (given.sides or [t.side])]
    try:
        measure(tasks, maker, given.jobs)
    finally:
        maker.close()
    print(f"{maker.made} runs made, {len(rows.found)} there, {rows.refused} of older strategies")


if __name__ == "__main__":
    main()
