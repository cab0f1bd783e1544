"""`paceline run` on real processes: streams, exit codes, and what is said about what was assumed."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from warm_python import Popen

from paceline.cli import main
from paceline.core.errors import OptionError

pytestmark = [pytest.mark.usefixtures("nothing_left")]

SCRIPT = """
import sys
import torch
import paceline

session = paceline.init()
data = torch.utils.data.TensorDataset(torch.ones(64, 2), torch.ones(64, 1))
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=session.option("lr", 0.01))
session.prepare(model, optimizer, evaluate=lambda model: {{"loss": float(model.weight.detach().abs().sum())}})
for number, (x, y) in enumerate(session.batches(data, batch_size=4, epochs={epochs})):
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    session.report(loss=loss)
    {inside}
    optimizer.step()
print("arguments", *sys.argv[1:])
"""
REAL = ["run", "--workers", "2", "--threads", "1"]


def script(folder: Path, epochs: str = "2", inside: str = "pass") -> str:
    (folder / "train.py").write_text(SCRIPT.format(epochs=epochs, inside=inside))
    return "train.py"


@pytest.mark.slow
def test_a_script_runs_on_two_processes_and_json_is_the_report(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*REAL, "--json", "--set", "lr=0.1", script(folder), "--depth", "3"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert (report["engine"], report["workers"], report["samples_used"]) == ("local", 2, 128)
    assert report["metrics"]["loss"] > 0
    assert sorted(err.splitlines()) == ["[worker 0] arguments --depth 3", "[worker 1] arguments --depth 3"]
    runs = Path(report["journal"]).parent
    assert json.loads((runs / "report.json").read_text()) == report
    assert main(["replay", report["journal"]]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "said"), [([], True), (["--json"], False), (["--quiet"], False)])
def test_a_start_is_announced_before_anything_is_loaded(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str], said: bool
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise OptionError("stopped")

    monkeypatch.setattr("paceline.launching.launch", stop)
    assert main([*REAL, *flags, script(folder)]) == 2
    assert capsys.readouterr().err.splitlines() == ["paceline: starting 2 workers"] * said + ["paceline: stopped"]


def test_the_command_line_loads_torch_after_it_has_started_a_nursery(folder: Path) -> None:
    code = (
        "import sys; from paceline.cli import main; from paceline.engines.local import nursery\n"
        "def prepare(): print('torch' in sys.modules, 'numpy' in sys.modules); raise SystemExit\n"
        f"nursery.prepare = prepare; main({[*REAL, script(folder)]!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("False False\n", "paceline: starting 2 workers\n")


@pytest.mark.slow
def test_a_task_needs_nothing_but_its_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--max-versions", "2", "--evaluate-every", "off"]) == 0
    out, err = capsys.readouterr()
    assert "bsp · local · " in out
    assert "no --workers given: training on " in err
    assert "no script and no --task given: training the built-in task digits" in err


@pytest.mark.slow
def test_a_script_that_raises_shows_its_traceback_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inside = "1 / (session.worker - 1 if number == 2 else 1)"
    assert main([*REAL, "-q", script(folder, inside=inside)]) == 1
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith('  File "train.py", line 16')
    assert lines[-2] == "ZeroDivisionError: division by zero"
    assert lines[-1].startswith("paceline: the script raised ZeroDivisionError in worker 1, batch 3")


@pytest.mark.slow
def test_an_option_that_nobody_asks_for_is_bad_input(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*REAL, "-q", "--set", "rate=1", script(folder)]) == 2
    assert "--set rate: the script asks for no such option" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_with_the_report_so_far(folder: Path, warm: type[Popen], number: signal.Signals) -> None:
    inside = "number == 3 and print('under way', file=sys.stderr, flush=True)"
    command = [sys.executable, "-m", "paceline", *REAL, "--json", script(folder, "10**6", inside)]
    with warm(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "under way" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(number)
        output, rest = process.communicate()
    assert process.returncode == 130, rest
    assert json.loads(output)["versions"] > 0
    assert "Traceback" not in rest
    assert [json.loads(each.read_text())["versions"] > 0 for each in folder.glob("runs/*/report.json")] == [True]
    (lines,) = folder.glob("runs/*/journal.jsonl")
    assert '"interrupted"' in lines.read_text().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "sim", "--respawn"], "--respawn is not supported by the sim engine"),
        (["--resume", "nowhere"], "--resume: nowhere"),
        (["--transport", "pigeon"], "--transport: must be one of shm, zeromq, not 'pigeon'"),
        (["--strategy", "fastest_k:k=3"], r"k must be <= the number of workers \(2\), not 3"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    given = [] if "sim" in arguments else ["--workers", "2"]
    assert main(["run", "-q", *given, *arguments, "--task", "digits"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert re.search(message, err), err
