"""Who is at the target first on clusters of unequal workers?

    python benchmarks/bench_unevenness.py                     # all parts that are not there yet; then writes the result
    python benchmarks/bench_unevenness.py --part tuning       # one part: rows are kept, no result is written
    python benchmarks/bench_unevenness.py --part fresh --only w8_4x stalls --sides bsp asp --minutes 9
    python benchmarks/bench_unevenness.py --so-far            # writes the result of the runs that are there
    python benchmarks/bench_unevenness.py --quick --json      # a tiny cell, writes nothing
    python benchmarks/bench_unevenness.py --try dasp --cell w8_4x --lr 0.2 0.3 --momentum 0.9 --seed 0 1

Strategies train an MLP on virtual clusters of unequal workers, behind slow lines, and under interference, stalls and
recorded times (contenders/uneven_cells.py). Rate, momentum and form of each are tuned in each cell
(contenders/uneven_tuning.py) and timed on fresh seeds. What needs no training, throughput up to 64 workers, is measured
with cost-only workers (contenders/uneven_growth.py). Every run is kept in results/unevenness_rows.jsonl(.gz) and used
again as long as the sources it depends on are the same (contenders/uneven_rows.py).

All parts together take some four hours of one core, a third of that for `tuning`; `--minutes` and `--only` split them.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Self

import msgspec

import publications
import results
import sources
from contenders import bars, uneven_cells, uneven_growth, uneven_verdicts
from contenders.strategy_code import codes_of
from contenders.uneven_cells import BATCH, CELLS, RESAMPLED_SEED, SIZES, Outcome, Trial
from contenders.uneven_growth import Throughput
from contenders.uneven_parts import AGAIN_SEED, PARTS, SPREAD_LONGER, SPREAD_SEEDS, Found, Task
from contenders.uneven_rows import Rows
from contenders.uneven_tuning import (
    CANDIDATES,
    CLOSE,
    CUT,
    FEW,
    FINALISTS,
    FRESH_SEEDS,
    LONGER,
    REFINED,
    SIDES,
    SLOWEST_ROUNDS,
    TIE,
    TUNING_SEEDS,
    Choice,
    seconds_of,
)
from paceline.core.errors import UserError
from paceline.strategies import checked

ROWS = "unevenness_rows.jsonl"
GROWTH = "growth"  # the part that trains nothing: it takes so little time that its numbers are not kept


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
        return self._pool.submit(uneven_cells.run, trial, CELLS[trial.cell]).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def exists(side: str) -> bool:
    """Whether the strategy has the options of that side."""
    try:
        checked(SIDES[side][0], 0, 8)
    except UserError:
        return False
    return True


def measure(tasks: Iterable[Task], maker: Maker, jobs: int) -> tuple[dict[Task, Found], bool]:
    """Carry the tasks out; what they found, and whether all were. A side that does not exist has nothing."""
    tasks = list(tasks)
    missing = sorted({task.side for task in tasks if not exists(task.side)})
    for side in missing:
        print(f"{side}: {SIDES[side][0]} is not there", file=sys.stderr, flush=True)
    going = [task for task in tasks if task.side not in missing]

    def one(task: Task) -> Found | None:
        try:
            found = task.carry_out(maker)
        except OutOfTimeError:
            return None
        print(f"{task.told}: {told(found)}", file=sys.stderr, flush=True)
        return found

    with ThreadPoolExecutor(2 * jobs if jobs > 1 else 1) as at_once:
        made = dict(zip(going, at_once.map(one, going), strict=True))
    return {task: found for task, found in made.items() if found is not None}, None not in made.values()


def told(found: Found) -> str:
    """What a task found, in a line."""
    if found.choice is None:
        return "never at the target"
    trial = found.choice.trial
    chosen = f"{trial.strategy} rate {trial.rate:g} momentum {trial.momentum:g} batch {trial.batch}"
    times = ", ".join(f"{seconds_of(outcome):.2f}" for outcome in found.outcomes)
    return f"{chosen}, tuned {found.choice.score:.2f} s" + f"; fresh {times}" * bool(times)


def quick(maker: Maker) -> dict[Task, Found]:
    """A few short runs in place of all: no side is tuned, and none comes to the target."""
    found = {}
    for cell in ("w8_4x", "interference", "equal"):
        for side in ("bsp", "asp", "ssp", "dssp", "dasp", "adaptive_sync"):
            trial = Trial(cell, SIDES[side][0], 0.1, 0.9, 0, limit_s=1.0)
            found[Task("fresh", cell, side)] = Found(Choice(side, trial, 1.0), [maker(trial)])
    return found


def grow(
    sides: Sequence[str] | None = None, sizes: tuple[int, ...] = uneven_growth.SIZES
) -> tuple[list[Throughput], dict[str, dict[str, float]]]:
    """Throughputs, and rounds lost to partitions, of all sides or some."""
    return uneven_growth.rows({side: SIDES[side][0] for side in sides or SIDES if exists(side)}, sizes)


def commits(rows: Rows) -> str:
    """At which commits the rows were made, and at which later ones they were found to be the same."""
    made = Counter(row.commit for row in rows.found.values())
    again = Counter(row.checked for row in rows.found.values() if row.checked)
    text = ", ".join(f"{count:,} at {commit}" for commit, count in made.most_common())
    same = ", ".join(f"{count:,} at {commit}" for commit, count in again.most_common())
    return text + (f"; checked again where shared sources had changed: {same}" if same else "")


def attempt(given: argparse.Namespace) -> None:
    """Single runs, told one per line as JSON."""
    for name in given.cell:
        for lr in given.lr:
            for seed in given.seed:
                trial = Trial(name, given.attempt, lr, given.momentum, seed, given.batch, given.limit)
                found = msgspec.to_builtins(uneven_cells.run(trial, CELLS[trial.cell]))
                short = {key: float(f"{v:.4g}") if isinstance(v, float) else v for key, v in found.items()}
                run = {"cell": name, "strategy": given.attempt, "lr": lr, "momentum": given.momentum, "seed": seed}
                print(json.dumps({**run, **short}), flush=True)


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = bars.parser("strategies on clusters of unequal workers")
    found.add_argument("--jobs", type=int, default=2, help="runs at a time; their seconds are virtual")
    found.add_argument("--part", dest="only", nargs="+", choices=[*PARTS, GROWTH], help="these alone, without a result")
    found.add_argument("--only", dest="cells", nargs="+", help="cells of these parts")
    found.add_argument("--sides", nargs="+", choices=list(SIDES), help="of these parts")
    found.add_argument("--minutes", type=float, help="stop after so long; a later call goes on there")
    found.add_argument("--so-far", action="store_true", help="make no runs; write the result of those that are there")
    found.add_argument("--pack", action="store_true", help="move the rows to the compressed file, and end")
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
    options = bars.asked(given, len(FRESH_SEEDS))
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            report(options, Rows(Path(folder) / ROWS, "none"), given.jobs)
        return
    if options.repeats != len(FRESH_SEEDS):
        raise SystemExit(f"--repeats: fresh seeds are fixed: {', '.join(map(str, FRESH_SEEDS))}; leave it out")
    of = options.of or sources.checked(given)
    rows = Rows((given.out or results.FOLDER) / ROWS, of.commit)
    if given.pack:
        rows.pack()
        print(f"{len(rows.found)} rows are in {rows.packed}")
        return
    if given.only is None:
        report(options, rows, given.jobs, given.minutes, so_far=given.so_far)
        return
    if GROWTH in given.only:
        growth, lost = grow(given.sides)
        print(results.table(uneven_verdicts.growth_table(growth, lost)))
    every = [task for name in given.only if name != GROWTH for task in PARTS[name]()]
    tasks = [t for t in every if t.cell in (given.cells or [t.cell]) and t.side in (given.sides or [t.side])]
    with Maker(rows, given.jobs, given.minutes) as maker:
        _, complete = measure(tasks, maker, given.jobs)
    print(f"{maker.made} runs made, {len(rows.found)} there, {rows.refused} given up before their limit")
    print("all done" if complete else "out of time: call it again to go on")


def report(options: bars.Asked, rows: Rows, jobs: int, minutes: float | None = None, *, so_far: bool = False) -> None:
    """Make what is missing, judge everything, and write the result. `so_far`: judge what is there."""
    wanted = {name: part() for name, part in PARTS.items()}
    with Maker(rows, jobs, 0.0 if so_far else minutes) as maker:
        if options.quick:
            found, complete = quick(maker), True
        else:
            found, complete = measure((task for tasks in wanted.values() for task in tasks), maker, jobs)
    if not complete and not so_far:
        raise SystemExit("out of time: call it again to go on; --so-far writes the result of the runs that are there")
    growth, lost = grow(sizes=uneven_growth.SIZES[:1] if options.quick else uneven_growth.SIZES)
    verdicts = uneven_verdicts.bars_of(found, growth, lost)
    table = [*uneven_verdicts.table(found), *uneven_verdicts.growth_table(growth, lost)]
    if not options.quick:
        rows.pack()
    text = lacking(wanted, found) * so_far + notes(commits(rows), rows)
    code = codes_of(SIDES[side][0] for side in SIDES if exists(side))
    bars.tell("unevenness", options, verdicts, table, text, code=code, flags=" --so-far" * so_far)


def lacking(wanted: dict[str, list[Task]], found: dict[Task, Found]) -> str:
    """Say which parts are not whole."""
    missing = {name: [task for task in tasks if task not in found] for name, tasks in wanted.items()}
    told = [f"{len(tasks)} of {len(wanted[name])} of `{name}`" for name, tasks in missing.items() if tasks]
    if not told:
        return ""
    return f"""
Not all runs are made. Sides in a cell that are missing: {", ".join(told)}. A bar that needs them is not measured.
"""


def finest(rows: Rows) -> float:
    """The largest share that the time between two evaluations has of a time to the target, among MNIST's cells."""
    shares = [
        uneven_cells.step_s(CELLS[trial.cell]) / row.outcome.reached_s
        for trial, row in rows.found.items()
        if row.outcome.reached_s and CELLS[trial.cell].task == "mnist"
    ]
    return max(shares, default=0.0)


def notes(made: str, rows: Rows) -> str:
    """What the numbers mean."""
    mnist, cifar = SIZES["mnist"], SIZES["cifar"]
    spent = sum(row.outcome.cpu_s for row in rows.found.values())
    count, minutes = len(rows.found), spent / 60
    return f"""
Seconds are virtual. The task is an MLP with {uneven_cells.HIDDEN} hidden units on {mnist.images:,} images of MNIST,
{BATCH} for a push, {uneven_cells.SECONDS_PER_SAMPLE} s for a sample at speed 1, to {mnist.target:.0%} of the first
{mnist.tested:,} test images, by the mean of three evaluations in a row at the middle one's time. The sizes were
chosen so that a run takes one to four seconds of one core. At 93 % one of the eleven settings tried first got there
within 100 s; 91 % is within reach of every side. Between two evaluations all workers together take 1.5 nominal
rounds, at most {finest(rows):.1%} of a tuned time here. The runs here, {count:,}, took {minutes:.0f} minutes of the
processor; they were made {made}.

Cells: `w8_4x` is 4 workers at speed 1, 2 at 1/2, 2 at 1/4; `w16_8x` 8 at 1, 4 at 1/2, 2 at 1/4, 2 at 1/8; `w8_8x` 4
at 1, 2 at 1/2, 1 at 1/4, 1 at 1/8; `w16_4x` 8 at 1, 4 at 1/2, 4 at 1/4. `line03` and `line10`: one round of all
gradients takes 0.3 and 1.0 of a fast worker's computing on the server's line, and so do the models in the other
direction. Of 8 equal workers: `interference`, one is {uneven_cells.SLOWER:g} times slower for {uneven_cells.SLOW_S:g}
s, every {uneven_cells.SLOW_EVERY_S:g} s another; `stalls`, one pauses for {uneven_cells.STALL_S:g} s in every
{uneven_cells.STALL_EVERY_S:g} s; `alibaba1`, the times of a recorded job, the first 8 of its 10 workers. `whole` is
`w8_4x` with samples of {uneven_cells.GROUP} images, two for a push, and BatchNorm, which needs two: less work than
that cannot be given. All others have lognormal jitter of 0.1. Reported, tuned on one seed and not judged: `w8_2x`,
`alibaba2`, `alibaba3`, and `cifar`: the speeds of `w8_4x`, batches of {cifar.batch}, a small convolutional net on
{cifar.images:,} images, to {cifar.target:.0%}. `mix0` to `mix4` and `pieces0`, `pieces1` were drawn by seed
{RESAMPLED_SEED}: speeds between 1 and 1/8, and pieces of {uneven_cells.PIECE} recorded times of any worker of any of
the three jobs. Defaults were frozen before these were run, but for `adaptive_sync`: its first form missed its bar on
the mixes, and the present one was made after that, on mixes of other seeds. So `again0` to `again4` were drawn for it
by seed {AGAIN_SEED} when that was done.

Every side is tuned in every cell: momentum 0 and 0.9, both forms of a step where it has two, and rates a factor of
the root of 2 apart, first every second one, further out while the best lies on the edge, then its neighbours, unless
it is {REFINED:g} times behind the side's best. A run ends at the target, at {CUT:g} times the side's best so far, or
when it diverges; while a side was nowhere at the target, after {SLOWEST_ROUNDS} rounds of the slowest worker, and if it
is not by then, after {LONGER:g} times as many. What is within {CLOSE:g} of the best on seed
{TUNING_SEEDS[0]}, {CANDIDATES} at most, runs on seeds {TUNING_SEEDS[1]} to {TUNING_SEEDS[FEW - 1]} as well, the best
{FINALISTS} of these on seeds {TUNING_SEEDS[FEW]} to {TUNING_SEEDS[-1]}, and the geometric mean of all chooses
(`tuned_s`), of two rates within {TIE:g} the lower one. If all of them miss the target on a tuning seed, the next ones
are tried in the same way (before, one that misses was taken; seen with states alone in `mix4`). Then seeds
{FRESH_SEEDS[0]} to {FRESH_SEEDS[-1]} are run. (Seeds
0 to 7 judged before, with three seeds to tune by, and seeds 8 to 15, with six and no regard to ties; why that was
changed, contenders/uneven_tuning.py says. Their rows are kept.) `over_rival` is the geometric mean of the ratios of
paired seeds to the best of bsp, asp, ssp and dssp, picked by `tuned_s`; `over_rival_low` and `_high` are its 90 %
interval by t on the logarithms. In part `free` each side has the best of
batches 16, 32 and 64. `samples_per_s` and `samples` say why a side is soon or late: it is its pace, or what it makes
of a sample; `states` are shares of the nodes' time, all from the journals. In part `spread` both sides run
{SPREAD_LONGER:g} times as long as `asp` needs, on {len(SPREAD_SEEDS)} seeds: the
ratio of two spreads, over two cells, has a standard error of 11 % then.

What publications claim, and which bars say the same of what was measured here (`*`: all that begin so):

{publications.beside("unevenness")}

Growth is of workers that only cost time, half of them at 1, a quarter at 1/2 and a quarter at 1/4, a model of
{uneven_growth.MODEL_BYTES:,} bytes, the line 1 Gbit/s. `of_speeds` is of what the speeds add up to. `of_rounds` is of
what a synchronous round can reach, the models passing one after the other downwards and the gradients upwards. With
`t` seconds for one of them, the k-th model is there at `k t`, and for a round that ends at `T` the gradient that is
the j-th last has to leave at `T - j t`. So a round of `G` samples at speeds `v` needs `G <= sum of v (T - (k + j)
t)`. Both orders are free, and the sum is largest when the fastest is first down and last up, `k = j = rank by speed`:
`T = (G + 2 t sum of rank v) / sum of v`, leaving out the slowest where that is shorter. It knows no jitter and no
transfer of the next round during this one. `rounds_lost`: samples that are missing at the end after one of 8 workers
was cut off for {uneven_growth.CUT_S:g} s, less its own share of that time, in rounds of the whole batch; without
jitter.
"""


if __name__ == "__main__":
    main()
