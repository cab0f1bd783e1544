"""The law of imports, for every module: a room imports only from the rooms below it.

    core <- strategies, model <- records, transport <- worker, server <- gradients, tables, peers <- shards
         <- session <- engines <- launching <- comparison <- cli, tasks

Rooms of one level do not import each other; so neither do `worker` and `server`. What a module imports when it is
loaded is judged. What only a type checker sees, or a function imports when it is called, may point upwards, but is
listed here: a new one is a decision.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "paceline"
LEVELS = [
    {"core", "_version", "_moved"},  # `_moved` looks modules up when an old name is asked for
    {"strategies", "model", "scenario"},  # `scenario` gives users what `core.scenario` has
    {"records", "transport"},
    {"worker", "server"},
    {"gradients", "tables", "peers"},
    {"shards"},
    {"session"},
    {"engines"},
    {"launching", "laws"},
    {"comparison"},
    {"paceline"},  # its own names, which are looked up when they are asked for
    {"cli", "tasks"},
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}


class Import(NamedTuple):
    """One import of another room of ours."""

    importer: str  # a module, without `paceline.`
    imported: str
    line: int
    when: str  # loaded, called, or typed: by a type checker alone

    @property
    def goes_up(self) -> bool:
        mine, theirs = room_of(self.importer), room_of(self.imported)
        return mine != theirs and LEVEL[theirs] >= LEVEL[mine]


def room_of(module: str) -> str:
    return module.partition(".")[0]


def module_of(file: Path) -> str:
    """Without `paceline.`; the package itself is its own room."""
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "paceline"


def imports_of(text: str, module: str, *, package: bool = False) -> list[Import]:
    """All imports of our own modules in a source."""
    home = ["paceline", *(module.split(".") if module != "paceline" else [])]
    if not package:
        home.pop()
    return [Import(module, _ours(name), line, when) for line, name, when in _walk(ast.parse(text), home, "loaded")
            if name.partition(".")[0] == "paceline"]  # fmt: skip


def _walk(node: ast.AST, home: list[str], when: str) -> Iterator[tuple[int, str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((child.lineno, alias.name, when) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            start = home[: len(home) - child.level + 1] if child.level else []
            base = ".".join([*start, *([child.module] if child.module else [])])
            yield from ((child.lineno, f"{base}.{alias.name}", when) for alias in child.names)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _walk(child, home, "called" if when == "loaded" else when)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for part in child.body:
                yield from _walk(ast.Module([part], []), home, "typed")
            for part in child.orelse:
                yield from _walk(ast.Module([part], []), home, when)
        else:
            yield from _walk(child, home, when)


def _ours(name: str) -> str:
    """The module, or the module's attribute, without `paceline.`; what is no room of ours is the package's own."""
    rest = name.removeprefix("paceline").removeprefix(".")
    return rest if room_of(rest) in LEVEL else "paceline"


def imports() -> list[Import]:
    return [
        found
        for file in sorted(SOURCE.rglob("*.py"))
        for found in imports_of(file.read_text(encoding="utf-8"), module_of(file), package=file.stem == "__init__")
    ]


def spelled(found: Import) -> str:
    """Module and room."""
    return f"{found.importer} <- {room_of(found.imported)}"


def upwards(when: str) -> set[str]:
    return {spelled(found) for found in imports() if found.goes_up and found.when == when}


def test_every_module_is_in_a_room() -> None:
    assert {room_of(module_of(file)) for file in SOURCE.rglob("*.py")} == set(LEVEL)


def test_what_a_module_needs_to_be_loaded_lies_below_it() -> None:
    assert upwards("loaded") == set()


def test_what_a_function_imports_from_above_is_known() -> None:
    assert upwards("called") == {
        "session <- engines",  # a script without a launcher starts the engine of a lone worker
        "cli.run_command <- tasks",
        "cli.inspect_commands <- tasks",
    }


def test_what_types_alone_need_from_above_is_known() -> None:
    assert upwards("typed") == set()


SOUND = """
from typing import TYPE_CHECKING
from paceline.core.errors import InternalError
from paceline.model.spec import ModelSpec

if TYPE_CHECKING:
    from paceline.core.ledger import Ledger
"""


@pytest.mark.parametrize(
    ("module", "line", "when", "imported"),
    [
        ("core.ledger", "import torch, paceline.model.store", "loaded", "model.store"),
        ("core.scenario.file", "from paceline.strategies import build", "loaded", "strategies.build"),
        ("core.scenario.file", "from ...model import spec", "loaded", "model.spec"),
        ("strategies.bsp", "from paceline.model.spec import Gradient", "loaded", "model.spec.Gradient"),
        ("model.store", "from ..records import journal", "loaded", "records.journal"),
        ("records.metrics", "from paceline.transport import messages", "loaded", "transport.messages"),
        ("transport.shm", "from paceline.worker.replica import Replica", "loaded", "worker.replica.Replica"),
        ("worker.replica", "from paceline.server.run import ServerRun", "loaded", "server.run.ServerRun"),
        ("server.run", "from paceline.worker import context", "loaded", "worker.context"),
        ("server.run", "from paceline.gradients import server", "loaded", "gradients.server"),
        ("tables.host", "from paceline.peers.node import Node", "loaded", "peers.node.Node"),
        ("gradients.server", "from paceline.session import Session", "loaded", "session.Session"),
        ("session", "with x:\n    from paceline.engines import alone", "loaded", "engines.alone"),
        ("engines.alone", "from paceline import launch", "loaded", "paceline"),
        ("launching", "class A:\n    from paceline.cli import app", "loaded", "cli.app"),
        ("server.run", "def f():\n    from paceline.engines import alone", "called", "engines.alone"),
        ("server.run", "if TYPE_CHECKING:\n    from paceline.session import Session", "typed", "session.Session"),
        ("server.run", "if TYPE_CHECKING:\n    pass\nelse:\n    from paceline import session", "loaded", "session"),
    ],
)  # fmt: skip
def test_a_planted_import_from_above_is_caught(module: str, line: str, when: str, imported: str) -> None:
    found = imports_of(f"{SOUND}\n{line}\n", module)
    assert len(found) > 2
    above = [each for each in found if each.goes_up and each.imported == imported]
    assert [each.when for each in above] == [when]


def test_what_lies_below_is_let_through() -> None:
    assert not [found for found in imports_of(SOUND, "server.run") if found.goes_up]
    assert not [
        found
        for found in imports_of("from . import workers\nfrom .engine import Engine", "server.run")
        if found.goes_up
    ]
