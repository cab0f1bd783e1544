"""A strategy of the user's own: by file, module, entry point, class or instance, on every engine, found again later."""

import json
import os
import shutil
import subprocess
import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import warm_python

import paceline
from paceline import strategies
from paceline.cli import main
from paceline.core.errors import OptionError
from paceline.records.journal import Header, read
from paceline.records.replay import replay
from paceline.strategies import Strategy, sources

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_strategy.py"
QUICK = ["--engine", "sim", "--task", "digits", "--scenario", "even4", "--max-versions", "6", "-q", "--json"]


@pytest.fixture
def mine(folder: Path) -> Path:
    """A file with a strategy, in the current folder."""
    return Path(shutil.copy(EXAMPLE, folder / "mine.py"))


def header(journal: Path) -> Header:
    first = next(read(journal))
    assert isinstance(first, Header)
    return first


@pytest.mark.parametrize(
    ("spec", "who", "options"),
    [
        ("ssp", "ssp", None),
        (" ssp : staleness = 3 ", "ssp", " staleness = 3"),
        ("ssp:staleness", "ssp", "staleness"),  # an option without its value, not a class of a module ssp
        ("ssp:", "ssp", ""),
        ("mine.py:Mine", "mine.py:Mine", None),
        ("./a b/mine.py:Mine:k=1,s=2", "./a b/mine.py:Mine", "k=1,s=2"),
        ("/x/ssp.py:Mine", "/x/ssp.py:Mine", None),
        ("a:b.py:Mine", "a:b.py:Mine", None),
        ("package.module:Mine", "package.module:Mine", None),
        ("module:Outer.Mine:k=1", "module:Outer.Mine", "k=1"),
        ("module:Mine:", "module:Mine", ""),
        ("dsap:staleness=3", "dsap", "staleness=3"),
        ("", "", None),
    ],
)
def test_what_is_written_means_one_thing(spec: str, who: str, options: str | None) -> None:
    assert sources.split(spec) == (who, options)


def test_a_class_in_a_file(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *QUICK, "--strategy", "mine.py:Damped:power=1", "--journal", "j.jsonl"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"] == 6
    assert report["strategy"] == header(Path("j.jsonl")).strategy == f"{mine}:Damped:power=1"
    assert [path.name.endswith("-Damped") for path in Path("runs").iterdir()] == [True]
    os.chdir("/")  # the journal says where the class came from, wherever it is read
    assert main(["replay", str(mine.parent / "j.jsonl")]) == 0


def test_a_class_in_a_file_on_real_processes(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["run", "--workers", "2", "--task", "digits", "--max-versions", "6", "-q", "--json"]
    assert main([*command, "--strategy", "mine.py:Damped:power=1", "--journal", "j.jsonl"]) == 0
    assert json.loads(capfd.readouterr().out)["strategy"] == f"{mine}:Damped:power=1"
    assert main(["replay", "j.jsonl"]) == 0


def test_a_strategy_that_is_gone_is_named_and_can_be_said_to_be_elsewhere(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *QUICK, "--strategy", "mine.py:Damped:power=1", "--journal", "j.jsonl"]) == 0
    mine.rename("theirs.py")
    assert main(["replay", "j.jsonl"]) == 2
    assert f"cannot read the file of strategy '{mine}:Damped': No such file" in capsys.readouterr().err
    assert main(["replay", "j.jsonl", "--strategy", "theirs.py:Damped:power=1"]) == 0
    assert main(["replay", "j.jsonl", "--strategy", "theirs.py:Damped:power=2"]) == 1
    assert main(["replay", "j.jsonl", "--strategy", "theirs.py:Damped:power=x"]) == 2


def test_a_changed_file_is_loaded_again(mine: Path) -> None:
    first = strategies.machine_class("mine.py:Damped")
    assert strategies.machine_class("mine.py:Damped") is first
    mine.write_text(mine.read_text().replace("nobody waits", "all wait"))
    os.utime(mine, ns=(1, 1))
    assert strategies.machine_class("mine.py:Damped") is not first


def test_a_class_of_a_module(mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    package = mine.parent / "somewhere" / "made_package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    mine.rename(package / "rules.py")
    monkeypatch.syspath_prepend(str(package.parent))
    assert main(["run", *QUICK, "--strategy", "made_package.rules:Damped", "--journal", "j.jsonl"]) == 0
    assert header(Path("j.jsonl")).strategy == "made_package.rules:Damped"
    assert main(["replay", "j.jsonl"]) == 0


def test_an_entry_point(mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    mine.rename("made_plugin.py")
    monkeypatch.syspath_prepend(str(mine.parent))
    point = EntryPoint("damped", "made_plugin:Damped", sources.GROUP)
    hidden = EntryPoint("ssp", "made_plugin:Damped", sources.GROUP)
    broken = EntryPoint("broken", "made_plugin:Nothing", sources.GROUP)
    points = [point, hidden, broken]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points if group == sources.GROUP else [])
    assert main(["run", *QUICK, "--strategy", "damped:power=2", "--journal", "j.jsonl"]) == 0
    assert header(Path("j.jsonl")).strategy == "made_plugin:Damped:power=2"
    assert strategies.machine_class("ssp").__name__ == "Ssp"
    with pytest.raises(OptionError, match="did you mean 'damped'"):
        strategies.build("dampde", 0)
    with pytest.raises(OptionError, match="the entry point broken .* cannot be loaded"):
        strategies.build("broken", 0)
    points.remove(broken)
    capsys.readouterr()
    assert main(["strategies"]) == 0
    assert "damped by the updates" in capsys.readouterr().out


def train() -> None:
    session = paceline.init()
    model = torch.nn.Linear(1, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for x, y in session.batches(torch.utils.data.TensorDataset(torch.ones(32, 1), torch.ones(32, 1)), batch_size=2):
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()


def test_launch_takes_a_class_and_an_instance(mine: Path) -> None:
    damped = strategies.machine_class("mine.py:Damped")
    for given, spec in ((damped, "Damped"), (damped(power=2), "Damped:power=2")):
        run = paceline.launch(train, engine="sim", scenario="even4", strategy=given, journal="j.jsonl")
        assert run.summary.strategy == header(Path("j.jsonl")).strategy == f"{mine}:{spec}"
        assert replay(Path("j.jsonl")).difference is None
    with pytest.raises(OptionError, match="power must be a number >= 0, not '-1'"):
        paceline.launch(train, engine="sim", strategy=damped(power=-1))
    built_in = strategies.build("ssp:staleness=1", 0)
    assert paceline.launch(train, engine="sim", strategy=built_in).summary.strategy == "ssp:staleness=1"


def of_a_notebook(mine: Path, monkeypatch: pytest.MonkeyPatch) -> type[Strategy]:
    notebook = types.ModuleType("__main__")
    exec(mine.read_text(), notebook.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    return notebook.Damped  # type: ignore[no-any-return]


def test_a_class_of_a_notebook_trains_in_this_process_only(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damped = of_a_notebook(mine, monkeypatch)
    run = paceline.launch(train, engine="sim", scenario="even4", strategy=damped, journal="j.jsonl")
    assert run.summary.strategy == "__main__:Damped"
    assert replay(Path("j.jsonl")).difference is None
    with pytest.raises(OptionError, match=r"defined in a notebook .*strategy='FILE.py:Damped', or use engine='sim'"):
        paceline.launch(train, engine="local", workers=2, strategy=damped)
    elsewhere = [sys.executable, "-m", "paceline", "replay", "j.jsonl"]
    done = subprocess.run(elsewhere, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no 'Damped' in it" in done.stderr


def test_a_class_inside_a_function_is_refused(mine: Path) -> None:
    class Inner(strategies.strategy_class("bsp")):  # type: ignore[misc]
        pass

    with pytest.raises(OptionError, match="Inner is defined inside a function"):
        paceline.launch(train, engine="sim", strategy=Inner)


PROGRAM = """
import paceline
import torch
{strategy}

def train():
    session = paceline.init()
    model = torch.nn.Linear(1, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for (x,) in session.batches(torch.utils.data.TensorDataset(torch.ones(8, 1)), batch_size=2):
        model(x).sum().backward()
        optimizer.step()

{guard}
    run = paceline.launch(train, engine="local", workers=1, evaluate_every="off", strategy=Damped, journal="j.jsonl")
    print(run.summary.strategy)
"""


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.usefixtures("warm")
def test_a_program_with_its_own_strategy(guarded: bool, mine: Path) -> None:
    """The server loads the program's file: what starts a run in it must not start one there."""
    guard = 'if __name__ == "__main__":' if guarded else "if True:"
    Path("program.py").write_text(PROGRAM.format(strategy=mine.read_text(), guard=guard))
    done = warm_python.run([sys.executable, "program.py"])
    if guarded:
        assert done.stdout == f"{mine.parent}/program.py:Damped\n", done.stderr
    else:
        assert done.returncode != 0
        assert "a call of launch() stands at its top level" in done.stderr


@pytest.mark.parametrize(
    ("text", "spec", "says"),
    [
        ("x = 1", "made.py:Mine", "there is no 'Mine' in it; there are none"),
        ("x = 1", "made.py", "names no class: write made.py:CLASS"),
        ("Mine = 3", "made.py:Mine", "is no strategy: derive a class from paceline.strategies.Strategy"),
        ("class Mine(", "made.py:Mine", "made.py cannot be loaded as a strategy: SyntaxError"),
        ("import nothing_of_the_kind", "made.py:Mine", "ModuleNotFoundError: No module named 'nothing_of_the_kind'"),
        ("raise SystemExit(3)", "made.py:Mine", "cannot be loaded as a strategy: SystemExit: 3"),
        ("1 / 0", "made:Mine", "the module made cannot be loaded as a strategy: ZeroDivisionError"),
        ("import nothing_of_the_kind", "made:Mine", "the module made cannot be loaded as a strategy: ModuleNotFound"),
        ("from paceline.strategies import Strategy\nclass Mine(Strategy): pass", "made.py:Mine", "lacks handle"),
        ("x = 1", "nowhere.py:Mine", "cannot read the file of strategy 'nowhere.py:Mine': No such file"),
        ("x = 1", "~no_such_user/x.py:Mine", "cannot read the file of strategy '~no_such_user/x.py:Mine': Could not"),
        ("x = 1", "nowhere.at_all:Mine", "no module 'nowhere.at_all'"),
        ("x = 1", "dsap:Mine", "no module 'dsap'; did you mean 'dasp'?"),
        ("from paceline.strategies.bsp import Bsp\nclass Mine(Bsp): pass", "made.py:Mnie", "did you mean 'Mine'?"),
        ("from paceline.strategies.bsp import Bsp\nclass Mine(Bsp): pass", "made.py:Mine:k=3", "it has no options"),
    ],
)
def test_what_is_no_strategy_is_refused_in_one_line(
    text: str, spec: str, says: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "made", raising=False)
    Path("made.py").write_text(text)
    assert main(["run", *QUICK, "--strategy", spec]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_what_a_subclass_is_called_is_its_own(mine: Path) -> None:
    described = strategies.describe(strategies.machine_class("mine.py:Damped"))
    assert (described.name, described.citation) == ("Damped", "unpublished")
    assert described.rule.startswith("Every push is applied at once")
