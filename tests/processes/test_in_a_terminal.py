"""What a person sees of a run's processes: names in `ps`, each warning once, and a debugger where one is possible."""

import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from paceline.server.waits import PATIENCE_S

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.slow, pytest.mark.fresh]

SCRIPT = """
import logging, pathlib, sys, warnings
import torch
import paceline

session = paceline.init()
data = torch.utils.data.TensorDataset(torch.ones(32, 2), torch.ones(32, 1))
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.prepare(model, optimizer)
for number, (x, y) in enumerate(session.batches(data, batch_size=4, epochs=2)):
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    session.report(loss=loss)
    if number == 2:
        {inside}
    optimizer.step()
print("came to the end", flush=True)
"""
ENDED = "came to the end"


def command(folder: Path, inside: str, *options: str) -> list[str]:
    (folder / "train.py").write_text(SCRIPT.format(inside=inside))
    return [sys.executable, "-m", "paceline", "run", "--threads", "1", "--evaluate-every", "off", *options, "train.py"]


def run(folder: Path, inside: str, *options: str, environment: Mapping[str, str] | None = None) -> list[str]:
    """The lines of a run without a terminal."""
    done = subprocess.run(
        command(folder, inside, *options), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env={**os.environ, **(environment or {})}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


def typed(folder: Path, inside: str, lines: list[str], *options: str) -> tuple[int, str]:
    """Run it in a terminal, and answer each prompt of a debugger with the next line."""
    program = command(folder, inside, *options)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(program[0], program)
    shown, prompts = b"", 0
    try:
        while True:
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    more = os.read(terminal, 65536)
                except OSError:  # the other side is closed
                    break
                if not more:
                    break
                shown += more
            if shown.count(b"(Pdb) ") > prompts and lines:
                prompts += 1
                os.write(terminal, f"{lines.pop(0)}\n".encode())
    finally:
        os.close(terminal)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode(errors="replace")).replace("\r", "")


@pytest.mark.parametrize("start", ["nursery", "fresh"])
def test_processes_are_named(folder: Path, start: str) -> None:
    inside = (
        "print('names', *(pathlib.Path(f'/proc/self/{f}').read_text().strip(chr(0)).strip() "
        "for f in ('comm', 'cmdline')), flush=True)"
    )
    lines = run(folder, inside, "--workers", "2", "--start", start)
    said = {line for line in lines if " names " in line}
    assert said == {f"[worker {n}] names paceline:w{n} paceline: worker {n}" for n in (0, 1)}


def test_a_warning_of_all_workers_is_shown_once_and_is_in_every_log(folder: Path) -> None:
    inside = "warnings.warn('all say this'); session.worker == 1 and warnings.warn('only one says this')"
    lines = run(folder, inside, "--workers", "3")
    assert sum("UserWarning: all say this" in line for line in lines) == 1
    (only,) = (line for line in lines if "UserWarning: only one says this" in line)
    assert only.startswith("[worker 1] train.py:")
    (logs,) = Path("runs").glob("*/logs")
    assert all("UserWarning: all say this" in (logs / f"worker-{n}.log").read_text() for n in range(3))


def test_a_warning_of_a_process_that_a_worker_starts_is_not_lost(folder: Path) -> None:
    inside = "import os; child = os.fork(); child or (warnings.warn('of a fork'), os._exit(0)); os.waitpid(child, 0)"
    lines = run(folder, inside, "--workers", "1")
    assert sum("UserWarning: of a fork" in line for line in lines) == 1
    assert f"[worker 0] {ENDED}" in lines


def test_a_debugger_works_on_the_terminal_of_the_only_worker(folder: Path) -> None:
    code, shown = typed(folder, "breakpoint()", ["p number * 1000 + 77", "c"], "--workers", "1")
    assert code == 0, shown
    assert re.search(r"train\.py\(1\d\)<module>\(\)", shown)
    assert "\n2077\n" in shown
    assert f"[worker 0] {ENDED}" in shown


def test_leaving_the_debugger_ends_the_run(folder: Path) -> None:
    code, shown = typed(folder, "breakpoint()", ["q"], "--workers", "1")
    assert code == 1, shown
    assert "BdbQuit" in shown


def test_several_workers_in_a_terminal_say_in_one_line_why_there_is_no_debugger(folder: Path) -> None:
    code, shown = typed(folder, "breakpoint()", [], "--workers", "2", "-q")
    assert code == 0, shown
    flat = " ".join(shown.split())
    assert flat.count("breakpoint() is ignored: 2 workers share one terminal; run with --workers 1 in a terminal") == 1
    assert shown.count(ENDED) == 2


def test_without_a_terminal_a_line_says_so(folder: Path) -> None:
    (said,) = (line for line in run(folder, "breakpoint()", "--workers", "1") if "breakpoint()" in line)
    assert said.startswith("[worker 0] paceline: WARNING: breakpoint() is ignored: this process has no terminal; run")
    assert "`python train.py`" in said
    assert "PYTHONBREAKPOINT" in said


@pytest.mark.parametrize(("chosen", "said"), [("0", 0), ("own_debugger.stop", 2)])
def test_a_debugger_of_ones_own_is_respected(folder: Path, chosen: str, said: int) -> None:
    (folder / "own_debugger.py").write_text("def stop(): print('my own debugger', flush=True)\n")
    environment = {"PYTHONBREAKPOINT": chosen}
    lines = run(folder, "breakpoint()", "--workers", "2", environment=environment)
    assert sum("my own debugger" in line for line in lines) == said
    assert not any("is ignored" in line for line in lines)


def test_a_worker_that_does_not_come_is_named_while_the_others_wait(folder: Path) -> None:
    script = SCRIPT.format(inside="pass")
    late = f"import time; session.worker == 1 and time.sleep({PATIENCE_S + 3})\n"
    written = command(folder, "pass", "--workers", "2")
    (folder / "train.py").write_text(script.replace("model = torch", f"{late}model = torch", 1))
    done = subprocess.run(written, capture_output=True, text=True, check=True)
    said = [line for line in done.stderr.splitlines() if "waiting for worker 1 " in line]
    assert said == [
        "paceline: waiting for worker 1 to call prepare(): the script imports, loads data or makes its model"
    ]
