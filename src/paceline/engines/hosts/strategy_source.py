"""The source of a run's strategy that is not one of this package: every machine must have the same, or none.

A strategy with a server runs on the serving machine alone, so that the others may lack it; nodes without a server run
it themselves. What is compared is the one file that has the class, not what it imports. A machine names a Python file
where the run's strategy would be found there, without running any of it.
"""

import hashlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import msgspec

from paceline.core.errors import OptionError
from paceline.strategies import is_peer
from paceline.strategies.sources import CENTRAL, PEERS, installed, split


class StrategySource(msgspec.Struct, frozen=True):
    """Where a run has its strategy from."""

    place: str  # a file, or the name of a module
    digest: str
    nodes_run_it: bool

    def refusal(self, theirs: str) -> str | None:
        """Return why a machine with this digest of its own may not join; empty means that it has none."""
        if theirs == self.digest or not (theirs or self.nodes_run_it):
            return None
        if not theirs:
            fix = "copy it there or beside the script; on Ray, --working-dir FOLDER sends it"
            return f"it has no {self.place}, the run's strategy ({self.digest}): {fix}"
        return f"its strategy {self.place} is {theirs}, this run's {self.digest}: give both the same file"


def strategy_source(strategy: str) -> StrategySource | None:
    """Return the source of a strategy as users write it; None for those of this package."""
    name = split(strategy)[0]
    if name in CENTRAL or name in PEERS:
        return None
    point = installed().get(name)
    place = (name if point is None else point.value).rpartition(":")[0]
    found = file_here(place, beside=None)
    return None if found is None else StrategySource(place, digest_of_file(found), is_peer(strategy))


def file_here(place: str, beside: Path | None) -> Path | None:
    """Return the file of a strategy on this machine: at the same path, beside the script, or of the module."""
    folders = [] if beside is None else [beside.parent]
    if place.endswith(".py"):
        tried = [Path(place), *(folder / Path(place).name for folder in folders)]
        return next((path for path in tried if path.is_file()), None)
    paths, name = [*map(str, folders), *sys.path, str(Path.cwd())], ""
    spec: ModuleSpec | None = None
    for part in place.split("."):  # importlib's own search would import the packages
        name = f"{name}.{part}" if name else part
        spec = PathFinder.find_spec(name, paths)
        if spec is None:
            return None
        paths = list(spec.submodule_search_locations or ())
    path = Path((spec and spec.origin) or "")
    return path if path.suffix == ".py" and path.is_file() else None


def digest_of_file(path: Path) -> str:
    """Return a file's name and the digest of its contents."""
    try:
        return f"{path.name} ({hashlib.sha256(path.read_bytes()).hexdigest()[:16]})"
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror}") from error
