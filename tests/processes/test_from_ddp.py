"""The how-to's diff applies to the DDP script, and both scripts train."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import main

ROOT = Path(__file__).parents[2]
ORIGINAL = ROOT / "tests" / "scripts" / "originals" / "ddp.py"
PAGE = ROOT / "docs" / "howto" / "from-ddp.md"
ARGUMENTS = ["ddp.py", "--epochs", "8"]


@pytest.fixture
def changed(folder):
    """The current folder, with the script as the page changes it."""
    (folder / "ddp.py").write_text(ORIGINAL.read_text())
    (diff,) = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    done = subprocess.run(["git", "apply", "--whitespace=error-all"], input=diff, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def require_learned(folder, printed):
    found = re.findall(r"epoch (\d): accuracy (\d\.\d+)", printed)
    assert [int(epoch) for epoch, _ in found] == list(range(8))  # one worker prints
    assert float(found[-1][1]) > 0.7  # of 0.5 by chance
    assert (folder / "spirals.pt").exists()


def test_the_diff_removes_all_of_torch_distributed(changed):
    text = (changed / "ddp.py").read_text()
    assert "import paceline" in text
    assert not re.search(r"dist\b|Distributed|torchrun|rank", text)
    compile(text, "ddp.py", "exec")


@pytest.mark.slow
def test_the_changed_script_learns_alone(changed, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ARGUMENTS)
    runpy.run_path("ddp.py", run_name="__main__")
    require_learned(changed, capfd.readouterr().out)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    "engine", [["--workers", "3"], ["--engine", "sim", "--scenario", "even4"]], ids=["local", "sim"]
)
def test_the_changed_script_learns_in_a_run(changed, engine, capfd):
    assert main(["run", *engine, "--evaluate-every", "off", *ARGUMENTS]) == 0
    require_learned(changed, capfd.readouterr().out)


@pytest.mark.slow
def test_the_original_learns_under_torchrun(tmp_path):
    (tmp_path / "ddp.py").write_text(ORIGINAL.read_text())
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *ARGUMENTS]
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    require_learned(tmp_path, done.stdout)
