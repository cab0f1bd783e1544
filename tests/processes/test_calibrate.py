"""`paceline calibrate` measures a script and writes a scenario that the simulator takes."""

import re
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.core.scenario import file as scenarios

pytestmark = [pytest.mark.usefixtures("nothing_left")]

SCRIPT = """
import sys, time
import torch
import paceline

session = paceline.init()
data = torch.utils.data.TensorDataset(torch.ones(16, 3), torch.ones(16, 1))
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.prepare(model, optimizer, evaluate=lambda model: {"loss": 1.0})
for x, y in session.batches(data, batch_size=2, epochs=2):
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    session.report(loss=loss)
    time.sleep(float(sys.argv[1]) * len(x) * (1 + 2 * session.worker))
    optimizer.step()
"""
SLEEP = 0.01  # a sample


@pytest.mark.slow
def test_a_measured_script_is_simulated_at_the_measured_pace(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train.py").write_text(SCRIPT)
    command = ["calibrate", "--workers", "2", "--seconds", "1.5", "--batch-size", "4", "--threads", "1"]
    assert main([*command, "train.py", str(SLEEP)]) == 0
    out = capsys.readouterr().out
    cluster = scenarios.load("train.toml")
    per_sample = cluster.compute.seconds_per_sample
    assert per_sample >= SLEEP
    first, second = cluster.workers
    assert second.speed < 0.75 * first.speed  # it sleeps three times as long
    shown = re.search(r"seconds per sample  ([\d.]+)", out)
    assert shown is not None
    assert float(shown[1]) == pytest.approx(per_sample, rel=1e-3)
    assert "16 bytes up, 16 bytes down a push" in out
    assert "paceline run --engine sim --scenario train.toml train.py" in out
    assert not Path("runs").exists()
    assert main(["run", "--engine", "sim", "--scenario", "train.toml", "--strategy", "asp", "train.py", "0"]) == 0
    seconds = float(re.search(r"time +([\d.]+) s virtual", capsys.readouterr().out)[1])  # type: ignore[index]
    assert seconds > 2 * 16 * per_sample / (first.speed + second.speed)  # two epochs of 16 samples on both


def test_a_file_is_never_replaced_unasked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "train.toml").write_text("mine")
    assert main(["calibrate", "train.py", "0"]) == 2
    assert "train.toml exists: give --force to replace it, or another file by --output" in capsys.readouterr().err
    assert main(["calibrate", "--output", "nowhere/train.toml", "train.py"]) == 2  # and not after having measured
    assert capsys.readouterr().err == "paceline: cannot write into the folder nowhere; choose another --output\n"
    assert (folder / "train.toml").read_text() == "mine"


def test_without_a_script_there_is_nothing_to_measure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate"]) == 2
    assert "give the script to measure, or --task NAME" in capsys.readouterr().err
    assert main(["calibrate", "--workers", "0", "nix.py"]) == 2
    assert "--workers: must be" in capsys.readouterr().err
    assert main(["calibrate", "nix.py"]) == 2
    assert "script 'nix.py' does not exist" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_script_that_makes_too_few_pushes_is_measured_for_longer_and_then_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text(SCRIPT)
    assert main(["calibrate", "--seconds", "0.2", "train.py", "0.1"]) == 2
    said = capsys.readouterr().err
    assert ": once more, for 0.8 s" in said
    assert "and 8 are needed: give more --seconds" in said
    assert not (folder / "train.toml").exists()
