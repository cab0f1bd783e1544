"""What a person sees of a run's processes: names in `ps`, each warning once, and a debugger where one is possible."""

import fcntl
import os
import pty
import re
import select
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
from warm_python import Popen

from paceline.cli import main
from paceline.server.waits import PATIENCE_S

Run = Callable[..., list[str]]
pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.slow]

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


REAL = ["run", "--threads", "1", "--evaluate-every", "off"]


def write(folder: Path, inside: str) -> None:
    (folder / "train.py").write_text(SCRIPT.format(inside=inside))


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """The lines of a run without a terminal."""

    def lines(inside: str, *options: str) -> list[str]:
        write(folder, inside)
        assert main([*REAL, *options, "train.py"]) == 0
        out, err = capsys.readouterr()
        return [*out.splitlines(), *err.splitlines()]

    return lines


def control_terminal() -> None:
    """Make standard input the terminal of this process, which leads its session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def typed(warm: type[Popen], folder: Path, inside: str, lines: list[str], *options: str) -> tuple[int, str]:
    """Run it in a terminal, and answer each prompt of a debugger with the next line."""
    write(folder, inside)
    program = [sys.executable, "-m", "paceline", *REAL, *options, "train.py"]
    terminal, its = pty.openpty()
    process = warm(program, stdin=its, stdout=its, stderr=its, preexec_fn=control_terminal)
    os.close(its)
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
        code = process.wait()
    return code, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode(errors="replace")).replace("\r", "")


@pytest.mark.parametrize("start", ["nursery", "fresh"])
def test_processes_are_named_and_have_torchruns_variables(run: Run, start: str) -> None:
    inside = (
        "import os; print('torchrun', *(os.environ[name] for name in ('RANK', 'WORLD_SIZE')), flush=True); "
        "print('names', *(pathlib.Path(f'/proc/self/{f}').read_text().strip(chr(0)).strip() "
        "for f in ('comm', 'cmdline')), flush=True)"
    )
    lines = run(inside, "--workers", "2", "--start", start)
    said = {line for line in lines if " names " in line}
    assert said == {f"[worker {n}] names paceline:w{n} paceline: worker {n}" for n in (0, 1)}
    assert {line for line in lines if " torchrun " in line} == {f"[worker {n}] torchrun {n} 2" for n in (0, 1)}


def test_a_warning_of_all_workers_is_shown_once_and_is_in_every_log(run: Run) -> None:
    inside = "warnings.warn('all say this'); session.worker == 1 and warnings.warn('only one says this')"
    lines = run(inside, "--workers", "3")
    assert sum("UserWarning: all say this" in line for line in lines) == 1
    (only,) = (line for line in lines if "UserWarning: only one says this" in line)
    assert only.startswith("[worker 1] train.py:")
    (logs,) = Path("runs").glob("*/logs")
    assert all("UserWarning: all say this" in (logs / f"worker-{n}.log").read_text() for n in range(3))


def test_a_warning_of_a_process_that_a_worker_starts_is_not_lost(run: Run) -> None:
    inside = "import os; child = os.fork(); child or (warnings.warn('of a fork'), os._exit(0)); os.waitpid(child, 0)"
    lines = run(inside, "--workers", "1")
    assert sum("UserWarning: of a fork" in line for line in lines) == 1
    assert f"[worker 0] {ENDED}" in lines


@pytest.mark.parametrize(
    ("lines", "code", "wanted"),
    [(["p number * 1000 + 77", "c"], 0, ["\n2077\n", f"[worker 0] {ENDED}"]), (["q"], 1, ["BdbQuit"])],
)
def test_a_debugger_works_on_the_terminal_of_the_only_worker(
    folder: Path, warm: type[Popen], lines: list[str], code: int, wanted: list[str]
) -> None:
    ended, shown = typed(warm, folder, "breakpoint()", lines, "--workers", "1")
    assert ended == code, shown
    assert re.search(r"train\.py\(1\d\)<module>\(\)", shown)
    assert [text for text in wanted if text not in shown] == []


def test_several_workers_in_a_terminal_say_in_one_line_why_there_is_no_debugger(
    folder: Path, warm: type[Popen]
) -> None:
    code, shown = typed(
        warm,
        folder,
        "optimizer.step(); ((model(x) - y) ** 2).mean().backward(); breakpoint()",
        [],
        "--workers",
        "2",
        "-q",
    )
    assert code == 0, shown
    assert shown.count("only the first step of a batch") == 1  # as it came, and not in the report once more
    flat = " ".join(shown.split())
    assert flat.count("breakpoint() is ignored: 2 workers share one terminal; run with --workers 1 in a terminal") == 1
    assert shown.count(ENDED) == 2


def test_without_a_terminal_a_line_says_so(run: Run) -> None:
    (said,) = (line for line in run("breakpoint()", "--workers", "1") if "breakpoint()" in line)
    assert said.startswith("[worker 0] paceline: WARNING: breakpoint() is ignored: this process has no terminal; run")
    assert "`python train.py`" in said
    assert "PYTHONBREAKPOINT" in said


@pytest.mark.parametrize(("chosen", "said"), [("0", 0), ("own_debugger.stop", 2)])
def test_a_debugger_of_ones_own_is_respected(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch, chosen: str, said: int
) -> None:
    (folder / "own_debugger.py").write_text("def stop(): print('my own debugger', flush=True)\n")
    monkeypatch.setenv("PYTHONBREAKPOINT", chosen)
    lines = run("breakpoint()", "--workers", "2")
    assert sum("my own debugger" in line for line in lines) == said
    assert not any("is ignored" in line for line in lines)


def test_a_worker_that_does_not_come_is_named_while_the_others_wait(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = f"import time; session.worker == 1 and time.sleep({PATIENCE_S + 3})\n"
    (folder / "train.py").write_text(SCRIPT.format(inside="pass").replace("model = torch", f"{late}model = torch", 1))
    assert main([*REAL, "--workers", "2", "train.py"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "waiting for worker 1 " in line]
    assert said == [
        "paceline: waiting for worker 1 to call prepare(): the script imports, loads data or makes its model"
    ]


def test_a_run_is_watched_as_it_goes_on_and_prints_stay_whole(folder: Path, warm: type[Popen]) -> None:
    slow = "import time; [print(f'word {number}', flush=True) or time.sleep(0.3) for number in range(5)]"
    code, shown = typed(warm, folder, slow, [], "--workers", "2", "--strategy", "ssp:staleness=0")
    assert code == 0, shown
    assert re.search(r"ssp:staleness=0 · local · 2 workers  \d+\.\d s · version \d+", shown)
    assert re.search(r"\b0 (works|waits) +\d+", shown)
    for worker in (0, 1):
        assert [shown.count(f"[worker {worker}] word {number}\n") for number in range(5)] == [1] * 5
    assert "last reason" not in shown.split("updates ")[-1]  # the report comes last, with nothing of the view in it
