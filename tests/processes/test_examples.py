"""The examples run as a newcomer would run them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short(example):
    assert len(example.read_text().splitlines()) <= 80, "an example is read in one go"


def run_in(folder: Path, *command: object) -> str:
    """What the command prints; it must succeed."""
    arguments = [sys.executable, *map(str, command)]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_demo_shows_three_strategies_simulated_and_on_real_processes(tmp_path):
    shown = run_in(tmp_path, EXAMPLES / "demo.py", "accuracy=0.6")  # nearer than its own, and sooner reached
    rows = [line.split() for line in shown.splitlines() if line.count(" / ") == 5]
    assert [row[0] for row in rows] == ["bsp", "dasp", "balanced"], shown
    assert "inf" not in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "told"),
    [
        (["--workers", "2"], "balanced · local · 2 workers"),
        (["--engine", "sim", "--scenario", "uneven8"], "balanced · sim · 8 workers"),
    ],
)
def test_the_example_script_runs_under_every_engine(tmp_path, engine, told):
    shown = run_in(
        tmp_path, "-m", "paceline", "run", *engine, "--strategy", "balanced", "--epochs", "3", EXAMPLES / "train.py"
    )
    assert "held-out accuracy" in shown
    assert told in shown


@pytest.mark.slow
def test_the_example_script_trains_alone(tmp_path):
    assert "held-out accuracy" in run_in(tmp_path, EXAMPLES / "train.py")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [pytest.param(["--workers", "2"], marks=pytest.mark.soak), ["--engine", "sim", "--scenario", "even4"]],
)
def test_the_example_on_tables_runs_under_every_engine(tmp_path, engine):
    script = EXAMPLES / "factors.py"
    shown = run_in(tmp_path, "-m", "paceline", "run", *engine, "--strategy", "ssp:staleness=3", "--json", script)
    report = json.loads(shown)
    assert report["loss"] < 0.7  # from 1.0
    assert report["table_reads"]["users"]["max_age"] <= 3


@pytest.mark.slow
def test_the_example_on_tables_runs_alone(tmp_path):
    run_in(tmp_path, EXAMPLES / "factors.py")
    assert list(tmp_path.iterdir()) == []
