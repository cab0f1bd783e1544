"""Runs that are kept: a file of rows, and the rule by which an older row still counts.

A run in virtual time is a function of its trial and of the sources. So a row keeps a digest of its strategy's sources
and one of everything else that a run goes through. Where the rest has changed, one row of each cell and side is made
again, and where the strategy's sources have, three of different length: if they are equal in every number but the
processor's seconds, the change does not touch these runs, and the others of that cell and side are kept too. A run that
was given up before its limit never counts: nobody knows whether it would have been at the target.

Rows are appended to a text file as they come, so that a run that is broken off loses at most those under way;
`Rows.pack` moves them to a compressed file that is committed.
"""

import functools
import gzip
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from contenders.strategy_code import PACKAGE, ROOT, STRATEGIES, base_name, digest, strategy_code
from contenders.uneven_cells import Outcome, Trial

SHARED = (
    "core",
    "engines/sim",
    "gradients",
    "model",
    "server",
    "worker",
    "session.py",
    "launching.py",
    "scenario.py",
    "tasks/cifar.py",
    "tasks/mnist.py",
)
STRATEGY_PROBES = 3  # rows of a cell and side that are made again where the strategy's own sources have changed
GIVEN_UP = "HopelessError"  # how runs ended that were given up before their limit, by a rule that is gone
CELLS = ROOT / "benchmarks" / "contenders" / "uneven_cells.py"


class Row(msgspec.Struct, frozen=True):
    """A run, the sources it was made of, and for which part of the benchmark."""

    trial: Trial
    outcome: Outcome
    strategy_code: str  # digests
    shared_code: str
    commit: str
    checked: str = ""  # a later commit of other sources, at which rows beside it came out the same


# -- what a run is a function of -------------------------------------------------------------------------------------


@functools.cache
def shared_code() -> str:
    """Of everything that every run goes through, the strategies' common base and torch among it."""
    files = [CELLS, STRATEGIES / "base.py"]
    for place in SHARED:
        path = PACKAGE / place
        files += [path] if path.is_file() else path.rglob("*.py")
    return f"{digest(files)} torch {torch.__version__}"


# -- the file --------------------------------------------------------------------------------------------------------


class Rows:
    """All rows that count with these sources, and where new ones are written."""

    def __init__(self, path: Path, commit: str) -> None:
        self.path, self.packed, self.commit = path, path.with_suffix(path.suffix + ".gz"), commit
        self.found: dict[Trial, Row] = {}
        self._by_run: dict[Trial, list[Row]] = {}  # under the trial without its limit
        self.doubtful: dict[tuple[str, str], list[Row]] = {}  # by cell and strategy: of other sources
        self.refused = 0  # given up before their limit
        for row in self._read():
            self._place(row)

    def _read(self) -> list[Row]:
        lines = gzip.decompress(self.packed.read_bytes()).splitlines() if self.packed.exists() else []
        lines += self.path.read_bytes().splitlines() if self.path.exists() else []
        rows = []
        for number, line in enumerate(lines, 1):
            try:
                rows.append(msgspec.json.decode(line, type=Row))
            except msgspec.DecodeError:
                if number < len(lines):  # the last one may have been cut short
                    raise SystemExit(f"{self.path}: line {number} is no row; remove it") from None
        return rows

    def _place(self, row: Row) -> None:
        if row.outcome.ended == GIVEN_UP:
            self.refused += 1
        elif (row.strategy_code, row.shared_code) != (strategy_code(base_name(row.trial.strategy)), shared_code()):
            self.doubtful.setdefault((row.trial.cell, row.trial.strategy), []).append(row)
        else:
            self._index(row)

    def _index(self, row: Row) -> None:
        self.found[row.trial] = row
        self._by_run.setdefault(unlimited(row.trial), []).append(row)

    def get(self, trial: Trial) -> Outcome | None:
        """What is known of a trial, also from one with another limit: a run does not know how long it may go on."""
        if trial in self.found:
            return self.found[trial].outcome
        for row in self._by_run.get(unlimited(trial), ()):
            reached = row.outcome.reached_s
            if reached is not None and reached <= trial.limit_s and not trial.to_the_end:
                return row.outcome
            if reached is None and row.trial.limit_s >= trial.limit_s and not trial.to_the_end:
                return row.outcome
        return None

    def add(self, trial: Trial, outcome: Outcome) -> Row:
        """Keep a run that was made."""
        return self._keep(Row(trial, outcome, strategy_code(base_name(trial.strategy)), shared_code(), self.commit))

    def _keep(self, row: Row) -> Row:
        self._index(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        return row

    def settle(self, key: tuple[str, str], again: Callable[[Trial], Outcome]) -> None:
        """Make some doubtful rows of a cell and strategy again: if they are the same, all of the same sources count."""
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in self.doubtful.get(key, []):
            if self.get(row.trial) is None:
                groups.setdefault((row.strategy_code, row.shared_code), []).append(row)
        present = strategy_code(base_name(key[1]))
        for rows in groups.values():
            if all(self._is_same(probe, again) for probe in probes(rows, present)):
                for row in rows:
                    if self.get(row.trial) is None:
                        checked = msgspec.structs.replace(row, strategy_code=present, shared_code=shared_code())
                        self._keep(msgspec.structs.replace(checked, checked=self.commit))
        self.doubtful.pop(key, None)

    def _is_same(self, probe: Row, again: Callable[[Trial], Outcome]) -> bool:
        """Whether a run comes out as it did; if not, what it is by now is kept."""
        made = self.get(probe.trial) or again(probe.trial)
        if same(made, probe.outcome):
            return True
        self.add(probe.trial, made)
        return False

    def pack(self) -> None:
        """Move all rows that count to the compressed file."""
        doubtful = {row.trial: row for kept in self.doubtful.values() for row in kept}
        rows = [*({**doubtful, **self.found}).values()]
        rows.sort(key=lambda row: msgspec.to_builtins(row.trial, order="sorted").__repr__())
        text = b"\n".join(msgspec.json.encode(row) for row in rows) + b"\n"
        self.packed.write_bytes(gzip.compress(text, 9, mtime=0))
        self.path.unlink(missing_ok=True)


def probes(rows: list[Row], present: str) -> list[Row]:
    """The rows to make again: the cheapest, and longer ones if the strategy's sources are not those present."""
    order = sorted(rows, key=lambda row: (row.outcome.reached_s is None, row.outcome.cpu_s))
    if rows[0].strategy_code == present:
        return order[:1]
    return order[:: max(1, len(order) // STRATEGY_PROBES)][:STRATEGY_PROBES]


def unlimited(trial: Trial) -> Trial:
    """The trial without its limit."""
    return msgspec.structs.replace(trial, limit_s=0.0)


def same(one: Outcome, other: Outcome) -> bool:
    """Whether two runs are equal but for the processor's time."""
    return msgspec.structs.replace(one, cpu_s=0.0) == msgspec.structs.replace(other, cpu_s=0.0)
