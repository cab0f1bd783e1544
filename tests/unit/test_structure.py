"""The counter of the source's structure finds what is planted in a made-up tree, and traces a real push."""

import functools
import json
from pathlib import Path

import pytest

import structure
import walks
from walks import Event

ROOT = Path(__file__).parents[2]
FAT = "class Fat:\n    def __init__(self):\n" + "".join(f"        self.a{i} = {i}\n" for i in range(21))


def plant(folder: Path, **files: str) -> list[structure.Module]:
    """A tree with these files; a double underscore in a key is a slash."""
    for name, text in {"__init__": "", "core__events": "", **files}.items():
        path = folder / "src" / "paceline" / f"{name if name.startswith('__') else name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return structure.modules_of(folder)


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("core__ledger", "from paceline.transport import shm", "up module"),
        ("core__ledger", "from ..transport import shm", "up module"),
        ("core__ledger", "import paceline.transport.shm", "up module"),
        ("core__ledger", "try:\n    from ..transport.shm import x\nexcept ImportError:\n    pass", "up module"),
        ("core__ledger", "def f():\n    from paceline.transport import shm", "up lazy"),
        ("core__ledger", "class A:\n    def f(self):\n        from ..transport import shm", "up lazy"),
        ("core__ledger", "TYPE_CHECKING = 0\nif TYPE_CHECKING:\n    from ..transport import shm", "up typing"),
        ("core__ledger", "import typing\nif typing.TYPE_CHECKING:\n    from ..transport import shm", "up typing"),
        ("core__ledger", "TYPE_CHECKING = 0\nif not TYPE_CHECKING:\n    from ..transport import shm", "up module"),
        ("worker__loop", "from paceline.server import run", "up module"),
        ("server__phases", "from paceline.worker import replica", "up module"),
        ("records__journal", "from paceline.transport import shm", "sideways module"),
        ("session", "from paceline.engines import sim", "up module"),
        ("session", "def init():\n    from paceline.engines import sim", "up lazy"),
        ("core__scenario__file", "from ...engines import sim", "up module"),
    ],
)  # fmt: skip
def test_a_planted_import_against_the_law_is_reported(tmp_path, name, text, kind):
    rest = {"transport__shm": "x = 1", "server__run": "", "worker__replica": "", "engines__sim": ""}
    found = structure.law(plant(tmp_path, **rest, **{name: text}))
    (violation,) = found.pop(kind)
    assert violation.startswith(f"{name.replace('__', '/')}.py:")
    assert not any(found.values())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("transport__shm", "from ..core.events import x\nfrom . import frames\nfrom paceline import _version"),
        ("tables__host", "from paceline.server import run\nfrom paceline.worker import replica\nimport json"),
        ("__main__", "from paceline.cli import main"),
        ("engines__local__launcher", "from paceline import session\nfrom ..sim import kernel"),
    ],
)
def test_imports_that_follow_the_law_are_not(tmp_path, name, text):
    rest = {
        "transport__frames": "", "server__run": "", "worker__replica": "", "cli__main": "", "session": "",
        "engines__sim__kernel": "", "_version": "",
    }  # fmt: skip
    found = structure.law(plant(tmp_path, **rest, **{name: text}))
    assert not any(found.values())


def test_a_room_without_a_place_in_the_law_is_reported(tmp_path):
    assert structure.law(plant(tmp_path, attic__box="from paceline.core import events"))["unplaced"] == ["attic"]


def test_a_tree_without_rooms_has_no_law(tmp_path):
    modules = [m for m in plant(tmp_path, coordinator="") if m.room != "core"]
    assert structure.law(modules) is None
    after = structure.count(tmp_path, static=True)
    before = {**after, "law": None}
    assert {v.name: v.value for v in structure.verdicts_of(before, after)}["imports against the law"] == "0, before n/a"


def test_names_that_stand_twice_and_fat_classes_are_reported(tmp_path):
    twice = {"core__jobs": "class Job: ...", "records__jobs": "class Task: ...", "tasks__linreg": "class Job: ..."}
    modules = plant(tmp_path, **twice, core__fat=FAT, transport__base="", strategies__base="")
    found = structure.names(modules)
    assert found["classes_twice"] == ["Job: core/jobs.py, tasks/linreg.py"]
    assert found["modules_twice"] == ["jobs: core/jobs.py, records/jobs.py"]
    assert found["fat"] == ["core/fat.py: Fat (21)"]
    lean = plant(tmp_path / "lean", core__fat=FAT.replace("        self.a20 = 20\n", ""))
    assert structure.names(lean)["fat"] == []


def test_lines_are_counted_by_room_and_by_engine(tmp_path):
    engines = {"engines__alone": "\n" * 3, "engines__sim__kernel": "\n" * 5, "engines__ray__actor": "\n" * 7}
    counted = structure.sizes(plant(tmp_path, session="\n" * 601, **engines))
    assert counted["rooms"] == {"(top)": 601, "core": 0, "engines": 15}
    assert counted["engines"] == {"alone": 3, "sim": 5, "local": 0, "ray": 7}
    assert (counted["lines"], counted["long"], counted["top"]) == (616, ["session.py"], ["__init__.py", "session.py"])
    assert counted["short"] == ["core/events.py", "engines/alone.py", "engines/ray/actor.py", "engines/sim/kernel.py"]


def test_blank_lines_comments_and_docstrings_are_no_code(tmp_path):
    text = """'''What it is.'''

# why
def f():
    '''Do it.

    At length.'''
    return (  # so
        1
    )
"""
    assert structure.sizes(plant(tmp_path, session=text))["code"] == 4


def test_an_engine_named_outside_of_engines_is_listed(tmp_path):
    text = 'def f(engine):\n    """A local run."""\n    from .engines.sim import kernel\n    return engine == "ray"\n'
    found = structure.engine_names(plant(tmp_path, launch=text, engines__sim__kernel='NAME = "sim"'))
    assert found == ["launch.py:4 'ray'", "launch.py:3 imports paceline.engines.sim.kernel"]


# -- walks -------------------------------------------------------------------------------------------------------------


def made_up(text: str) -> walks.Trace:
    """A trace from words: `a(` enters the file a, `)` returns, `a!` enters it with a message, the rest are kinds."""
    found = []
    for at, word in enumerate(text.split()):
        kind = "call" if word.endswith(("(", "!")) else "return" if word == ")" else word
        held = [{"record": True, "line": False}] if word.endswith("!") else []
        found.append(Event(float(at), 0, kind, word.rstrip("(!"), 9 if word == "wait" else held))
    return found


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        ("a( b( ) c( ) )", []),
        ("a( b( a( ) ) )", ["a -> b -> a"]),
        ("a( a( b( c( a( ) a( ) ) ) ) )", ["a -> b -> c -> a"]),
        ("a( b( a( b( ) ) ) )", ["a -> b -> a", "b -> a -> b"]),
    ],
)
def test_a_walk_turns_back_where_it_enters_a_file_that_it_is_in(text, turns):
    assert walks.turns_of([made_up(text)]) == turns


@pytest.mark.parametrize(
    ("text", "files"),
    [
        ("wait links( recv run( send late( ) ) )", ["links", "run"]),
        ("loop( wait ) loop( wait links( recv ) chores( ) run! send ) late!", ["links", "run"]),
        ("early! ) links( recv ) chores( ) links( recv send ) )", ["links"]),
        ("links( recv ) run! )", []),
        ("run! send )", []),
    ],
)
def test_of_a_process_with_a_loop_what_handles_messages_counts(text, files):
    assert walks.files_of([walks.handling(made_up(text))]) == files


def test_a_window_ends_with_the_message():
    trace = made_up("script( early( ) mail( recv node( send ) late( ) )")
    assert walks.files_of([walks.cut(trace, "recv", "send")]) == ["script", "mail", "node"]
    with pytest.raises(RuntimeError, match="nothing was traced from recv to write"):
        walks.cut(trace, "recv", "write")


@pytest.mark.slow
def test_a_push_is_traced_through_worker_and_server():
    traces = walks.traced("push", ROOT)
    own, others = walks.window(traces, "push 0")
    served = [way for trace in others if (way := walks.handling(trace))]
    assert len(served) == 1, "one server answers, and nobody else is on the way"
    assert "session.py" in walks.files_of([own])
    assert "strategies/bsp.py" in walks.files_of(served)
    assert "strategies/bsp.py" not in walks.files_of([walks.beside_decision(served[0])])
    assert any(name.endswith(".Pushed") for name in walks.shapes_of(own, served))
    assert walks.line_of(walks.window(traces, "line")[1]).files


def test_the_result_holds_both_trees(tmp_path, monkeypatch):
    monkeypatch.setattr(structure, "checked_out", lambda revision: structure.contextlib.nullcontext(ROOT))
    monkeypatch.setattr(structure, "_git", lambda *words: "")
    monkeypatch.setattr(structure, "count", functools.cache(structure.count))  # both are this tree
    structure.main(["--unclean", "--static", "--before", "HEAD", "--out", str(tmp_path)])
    written = json.loads((tmp_path / "structure.json").read_text())
    assert written["before"]["lines"] == written["after"]["lines"] > 0
    page = (tmp_path / "structure.md").read_text()
    assert page.count("| **missed** |") + page.count("| met |") == len(structure.CRITERIA)
