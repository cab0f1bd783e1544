"""Training from the command line: reports, streams, exit codes, where settings come from."""

import io
import json
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm_python
from full_disks import writer_with_room

from paceline import __version__
from paceline.cli import main
from paceline.records import journal_file
from paceline.records.journal import Writer

QUICK = ["--engine", "sim", "--max-versions", "3", "--evaluate-every", "2v"]
CLUSTER = "seed = 1\n[compute]\nseconds_per_sample = 0.002\n[[workers]]\ncount = 2\nspeed = 1.0\n"
REPORT_FIELDS = [
    "strategy",
    "engine",
    "workers",
    "seed",
    "seconds",
    "versions",
    "pushes",
    "samples_used",
    "samples_discarded",
    "samples_per_second",
    "wait_fraction",
    "staleness",
    "bytes_up",
    "bytes_down",
    "exchanges",
    "loss",
    "accuracy",
    "metrics",
    "target",
    "per_worker",
    "warnings",
    "journal",
    "table_reads",
    "peers",
    "batch",
    "reported",
    "folder",
    "model",
    "faults",
    "streams",
]

TRAINING = """
import sys
import time
import torch
import paceline

{before}
session = paceline.init()
data = torch.utils.data.TensorDataset(torch.ones(64, 2), torch.ones(64, 1))
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=float(session.option("lr", 0.01)))
evaluate = lambda model: {{"loss": float(model.weight.detach().abs().sum())}}
model, optimizer = session.prepare(model, optimizer, evaluate=evaluate)
for number, (x, y) in enumerate(session.batches(data, batch_size=4, epochs=2)):
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    session.report(loss=loss)
    {inside}
    optimizer.step()
"""


def script(folder: Path, before: str = "", inside: str = "pass") -> str:
    path = folder / "train.py"
    path.write_text(TRAINING.format(before=before, inside=inside))
    return str(path)


def test_json_is_the_report_and_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--task", "digits", "--scenario", "even4", "--quiet", "--json", *QUICK]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert list(report) == REPORT_FIELDS
    assert (report["strategy"], report["engine"], report["workers"], report["versions"]) == ("bsp", "sim", 4, 3)
    assert err == ""
    assert Path(report["journal"]).is_file()
    assert json.loads(Path(report["journal"]).with_name("report.json").read_text()) == report


def test_what_was_assumed_is_said_on_standard_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--json", *QUICK]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["workers"] == 8
    assert "no --scenario given: simulating uneven8, 8 workers" in err
    assert "no script and no --task given: training the built-in task digits" in err


def test_without_json_a_person_reads_the_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--quiet", "--scenario", "even4", *QUICK]) == 0
    out, err = capsys.readouterr()
    assert "bsp" in out
    assert "accuracy" in out
    assert err == ""


def test_what_follows_the_script_is_the_scripts_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = script(folder, before="import pathlib; pathlib.Path('seen').write_text(' '.join(sys.argv[1:]))")
    own = ["--json", "--strategy", "none", "-x", "deep", "--", "--help"]
    assert main(["run", "--quiet", "--scenario", "even4", *QUICK, train, *own]) == 0
    assert Path("seen").read_text() == " ".join(own)
    assert not capsys.readouterr().out.startswith("{")


@pytest.mark.slow
def test_prints_of_the_script_leave_the_json_alone(
    folder: Path, capfd: pytest.CaptureFixture[str], warm: type[warm_python.Popen]
) -> None:
    """Standard output is moved aside where the system has it, which pytest's own is not."""
    train = script(folder, before="import os; print('from python'); sys.stdout.flush(); os.system('echo from a child')")
    command = [sys.executable, "-m", "paceline", "run", "-q", "--json", "--scenario", "even4", *QUICK, train]
    clean = warm_python.run(command)
    assert clean.returncode == 0, clean.stderr
    assert json.loads(clean.stdout)["workers"] == 4
    assert {"from python", "from a child"} <= set(clean.stderr.splitlines())
    assert main(["run", "-q", "--scenario", "even4", *QUICK, train]) == 0
    out, err = capfd.readouterr()
    assert {"from python", "from a child"} <= set(out.splitlines())
    assert err == ""


def test_precedence_of_sources_in_a_run(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = CLUSTER
    Path("mine.toml").write_text(cluster + '[run]\nstrategy = "ssp:staleness=1"\nseed = 5\nmax_versions = 2\n')
    monkeypatch.setenv("PACELINE_SEED", "6")
    monkeypatch.setenv("PACELINE_MAX_VERSIONS", "3")
    assert (
        main(
            [
                "run",
                "--engine",
                "sim",
                "--quiet",
                "--json",
                "--scenario",
                "mine.toml",
                "--max-versions",
                "4",
                script(folder),
            ]
        )
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert (report["strategy"], report["seed"], report["versions"]) == ("ssp:staleness=1", 6, 4)


def test_the_journal_goes_where_it_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "run",
        "--engine",
        "sim",
        "-q",
        "--json",
        "--scenario",
        "even4",
        "--journal",
        "deep/j.jsonl.gz",
        "--runs-dir",
        "out",
    ]
    assert main([*arguments, *QUICK, script(folder)]) == 0
    assert json.loads(capsys.readouterr().out)["journal"] == "deep/j.jsonl.gz"
    assert Path("deep/j.jsonl.gz").is_file()
    assert len(list(Path("out").glob("*/report.json"))) == 1
    assert not Path("runs").exists()


def test_a_missed_target_is_no_failure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "-q", "--json", "--scenario", "even4", "--target", "loss<=-1", *QUICK]
    assert main([*arguments, script(folder)]) == 0
    target = json.loads(capsys.readouterr().out)["target"]
    assert target == {"metric": "loss", "value": -1.0, "reached_at_seconds": None}


def test_a_reached_target_ends_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "run",
        "--engine",
        "sim",
        "-q",
        "--json",
        "--scenario",
        "even4",
        "--target",
        "loss<=1000",
        "--evaluate-every",
        "1v",
    ]
    assert main([*arguments, script(folder)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["target"]["reached_at_seconds"] is not None
    assert report["versions"] < 8


def test_a_script_that_raises_shows_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = script(folder, inside="if session.worker == 2 and number == 1: raise ValueError('no such luck')")
    assert main(["run", "--engine", "sim", "-q", "--json", "--scenario", "even4", "--journal", "j.jsonl", train]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "train.py" in lines[1]  # the script's own frames, none of ours before them
    assert lines[-2] == "ValueError: no such luck"
    assert "worker 2, batch 2" in lines[-1]
    assert "internal error" not in err
    assert main(["replay", "j.jsonl"]) == 0


def test_a_script_that_cannot_start_is_the_scripts_failure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.py").write_text("import no_such_module_anywhere\n")
    assert main(["run", "--engine", "sim", "-q", "--scenario", "even4", "broken.py"]) == 1
    assert "no_such_module_anywhere" in capsys.readouterr().err


def test_a_diverging_run_is_stopped_by_the_guard(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = script(
        folder, inside="loss.data.fill_(float('nan')); [p.grad.fill_(float('nan')) for p in model.parameters()]"
    )
    assert (
        main(["run", "--engine", "sim", "-q", "--json", "--scenario", "even4", "--on-divergence", "stop", train]) == 3
    )
    out, err = capsys.readouterr()
    assert any(text.startswith("diverging: ") for text in json.loads(out)["warnings"])
    logged, told = err.splitlines()
    assert logged.startswith("paceline: WARNING: diverging: the gradient of worker 0 at its step 1 is not finite")
    assert told == "paceline: stopped by the convergence guard: the report's warnings say why"


def test_an_error_of_our_own_asks_for_a_report(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import paceline.launching

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a promise of ours")

    monkeypatch.setattr(paceline.launching, "launch", broken)
    assert main(["run", "--engine", "sim", "-q", "--json", script(folder)]) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" in err
    assert "ZeroDivisionError: a promise of ours" in err
    assert err.splitlines()[-1].startswith(f"paceline: internal error in version {__version__}: please report")


def test_ctrl_c_ends_with_the_report_so_far(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    interrupt = "import os, signal\n    if session.worker == 1 and number == 1: os.kill(os.getpid(), signal.SIGINT)"
    train = script(folder, inside=interrupt)
    assert main(["run", "--engine", "sim", "-q", "--json", "--scenario", "even4", "--journal", "j.jsonl", train]) == 130
    out, err = capsys.readouterr()
    assert json.loads(out)["versions"] < 8
    assert "Traceback" not in err
    assert main(["replay", str(folder / "j.jsonl")]) == 0


def test_replay_names_the_first_action_that_differs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-q", "--json", "--scenario", "even4", "--journal", "j.jsonl", *QUICK, script(folder)]) == 0
    capsys.readouterr()
    assert main(["replay", "j.jsonl"]) == 0
    assert "all identical" in capsys.readouterr().out
    text = Path("j.jsonl").read_text()
    assert '"work":4' in text
    Path("altered.jsonl").write_text(
        text.replace('"kind":"grant","worker":3,"work":4', '"kind":"grant","worker":3,"work":5', 1)
    )
    assert main(["replay", "altered.jsonl"]) == 1
    out = capsys.readouterr().out
    assert "differs" in out
    assert "expected" in out


def test_logging_lasts_as_long_as_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (
        "import logging; logging.getLogger('paceline').info('heard'); logging.getLogger('paceline').debug('unheard')"
    )
    train = script(folder, before=before)
    assert main(["run", "-q", "--json", "--log-level", "info", "--scenario", "even4", *QUICK, train]) == 0
    err = capsys.readouterr().err
    assert "paceline: INFO: heard" in err
    assert "unheard" not in err
    assert logging.getLogger("paceline").handlers == []


def test_missing_data_says_which_file_and_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    assert main(["run", "--task", "mnist", "--data-dir", "empty", "-q", *QUICK]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "empty" in err
    assert "Traceback" not in err


def test_a_set_name_that_nobody_asks_for_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-q", "--set", "learning_rate=1", *QUICK, script(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "learning_rate" in err
    assert "Traceback" not in err


class Terminal(io.StringIO):
    """What a run would draw on."""

    def isatty(self) -> bool:
        return True


def test_progress_is_drawn_on_a_terminal_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["run", "--json", "--scenario", "even4", *QUICK, script(folder)]
    for quiet, drawn in ((False, True), (True, False)):
        terminal, output = Terminal(), io.StringIO()
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setenv("TERM", "xterm")
        assert main([*arguments[:1], *(["--quiet"] if quiet else []), *arguments[1:]]) == 0
        assert json.loads(output.getvalue())["versions"] == 3
        assert ("starting" in terminal.getvalue()) == drawn


def test_what_comes_after_the_commands_end_does_not_change_its_exit_code() -> None:
    struck = "import os, signal; [os.kill(os.getpid(), number) for number in (signal.SIGINT, signal.SIGTERM)]"
    command = f"import sys; from paceline.cli import main; sys.argv[1:] = ['--version']; code = main(); {struck}"
    done = subprocess.run([sys.executable, "-c", f"{command}; sys.exit(code)"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.soak  # real processes are sent it in every run
@pytest.mark.slow
def test_sigterm_ends_as_ctrl_c_does(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "paceline",
        "run",
        "--engine",
        "sim",
        "--task",
        "digits",
        "--epochs",
        "100000",
        "--json",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder)
    journals: list[Path] = []
    while process.poll() is None and not (journals and journals[0].stat().st_size > 20_000):
        journals = list(folder.glob("runs/*/journal.jsonl"))
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert json.loads(output)["versions"] > 0
    assert '"interrupted"' in journals[0].read_text().splitlines()[-1]


def test_a_file_that_is_no_journal_is_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "precious.py").write_text("print('mine')\n")
    code = main(["run", "--engine", "sim", "--task", "digits", "--journal", "precious.py", "--max-versions", "1"])
    assert code == 2
    assert "precious.py exists and is no journal" in capsys.readouterr().err
    assert (folder / "precious.py").read_text() == "print('mine')\n"


@pytest.mark.parametrize("name", ["j.jsonl", "j.jsonl.gz"])
@pytest.mark.parametrize("room", [0, 5_000])
def test_a_full_disk_costs_neither_the_report_nor_what_was_written(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, room: int
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(journal_file.os, "write", writer_with_room(room))
        arguments = ["run", "--engine", "sim", "--task", "digits", "--journal", name, "--max-versions", "40", "--json"]
        assert main(arguments) == 2
    shown = capsys.readouterr()
    begun = bool(room) or name == "j.jsonl"  # the other one cannot even be opened: compressed files have a beginning
    assert json.loads(shown.out)["strategy"] == "bsp" if begun else not shown.out
    assert shown.err.splitlines()[-1].startswith(
        f"paceline: cannot write journal {name}: No space left on device; free"
    )
    assert "Traceback" not in shown.err
    if room:
        assert main(["replay", name]) == 0
        assert capsys.readouterr().out.endswith("all identical; the journal ends before the run did\n")


def test_a_report_that_cannot_be_saved_is_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("blocking.py").write_text(
        "import pathlib\nfrom paceline import tasks\n"
        "for run in pathlib.Path('runs').iterdir():\n    (run / '.report.json').mkdir(exist_ok=True)\n"
        "tasks.get('digits')()\n"
    )
    assert main(["run", "--engine", "sim", "--max-versions", "2", "--json", "blocking.py"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["versions"] == 2
    assert "report.json: Is a directory" in shown.err
    assert not list(Path("runs").glob("*/report.json"))


def test_a_second_run_on_one_journal_is_refused_before_it_begins(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = Writer(Path("j.jsonl"))
    code = main(["run", "--engine", "sim", "--task", "digits", "--journal", "j.jsonl", "--max-versions", "1"])
    assert code == 2
    assert "paceline: another run writes the journal 'j.jsonl'" in capsys.readouterr().err
    writer.close()
