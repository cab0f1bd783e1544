"""Pages and docstrings name files, modules and classes that exist."""

import ast
import functools
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
READERS = {"my_strategy.py", "mine.py", "wrong.py", "train.py", "FILE.py", "alone.py", "majority.py"}
NOT_THERE = {"launch.py"}  # the structure page says why there is none
SOURCE = sorted((ROOT / "src").rglob("*.py"))
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef
FOLDERS = (ROOT, ROOT / "src", ROOT / "src" / "paceline", ROOT / "benchmarks")
FILE = re.compile(r"`((?:[\w.-]+/)*\w+\.py)`")
DOTTED = re.compile(r"\bpaceline(?:\.[A-Za-z_]\w*)+")
QUOTED = re.compile(r"`([A-Za-z_][\w.]*)(?:\(.*?\))?`")
OF_MODULE = re.compile(r"`([a-z_]+)\.[A-Z]\w+")
OTHERS = {"GradScaler", "unscale_", "ps", "setproctitle", "random", "zmq", "s_i", "scaler"}  # no names of ours
OF_CLASS = re.compile(r"`([A-Z][a-z]\w+)\.(\w+)")
ATTRIBUTES = {"Grant.work", "Run.tables", "Run.model_state", "Run.summary", "Apply.stock"}  # not in a class's namespace


def lacking_files(text: str) -> list[str]:
    named = set(FILE.findall(text)) - READERS - NOT_THERE
    return sorted(name for name in named if not any((folder / name).exists() for folder in FOLDERS))


def lacking_modules(text: str) -> list[str]:
    return sorted(name for name in set(DOTTED.findall(text)) if not exists(name))


def exists(dotted: str) -> bool:
    """Whether it is a module, or can be had from one."""
    module, _, name = dotted.rpartition(".")
    try:
        return importlib.util.find_spec(dotted) is not None or hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:  # what should be its package is a module, or is not there
        try:
            return hasattr(importlib.import_module(module), name)
        except ModuleNotFoundError:
            return False


def lacking_names(text: str) -> list[str]:
    """Of a docstring: words that no code has, and modules that are none of ours."""
    quoted = {word for name in QUOTED.findall(text) for word in name.split(".") if word}
    modules = {name for name in OF_MODULE.findall(text) if name not in stems()}
    return sorted(({word for word in quoted if word not in words_of_code()} | modules) - OTHERS)


@functools.cache
def words_of_code() -> set[str]:
    """All words of the source beside those of docstrings and comments."""
    found = stems()
    for file in SOURCE:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        found.update(re.findall(r"\w+", ast.unparse(tree)))
    return found


def stems() -> set[str]:
    return {part for file in SOURCE for part in file.relative_to(ROOT).with_suffix("").parts}


def lacking_methods(text: str) -> list[str]:
    """Of classes of ours, those that no class of that name defines."""
    source = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py"))
    named = {(kind, name) for kind, name in OF_CLASS.findall(text) if f"{kind}.{name}" not in ATTRIBUTES}
    return sorted(
        f"{kind}.{name}"
        for kind, name in named
        if not any(re.search(rf"    def {name}\(|    {name}:", body) for body in bodies(source, kind))
    )


def bodies(source: str, kind: str) -> list[str]:
    return re.findall(rf"^class {kind}\b.*\n((?:(?:[ )].*)?\n)*)", source, re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert lacking_files(text) == []
    assert lacking_modules(text) == []
    assert lacking_methods(text) == []


def test_what_docstrings_name_exists() -> None:
    lacking = {}
    for file in SOURCE:
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        texts = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, DOCUMENTED)]
        found = lacking_names("\n".join(texts))
        if found:
            lacking[file.relative_to(ROOT).as_posix()] = found
    assert lacking == {}


def test_what_is_gone_is_noticed() -> None:
    assert lacking_files("`server/run.py`, `engines/local/cluster.py`") == ["engines/local/cluster.py"]
    text = "paceline.records.journal.read, paceline.passes, paceline.launch, paceline.records.blame.fold"
    assert lacking_modules(text) == ["paceline.passes", "paceline.records.blame.fold"]
    assert lacking_methods("`Store.merge(...)`, `Store.blend`, `Passes.push`") == ["Passes.push", "Store.blend"]
    assert lacking_names("`slots.SlotReplica`, `device_slots`, `Replica.take(loss)`") == ["device_slots", "slots"]
