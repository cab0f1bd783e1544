"""How the source is built, in numbers: sizes, names, the law of imports and four walks, of two revisions side by side.

python benchmarks/structure.py                      # this tree beside BEFORE; writes results/structure.md and .json
python benchmarks/structure.py --before v0.2        # beside another revision
python benchmarks/structure.py --static             # without the walks, which start processes

Both columns come from this script: the other revision is checked out into a temporary git worktree. Sizes, names and
imports are read off the source (`ast`), nothing of it is imported; the walks run it (`walks.py` says what they count).

A room is a folder directly under `src/paceline`; files that lie there themselves are the room `(top)`. LAW lists the
rooms from the bottom up; there `__main__` belongs to cli and `_version` to core. A module may import its own room and
rooms further down. An import of a room further up is a violation, so is one between `worker` and `server`; one of
another room on the same level is counted apart ("sideways"). Imports that run with the module, those within a function
(lazy) and those for type checkers alone are counted separately. A tree without a room `core` has no law to follow: n/a.
"""

import argparse
import ast
import contextlib
import io
import subprocess
import sys
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import results
import sources
import walks

ROOT = Path(__file__).parents[1]
BEFORE = "a878fe5"
COMMAND = "python benchmarks/structure.py"
TOP = "(top)"
NOT_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LAW = (
    ("core",),
    ("strategies", "model"),
    ("records", "transport"),
    ("worker", "server"),
    ("gradients", "tables", "peers"),
    ("shards",),
    (TOP,),
    ("engines",),
    ("forecast", "comparison", "laws"),
    ("cli", "tasks"),
)
LEVELS = {room: level for level, rooms in enumerate(LAW) for room in rooms}
HOMES = {"__main__": "cli", "_version": "core"}  # modules of the top folder that stand elsewhere in the law
PLACES = ("module", "lazy", "typing")
ENGINES = ("alone", "sim", "local", "ray")
THIN = ("alone", "sim", "local")  # whose lines the bar is about
NOT_UNIQUE = {"__init__", "__main__", "base", "messages", "worker", "server"}  # names that modules may share
MOST_ATTRIBUTES = 20
SHORT, LONG = 25, 600
NA = "n/a"


class Module(NamedTuple):
    """One source file."""

    file: str  # below src/paceline
    name: str  # as it is imported
    text: str

    @property
    def room(self) -> str:
        parts = Path(self.file).parts
        return parts[0] if len(parts) > 1 else TOP

    @property
    def place(self) -> str:
        """The room whose imports it may have."""
        return HOMES.get(self.stem, self.room) if self.room == TOP else self.room

    @property
    def stem(self) -> str:
        return Path(self.file).stem

    @property
    def package(self) -> str:
        """What its relative imports start from."""
        return self.name if self.stem == "__init__" else self.name.rpartition(".")[0]

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def code(self) -> int:
        """Its lines without blank ones, comments and docstrings."""
        found: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in NOT_CODE:
                found.update(range(token.start[0], token.end[0] + 1))
        for node in ast.walk(ast.parse(self.text)):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                found.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        return len(found)


class Import(NamedTuple):
    """A module that another one imports."""

    line: int
    name: str
    place: str  # one of PLACES


def modules_of(tree: Path) -> list[Module]:
    """Every source file of a checkout."""
    source = tree / "src" / "paceline"
    found = []
    for path in sorted(source.rglob("*.py")):
        file = path.relative_to(source)
        parts = ("paceline", *file.with_suffix("").parts)
        name = ".".join(parts[:-1] if file.stem == "__init__" else parts)
        found.append(Module(file.as_posix(), name, path.read_text(encoding="utf-8")))
    if not found:
        raise SystemExit(f"{source} holds no source: give the root of a checkout")
    return found


# -- sizes and names ---------------------------------------------------------------------------------------------------


def sizes(modules: Sequence[Module]) -> dict[str, Any]:
    """Lines and files, in total, by room and by engine."""
    rooms: dict[str, int] = defaultdict(int)
    for module in modules:
        rooms[module.room] += module.lines
    engines = dict.fromkeys(ENGINES, 0)
    for module in modules:
        parts = Path(module.file).with_suffix("").parts
        if parts[0] == "engines" and parts[1] in engines:
            engines[parts[1]] += module.lines
    return {
        "lines": sum(rooms.values()),
        "code": sum(module.code for module in modules),
        "rooms": dict(sorted(rooms.items())),
        "engines": engines,
        "files": len(modules),
        "short": [m.file for m in modules if m.lines < SHORT and m.stem not in NOT_UNIQUE],
        "long": [m.file for m in modules if m.lines > LONG],
        "top": [m.file for m in modules if "/" not in m.file],
    }


def names(modules: Sequence[Module]) -> dict[str, list[str]]:
    """Classes with too many attributes, and names that stand twice."""
    fat = []
    classes: dict[str, list[str]] = defaultdict(list)
    stems: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        if module.stem not in NOT_UNIQUE:
            stems[module.stem].append(module.file)
        for node in ast.walk(ast.parse(module.text)):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(module.file)
                count = len(_attributes(node))
                if count > MOST_ATTRIBUTES:
                    fat.append(f"{module.file}: {node.name} ({count})")
    return {"fat": fat, "classes_twice": _twice(classes), "modules_twice": _twice(stems)}


def _attributes(node: ast.ClassDef) -> set[str]:
    """What its methods assign to on `self`."""
    targets: list[ast.expr] = []
    for found in ast.walk(node):
        if isinstance(found, ast.Assign):
            targets += found.targets
        elif isinstance(found, ast.AnnAssign):
            targets.append(found.target)
    return {
        t.attr
        for t in targets
        if isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name) and t.value.id == "self"
    }


def _twice(places: dict[str, list[str]]) -> list[str]:
    return [f"{name}: {', '.join(files)}" for name, files in sorted(places.items()) if len(files) > 1]


# -- the law of imports ------------------------------------------------------------------------------------------------


def imports_of(module: Module, known: set[str]) -> list[Import]:
    """What it imports of the package; `from a import b` is the module a.b where there is one, else a."""
    found = []
    for node, place in _imports(ast.parse(module.text), "module"):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            package = module.package.split(".")
            parents = package[: len(package) - node.level + 1] if node.level else []
            home = ".".join([*parents, *([node.module] if node.module else [])])
            targets = [f"{home}.{alias.name}" if f"{home}.{alias.name}" in known else home for alias in node.names]
        names = dict.fromkeys(name for name in targets if name.partition(".")[0] == "paceline")
        found += [Import(node.lineno, name, place) for name in names]
    return found


def _imports(node: ast.AST, place: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, place
        elif isinstance(child, ast.If) and ast.unparse(child.test).removeprefix("typing.") == "TYPE_CHECKING":
            for statement in child.body:
                yield from _imports(ast.Module([statement], []), "typing")
            for statement in child.orelse:
                yield from _imports(ast.Module([statement], []), place)
        else:
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _imports(child, "lazy" if function and place == "module" else place)


def law(modules: Sequence[Module]) -> dict[str, list[str]] | None:
    """Imports against the law, by kind and place; None where the rooms of the law do not exist."""
    if all(module.room != "core" for module in modules):
        return None
    rooms = {module.name: module.place for module in modules}
    found: dict[str, list[str]] = {f"{kind} {place}": [] for kind in ("up", "sideways") for place in PLACES}
    found["unplaced"] = sorted({room for room in rooms.values() if room not in LEVELS})
    for module in modules:
        for imported in imports_of(module, set(rooms)):
            target = rooms.get(imported.name)
            kind = None if target is None else _kind(module.place, target)
            if kind is not None:
                found[f"{kind} {imported.place}"].append(f"{module.file}:{imported.line} imports {imported.name}")
    return found


def _kind(room: str, target: str) -> str | None:
    """How an import from one room of another stands to the law; None: it follows it, or a room has no place in it."""
    if room == target or room not in LEVELS or target not in LEVELS:
        return None
    if {room, target} == {"worker", "server"} or LEVELS[target] > LEVELS[room]:
        return "up"
    return "sideways" if LEVELS[target] == LEVELS[room] else None


def engine_names(modules: Sequence[Module]) -> list[str]:
    """Where an engine is named outside of `engines/`: as a string of its own, or by importing it."""
    found = []
    known = {module.name for module in modules}
    for module in modules:
        if module.room == "engines":
            continue
        for node in ast.walk(ast.parse(module.text)):
            if isinstance(node, ast.Constant) and node.value in ENGINES:
                found.append(f"{module.file}:{node.lineno} {node.value!r}")
        for imported in imports_of(module, known):
            if imported.name.startswith("paceline.engines.") and imported.name.split(".")[2] in ENGINES:
                found.append(f"{module.file}:{imported.line} imports {imported.name}")
    return found


# -- one tree, two trees -----------------------------------------------------------------------------------------------


def count(tree: Path, *, static: bool = False) -> dict[str, Any]:
    """All that is counted of one checkout."""
    modules = modules_of(tree)
    traced = {} if static else {name: walk._asdict() for name, walk in walks.walks(tree).items()}
    return {
        **sizes(modules), **names(modules), "law": law(modules), "engine_names": engine_names(modules), "walks": traced,
    }  # fmt: skip


@contextlib.contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """Another revision in a folder of its own, for as long as it is looked at."""
    with tempfile.TemporaryDirectory(prefix="structure-") as folder:
        tree = Path(folder) / "tree"
        _git("worktree", "add", "--detach", str(tree), revision)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


class Figure(NamedTuple):
    """A figure of the count, and the bar for it if there is one."""

    what: str
    of: Callable[[dict[str, Any]], int | str]
    most: int | None = None


def _walk(name: str, what: str) -> Callable[[dict[str, Any]], int | str]:
    return lambda counted: len(counted["walks"][name][what]) if name in counted["walks"] else NA


def _law(*kinds: str) -> Callable[[dict[str, Any]], int | str]:
    return lambda counted: NA if counted["law"] is None else sum(len(counted["law"][kind]) for kind in kinds)


def _length(key: str) -> Callable[[dict[str, Any]], int]:
    return lambda counted: len(counted[key])


CRITERIA = (
    Figure("files that a gradient passes under bsp on processes", _walk("push", "files"), 20),
    Figure("shapes of a gradient on its way", _walk("push", "shapes"), 4),
    Figure("turns back of a gradient", _walk("push", "turns"), 0),
    Figure("files that a table's inc, clock and get pass", _walk("table", "files"), 16),
    Figure("turns back of a table's inc, clock and get", _walk("table", "turns"), 0),
    Figure("lines of alone, sim and local", lambda c: sum(c["engines"][name] for name in THIN), 3200),
    Figure("lines of ray", lambda c: c["engines"]["ray"], 600),
    Figure("lines of source", lambda c: c["lines"], 23500),
    Figure(f"classes with more than {MOST_ATTRIBUTES} attributes", _length("fat"), 0),
    Figure("class names that stand twice", _length("classes_twice"), 0),
    Figure("module names that stand twice", _length("modules_twice"), 0),
    Figure("imports against the law", _law("up module", "unplaced"), 0),
)
FIGURES = (
    Figure("lines of code alone: no blank lines, comments and docstrings", lambda c: c["code"]),
    Figure("source files", lambda c: c["files"]),
    Figure("modules directly in src/paceline", _length("top")),
    Figure(f"files under {SHORT} lines (package files aside)", _length("short")),
    Figure(f"files over {LONG} lines", _length("long")),
    Figure("files of a gradient beside decision and journal line", _walk("push", "outside")),
    Figure("files of inc, clock and get beside decision and journal line", _walk("table", "outside")),
    Figure("files that a message between peers passes", _walk("message", "files")),
    Figure("turns back of a message between peers", _walk("message", "turns")),
    Figure("files that a journal line passes", _walk("line", "files")),
    Figure("imports further up within functions", _law("up lazy")),
    Figure("imports further up for type checkers", _law("up typing")),
    Figure("imports sideways", _law("sideways module", "sideways lazy", "sideways typing")),
    Figure("names of engines outside of engines/", _length("engine_names")),
)  # fmt: skip


def verdicts_of(before: dict[str, Any], after: dict[str, Any]) -> list[results.Verdict]:
    """Each criterion: before, after, met or missed."""
    found = []
    for what, of, most in CRITERIA:
        value = of(after)
        passed = isinstance(value, int) and most is not None and value <= most
        found.append(results.Verdict(what, f"{_told(value)}, before {_told(of(before))}", f"<= {most:,}", passed))
    return found


def _told(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value


def rows_of(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    """Every figure of both trees side by side."""
    found = [(figure.what, figure.of(before), figure.of(after)) for figure in (*CRITERIA, *FIGURES)]
    for what in ("rooms", "engines"):
        for name in dict.fromkeys((*sorted(before[what]), *sorted(after[what]))):
            title = f"lines of the {'room' if what == 'rooms' else 'engine'} {name}"
            found.append((title, before[what].get(name, 0), after[what].get(name, 0)))
    return [{"figure": title, "before": old, "after": new} for title, old, new in found]


def lists_of(counted: dict[str, Any]) -> str:
    """What the figures of one tree count, by name."""
    listed = {
        "Classes with too many attributes": counted["fat"],
        "Class names that stand twice": counted["classes_twice"],
        "Module names that stand twice": counted["modules_twice"],
        **{f"Imports against the law, {kind}": found for kind, found in (counted["law"] or {}).items()},
        "Names of engines outside of engines/": counted["engine_names"],
    }
    for name, walk in counted["walks"].items():
        listed[f"Walk of a {name}: turns back"] = walk["turns"]
        listed[f"Walk of a {name}: shapes"] = walk["shapes"]
    parts = [f"**Walk of a {name}**: {', '.join(walk['files'])}" for name, walk in counted["walks"].items()]
    parts += [f"**{title}** ({len(found)})\n\n" + "\n".join(f"- {line}" for line in found)
              for title, found in listed.items() if found]  # fmt: skip
    return "\n\n".join(parts)


def main(given: Sequence[str] | None = None) -> int:
    """Count both and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", default=BEFORE, help="the revision to stand beside")
    parser.add_argument("--static", action="store_true", help="leave out the walks, which start processes")
    parser.add_argument("--out", type=Path, help="folder of the result, instead of benchmarks/results")
    sources.add_options(parser)
    chosen = parser.parse_args(given)
    of = sources.checked(chosen)
    revision = _git("rev-parse", "--short", f"{chosen.before}^{{commit}}")
    with checked_out(revision) as tree:
        before = count(tree, static=chosen.static)
    after = count(ROOT, static=chosen.static)
    notes = (
        f"Before: {revision}. After: {of.commit}. `benchmarks/structure.py` says how sizes, names and imports are "
        "counted, "
        "`benchmarks/walks.py` how the walks are traced. That no test and no decision of the reference journals is "
        "lost is for the test suite to show.\n\n"
        f"<details><summary>after, by name</summary>\n\n{lists_of(after)}\n\n</details>\n\n"
        f"<details><summary>before, by name</summary>\n\n{lists_of(before)}\n\n</details>"
    )
    command = " ".join([COMMAND, *(sys.argv[1:] if given is None else given)])
    verdicts, rows = verdicts_of(before, after), rows_of(before, after)
    folder = chosen.out or results.FOLDER
    details = {"before": before, "after": after}
    print(results.write("structure", command, verdicts, rows, notes, of, folder, details=details))
    for verdict in verdicts:
        print(f"{'met   ' if verdict.passed else 'missed'} {verdict.name}: {verdict.value} (bar {verdict.bar})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
