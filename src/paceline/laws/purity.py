"""Check a strategy's purity by its source, which also covers lines that no run executes.

A strategy has no clock, no randomness of its own, no files, no sockets, no tensors and no logging: its decisions must
follow from its events alone, or a journal could not be replayed.
"""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

PURE_PACKAGES = (
    "msgspec", "paceline.core.events", "paceline.core.actions", "paceline.core.peer_events",
    "paceline.core.peer_actions", "paceline.core.errors", "paceline.core.values", "paceline.strategies",
)  # fmt: skip
# Modules without clocks, files, sockets, processes, threads and logging; of `random` only a seeded Random.
PURE_LIBRARY = {
    "__future__", "abc", "bisect", "collections", "dataclasses", "enum", "fractions", "functools", "heapq", "itertools",
    "math", "numbers", "operator", "random", "statistics", "typing",
}  # fmt: skip
EFFECTS = {"open", "print", "input", "exec", "eval", "__import__"}


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Yield line and full name of every import in a module; relative ones are resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            home = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{home}.{alias.name}") for alias in node.names)


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def impurities(text: str, package: str = "paceline.strategies") -> list[str]:
    """Describe each impurity in a strategy's source."""
    tree = ast.parse(text)
    found = [
        f"line {line}: imports {name}"
        for line, name in imports(tree, package)
        if not within(name, PURE_PACKAGES) and name.partition(".")[0] not in PURE_LIBRARY
    ]
    found += [
        f"line {line}: imports {name}" for line, name in imports(tree, package) if name.startswith("random.")
    ]  # `from random import ...` would hide module-level randomness from the check below
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
            if node.attr != "Random":
                found.append(f"line {node.lineno}: random.{node.attr} is randomness that is not injected")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in EFFECTS:
            found.append(f"line {node.lineno}: {node.func.id}() is an effect")
        elif isinstance(node, ast.Global | ast.Nonlocal):
            found.append(f"line {node.lineno}: state outside `self.state`")
    return found


def impurities_of(cls: type) -> list[str]:
    """Describe each impurity in the file of a class, and in the files of its package that it imports."""
    file = inspect.getsourcefile(cls)
    if file is None:
        return ["its source cannot be read"]
    return _impurities_from(Path(file), cls.__module__.rpartition(".")[0], set())


def _impurities_from(file: Path, package: str, seen: set[Path]) -> list[str]:
    seen.add(file)
    found = []
    for impurity in impurities(file.read_text(encoding="utf-8"), package):
        imported = _beside(impurity.partition(" imports ")[2], file, package)
        if imported is None:
            found.append(f"{file.name}, {impurity}")
        elif imported not in seen:
            found += _impurities_from(imported, package, seen)
    return found


def _beside(name: str, file: Path, package: str) -> Path | None:
    """Return the file of an imported module, or of the module that defines the name, in the same package."""
    parts, top = name.split("."), package.partition(".")[0]
    root = file.parents[package.count(".") + 1] if package else file.parent
    places = [root.joinpath(*parts[:count]).with_suffix(".py") for count in (len(parts), len(parts) - 1) if count]
    return next((place for place in places if place.is_file() and parts[0] in (top or parts[0],)), None)
