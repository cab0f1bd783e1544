"""Whatever befalls real workers, every sample of the epoch is settled and nothing is left behind.

All strategies against all faults are run by `make soak`; an ordinary run takes a sample that the seed names.
"""

import os
import random
import time
from pathlib import Path

import pytest

import paceline
from clusters import cluster, event
from local_jobs import Job
from paceline import journal, strategies
from paceline.actions import Grant
from paceline.events import Joined, Left, Pushed
from paceline.journal import Decision, Lines, Observation
from paceline.replay import replay

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

SPEEDS = (1.0, 0.5, 0.25)
FASTEST, SLOWEST, NEWCOMER = 0, 2, 3
SIZE, EPOCHS, BATCH = 60, 3, 4
OPTIONS = {"fastest_k": "fastest_k:k=2", "k_async": "k_async:k=2"}
STRATEGIES = [OPTIONS.get(name, name) for name in strategies.names()]
FAULTS = ("slowest killed", "fastest killed", "parked killed", "stopped 3 s", "newcomer", "server killed")
SEED = os.environ.get("LAWS_SEED", "1")
SAMPLE = random.Random(f"faults {SEED}").sample([(s, f) for s in STRATEGIES for f in FAULTS], 4)


def cases():
    found = []
    for strategy in STRATEGIES:
        for fault in FAULTS:
            marks = () if (strategy, fault) in SAMPLE else (pytest.mark.soak,)
            found.append(pytest.param(strategy, fault, marks=marks, id=f"{strategy}-{fault.replace(' ', '_')}"))
    return found


class Patient(Job):
    """Old workers wait at their fifth batch for the newcomer to have taken one."""

    def before_batch(self, worker, number):
        newcomer = Path(self.notes) / f"worker-{NEWCOMER}.jsonl"
        while worker != NEWCOMER and number == 5 and not (newcomer.exists() and newcomer.stat().st_size):
            time.sleep(0.01)


def when_parked(strategy):
    """A moment at which the fastest worker waits for the others, by the simulator; None if it never does."""
    lines = Lines()
    job = {"engine": "sim", "scenario": cluster(*SPEEDS), "strategy": strategy, "sink": lines}
    folder = Path(os.environ["TMPDIR"])
    paceline.launch(Job(folder, SIZE, EPOCHS, BATCH), **job)
    for file in folder.glob("worker-*.jsonl"):
        file.unlink()
    pushed_at, best = None, (0.0, None)
    for line in lines:
        if not isinstance(line, Decision):
            continue
        at = line.event.at
        if isinstance(line.event, Pushed) and line.event.worker == FASTEST:
            pushed_at = at
        granted = any(isinstance(a, Grant) and a.worker == FASTEST for a in line.actions)
        if granted and pushed_at is not None:
            best = max(best, (at - pushed_at, (at + pushed_at) / 2), key=lambda pair: pair[0])
            pushed_at = None
    return best[1] if best[0] > 0.02 else None


def scenario_of(strategy, fault):
    match fault:
        case "slowest killed":
            return cluster(*SPEEDS, events=event("crash", 0.25, worker=SLOWEST))
        case "fastest killed":
            return cluster(*SPEEDS, events=event("crash", 0.25, worker=FASTEST))
        case "parked killed":
            at = when_parked(strategy)
            if at is None:  # nobody is ever parked under this strategy: kill somebody who computes
                return cluster(*SPEEDS, events=event("crash", 0.3, worker=1))
            return cluster(*SPEEDS, events=event("crash", round(at, 6), worker=FASTEST))
        case "stopped 3 s":
            return cluster(*SPEEDS, events=event("pause", 0.2, worker=1, for_=3.0))
        case "newcomer":
            return cluster(*SPEEDS, events=event("join", 0.1))
        case "server killed":
            return cluster(*SPEEDS, events=event("server_crash", 0.4))
    raise AssertionError(fault)


@pytest.mark.parametrize(("strategy", "fault"), cases())
def test_every_sample_is_settled(tmp_path, strategy, fault):
    job = (Patient if fault == "newcomer" else Job)(tmp_path, SIZE, EPOCHS, BATCH, evaluates=False)
    settings = {"evaluate_every": "off", "threads": 1, "runs_dir": tmp_path / "runs"}
    if fault == "server killed":
        settings["checkpoint_every"] = "4v"
    done = paceline.launch(job, engine="local", scenario=scenario_of(strategy, fault), strategy=strategy, **settings)
    assert done.ended == "done"
    assert done.summary.samples_used == SIZE * EPOCHS
    assert replay(done.journal).difference is None
    check_that_it_happened(fault, list(journal.read(done.journal)))


def check_that_it_happened(fault, lines):
    events = [line.event for line in lines if isinstance(line, Decision)]
    if fault.endswith("killed") and fault != "server killed":
        assert [e.worker for e in events if isinstance(e, Left) and e.cause == "crash"]
    if fault == "newcomer":
        assert NEWCOMER in {e.worker for e in events if isinstance(e, Joined)}
        assert NEWCOMER in {e.worker for e in events if isinstance(e, Pushed)}
    if fault == "server killed":
        headers = [line for line in lines if isinstance(line, journal.Header)]
        assert len(headers) == 2
        assert headers[1].restored is not None
    observed = {line.what for line in lines if isinstance(line, Observation)}
    assert "scenario" in observed
