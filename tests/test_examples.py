"""The examples run as a newcomer would run them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short(example):
    assert len(example.read_text().splitlines()) <= 80, "an example is read in one go"


@pytest.mark.slow
def test_the_demo_compares_five_strategies(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "demo.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in ("bsp", "asp", "ssp", "dasp", "balanced"):
        assert f"│ {name}" in done.stdout
    assert "inf" not in done.stdout
    assert "Soonest at the target" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_example_script_runs_on_a_virtual_cluster(tmp_path):
    command = [
        sys.executable,
        "-m",
        "paceline",
        "run",
        "--engine",
        "sim",
        "--scenario",
        "uneven8",
        "--strategy",
        "balanced",
        "--epochs",
        "3",
    ]
    done = subprocess.run([*command, EXAMPLES / "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "held-out accuracy" in done.stdout
    assert "balanced · sim · 8 workers" in done.stdout
