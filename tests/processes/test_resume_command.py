"""A run that is interrupted by Ctrl-C leaves a checkpoint, and `paceline resume` goes on with it."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from warm_python import Popen

from paceline.cli import main
from paceline.cli.run_command import settle
from paceline.core.errors import OptionError
from paceline.records import run_file
from paceline.server.checkpoint import files as checkpoint

pytestmark = [pytest.mark.usefixtures("nothing_left")]

SCRIPT = """
import pathlib, sys, time
import torch
import paceline


class Count:
    number = 0
    def state_dict(self): return {"number": self.number}
    def load_state_dict(self, state): self.number = state["number"]


session = paceline.init()
generator = torch.Generator().manual_seed(3)
x = torch.randn(64, 4, generator=generator)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=session.option("lr", 0.01), momentum=0.9)
session.prepare(model, optimizer)
torch.manual_seed(session.worker)
count = Count()
session.keep("count", count)
for x, y in session.batches(data, batch_size=4, epochs=20):
    optimizer.zero_grad()
    (((model(x) - y) ** 2).mean()).backward()
    count.number += 1
    if count.number == 20 and sys.argv[1] == "slowly" and not pathlib.Path("hurry").exists():
        pathlib.Path("under way").touch()
        time.sleep(float(sys.argv[2]))
    if sys.argv[1] == "slowly" and not pathlib.Path("hurry").exists():
        time.sleep(0.05)
    optimizer.step()
print("made", count.number)
"""
REAL = ["run", "--workers", "2", "--threads", "1", "--evaluate-every", "off"]


def pressed(press: Callable[[], None], presses: int) -> None:
    """Press Ctrl-C once the script is under way, and again where asked to."""
    while not Path("under way").exists():
        time.sleep(0.02)
    for _ in range(presses):
        press()
        time.sleep(0.5)  # two signals of one moment are one


def interrupted(warm: type[Popen], folder: Path, *options: str) -> tuple[int, str]:
    """Press Ctrl-C on a command while it trains; return the exit code and what was said."""
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline", *REAL, *options, "train.py", "slowly", "0"]
    with warm(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        pressed(lambda: process.send_signal(signal.SIGINT), 1)
        _, said = process.communicate()
    return process.returncode, said


def interrupted_here(folder: Path, presses: int) -> int:
    """Press Ctrl-C on this process while it trains with workers that hang; return the exit code."""
    (folder / "train.py").write_text(SCRIPT)
    here = threading.get_ident()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    presser = threading.Thread(target=pressed, args=(lambda: signal.pthread_kill(here, signal.SIGINT), presses))
    presser.start()
    try:
        return main([*REAL, "train.py", "slowly", "1000"])
    finally:
        presser.join()
        signal.signal(signal.SIGINT, before)


def model_of(run: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(run / "model.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [[], ["--checkpoint-every", "7v"], ["--strategy", "ssp:staleness=1"], ["--strategy", "gossip"]]
)
def test_an_interrupted_run_goes_on_without_any_option_as_if_nothing_had_happened(
    folder: Path, capsys: pytest.CaptureFixture[str], warm: type[Popen], options: list[str]
) -> None:
    code, said = interrupted(warm, folder, "--set", "lr=0.02", *options)
    assert code == 130, said
    (run,) = Path("runs").iterdir()
    assert f"paceline: to go on: paceline resume {run}" in said.splitlines()
    newest = checkpoint.newest(run)
    assert newest is not None
    assert checkpoint.read(newest).workers == [0, 1]  # their own states are in it
    Path("hurry").touch()
    assert main(["resume", run.name]) == 0
    err = capsys.readouterr().err
    assert f"going on with {run}: {Path('train.py').resolve()} on 2 workers" in err
    assert "instead of" not in err
    (resumed,) = (path for path in Path("runs").iterdir() if path != run)
    assert run_file.load(resumed).settings == run_file.load(run).settings
    if options[:1] == ["--strategy"]:
        return  # the order of its updates is another every time
    assert main([*REAL, "-q", "--runs-dir", "whole", "--set", "lr=0.02", "train.py", "fast"]) == 0
    (whole,) = Path("whole").iterdir()
    assert all(torch.equal(value, model_of(resumed)[key]) for key, value in model_of(whole).items())
    made = [line for line in capsys.readouterr().out.splitlines() if " made " in line]
    assert len(made) == 2


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_the_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert interrupted_here(folder, presses=2) == 130
    said = capsys.readouterr().err
    assert "once more ends it at once" in said
    assert "Traceback" not in said
    (run,) = Path("runs").iterdir()
    assert checkpoint.newest(run) is None


@pytest.mark.slow
def test_a_checkpoint_is_written_though_workers_do_not_come_to_their_next_update(folder: Path) -> None:
    assert interrupted_here(folder, presses=1) == 130
    (run,) = Path("runs").iterdir()
    newest = checkpoint.newest(run)
    assert newest is not None
    assert checkpoint.read(newest).workers == []


@pytest.mark.slow
def test_options_given_on_top_replace_those_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train.py").write_text(SCRIPT)
    first = [*REAL, "-q", "--max-versions", "10", "--checkpoint-every", "5v", "--set", "lr=0.02", "train.py", "fast"]
    assert main(first) == 0
    (run,) = Path("runs").iterdir()
    capsys.readouterr()
    newest = checkpoint.newest(run)
    assert newest is not None
    assert main(["resume", str(newest), "--max-versions", "15", "--set", "lr=0.03"]) == 0
    out, err = capsys.readouterr()
    assert "15 versions" in out
    assert "paceline: --max-versions 15 instead of 10" in err.splitlines()
    assert "paceline: --set lr=0.03 instead of lr=0.02" in err.splitlines()
    assert main(["resume", str(run), "--strategy", "asp"]) == 2
    assert "was trained under bsp, not asp: leave --strategy out" in capsys.readouterr().err


def test_a_run_that_cannot_be_resumed_says_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: str) -> str:
        assert main(["resume", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "there is no run 'nix', neither here nor in runs; runs holds no runs" in refused("nix")
    run = Path("runs/20260102-030405-bsp")
    run.mkdir(parents=True)
    assert "there is no run '20260102-030405-asp', neither here nor in runs; did you mean" in refused(
        "20260102-030405-asp"
    )
    assert "has no run.json, so its script and options are not known" in refused(run.name)
    (run / "run.json").write_text("{")
    assert "run.json cannot be read" in refused(run.name)
    (run / "run.json").write_text(json.dumps({"format": 9, "folder": "/", "settings": {}}))
    assert "has format 9; this version reads up to 1" in refused(run.name)
    (run / "run.json").write_text(json.dumps({"folder": "/", "settings": {}}))
    assert "is of a function that was given to launch(): call launch(..., resume=" in refused(run.name)
    (run / "run.json").write_text(json.dumps({"folder": "/", "settings": {}, "task": "digits"}))
    assert "holds no checkpoint" in refused(run.name)


def test_every_setting_is_kept_and_read_back_as_it_was() -> None:
    given = {
        "scenario": "even4", "strategy": "ssp:staleness=2", "seed": "3", "global_batch": "16", "epochs": "2.5",
        "max_versions": "9", "evaluate_every": "off", "set": ["a=1", "b=x"], "respawn": "yes",
        "checkpoint_every": "7v", "data_dir": "data", "transport": "zeromq", "start": "fresh",
        "worker_timeout": "5..60",
    }  # fmt: skip
    before = settle(given, {})
    kept = run_file.settings_to_repeat(before)
    again = settle({}, {}, json.loads(json.dumps(kept)))
    for name in before.__struct_fields__:
        if name not in ("given", "data_dir", "runs_dir"):
            assert getattr(again, name) == getattr(before, name), name
    assert again.data_dir == Path("data").absolute()


def test_a_batch_given_anew_replaces_the_other_way_to_say_it() -> None:
    kept = run_file.settings_to_repeat(settle({"workers": "2", "global_batch": "16"}, {}))
    again = settle({"batch_size": "4"}, {}, kept)
    assert (again.batch_size, again.global_batch) == (4, None)
    with pytest.raises(OptionError, match="leave one out"):
        settle({"batch_size": "4", "global_batch": "8"}, {}, kept)


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        (["--workers", "4", "--epochs=3", "--workers", "2"], "--workers, --epochs after the script are the script's"),
        (
            ["--workers=4"],
            "--workers after the script is the script's own: for paceline, write `paceline run",
        ),
        (["--depth", "3", "workers"], None),
        (["--seed", "4"], None),  # which the script itself knows
    ],
)
def test_an_option_of_ours_behind_the_script_is_named_once_with_the_right_order(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], warned: str | None
) -> None:
    (folder / "own.py").write_text('import sys\nassert sys.argv[1:]\n"--seed" in sys.argv\n')
    assert main(["run", "--engine", "sim", "--scenario", "even4", "own.py", *arguments]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "after the script" in line]
    assert len(lines) == (warned is not None)
    assert warned is None or warned in lines[0]
