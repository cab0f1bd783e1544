"""Which loops that people write train under paceline, and how many of their lines have to change?

    python benchmarks/scripts_table.py                   # all of tests/scripts; writes results/scripts.md and .json
    python benchmarks/scripts_table.py sgd gan --unclean # some of them; prints their rows, writes nothing

`tests/scripts/catalogue.py` lists the loops and what is expected of each. The original runs in this process, with the
data order of a run; so does the port alone, and model and optimizer must agree to the last bit. On workers the port
runs by the command line's own function; all commands fork their processes from one nursery.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import results
import sources
from paceline.engines.local import nursery

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support")]

import loop_runs  # noqa: E402 - it lies beside the tests, which use it too

from scripts.catalogue import LOOPS, Loop  # noqa: E402

COMMAND = "python benchmarks/scripts_table.py"
LOCAL, VIRTUAL = 4, 8
ORDERS = (0, 1, 2)  # seeds of data orders, under which the original's own score is looked at
LEAST = 25
SHOWN = 160  # characters of a problem that the table shows; the raw rows have all


def measure(loop: Loop, folder: Path) -> dict[str, Any]:
    """Run one loop everywhere."""
    changed = loop_runs.lines_changed(loop.original.read_text(), loop.port.read_text())
    row: dict[str, Any] = {"loop": loop.name, "kind": loop.kind, "lines changed": changed}
    begun = time.monotonic()
    originals = [loop_runs.run_original(loop, folder / f"original{seed}.pt", seed) for seed in ORDERS]
    scores = [float(each["score"]) for each in originals]
    row |= {"original's score": scores[0], "spread": max(scores) - min(scores), "allowed": loop.within}
    row["alone equal"] = alone(loop, folder / "alone.pt", originals[0])
    row[f"{LOCAL} local"] = on_workers(loop, folder / "local.pt", "local", LOCAL, loop.local, scores[0])
    row[f"{VIRTUAL} virtual"] = on_workers(loop, folder / "virtual.pt", "sim", VIRTUAL, loop.sim, scores[0])
    good = all(row[column].startswith(("yes", "refused")) for column in columns())
    row["as expected"] = "yes" if good else "no"
    row["seconds"] = time.monotonic() - begun
    return row


def columns() -> tuple[str, str, str]:
    """The columns that say how a loop did."""
    return "alone equal", f"{LOCAL} local", f"{VIRTUAL} virtual"


def alone(loop: Loop, result: Path, original: dict[str, Any]) -> str:
    """Whether the port by itself comes to the original's bits, and where not."""
    try:
        found = loop_runs.difference(original, loop_runs.run_port(loop, result))
    except Exception as error:  # noqa: BLE001 - a script may raise anything, and the row says what
        found = f"{type(error).__name__}: {error}"
    return f"no: {found}" if found else "yes"


def on_workers(loop: Loop, result: Path, engine: str, workers: int, expected: str, of_original: float) -> str:
    """Whether the port on workers does what is expected, with its score; if not, why."""
    code, said = loop_runs.run_on_workers(loop, result, engine, workers)
    said = said.replace(f"{ROOT}/", "")  # where this tree lies says nothing
    problem = loop_runs.unexpected(loop, expected, code, said, result, of_original)
    if problem is not None:
        return f"no: {problem}"
    return f"yes, {loop_runs.read(result)['score']:.4g}" if result.exists() else "refused, as expected"


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row as the table shows it: long texts cut, and no character that would end a cell."""
    return {
        name: value.replace("|", "/")[:SHOWN] if isinstance(value, str) else value
        for name, value in row.items()
        if name != "seconds"
    }


def verdicts_of(rows: Sequence[dict[str, Any]]) -> list[results.Verdict]:
    """The bars: enough loops, and each does what the catalogue expects."""
    good = [row for row in rows if row["as expected"] == "yes"]
    bad = [row["loop"] for row in rows if row["as expected"] != "yes"]
    told = f"{len(bad)} ({', '.join(bad)})" if bad else "0"
    return [
        results.Verdict("loops that do what the catalogue expects", str(len(good)), f">= {LEAST}", len(good) >= LEAST),
        results.Verdict("loops that do not", told, "= 0", not bad),
    ]


def main(given: Sequence[str] | None = None) -> int:
    """Run the loops and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("loops", nargs="*", help="names of loops; all, if none is named")
    parser.add_argument("--out", type=Path, help="folder of the result, instead of benchmarks/results")
    sources.add_options(parser)
    chosen = parser.parse_args(given)
    unknown = set(chosen.loops) - {loop.name for loop in LOOPS}
    if unknown:
        raise SystemExit(f"tests/scripts has no loop {', '.join(sorted(unknown))}")
    of = sources.checked(chosen, measured=(*sources.MEASURED, "tests"))
    rows = []
    with nursery.kept():
        for loop in [loop for loop in LOOPS if not chosen.loops or loop.name in chosen.loops]:
            with tempfile.TemporaryDirectory(prefix="paceline-scripts-") as folder:
                rows.append(measure(loop, Path(folder)))
            print(" · ".join(f"{name} {value}" for name, value in shown(rows[-1]).items()), flush=True)
    verdicts = verdicts_of(rows)
    if not chosen.loops:
        folder = chosen.out or results.FOLDER
        table = [shown(row) for row in rows]
        print(results.write("scripts", COMMAND, verdicts, table, NOTES, of, folder, details={"full": rows}))
    for verdict in verdicts:
        print(f"{'met   ' if verdict.passed else 'missed'} {verdict.name}: {verdict.value} (bar {verdict.bar})")
    return 0


NOTES = f"""
Every loop of `tests/scripts`: the plain PyTorch script in `originals/`, and its port. `lines changed` counts lines
added and removed between the two. `alone equal`: run by itself, the port saves the same model and optimizer state as
the original, to the last bit, given the same order of samples. `{LOCAL} local` and `{VIRTUAL} virtual`: the port under
`paceline run --workers {LOCAL}` and under `paceline run --engine sim --workers {VIRTUAL}` (the scenario uneven8), with
the strategy bsp, and the score it comes to.

On workers each has its share of the original's batch (`--batch-size`), so that an update takes as many samples as one
of the original's steps, and there are as many of them. What differs is which samples come together, as it does between
two seeds of the original. `spread` is the difference between the best and the worst score of the original under
{len(ORDERS)} orders of its data, and `allowed` how much worse than the original's a score on workers may be: more than
that spread, and little beside what a model gains in training. Loops that make their own batches (nanogpt, actor_critic,
stream_generator) do so on every worker, so that an update takes more samples than the original's; their originals know
no other order. In target_loss each worker averages the loss of its own smaller batches, and the first to go below the
target ends training for all.
"""


if __name__ == "__main__":
    sys.exit(main())
