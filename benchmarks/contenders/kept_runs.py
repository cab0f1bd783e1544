"""Runs that were made before with the same sources, so that a long comparison can be gone on with.

A line of the file is a job and what became of it; the file's name is the commit. A run is in virtual time and fixed by
its job, so that one that was kept is the one that would be made again. Nothing is kept of sources that no commit has.
"""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

import msgspec

from sources import ROOT, Sources

FOLDER = ROOT / "runs" / "kept"  # which git ignores

JobT = TypeVar("JobT", bound=msgspec.Struct)
RanT = TypeVar("RanT", bound=msgspec.Struct)


class OutOfTimeError(Exception):
    """The minutes that were given are over; what was made is kept."""


class KeptRuns:
    """Makes runs that are not kept yet, in the order given."""

    def __init__(self, question: str, of: Sources | None, pool: Executor, minutes: float | None = None) -> None:
        """`of` None or unclean: keep nothing. `minutes`: begin no run after these."""
        whole = of is not None and of.clean and not of.copied
        self._file = FOLDER / f"{question}-{of.commit}.jsonl" if of is not None and whole else None
        self._pool = pool
        self._until = None if minutes is None else time.monotonic() + 60 * minutes
        self._known: dict[str, object] = {}
        if self._file is not None and self._file.exists():
            for line in self._file.read_text().splitlines():
                known = _read(line)
                if known is not None:
                    self._known[json.dumps(known["job"], sort_keys=True)] = known["ran"]

    def make(self, run: Callable[[JobT], RanT], kind: type[RanT], jobs: Sequence[JobT]) -> list[RanT]:
        """Return what became of each job; OutOfTimeError if the time is over before all are made."""
        names = [json.dumps([run.__name__, msgspec.to_builtins(job)], sort_keys=True) for job in jobs]
        wanted = {name: job for name, job in zip(names, jobs, strict=True) if name not in self._known}
        if wanted and self._until is not None:
            self._one_by_one(run, wanted)
        else:
            for name, ran in zip(wanted, self._pool.map(run, wanted.values()), strict=True):
                self._keep(name, msgspec.to_builtins(ran))
        return [msgspec.convert(self._known[name], kind) for name in names]

    def _one_by_one(self, run: Callable[[JobT], RanT], wanted: dict[str, JobT]) -> None:
        for name, job in wanted.items():
            if self._until is not None and time.monotonic() > self._until:
                raise OutOfTimeError
            self._keep(name, msgspec.to_builtins(self._pool.submit(run, job).result()))

    def _keep(self, name: str, ran: object) -> None:
        self._known[name] = ran
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write(json.dumps({"job": json.loads(name), "ran": ran}) + "\n")


def _read(line: str) -> dict[str, object] | None:
    """A line of the file; None if it was cut short when its process was killed."""
    try:
        found: dict[str, object] = json.loads(line)
    except ValueError:
        return None
    return found
