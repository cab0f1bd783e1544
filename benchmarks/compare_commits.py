"""Is one commit slower than another? Both are measured alternately in one run, each by its own benchmarks.

    python benchmarks/compare_commits.py OLD              # against HEAD: writes results/compare_commits.md and .json
    python benchmarks/compare_commits.py OLD NEW --only overhead    # that alone: writes results/compare_overhead.md
    python benchmarks/compare_commits.py OLD --quick --only simulator    # tiny sizes, 2 pairs, writes nothing
    python benchmarks/compare_commits.py OLD --lanes 5 --rows kept.jsonl    # five benchmarks at once

Two results of different hours cannot be compared on a machine that others use too. Here a pair is one measurement of
each commit, one right after the other and in alternating order, so that what else the machine does strikes both. A
number's ratio is that of one pair; the median over the pairs counts. A loss of more than 3 % in the median is flagged;
in how many pairs the newer commit was behind says how sure that is: by chance, 8 of 9 come up once in fifty times.

With `--lanes` each benchmark stays in one lane, whose cores no other lane uses. `--rows` keeps every measurement as it
comes: given again, a run that was cut off goes on where it was.
"""

import argparse
import compileall
import concurrent.futures
import contextlib
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

import results
import sources
from commit_probe import PROBES

PROBE = Path(__file__).with_name("commit_probe.py")
PAIRS, QUICK_PAIRS = 9, 2
PARTS = ("_ours_ms", "_model_ms")  # of a training loop
LOSS = 0.03  # of the median ratio, from which on it is flagged
LIMIT_S = 900.0


class Comparison(msgspec.Struct, frozen=True):
    """One number of one benchmark on both commits; `losses` are those of the pairs, negative where the newer gains."""

    benchmark: str
    number: str
    old: float
    new: float
    losses: list[float]

    @property
    def loss(self) -> float:
        """The median over the pairs."""
        return statistics.median(self.losses)

    @property
    def flagged(self) -> bool:
        """Whether the newer commit lost more than it may; a loop's parts only say where a loss comes from."""
        return self.loss > LOSS and not self.number.endswith(PARTS)


@contextlib.contextmanager
def checkout(repository: Path, revision: str, folder: Path) -> Iterator[Path]:
    """A work tree of the revision, whose benchmarks import its own sources.

    Older benchmarks start their processes with their own folder alone on the import path: a link beside them leads to
    the sources.
    """
    git(repository, "worktree", "add", "--detach", "--quiet", str(folder), revision)
    try:
        (folder / "benchmarks" / "paceline").symlink_to(folder / "src" / "paceline")
        # Else the first measurement of a commit would compile what the later ones find compiled.
        compileall.compile_dir(folder / "src", quiet=1)
        compileall.compile_dir(folder / "benchmarks", quiet=1)
        yield folder
    finally:
        git(repository, "worktree", "remove", "--force", str(folder))


def git(repository: Path, *arguments: str) -> str:
    """What git prints."""
    done = subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def measure(tree: Path, benchmark: str, quick: bool, cores: frozenset[int]) -> dict[str, float]:
    """One measurement of one commit, on these cores, in a process that knows nothing of the other."""
    path = os.pathsep.join([str(tree / "benchmarks"), str(tree / "src")])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [
        "taskset", "--cpu-list", ",".join(map(str, sorted(cores))),
        sys.executable, "-P", str(PROBE), str(tree), benchmark, *(["--quick"] if quick else []),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"{benchmark} failed on {tree.name}:\n{done.stderr[-4000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


class Rows:
    """Every number of every measurement; in a file too, if one is given, which may hold those of an earlier run."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._lock = threading.Lock()
        kept = file.read_text().splitlines() if file is not None and file.exists() else []
        self.all: list[dict[str, Any]] = [json.loads(line) for line in kept]

    def has(self, **which: Any) -> bool:
        """Whether that measurement was made."""
        return any(which.items() <= row.items() for row in self.all)

    def add(self, found: dict[str, float], **which: Any) -> None:
        """Keep one measurement."""
        rows = [{**which, "number": number, "value": value} for number, value in found.items()]
        with self._lock:
            self.all.extend(rows)
            if self._file is not None:
                with self._file.open("a") as out:
                    out.write("".join(json.dumps(row) + "\n" for row in rows))


def alternate(
    trees: dict[str, Path], benchmarks: Sequence[str], pairs: int, quick: bool, rows: Rows, lanes: int = 1
) -> None:
    """Measure every pair of every benchmark; the order within a pair changes from pair to pair."""
    free: queue.SimpleQueue[frozenset[int]] = queue.SimpleQueue()
    for cores in split_cores(sorted(os.sched_getaffinity(0)), lanes):
        free.put(cores)

    def measure_pairs(benchmark: str) -> None:
        cores = free.get()
        try:
            for pair in range(pairs):
                for side in ("old", "new") if pair % 2 == 0 else ("new", "old"):
                    which = {"benchmark": benchmark, "pair": pair, "side": side}
                    if not rows.has(**which):
                        rows.add(measure(trees[side], benchmark, quick, cores), **which)
                print(f"{benchmark}: pair {pair + 1} of {pairs}", file=sys.stderr, flush=True)
        finally:
            free.put(cores)

    pool = concurrent.futures.ThreadPoolExecutor(lanes)
    try:
        for done in concurrent.futures.as_completed([pool.submit(measure_pairs, each) for each in benchmarks]):
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def split_cores(cores: Sequence[int], lanes: int) -> list[frozenset[int]]:
    """Equal parts of the cores, neighbours together; what is left over stays idle."""
    each = len(cores) // lanes
    if each < 1:
        raise SystemExit(f"--lanes must be <= {len(cores)}, the number of cores, not {lanes}")
    return [frozenset(cores[lane * each : (lane + 1) * each]) for lane in range(lanes)]


def compare(rows: Sequence[dict[str, Any]]) -> list[Comparison]:
    """The numbers that both commits have, pair by pair."""
    values: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for row in rows:
        sides = values.setdefault((row["benchmark"], row["number"]), {"old": {}, "new": {}})
        sides[row["side"]][row["pair"]] = row["value"]
    found = []
    for (benchmark, number), sides in values.items():
        pairs = sorted(sides["old"].keys() & sides["new"].keys())
        if not pairs:
            continue
        old, new = ([sides[side][pair] for pair in pairs] for side in ("old", "new"))
        losses = [loss(number, before, after) for before, after in zip(old, new, strict=True)]
        found.append(Comparison(benchmark, number, statistics.median(old), statistics.median(new), losses))
    return found


def loss(number: str, before: float, after: float) -> float:
    """By how much of itself a pair's number got worse: 0.05 is 5 % slower, or 5 % fewer in a second."""
    return 1 - after / before if number.endswith("_per_s") else after / before - 1


def shown(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """One row per number."""
    return [
        {
            "benchmark": each.benchmark,
            "number": each.number,
            "old": each.old,
            "new": each.new,
            "loss, median": f"{each.loss:+.1%}",
            "loss, range": f"{min(each.losses):+.1%} to {max(each.losses):+.1%}",
            "behind in": f"{sum(loss > 0 for loss in each.losses)} of {len(each.losses)} pairs",
            "": "**loss**" if each.flagged else "",
        }
        for each in found
    ]


def judge(found: Sequence[Comparison]) -> list[results.Verdict]:
    """One verdict per benchmark: its worst number."""
    verdicts = []
    whole = [each for each in found if not each.number.endswith(PARTS)]
    for benchmark in dict.fromkeys(each.benchmark for each in whole):
        worst = max((each for each in whole if each.benchmark == benchmark), key=lambda each: each.loss)
        value = f"{worst.loss:+.1%} ({worst.number})"
        verdicts.append(
            results.Verdict(f"largest median loss of {benchmark}", value, f"<= {LOSS:.0%}", not worst.flagged)
        )
    return verdicts


def kind_of(probe: str) -> str:
    """The benchmark that a probe is of; one of several loops is measured by a probe of its own."""
    return probe.partition(":")[0]


def main(arguments: list[str] | None = None, repository: Path = sources.ROOT) -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description="one commit's speed against another's, measured alternately")
    parser.add_argument("old", help="a revision")
    parser.add_argument("new", nargs="?", default="HEAD", help="another (HEAD)")
    kinds = list(dict.fromkeys(kind_of(name) for name in PROBES))
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds, help="benchmarks; else all")
    parser.add_argument("--pairs", type=int, help=f"measurements of each commit ({PAIRS}; {QUICK_PAIRS} with --quick)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works; writes no result")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, help="folder of the result, instead of benchmarks/results")
    parser.add_argument("--lanes", type=int, default=1, help="benchmarks at once, each on cores of its own (1)")
    parser.add_argument("--rows", type=Path, help="keep every measurement here, and go on from those in it")
    sources.add_options(parser)
    given = parser.parse_args(arguments)
    pairs = given.pairs or (QUICK_PAIRS if given.quick else PAIRS)
    for option, value in (("--pairs", pairs), ("--lanes", given.lanes)):
        if value < 1:
            parser.error(f"{option} must be >= 1, not {value}")
    name = "compare_commits" if given.only == kinds else f"compare_{'_'.join(given.only)}"
    probes = [probe for probe in PROBES if kind_of(probe) in given.only]
    of = sources.checked(given) if given.out is not None or not given.quick else None
    names = {"old": given.old, "new": given.new}
    commits = {side: git(repository, "rev-parse", "--short", f"{name}^{{commit}}") for side, name in names.items()}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-commits-")))
        trees = {
            side: stack.enter_context(checkout(repository, commit, folder / side)) for side, commit in commits.items()
        }
        kept = Rows(given.rows)
        alternate(trees, probes, pairs, given.quick, kept, given.lanes)
    rows = kept.all
    found = compare(rows)
    if given.json:
        print(json.dumps({**commits, "comparisons": msgspec.to_builtins(found), "rows": rows}))
    else:
        print(results.table(shown(found)))
    if of is not None:
        only = "" if given.only == kinds else f" --only {' '.join(given.only)}"
        command = f"python benchmarks/compare_commits.py {commits['old']} {commits['new']} --pairs {pairs}{only}"
        if given.lanes > 1:
            command += f" --lanes {given.lanes}"
        told = f"{notes(commits, pairs, given.lanes)}\n\n{results.table(shown(found))}"
        page = results.write(name, command, judge(found), rows, told, of, given.out or results.FOLDER)
        print(f"written to {page}", file=sys.stderr)


def notes(commits: dict[str, str], pairs: int, lanes: int) -> str:
    """What the numbers mean."""
    at_once = f"\n{lanes} benchmarks ran at once, each on cores of its own." if lanes > 1 else ""
    return f"""
Commit {commits["new"]} against {commits["old"]}, each measured by its own benchmarks (paceline's part alone) with its
own sources, alternately, {pairs} pairs. A loss is what a number got worse by: more time, or fewer in a second; negative
ones are gains. More than {LOSS:.0%} in the median is flagged. `old` and `new` are medians over all pairs; losses are
those of single pairs. Of a training loop, `ours` is what fetching a batch and stepping take, `model` the passes forward
and backward, which run no line of paceline's but a copy of each gradient: a loss that stands in `model` is the
machine's, not the commit's. With two workers `ours` holds waiting for the other.{at_once}
""".strip()


if __name__ == "__main__":
    main()
