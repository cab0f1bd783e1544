"""One scripted conversation, through the memory transport and through real processes: the same actions.

The simulator's run fixes the order in which pushes arrive. The real workers then push in that order: each waits until
the journal holds all the pushes before its own.
"""

import time
from pathlib import Path

import msgspec
import pytest
from clusters import cluster
from local_jobs import Job

import paceline
from paceline.core.events import Pushed
from paceline.records import journal
from paceline.records.journal import Decision, Lines

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

SPEEDS = (1.0, 0.7, 0.25)
TIMES = {"at", "compute_s", "transfer_s", "wait_s", "reason"}  # what the clock has a say in


class Scripted(Job):
    """Pushes in a given order of workers."""

    def __init__(self, notes, order, path):
        super().__init__(notes, size=24, epochs=2, batch_size=4, evaluates=False)
        self.order = order
        self.path = str(path)

    def before_batch(self, worker, number):
        places = [place for place, who in enumerate(self.order) if who == worker]
        place = places[number] if number < len(places) else len(self.order)
        while pushes_in(self.path) < place:
            time.sleep(0.02)


def pushes_in(path):
    try:
        return Path(path).read_bytes().count(b'"kind":"pushed"')
    except FileNotFoundError:
        return 0


def conversation(lines):
    """Events and actions without the clock's numbers, up to where the scripts end, which they do in any order."""
    decisions = [line for line in lines if isinstance(line, Decision)]
    ends = [line.event.worker for line in decisions if getattr(line.event, "cause", None) == "done"]
    told = [line for line in decisions if getattr(line.event, "cause", None) != "done"]
    return [[_timeless(line.event), *map(_timeless, line.actions)] for line in told], sorted(ends)


def _timeless(part):
    return {key: value for key, value in msgspec.to_builtins(part).items() if key not in TIMES}


@pytest.mark.parametrize(
    "strategy",
    [
        "ssp:staleness=1",
        *[pytest.param(s, marks=pytest.mark.soak) for s in ("bsp", "asp", "k_async:k=2", "fastest_k:k=2")],
    ],
)
def test_the_same_actions_through_memory_and_through_processes(tmp_path, strategy):
    virtual = Lines()
    job = Job(tmp_path, size=24, epochs=2, batch_size=4, evaluates=False)
    paceline.launch(job, engine="sim", scenario=cluster(*SPEEDS), strategy=strategy, sink=virtual)
    order = [line.event.worker for line in virtual if isinstance(line, Decision) and isinstance(line.event, Pushed)]
    path = tmp_path / "real.jsonl"
    settings = {"engine": "local", "workers": len(SPEEDS), "threads": 1, "evaluate_every": "off", "journal": path}
    paceline.launch(Scripted(tmp_path, order, path), strategy=strategy, **settings)
    assert conversation(journal.read(path)) == conversation(virtual)
