"""How long is it from `paceline run --workers 4 train.py` to the first batch?

    python benchmarks/bench_startup.py                 # writes results/startup.md and .json
    python benchmarks/bench_startup.py --quick --json  # one run of each kind, one JSON object, writes nothing

The script imports torch and paceline alone. Every run is a command of its own; the time is that from its start to the
moment a line of its output is read, as somebody in front of the terminal would see it. Runs with a nursery and with
fresh interpreters take turns. The first run of all, which finds files not yet cached, is not counted.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from contenders import bars
from contenders.bars import Bar

WORKERS = 4
REPEATS = 10
BOUND_S = 4.0
STARTS = ("nursery", "fresh")
MOMENTS = (
    "interpreter_s",
    "first_line_s",
    "nursery_begun_s",
    "nursery_ready_s",
    "script_begun_s",
    "prepared_s",
    "first_batch_s",
    "total_s",
)

SCRIPT = """
import time
begun = time.monotonic()
import torch
import paceline

session = paceline.init()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(512, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
session.prepare(model, optimizer)
prepared = time.monotonic()
for number, (x, y) in enumerate(session.batches(data, batch_size=16, epochs=1)):
    if number == 0:
        print("first batch", begun, prepared, flush=True)
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    session.report(loss=loss)
    optimizer.step()
"""

# What the launcher does on the way, told by the launcher itself: each moment on a line of standard error.
TRACED = """
import sys, time
def tell(what): print("moment", what, time.monotonic(), file=sys.stderr, flush=True)
tell("interpreter")
from paceline.cli import main
from paceline.engines.local import nursery
def told(kind, name, before=None, after=None):
    plain = getattr(kind, name)
    def wrapped(*given, **named):
        if before: tell(before)
        found = plain(*given, **named)
        if after: tell(after)
        return found
    setattr(kind, name, wrapped)
told(nursery, "prepare", before="nursery begun")
told(nursery.Nursery, "listen", after="nursery ready")
sys.exit(main(sys.argv[1:]))
"""


def measure(folder: Path, start: str, repeat: int) -> dict[str, Any]:
    """One command, from its start to the end."""
    arguments = ["run", "--workers", str(WORKERS), "--start", start, "--runs-dir", str(folder / "runs"), "train.py"]
    begun = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", TRACED, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as command:
        row: dict[str, Any] = {"start": start, "repeat": repeat, "load": os.getloadavg()[0], **dict.fromkeys(MOMENTS)}
        said = []
        for line in command.stdout or ():
            said.append(line)
            note(row, line, begun, time.monotonic())
    row["total_s"] = time.monotonic() - begun
    if command.returncode or row["first_batch_s"] is None:
        raise SystemExit(f"the run ended with {command.returncode} and said\n{''.join(said)}")
    return row


def note(row: dict[str, Any], line: str, begun: float, now: float) -> None:
    """What this line of output says about the time."""
    words = line.split()
    if line.startswith("moment"):
        row["_".join(words[1:-1]) + "_s"] = float(words[-1]) - begun
    elif "starting" in words:
        row["first_line_s"] = now - begun
    elif "first batch" in line and row["first_batch_s"] is None:
        row["first_batch_s"] = now - begun
        row["script_begun_s"], row["prepared_s"] = (float(word) - begun for word in words[-2:])


def judge(rows: list[dict[str, Any]]) -> list[Bar]:
    """One bar for each thing promised."""

    def middle(start: str, column: str) -> float:
        return float(statistics.median(row[column] for row in rows if row["start"] == start))

    ours, fresh = (middle(start, "first_batch_s") for start in STARTS)
    return [
        Bar("first_batch_s", ours, BOUND_S, False, f"seconds from the command to the first batch, {WORKERS} workers"),
        Bar("fresh_over_nursery", fresh / ours, 1.0, True, "the same with fresh interpreters, over it"),
        Bar("first_line_s", middle("nursery", "first_line_s"), 1.0, False, "seconds to the first line on the terminal"),
    ]


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    given = bars.parser("from the command to the first batch").parse_args(arguments)
    options = bars.asked(given, REPEATS)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        measure(folder, "nursery", 0)
        for repeat in range(options.repeats):
            for start in STARTS if repeat % 2 else reversed(STARTS):
                rows.append(measure(folder, start, repeat))
    bars.tell("startup", options, judge(rows), rows, NOTES)


NOTES = f"""
`paceline run --workers {WORKERS} train.py` on a script that imports torch and paceline alone: a server,
{WORKERS} workers and an evaluator. Seconds since the command was started, read from its output as it came; files are
cached. `nursery` imports torch once and forks the processes, `fresh` has each import it for itself.

Where the time goes, in the order of the columns: `interpreter` runs, the first line is shown, the nursery is begun (it
imports torch while the launcher does the same), the nursery is ready, the first worker's script begins, it is prepared
(its model is shared with the server), the first batch is there once all workers and the evaluator are prepared. `load`
is the machine's load average of the last minute: beside other work all of it takes longer.
"""


if __name__ == "__main__":
    main()
