"""The public surface: names and signatures as `public_surface.txt` has them, and documents that use nothing else.

    pytest --rewrite tests/unit/test_public.py

writes the file again. A name that it loses, and a parameter, goes through one release of `DeprecationWarning` first.
"""

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import surface

import paceline
from paceline import _moved, strategies

ROOT = Path(__file__).parents[2]
SNAPSHOT = Path(__file__).with_name("public_surface.txt")
PUBLIC = [
    "paceline",
    "paceline.engines.sim.light",
    "paceline.records",
    "paceline.scenario",
    "paceline.strategies",
    "paceline.strategies.peers",
    "paceline.tasks",
    "paceline.tasks.digits",
    "paceline.tasks.classification",
    "paceline.transport.memory",
]
# What public calls take or give and nobody needs to import.
GIVEN = [
    ("paceline.core.settings", "Every"),
    ("paceline.core.settings", "Target"),
    ("paceline.server.progress", "Progress"),
    ("paceline.server.progress", "RecentLine"),
    ("paceline.tables.table", "Table"),
]
OF_TABLES = ("bound", "get", "inc", "name", "prefetch", "rows", "width")  # the rest is for the worker's client
MADE_BY_PACELINE = ("Run", "Session")  # nobody else calls these constructors


def public_surface() -> str:
    """All of it, as the file has it."""
    blocks = ["\n".join(_without_constructors(surface.module_surface(name))) for name in PUBLIC]
    given = ["given by public calls"]
    for home, name in GIVEN:
        heading, *members = surface.described(name, getattr(_module(home), name))
        mine = [line for line in members if name != "Table" or line.strip().partition("(")[0] in OF_TABLES]
        given += [f"  {line}" for line in [heading, *mine]]
    blocks.append("\n".join(given))
    machines = ["strategies and their options"]
    for name in [*strategies.names(), *strategies.peer_names()]:
        cls = strategies.machine_class(name)
        machines.append(f"  {name}: {cls.__module__}.{cls.__name__}")
        machines += [f"    {field}" for field in surface.fields(cls.Options)]
    return "\n\n".join([*blocks, "\n".join(machines)]) + "\n"


def _without_constructors(lines: Iterator[str] | list[str]) -> Iterator[str]:
    made_by = ""
    for line in lines:
        if found := re.match(r" *class (\w+)", line):
            made_by = found[1]
        if not (made_by in MADE_BY_PACELINE and line.lstrip().startswith("__init__(")):
            yield line


def _module(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_names_and_signatures_are_those_on_record(request: pytest.FixtureRequest) -> None:
    found = public_surface()
    if request.config.getoption("--rewrite"):
        SNAPSHOT.write_text(found, encoding="utf-8")
    assert found == SNAPSHOT.read_text(encoding="utf-8"), "deprecate what goes; then pytest --rewrite this file"


def test_a_planted_change_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    before = public_surface()

    def load(name: str, *, strict: bool = True) -> None: ...

    class Wider(paceline.Report, frozen=True):
        more: int = 3

    for module, name, value, line in [
        ("paceline.scenario", "load", load, "  load(name: str, *, strict: bool = True) -> None"),
        ("paceline.records", "Report", Wider, "    more: int = 3"),
        ("paceline.records", "__all__", [*_module("paceline.records").__all__, "journal"], "  journal: module"),
        (
            "paceline.session",
            "Session",
            type("Session", (), {"stop": load}),
            "    stop(*, strict: bool = True) -> None",
        ),
    ]:
        with monkeypatch.context() as planted:
            planted.setattr(f"{module}.{name}", value)
            after = public_surface()
        assert after != before
        assert line in after.splitlines()
        assert line not in before.splitlines()
    assert public_surface() == before


@pytest.mark.parametrize("name", PUBLIC)
def test_names_are_sorted_and_exist(name: str) -> None:
    module = _module(name)
    assert module.__all__ == sorted(module.__all__)
    assert all(hasattr(module, public) for public in module.__all__)


def test_dir_lists_what_is_loaded_later() -> None:
    assert set(paceline.__all__) <= set(dir(paceline))


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="lunch"):
        paceline.lunch  # noqa: B018


def test_every_error_can_be_caught_by_a_public_name() -> None:
    from paceline.core import errors

    raised = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert raised == {name for name in paceline.__all__ if name.endswith("Error")}
    assert all(getattr(paceline, name) is getattr(errors, name) for name in raised)


def test_what_is_not_public_says_so() -> None:
    found = [*pkgutil.iter_modules(paceline.__path__)]
    packages = {info.name for info in pkgutil.walk_packages(paceline.__path__, "paceline.") if info.ispkg}
    top = {f"paceline.{info.name}" for info in found} - {"paceline.__main__"}
    for name in sorted((packages | top) - set(PUBLIC)):
        assert re.search(r"(^|\. )Not public: .+\.$", _module(name).__doc__ or "", re.M), name
    for name in PUBLIC:
        assert "Not public" not in (_module(name).__doc__ or ""), name


# -- documents --------------------------------------------------------------------------------------------------------


def imports_in(text: str) -> Iterator[tuple[str, str | None]]:
    """(module, name) of every import of ours in a document or a script; of a plain import the name is None."""
    for found in re.finditer(r"^ *((?:from|import) paceline\b[^\n(]*(?:\([^)]*\))?)", text, re.M):
        (statement,) = ast.parse(found[1]).body
        if isinstance(statement, ast.Import):
            yield from ((alias.name, None) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            yield from ((str(statement.module), alias.name) for alias in statement.names)


def is_public(module: str, name: str | None) -> bool:
    if name is None or f"{module}.{name}" in PUBLIC:
        return (module if name is None else f"{module}.{name}") in PUBLIC
    if module in PUBLIC:
        return name in _module(module).__all__
    machines = [strategies.machine_class(each) for each in [*strategies.names(), *strategies.peer_names()]]
    return (module, name) in [(cls.__module__, cls.__name__) for cls in machines]


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_and_examples_use_public_names_only(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert [found for found in imports_in(text) if not is_public(*found)] == []
    named = re.findall(r"`(paceline(?:\.\w+)+)", text) if path.suffix == ".md" else []
    assert [name for name in named if name not in PUBLIC and not is_public(*name.rsplit(".", 1))] == []


def test_a_planted_import_of_something_else_is_caught() -> None:
    text = (
        "    from paceline.records import Lines, journal\nimport paceline.server.run\nfrom paceline import scenario\n"
    )
    found = list(imports_in(text))
    assert [each for each in found if not is_public(*each)] == [
        ("paceline.records", "journal"),
        ("paceline.server.run", None),
    ]
    assert is_public("paceline.strategies.asp", "Asp")
    assert not is_public("paceline.strategies.asp", "Apply")


# -- moved modules ----------------------------------------------------------------------------------------------------


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No old name has been imported before, nor will have been after."""
    before = set(sys.modules)
    yield
    for name in _moved.MOVED:
        assert name not in before
        sys.modules.pop(name, None)
        vars(paceline).pop(name.rpartition(".")[2], None)


@pytest.mark.parametrize("old", sorted(_moved.MOVED))
@pytest.mark.usefixtures("forgotten")
def test_a_moved_module_is_the_same_module_and_warns(old: str) -> None:
    place, home = _moved.MOVED[old]
    with pytest.warns(DeprecationWarning, match=rf"{old} will be removed .* from {home}$") as warned:
        exec(f"from paceline import {old.rpartition('.')[2]} as found; import {old}", names := {})
    assert len(warned) == 1
    assert warned[0].filename == "<string>"  # the importer's, not ours
    assert names["found"] is _module(place)
    assert _module(place).__spec__.name == place
    assert home in PUBLIC


@pytest.mark.usefixtures("forgotten")
def test_a_moved_module_is_an_error_where_warnings_are() -> None:
    with pytest.raises(DeprecationWarning, match=r"paceline\.journal"):
        _module("paceline.journal")


def test_no_file_has_a_moved_name_and_the_finder_is_there_once() -> None:
    here = {f"paceline.{info.name}" for info in pkgutil.iter_modules(paceline.__path__)}
    assert not here & set(_moved.MOVED)
    _moved.install()
    assert sys.meta_path.count(_moved.MovedModules) == 1
    with pytest.raises(ModuleNotFoundError):
        _module("paceline.never")


def test_public_modules_for_reading_load_no_torch() -> None:
    light = "paceline, paceline.records, paceline.scenario, paceline.strategies.peers, paceline.tasks"
    code = f"import sys, {light}; print([name for name in ('torch', 'zmq', 'rich') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_structs_are_spelled_with_their_bounds() -> None:
    class Made(msgspec.Struct):
        name: str | None
        many: dict[str, list[int]] = msgspec.field(default_factory=dict)

    assert list(surface.fields(Made)) == ["name: str | None", "many: dict[str, list[int]] = dict()"]
