"""Measured rows that are kept, each under a key of all that it depends on, so that a benchmark measures only the rest.

A row's key is a hash of its question and of how its side behaves: `behaviour` hashes the decisions of a run without
gradients, and `learning` what a short training run arrives at. A change of the package that changes neither leaves a
row as it is; one that changes a side has this side measured anew. Rows are kept in `.kept` as they are measured;
beside a committed result lies `<question>.rows.jsonl.gz` with those it is made of, each with the commit at which it
was measured.
"""

import gzip
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

import paceline
from paceline import strategies, tasks
from paceline.core.actions import Action
from paceline.engines.sim.light import simulate
from paceline.records import journal
from paceline.scenario import Scenario

FOLDER = Path(__file__).parents[1] / ".kept"
Row = dict[str, Any]


def key_of(*question: Any) -> str:
    """A short hash of plain data."""
    text = json.dumps(msgspec.to_builtins(question), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Kept:
    """Rows by key: those of a committed result and those measured since."""

    def __init__(self, question: str, commit: str, folder: Path = FOLDER, committed: Path | None = None) -> None:
        self._file = folder / f"{question}.jsonl"
        self._commit = commit
        self._rows: dict[str, Row] = {}
        self._used: dict[str, Row] = {}
        if committed is not None and committed.exists():
            self._take(gzip.decompress(committed.read_bytes()).decode().splitlines())
        if self._file.exists():
            text = self._file.read_text(encoding="utf-8")
            self._take(text.splitlines())
            if not text.endswith("\n"):  # the last line was cut short: what follows it begins anew
                self._file.write_text(text + "\n", encoding="utf-8")

    def _take(self, lines: Iterable[str]) -> None:
        for line in lines:
            if line.endswith("}"):  # the last one may be cut short
                row = json.loads(line)
                self._rows[row["key"]] = row

    def row(self, key: str, measure: Callable[[], Row], good: Callable[[Row], bool] = bool) -> Row:
        """The kept row if there is one that is still `good`, else what is measured."""
        found = self._rows.get(key)
        if found is None or not good(found):
            found = {**measure(), "key": key, "commit": self._commit}
            self._rows[key] = found
            self._file.parent.mkdir(exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
        self._used[key] = found
        return found

    def save(self, committed: Path) -> None:
        """Write the rows that were asked for; the same rows are the same bytes."""
        lines = "".join(json.dumps(row) + "\n" for row in self._used.values())
        committed.write_bytes(gzip.compress(lines.encode(), mtime=0))


def behaviour(spec: str, cluster: Scenario, work: int, samples: int) -> str:
    """A hash of the times and decisions of a strategy on light workers; its sentences do not count."""
    lines = journal.Lines()
    simulate(strategies.build(spec, 0), cluster, work=work, samples=samples, sink=lines)
    made = hashlib.sha256()
    for line in lines:
        if isinstance(line, journal.Decision):
            made.update(repr((line.event.at, [_bare(action) for action in line.actions])).encode())
    return made.hexdigest()[:16]


def _bare(action: Action) -> tuple[str, dict[str, Any]]:
    """An action without its sentence; a field at its default is left out, so that one that is added changes nothing."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(action)}
    fields: Mapping[str, Any] = msgspec.structs.asdict(action)
    return type(action).__name__, {
        name: value for name, value in fields.items() if name != "reason" and value != defaults[name]
    }


def learning(task: str, spec: str, cluster: Scenario, options: Mapping[str, float]) -> str:
    """A hash of what one epoch of real gradients ends with."""
    run = paceline.launch(tasks.get(task), engine="sim", scenario=cluster, strategy=spec, options=options, epochs=1)
    weights = hashlib.sha256()
    for name, tensor in sorted((run.model_state or {}).items()):
        weights.update(name.encode() + tensor.numpy().tobytes())
    return key_of(run.summary.seconds, run.summary.versions, run.summary.loss, weights.hexdigest())
