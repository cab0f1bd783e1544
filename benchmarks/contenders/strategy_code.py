"""Digests of strategies' sources: a row or result that carries one says which version of a strategy it is of.

Two versions are the same if they do the same: comments, docstrings and layout do not count.
"""

import ast
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

from paceline.strategies import machine_class

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "paceline"
STRATEGIES = PACKAGE / "strategies"


def digest(files: Iterable[Path]) -> str:
    """Of what these sources do: comments, docstrings and layout do not count."""
    found = hashlib.sha256()
    for file in sorted(files):
        found.update(file.name.encode() + b"\0" + meaning(file.read_text()).encode() + b"\0")
    return found.hexdigest()[:12]


def meaning(source: str) -> str:
    """The syntax tree of a file without its docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)


@functools.cache
def strategy_code(name: str) -> str:
    """Of a strategy's module and those beside it that it imports, however indirectly."""
    start = STRATEGIES / f"{machine_class(name).__module__.rpartition('.')[2]}.py"
    return digest(reached(start))


def reached(start: Path) -> set[Path]:
    """A module of the strategies and the modules of the same folder that it needs, but for the common base."""
    found: set[Path] = set()
    waiting = [start]
    while waiting:
        path = waiting.pop()
        if path not in found and path.is_file() and path.name != "base.py":
            found.add(path)
            waiting += [path.parent / f"{name}.py" for name in _neighbours(path)]
    return found


def _neighbours(path: Path) -> list[str]:
    """Names of the modules in the strategies' folder that a file imports."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline.strategies."):
            found.append((node.module or "").split(".")[2])
        elif isinstance(node, ast.ImportFrom) and node.module == "paceline.strategies":
            found += [alias.name for alias in node.names]
    return found


def base_name(spec: str) -> str:
    """The strategy's name without its options."""
    return spec.partition(":")[0]


def codes_of(specs: Iterable[str]) -> dict[str, str]:
    """The digests of these strategies, by their names."""
    return {name: strategy_code(name) for name in sorted({base_name(spec) for spec in specs})}
