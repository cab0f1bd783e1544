"""The page on streams: its changes apply to the script that it begins with, and the result trains."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "howto" / "streaming.md"
ORIGINAL = ROOT / "tests" / "scripts" / "originals" / "streaming.py"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm", "nothing_left")]


@pytest.fixture
def changes():
    (block,) = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.S)
    return block


def run(folder, *command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = warm_python.run(command, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def changed(folder, changes, *command):
    shutil.copy(ORIGINAL, folder / "streaming.py")
    subprocess.run(command, cwd=folder, input=changes, text=True, check=True, capture_output=True)
    return folder / "streaming.py"


def test_the_changes_apply_either_way(tmp_path, changes):
    texts = []
    for name, command in (("git", ["git", "apply", "-p1", "-"]), ("patch", ["patch", "-p1"])):
        if shutil.which(command[0]) is not None:
            (tmp_path / name).mkdir()
            texts.append(changed(tmp_path / name, changes, *command).read_text())
    assert "session.batches(" in texts[0]
    assert len(set(texts)) == 1


def test_alone_it_trains_to_the_same_bits_and_on_workers_it_trains(tmp_path, changes):
    before = run(tmp_path, sys.executable, str(ORIGINAL))
    changed(tmp_path, changes, "git", "apply", "-p1", "-")
    assert run(tmp_path, sys.executable, "streaming.py") == before
    assert before.count("epoch") == 3
    on_workers = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--strategy", "ssp", "streaming.py"]
    assert "streams of the script" in run(tmp_path, *on_workers)
