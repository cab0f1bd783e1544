"""The examples run as a newcomer would run them."""

import json
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import nbformat
import pytest
import warm_python
from nbclient import NotebookClient

from paceline.cli import main

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short(example):
    assert len(example.read_text().splitlines()) <= 80, "an example is read in one go"


NOTEBOOK = EXAMPLES / "compare.ipynb"


@pytest.mark.slow
@pytest.mark.fresh
def test_the_notebook_compares_two_strategies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell runs; what is committed has no outputs."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in code)
    assert sum(len(cell.source.splitlines()) for cell in notebook.cells) <= 80
    NotebookClient(notebook, timeout=110, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = code[-2].outputs[-1]["data"]["text/plain"]
    assert "bsp" in shown
    assert "balanced" in shown
    assert len(code[-1].outputs[0]["text"].splitlines()) == 2  # a row for each strategy


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run an example in an empty folder, by itself or by the command line, and take what it prints."""

    def run(script: str, *arguments: str, by: Sequence[str] = ()) -> str:
        path = str(EXAMPLES / script)
        if by:
            assert main([*by, path, *arguments]) == 0
        else:
            monkeypatch.setattr(sys, "argv", [path, *arguments])
            runpy.run_path(path, run_name="__main__")
        return capfd.readouterr().out

    return run


@pytest.mark.slow
def test_the_demo_shows_three_strategies_simulated_and_on_real_processes(run, tmp_path):
    shown = run("demo.py", "accuracy=0.6")  # nearer than its own, and sooner reached
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
def test_the_example_script_runs_under_every_engine(run, engine, told):
    shown = run("train.py", by=["run", *engine, "--strategy", "balanced", "--epochs", "3"])
    assert "held-out accuracy" in shown
    assert told in shown


@pytest.mark.slow
def test_the_example_script_trains_alone(tmp_path, warm):
    """By itself, as a newcomer starts it."""
    done = warm_python.run([sys.executable, str(EXAMPLES / "train.py")], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "held-out accuracy" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [pytest.param(["--workers", "2"], marks=pytest.mark.soak), ["--engine", "sim", "--scenario", "even4"]],
)
def test_the_example_on_tables_runs_under_every_engine(run, engine):
    report = json.loads(run("factors.py", by=["run", *engine, "--strategy", "ssp:staleness=3", "--json"]))
    assert report["loss"] < 0.7  # from 1.0
    assert report["table_reads"]["users"]["max_age"] <= 3


@pytest.mark.slow
def test_the_example_on_tables_runs_alone(run, tmp_path):
    run("factors.py")
    assert list(tmp_path.iterdir()) == []
