"""Does a run in which much goes wrong lose a push, apply one twice, break a bound, wait for ever or miss a sample?

    python benchmarks/bench_chaos.py                 # writes results/chaos.md and .json
    python benchmarks/bench_chaos.py --quick --json  # a few of the runs, one JSON object, writes nothing
    python benchmarks/bench_chaos.py --seed 17       # one run, and what is wrong with it; exit code 1 if anything is
    python benchmarks/bench_chaos.py --seed 17 --plant a_push_is_lost

The runs are in chaos_runs.py. Their journals are judged by attacks/foreign_checker.py, which shares no code with the
package. Mistakes planted in the package (chaos_plants.py) show that the judges can find some.
"""

import contextlib
import itertools
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

import chaos_runs
from attacks import foreign_checker
from chaos_plants import PLANTS
from contenders import bars
from contenders.bars import Bar

RUNS = 1280  # 40 of each strategy under each exchange
WITHIN = 100  # runs in which a planted fault must show
STRUCK = 100  # runs that every kind of fault must strike
TWICE = 10  # every so manieth run is made twice, and must write the same journal
HANGS_S = 120  # of one run, which takes a tenth of a second: then it is taken for one that never ends
QUICK = 32
CHUNK = 8


class Judged(msgspec.Struct, frozen=True):
    """One run and what was found."""

    seed: int
    kind: str
    strategy: str
    faults: list[str]
    lines: int
    struck: list[str]  # kinds of faults that happened to it
    restarts: int
    rolled_back: int  # versions
    copies: int  # that the intake refused


class Hangs(BaseException):
    """A run has taken so long that it will never end."""


def judge(seed: int, plant: str | None = None, folder: Path | None = None) -> Judged:
    """Make the run of this seed, with a fault planted in the package, and judge it."""
    drawn = chaos_runs.chaos(seed)
    with contextlib.ExitStack() as stack:
        if folder is None:
            prefix = f"paceline-chaos-{os.getpid()}-"  # whose it is, so that nobody else takes it for left behind
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=_memory(), prefix=prefix)))
        if plant is not None:
            stack.enter_context(PLANTS[plant]())
        stack.enter_context(_watched())
        try:
            outcome = chaos_runs.make(drawn, folder)
            faults = chaos_runs.faults_of(outcome)
            if seed % TWICE == 0 and plant is None:
                first = outcome.journal.read_bytes()
                if chaos_runs.make(drawn, folder).journal.read_bytes() != first:
                    faults.append("the same run wrote another journal")
        except Hangs:
            return Judged(seed, drawn.kind, drawn.strategy, [f"it did not end within {HANGS_S} s"], 0, [], 0, 0, 0)
        lines = foreign_checker.read(outcome.journal)
    observed = [line for line in lines if line["type"] == "observation"]
    struck = sorted({line["data"]["kind"] for line in observed if line["what"] == "scenario"})
    return Judged(
        seed, drawn.kind, drawn.strategy, faults, len(lines), struck,
        sum(line["type"] == "header" for line in lines) - 1,
        sum(line["data"]["versions"] for line in observed if line["what"] == "rolled_back"),
        sum(line["what"] == "refused" for line in observed),
    )  # fmt: skip


def _memory() -> str | None:
    """A folder in main memory, where there is one: these runs write many small checkpoints."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    def give_up(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise Hangs

    before = signal.signal(signal.SIGALRM, give_up)
    left, every = signal.setitimer(signal.ITIMER_REAL, HANGS_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left, every)  # of who watches this process


def catch(plant: str) -> tuple[str, int | None, str]:
    """Make runs with this fault until one is found out; return in which run, from 1, and what gave it away."""
    for seed in range(WITHIN):
        found = judge(seed, plant).faults
        if found:
            return plant, seed + 1, found[0]
    return plant, None, ""


def rows_of(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """A line for each strategy under each exchange."""
    rows = []
    ordered = sorted(judged, key=lambda each: chaos_runs.CASES.index(case_of(each)))
    for (kind, name), group in itertools.groupby(ordered, case_of):
        runs = list(group)
        rows.append({
            "exchange": kind, "strategy": name, "runs": len(runs), "lines judged": sum(run.lines for run in runs),
            "server restarts": sum(run.restarts for run in runs),
            "versions rolled back": sum(run.rolled_back for run in runs),
            "copies refused": sum(run.copies for run in runs), "with a fault": sum(bool(run.faults) for run in runs),
        })  # fmt: skip
    return rows


def case_of(run: Judged) -> tuple[str, str]:
    """The exchange and the strategy's name."""
    return run.kind, run.strategy.partition(":")[0]


def bars_of(
    judged: Sequence[Judged], caught: Sequence[tuple[str, int | None, str]], runs: int, struck: int
) -> list[Bar]:
    """What the runs and the planted faults have to show."""
    strikes = Counter(kind for run in judged for kind in run.struck)
    found = [run for _, run, _ in caught if run is not None]
    return [
        Bar("runs", len(judged), runs, True, "seeded runs"),
        Bar("faults", sum(bool(run.faults) for run in judged), 0, False, "of them in which the judges found a fault"),
        Bar("struck", min(strikes[kind] for kind in chaos_runs.FAULTS), struck, True,
            "runs that the rarest kind of fault struck"),
        Bar("caught", len(found), len(PLANTS), True, f"planted faults found within {WITHIN} runs"),
        Bar("slowest", max(found, default=None), WITHIN, False, "runs until the last of them was found",
            "none was found"),
    ]  # fmt: skip


def notes(judged: Sequence[Judged], caught: Sequence[tuple[str, int | None, str]]) -> str:
    """What was done and how it was judged."""
    strikes = Counter(kind for run in judged for kind in run.struck)
    counts = ", ".join(f"`{kind}` {strikes[kind]}" for kind in chaos_runs.FAULTS)
    told = "".join(
        f"| `{name}` | {'never' if run is None else run} | {what.replace('|', '/')} |\n" for name, run, what in caught
    )
    failing = "".join(
        f"\n- seed {run.seed} ({run.kind}, {run.strategy}): {run.faults[0]}\n"
        f"  (`python benchmarks/bench_chaos.py --seed {run.seed}`)"
        for run in judged
        if run.faults
    )
    return f"""
Each run is drawn from its seed: two to six workers of unequal speed and jitter, 5 to 14 faults within the time that it
takes, and up to three crashes of the server. Runs that each kind of fault struck: {counts}. Copies and late messages
strike pushes, clocks and models before the intake; {sum(run.copies for run in judged):,} were refused there.
{sum(run.restarts for run in judged):,} times a server went on from a checkpoint on disk (light workers: in memory).

The journal alone is judged, by `attacks/foreign_checker.py`: every push answers a grant, arrives once and is settled
once; every grant is answered or taken back; versions are consecutive; a restored server goes on where the run once
stood, at a checkpoint, and says what it rolled back; the bounds of `ssp` and `dssp`, whom `bsp`, `fastest_k` and
`k_async` wait for, the mass rule; every sample of every epoch is settled once, net of what was rolled back; every
message of nodes arrives once, and weights are kept; the run comes to its end. Beside it the result is looked at: every
sample of a run of one epoch has moved a weight of its own, and every worker that stayed has counted all its clocks in
its table. Every {TWICE}th run is made twice and must write the same journal. What a journal cannot show is not judged
here: a store that would add a gradient twice although it was told to once.

{"No run had a fault." if not failing else "Runs with a fault:" + failing}

Planted in the package, and in which run they were found, from seed 0 on:

| fault | found in run | by |
|---|---|---|
{told}"""


def run_all(call: Callable[[Any], Any], given: Sequence[Any], jobs: int, chunk: int) -> Iterator[Any]:
    """Make all calls, several at a time; one job makes them in this process."""
    if jobs == 1:
        yield from map(call, given)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _quiet) as pool:
        yield from pool.map(call, given, chunksize=chunk)


def _quiet() -> None:
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


def one(seed: int, plant: str | None) -> int:
    """Make one run, say what is wrong with it and where its journal is; return the exit code."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-chaos-"))
    found = judge(seed, plant, folder)
    print(f"seed {seed}: {found.kind}, {found.strategy}, {found.restarts} restarts, {found.lines} lines in {folder}")
    for fault in found.faults:
        print(f"  {fault}")
    print("no fault" if not found.faults else f"{len(found.faults)} faults")
    return 1 if found.faults else 0


def main(arguments: list[str] | None = None) -> None:
    """Make the runs, plant the faults, print, and write the result."""
    parser = bars.parser("runs in virtual time in which everything goes wrong, judged by their journals")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--runs", type=int, default=RUNS, help="how many, from seed 0 on")
    parser.add_argument("--seed", type=int, help="make this run alone and say what is wrong with it")
    parser.add_argument("--plant", choices=PLANTS, help="with --seed: a fault to plant in the package")
    given = parser.parse_args(arguments)
    if given.seed is not None:
        _quiet()
        sys.exit(one(given.seed, given.plant))
    options = bars.asked(given, 1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _quiet()
    runs = QUICK if options.quick else given.runs
    judged = []
    for run in run_all(judge, range(runs), given.jobs, CHUNK):
        judged.append(run)
        if run.faults:
            print(
                f"seed {run.seed}: {run.faults[0]}; python benchmarks/bench_chaos.py --seed {run.seed}", file=sys.stderr
            )
    caught = list(run_all(catch, list(PLANTS), given.jobs, 1))
    verdicts = bars_of(judged, caught, runs if options.quick else 1000, 1 if options.quick else STRUCK)
    bars.tell("chaos", options, verdicts, rows_of(judged), notes(judged, caught))


if __name__ == "__main__":
    main()
