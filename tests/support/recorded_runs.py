"""Runs on real processes that the simulator has no part in: resumed, respawned, with a server that died.

Their journals are kept in tests/reference/recorded. They come out differently each time, so what is checked is not the
run but the journal: its events, fed to strategies again, lead to its actions, and its report stays the same.
"""

import gzip
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusters import cluster, event
from digests import Digest, lines_of, with_report
from reference_runs import CENTRAL, PEERS, Count, Train

import paceline

SPEEDS = (1.0, 0.5, 0.25)
SERVER_CRASH = cluster(*SPEEDS, events=event("server_crash", 1.0))
SPECS = {**CENTRAL, "fastest_k": "fastest_k:k=2"}  # of three workers


@dataclass(frozen=True)
class Dying(Train):
    """Worker 1 kills itself at its third batch, once."""

    notes: str = ""

    def backward(self, session: paceline.Session, model: Any, x: Any, y: Any, number: int) -> None:
        kill_once(session.worker == 1 and number == 3, self.notes)
        super().backward(session, model, x, y, number)


@dataclass(frozen=True)
class DyingCount(Count):
    """Worker 1 kills itself when it has seen some clocks, once."""

    notes: str = ""

    def at_clock(self, session: paceline.Session) -> None:
        kill_once(session.worker == 1 and session.clocks == 5, self.notes)


def kill_once(due: bool, notes: str) -> None:
    note = Path(notes) / "killed"
    if due and not note.exists():
        note.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class RecordedRun:
    strategy: str
    script: Callable[[str], Callable[[], None]]  # of a folder for notes
    scenario: Any = SERVER_CRASH
    settings: dict[str, Any] = field(default_factory=dict)
    resumed_after: int | None = None  # versions of a run before it

    def record(self, folder: Path, path: Path) -> None:
        """Run it and keep its journal, without the machine's name and folders."""
        script = self.script(str(folder))
        settings = {
            "engine": "local", "scenario": self.scenario, "strategy": self.strategy, "threads": 1, "seed": 4,
            "evaluate_every": "off", "checkpoint_every": "4v", "runs_dir": folder / "runs", **self.settings,
        }  # fmt: skip
        if self.resumed_after is not None:
            part = paceline.launch(script, **settings, max_versions=self.resumed_after)
            del settings["strategy"], settings["seed"]
            settings["resume"] = part.folder
        done = paceline.launch(script, **settings)
        lines = "".join(json.dumps(_nameless(line), separators=(",", ":")) + "\n" for line in lines_of(done.journal))
        path.write_bytes(gzip.compress(lines.encode(), mtime=0))


def _nameless(line: dict[str, Any]) -> dict[str, Any]:
    if line["type"] == "header":
        return {**line, "host": None, "started": None}
    if line["type"] == "observation" and "folder" in line.get("data", {}):
        return {**line, "data": {**line["data"], "folder": Path(line["data"]["folder"]).name}}
    return line


def reported(path: Path) -> Digest:
    """The report that is made of a journal."""
    from paceline.records import journal
    from paceline.records.metrics import fold

    return with_report({}, fold(journal.read(path)).report(None))


def _runs() -> Iterator[tuple[str, RecordedRun]]:
    def train(epochs: float = 5) -> Callable[[str], Callable[[], None]]:
        return lambda notes: Train((epochs,))

    for name, spec in SPECS.items():
        yield f"server-crash-{name}", RecordedRun(spec, train())
    yield "server-crash-phases", RecordedRun("ssp", lambda notes: Train((1, 1, 3)))
    for name in ("ssp", "dasp", "balanced"):
        yield f"resumed-{name}", RecordedRun(SPECS[name], train(), cluster(*SPEEDS), resumed_after=14)
    for name in ("fastest_k", "dssp"):
        respawn = {"respawn": True}
        dying = lambda notes: Dying((8,), notes=notes)
        yield f"respawned-{name}", RecordedRun(SPECS[name], dying, cluster(*SPEEDS), respawn)
    count = lambda notes: Count(40)
    yield "tables-server-crash", RecordedRun("ssp:staleness=2", count)
    yield "tables-resumed", RecordedRun("bsp", count, cluster(*SPEEDS), resumed_after=30)
    counting = lambda notes: DyingCount(60, notes=notes)
    yield "tables-respawned", RecordedRun("ssp:staleness=2", counting, cluster(*SPEEDS), {"respawn": True})
    for name in ("gossip", "adaptive_elastic"):
        yield f"server-crash-{name}", RecordedRun(PEERS[name], train())
    for name in ("adaptive_gossip", "local_sgd"):
        yield f"resumed-{name}", RecordedRun(PEERS[name], train(), cluster(*SPEEDS), resumed_after=14)


RECORDED: dict[str, RecordedRun] = dict(_runs())
