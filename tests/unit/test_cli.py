"""The command line: what each command prints, on which stream, with which exit code."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import __version__, strategies, tasks
from paceline.cli import main

DOCS = Path(__file__).parents[2] / "docs"


def in_a_process(arguments: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_too_few_descriptors_are_no_internal_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("paceline.cli.app.app", full)
    assert main(["doctor"]) == 2
    said = "paceline: no more files may be open in this process: raise the limit (ulimit -n 4096)\n"
    assert capsys.readouterr().err == said


# --- what needs no training ---------------------------------------------------------------------------------------


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"paceline {__version__}\n"
    for arguments in ([], ["--help"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert all(command in out for command in ("run", "strategies", "scenario", "replay", "tasks"))


def test_python_m_paceline_is_the_same_command(folder: Path) -> None:
    done = in_a_process(["--version"], folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"paceline {__version__}\n", "")


def test_every_option_of_run_is_documented(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    main(["run", "--help"])
    flags = {word.strip("│,") for word in capsys.readouterr().out.split() if word.startswith("--")}
    assert len(flags) > 20
    pages = (DOCS / "reference" / "cli.md").read_text() + (DOCS / "reference" / "settings.md").read_text()
    undocumented = [flag for flag in flags - {"--help"} if f"`{flag}" not in pages]
    assert undocumented == []


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["run", "--help"], ["strategies"], ["strategies", "ssp"], ["scenario", "uneven8"], ["tasks"]],
)
def test_what_trains_nothing_loads_no_torch(arguments: list[str], folder: Path) -> None:
    code = f"import sys; from paceline.cli import main; assert main({arguments}) == 0; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_strategies_lists_every_rule(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["strategies"]) == 0
    out = capsys.readouterr().out
    for name in strategies.names():
        assert strategies.strategy_class(name).rule in out


@pytest.mark.parametrize("name", strategies.names())
def test_a_strategy_is_shown_with_its_options_and_its_citation(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert main(["strategies", name]) == 0
    out = capsys.readouterr().out
    description = strategies.describe(strategies.strategy_class(name))
    assert description.rule in out
    assert description.citation in out
    for option in description.options:
        shown = next(line for line in out.splitlines() if line.startswith(option.name + " "))
        assert option.description in shown
        assert ("must be given" if option.default is None else option.default) in shown


@pytest.mark.parametrize("name", strategies.peer_names())
def test_a_strategy_without_a_server_is_shown_too(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert main(["strategies", name]) == 0
    out = capsys.readouterr().out
    description = strategies.describe(strategies.peer_class(name))
    assert description.citation in out
    assert all(option.description in out for option in description.options)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("adaptive_gossip:treshold=0.2", "adaptive_gossip has no option 'treshold'; did you mean 'threshold'?"),
        ("gosip", "unknown strategy 'gosip'; did you mean 'gossip'?"),
    ],
)
def test_a_strategy_without_a_server_that_there_is_not_is_refused(
    spec: str, says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--engine", "sim", "--task", "digits", "--strategy", spec]) == 2
    assert says in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("engine", ["sim", pytest.param("local", marks=[pytest.mark.slow, pytest.mark.soak])])
def test_a_strategy_without_a_server_is_run_as_any_other(
    engine: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "--engine", engine, "--task", "digits", "--strategy", "adaptive_gossip", "--epochs", "0.5"]
    assert main([*command, "--json", *(["--workers", "2"] if engine == "local" else [])]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["exchanges"] > 0
    assert report["peers"]["consensus"] is not None
    if engine == "local":
        assert len(list(folder.glob("runs/*/nodes/*.safetensors"))) == 2


def test_tasks_lists_every_task(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["tasks"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == tasks.names()


def test_a_printed_scenario_is_a_file_to_start_from(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scenario", "even4"]) == 0
    Path("mine.toml").write_text(capsys.readouterr().out)
    assert main(["scenario", "mine.toml", "--check"]) == 0
    assert "4 workers" in capsys.readouterr().out


def test_importing_sets_up_no_logging() -> None:
    code = (
        "import logging, paceline, paceline.cli; print(logging.getLogger('paceline').handlers, logging.root.handlers)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] []\n"


# --- bad input: exit code 2, one line on standard error, nothing on standard output --------------------------------

BAD_SCENARIO = "seed = 1\n[compute]\nseconds_per_sampel = 0.002\n[[workers]]\ncount = 2\nspeed = 1.0\n"

BAD_INPUT = {
    "unknown command": (["rnu"], "'rnu'"),
    "unknown flag": (["run", "--stratgy", "bsp"], "--strategy"),
    "flag without value": (["run", "--strategy"], "--strategy"),
    "unknown strategy": (["run", "--strategy", "dsp"], "unknown strategy 'dsp'; did you mean 'dasp'|'dssp'"),
    "unknown strategy shown": (["strategies", "balnced"], "did you mean 'balanced'"),
    "unknown strategy option": (["run", "--strategy", "ssp:stalness=3"], "'stalness'.*'staleness'"),
    "negative staleness": (["run", "--strategy", "ssp:staleness=-1"], "staleness must be a number >= 0, not '-1'"),
    "k missing": (["run", "--strategy", "fastest_k"], "fastest_k needs k"),
    "k above the workers": (
        ["run", "--engine", "sim", "--strategy", "fastest_k:k=9"],
        r"k must be <= the number of workers \(8\), not 9",
    ),
    "unknown engine": (["run", "--engine", "slurm"], "--engine: must be one of hosts, local, ray, sim, not 'slurm'"),
    "unknown scenario": (["run", "--scenario", "unevn8"], "uneven8"),
    "scenario file missing": (["scenario", "nowhere.toml"], "nowhere.toml"),
    "scenario with a typo": (["run", "--scenario", "typo.toml"], "seconds_per_sampel.*seconds_per_sample"),
    "scenario checked": (["scenario", "typo.toml", "--check"], "seconds_per_sampel.*seconds_per_sample"),
    "workers against the default": (
        ["run", "--engine", "sim", "--workers", "3"],
        "uneven8.* has 8 workers, not 3; .*scenario file",
    ),
    "workers against a scenario": (["run", "--scenario", "even4", "--workers", "5"], "even4 has 4 workers, not 5"),
    "unknown task": (["run", "--task", "digit"], "'digit'.*'digits'"),
    "script and task": (["run", "--task", "digits", "train.py"], "a script or --task, not both"),
    "script missing": (["run", "nowhere.py"], "'nowhere.py' does not exist"),
    "malformed target": (["run", "--target", "accuracy"], "--target: .*accuracy=0.93.*not 'accuracy'"),
    "malformed interval": (["run", "--evaluate-every", "10"], "--evaluate-every: .*50v.*not '10'"),
    "malformed set": (["run", "--set", "lr"], "--set: must be name=value"),
    "zero epochs": (["run", "--epochs", "0"], "--epochs: must be a finite number > 0, not '0'"),
    "on divergence": (["run", "--on-divergence", "cry"], "bsp, stop, warn"),
    "log level": (["run", "--log-level", "loud"], "--log-level: must be one of debug"),
    "data folder missing": (["run", "--task", "mnist", "--data-dir", "nowhere"], "--data-dir: nowhere is not a folder"),
    "journal is a folder": (["run", "--journal", "."], "--journal: . is a folder"),
    "runs folder is a file": (["run", "--runs-dir", "typo.toml"], "--runs-dir: cannot make the folder typo.toml"),
    "not a journal": (["replay", "typo.toml"], "typo.toml"),
    "journal missing": (["replay", "nowhere.jsonl"], "nowhere.jsonl"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_answered_by_one_line(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = BAD_INPUT[name]
    Path("typo.toml").write_text(BAD_SCENARIO)
    code = main(arguments)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.count("\n") == 1, err
    assert re.search(message, err), err
    assert not Path("runs").exists()


def test_a_bad_variable_names_itself(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_SEED", "chance")
    assert main(["run"]) == 2
    assert capsys.readouterr().err == "paceline: PACELINE_SEED: must be a whole number >= 0, not 'chance'\n"


def test_a_bad_run_table_names_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.toml").write_text(BAD_SCENARIO.replace("sampel", "sample") + '[run]\nstratgy = "bsp"\n')
    assert main(["run", "--scenario", "mine.toml"]) == 2
    assert "did you mean 'strategy'" in capsys.readouterr().err
