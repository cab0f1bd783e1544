"""What does the live view cost? The same run in a terminal with the view and with `--quiet`.

    python benchmarks/bench_live_view.py              # writes results/live_view.md and .json, ten minutes
    python benchmarks/bench_live_view.py --quick      # seconds; writes nothing

Each run has a terminal of its own, which is read as fast as it is written to. A fixed number of samples is trained. The
process that draws is the launcher; it tells at its end how much processor time it took itself, and how much all
processes of the run that it has waited for: nursery, server, workers. It has imported torch before its time is counted:
that takes a second and differs from one time to the next by more than the view costs.
"""

import argparse
import fcntl
import json
import os
import pty
import select
import statistics
import struct
import sys
import tempfile
import termios
import time
from pathlib import Path

import msgspec

import results
import sources
from results import Verdict

MOST = 0.01  # of the run's processor time
ROWS, COLUMNS = 40, 120
REPEATS = 3
COMMAND = "python benchmarks/bench_live_view.py"
SCRIPT = """
import sys
import torch
import paceline

session = paceline.init()
torch.manual_seed(0)
size, epochs = map(int, sys.argv[1:])
data = torch.utils.data.TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
model = torch.nn.Sequential(torch.nn.Linear(64, size), torch.nn.ReLU(), torch.nn.Linear(size, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.prepare(model, optimizer)
for x, y in session.batches(data, batch_size=32, epochs=epochs):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    session.report(loss=loss)
    optimizer.step()
"""
# The launcher as the command line is; at its end it leaves its times in a file.
LAUNCHER = """
import json, os, sys, time
from pathlib import Path
import torch, paceline.launching
from paceline.cli import main
place = Path(sys.argv.pop(1))
before = time.process_time()
code = main(sys.argv[1:])
mine, others = time.process_time() - before, os.times()
place.write_text(json.dumps({"draws_s": mine, "others_s": others.children_user + others.children_system}))
sys.exit(code)
"""
NOTES = f"""\
A run on this machine, by one thread in each process, with a terminal of {COLUMNS} columns and {ROWS} rows that is read
at once; drawing by the terminal itself is not counted. `draws_s` is the processor time of the launcher, which draws,
torch's import left out, and `others_s` that of all other processes of the run. Cases take turns with and without the
view. `pushes/s` says how much there was to tell: large models push seldom, small ones as often as they can.

The bar holds the median of what the launcher takes more with the view than without it, over the median of all that the
run without it takes. The difference of the other processes is listed too: it holds what the server does to tell the
launcher, and how much one run differs from the next, which is more than the bar.
"""


class Case(msgspec.Struct, frozen=True):
    """One run: so many workers, a hidden layer of this size, so many epochs."""

    name: str
    workers: int
    hidden: int
    epochs: int


FULL = (Case("2 workers, large model", 2, 4096, 60), Case("4 workers, small model", 4, 256, 220),
        Case("8 workers, small model", 8, 256, 220))  # fmt: skip
QUICK = (Case("2 workers, quick", 2, 256, 4),)


class Measured(msgspec.Struct, frozen=True):
    """One run."""

    case: str
    view: bool
    repeat: int
    seconds: float
    draws_s: float
    others_s: float
    pushes: int
    shown_bytes: int


def run(case: Case, repeat: int, *, view: bool, folder: Path) -> Measured:
    """Run once in a terminal; return what it took."""
    (folder / "train.py").write_text(SCRIPT)
    told = folder / "times.json"
    told.unlink(missing_ok=True)
    arguments = ["run", "--workers", str(case.workers), "--strategy", "ssp", "--threads", "1",
                 "--evaluate-every", "off", "--journal", "journal.jsonl", *([] if view else ["--quiet"]),
                 "train.py", str(case.hidden), str(case.epochs)]  # fmt: skip
    began = time.monotonic()
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["TERM"] = "xterm-256color"
        os.execv(sys.executable, [sys.executable, "-c", LAUNCHER, str(told), *arguments])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    shown = drained(terminal)
    _, status = os.waitpid(pid, 0)
    seconds = time.monotonic() - began
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"the run failed:\n{shown.decode(errors='replace')[-2000:]}")
    times = json.loads(told.read_text())
    report = json.loads(next(folder.glob("runs/*/report.json")).read_text())
    for each in folder.glob("runs/*"):
        each.rename(folder / f"done-{time.monotonic_ns()}")
    return Measured(
        case.name, view, repeat, seconds, times["draws_s"], times["others_s"], report["pushes"], len(shown)
    )  # fmt: skip


def drained(terminal: int) -> bytes:
    """Read all that is shown until the program ends."""
    shown = bytearray()
    while True:
        if select.select([terminal], [], [], 1.0)[0]:
            try:
                more = os.read(terminal, 1 << 16)
            except OSError:  # the other side is closed
                break
            if not more:
                break
            shown += more
    os.close(terminal)
    return bytes(shown)


def shares(found: list[Measured]) -> dict[str, tuple[float, float]]:
    """By case: what the view costs the process that draws, and all others, over the processor time without it."""
    told = {}
    for case in dict.fromkeys(each.case for each in found):
        with_view = [each for each in found if each.case == case and each.view]
        without = [each for each in found if each.case == case and not each.view]

        def middle(runs: list[Measured], name: str) -> float:
            return statistics.median(getattr(each, name) for each in runs)

        whole = middle(without, "draws_s") + middle(without, "others_s")
        told[case] = (
            (middle(with_view, "draws_s") - middle(without, "draws_s")) / whole,
            (middle(with_view, "others_s") - middle(without, "others_s")) / whole,
        )
    return told


def judge(found: list[Measured]) -> list[Verdict]:
    """One bar for each case."""
    return [
        Verdict(f"{case}: of the run's processor time for the view", f"{draws:.2%}", f"<= {MOST:.0%}", draws <= MOST)
        for case, (draws, _) in shares(found).items()
    ]


def rows(found: list[Measured]) -> list[dict[str, object]]:
    """A row for each run."""
    return [
        {
            "case": each.case, "view": "yes" if each.view else "no", "repeat": each.repeat,
            "seconds": round(each.seconds, 2), "draws_s": round(each.draws_s, 3), "others_s": round(each.others_s, 2),
            "pushes/s": round(each.pushes / each.seconds), "shown kB": round(each.shown_bytes / 1e3),
        }
        for each in found
    ]  # fmt: skip


def main() -> int:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a short run, to see that it works; writes no result")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of each case with and without the view")
    parser.add_argument("--out", type=Path, help="folder of the result, instead of benchmarks/results")
    sources.add_options(parser)
    given = parser.parse_args()
    of = sources.checked(given) if not given.quick or given.out else None
    found: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="paceline-live-view-") as folder:
        for repeat in range(1 if given.quick else given.repeats):
            for case in QUICK if given.quick else FULL:
                for view in (False, True):
                    found.append(run(case, repeat, view=view, folder=Path(folder)))
                    print(rows(found)[-1], flush=True)
    verdicts = judge(found)
    for each in verdicts:
        print(f"{each.name}: {each.value} ({each.bar}): {'met' if each.passed else 'MISSED'}")
    if of is not None:
        others = ", ".join(f"{case}: {other:+.1%}" for case, (_, other) in shares(found).items())
        notes = f"{NOTES}\nWhat all other processes took more with the view: {others}.\n"
        print(results.write("live_view", COMMAND, verdicts, rows(found), notes, of, given.out or results.FOLDER))
    return 0 if all(each.passed for each in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
