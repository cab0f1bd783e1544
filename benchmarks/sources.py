"""Which sources a result is of: the commit, and whether the tree held anything else while it was measured.

A number without its sources cannot be made again. So every benchmark looks before it measures, refuses to write a
result of sources that no commit has, and looks once more before it writes. `--unclean` writes all the same, and the
page says so. `benchmarks/results` is left out: it holds what earlier runs wrote, and no measurement reads it.
"""

import argparse
import importlib.util
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[1]
MEASURED = ("src", "benchmarks", "pyproject.toml", "constraints.txt")
WRITTEN = "benchmarks/results"
SHOWN = 3  # changed files that are named; the rest is counted


class Sources(msgspec.Struct, frozen=True):
    """A commit and what differs from it; `problems` is empty for a clean tree."""

    commit: str
    problems: tuple[str, ...] = ()
    copied: bool = False  # the tree is a copy without its history: its commit was named, and nothing can be checked

    @property
    def clean(self) -> bool:
        """Whether the commit has all that is measured."""
        return not self.problems

    @property
    def tree(self) -> str:
        """The state of the tree, for the page."""
        if self.copied:
            return "a copy, not checked"
        if self.clean:
            return "clean"
        more = len(self.problems) - SHOWN
        return f"not clean ({', '.join(self.problems[:SHOWN])}{f' and {more} more' if more > 0 else ''})"


def look(root: Path = ROOT, measured: Sequence[str] = MEASURED) -> Sources:
    """The state of a tree. Where git cannot tell, that is a problem too."""
    try:
        commit = _git(root, "rev-parse", "--short", "HEAD").strip()
        status = _git(root, "status", "--porcelain", "--untracked-files=all", "--no-renames",
                      "--", *measured, f":(exclude){WRITTEN}")  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return Sources("unknown", ("git cannot tell the commit",))
    problems = [line[3:] for line in status.splitlines()]
    if root == ROOT and not _imports_this_tree():
        problems.append("paceline is not imported from this tree's src")
    return Sources(commit, tuple(problems))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every command that writes a result."""
    parser.add_argument("--unclean", action="store_true", help="write a result of uncommitted sources; it says so")
    parser.add_argument("--commit", help="the commit that is measured, where only a copy of the tree is at hand")


def checked(given: argparse.Namespace, root: Path = ROOT, measured: Sequence[str] = MEASURED) -> Sources:
    """The sources of a result that is going to be written; SystemExit if it may not be."""
    found = look(root, measured)
    if given.commit and found.commit == "unknown":
        return Sources(given.commit, copied=True)
    if given.commit and not found.commit.startswith(given.commit[: len(found.commit)]):
        raise SystemExit(f"--commit {given.commit}: git says that this tree is at {found.commit}; leave it out")
    if not found.clean and not given.unclean:
        raise SystemExit(f"the tree is {found.tree}: commit or stash first, or give --unclean; the page says so")
    return found


def _imports_this_tree() -> bool:
    spec = importlib.util.find_spec("paceline")
    return spec is not None and spec.origin is not None and Path(spec.origin).is_relative_to(ROOT / "src")


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout
