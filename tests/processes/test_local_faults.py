"""Whatever befalls real workers, every sample of the epoch is settled and nothing is left behind.

All strategies against all faults are run by `make soak`, the pairs of tests/support/fault_pairs.py by an ordinary run.
"""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from clusters import Rows, cluster, event, mean_square, network
from fault_pairs import ALL_PAIRS, FAULTS, PAIRS
from launching import launch, lines_of
from local_jobs import Job

import paceline
from paceline.core.actions import Cancel, Grant
from paceline.core.events import Joined, Left, Pushed
from paceline.records import journal
from paceline.records.journal import Decision, Observation
from paceline.records.replay import replay

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

SPEEDS = (1.0, 0.5, 0.25)
FASTEST, SLOWEST, NEWCOMER = 0, 2, 3
SIZE, EPOCHS, BATCH = 60, 3, 4


def cases():
    found = []
    for strategy, fault in ALL_PAIRS:
        marks = () if (strategy, fault) in PAIRS else (pytest.mark.soak,)
        found.append(pytest.param(strategy, fault, marks=marks, id=f"{strategy}-{fault.replace(' ', '_')}"))
    return found


class Patient(Job):
    """Old workers dawdle from their fifth batch on until the newcomer has taken one.

    They do not stand still: whoever comes in the middle of a round may get its first batch only after it.
    """

    DAWDLE_S = 2.0  # a batch

    def before_batch(self, worker, number):
        newcomer = Path(self.notes) / f"worker-{NEWCOMER}.jsonl"
        until = time.monotonic() + (self.DAWDLE_S if worker != NEWCOMER and number >= 5 else 0.0)
        while time.monotonic() < until and not (newcomer.exists() and newcomer.stat().st_size):
            time.sleep(0.01)


class Pulse(Job):
    """Worker 1 notes how long its process stood still: a thread of its own does, whatever the script waits for."""

    def before_batch(self, worker, number):
        if worker == 1 and number == 0:
            threading.Thread(target=self.beat, daemon=True).start()

    def beat(self):
        last, longest = time.monotonic(), 0.0
        while True:
            time.sleep(0.02)
            now = time.monotonic()
            if now - last > longest:
                longest = now - last
                (Path(self.notes) / "stood-still").write_text(str(longest))
            last = now


class Holding(Job):
    """All but the fastest worker sit on their third batch until it is dead; by then it waits, or has nothing to do."""

    def before_batch(self, worker, number):
        notes = Path(self.notes)
        (notes / f"pid-{worker}").write_text(str(os.getpid()))
        if worker != FASTEST and number == 2:
            (notes / "holding").touch()
            until = time.monotonic() + 60
            while not (notes / "killed").exists() and time.monotonic() < until:
                time.sleep(0.01)


class Killer:
    """Hears the journal's lines and kills the fastest worker when it has had no grant for a while."""

    STABLE_S = 1.0  # lines come in parcels, several in a second

    def __init__(self, notes):
        self.notes = notes
        self.granted = self.buried = False
        self.heard = time.monotonic()
        threading.Thread(target=self.watch, daemon=True).start()

    def write(self, line):
        self.granted = has_grant(line, FASTEST, self.granted)
        self.buried = self.buried or is_death(line, FASTEST)
        self.heard = time.monotonic()

    def watch(self):
        if self.until(lambda: (self.notes / "holding").exists()):
            held_since = time.monotonic()
            self.until(lambda: not self.granted and time.monotonic() - max(held_since, self.heard) > self.STABLE_S)
            os.kill(int((self.notes / f"pid-{FASTEST}").read_text()), signal.SIGKILL)
            self.until(lambda: self.buried)  # or what others push next could bring it another grant
            (self.notes / "killed").touch()

    def until(self, condition):
        while self.notes.exists():
            if condition():
                return True
            time.sleep(0.02)
        return False


def is_death(line, worker):
    event = line.event if isinstance(line, Decision) else None
    return isinstance(event, Left) and event.worker == worker and event.cause == "crash"


def has_grant(line, worker, before):
    """Whether the worker has one after this line."""
    if not isinstance(line, Decision):
        return before
    if isinstance(line.event, Pushed | Left) and line.event.worker == worker:
        before = False
    for action in line.actions:
        if isinstance(action, Grant | Cancel) and action.worker == worker:
            before = isinstance(action, Grant)
    return before


JOBS = {"newcomer": Patient, "stopped": Pulse, "parked killed": Holding}


def scenario_of(fault):
    match fault:
        case "slowest killed":
            return cluster(*SPEEDS, events=event("crash", 0.25, worker=SLOWEST))
        case "fastest killed":
            return cluster(*SPEEDS, events=event("crash", 0.25, worker=FASTEST))
        case "parked killed":  # by the test
            return cluster(*SPEEDS)
        case "stopped":
            return cluster(*SPEEDS, events=event("pause", 0.2, worker=1, for_=1.5))
        case "newcomer":
            return cluster(*SPEEDS, events=event("join", 0.1))
        case "left and back":
            return cluster(*SPEEDS, events=event("leave", 0.1, worker=1) + event("rejoin", 0.3, worker=1))
        case "bad network":
            bad = event("slow", 0.1, worker=0, for_=0.3, factor=2) + event("partition", 0.15, worker=1, for_=0.2)
            bad += event("slow_link", 0.2, for_=0.3, factor=4)
            bad += event("duplicate", 0.05, share=0.5) + event("reorder", 0.05, share=0.5)
            return cluster(*SPEEDS, network="latency_ms = 5", events=bad)
        case "server killed":
            return cluster(*SPEEDS, events=event("server_crash", 0.4))
    raise AssertionError(fault)


@pytest.mark.parametrize(("strategy", "fault"), cases())
def test_every_sample_is_settled(tmp_path, strategy, fault):
    job = JOBS.get(fault, Job)(tmp_path, SIZE, EPOCHS, BATCH, evaluates=False)
    settings = {}
    if fault == "parked killed":
        settings["sink"] = Killer(tmp_path)
    if fault == "server killed":
        settings["checkpoint_every"] = "4v"
    done = launch(job, tmp_path, scenario=scenario_of(fault), strategy=strategy, **settings)
    assert done.ended == "done"
    assert done.summary.samples_used == SIZE * EPOCHS
    assert replay(done.journal).difference is None
    check_that_it_happened(fault, lines_of(done), tmp_path)


def check_that_it_happened(fault, lines, notes):
    events = [line.event for line in lines if isinstance(line, Decision)]
    if fault.endswith("killed") and fault != "server killed":
        victim = SLOWEST if fault == "slowest killed" else FASTEST
        assert [e.worker for e in events if isinstance(e, Left) and e.cause == "crash"] == [victim]
    if fault == "parked killed":
        granted = False
        for line in lines:
            assert not (granted and is_death(line, FASTEST))
            granted = has_grant(line, FASTEST, granted)
        return
    if fault == "stopped":
        assert float((notes / "stood-still").read_text()) > 0.5
    if fault == "newcomer":
        assert NEWCOMER in {e.worker for e in events if isinstance(e, Joined)}
        assert NEWCOMER in {e.worker for e in events if isinstance(e, Pushed)}
    if fault == "server killed":
        headers = [line for line in lines if isinstance(line, journal.Header)]
        assert len(headers) == 2
        assert headers[1].restored is not None
    happened = {line.data["kind"] for line in lines if isinstance(line, Observation) and line.what == "scenario"}
    assert happened == set(FAULTS[fault])


class Twice(Job):
    """Two loops, and a while between them."""

    BETWEEN_S = 2.0

    def __call__(self):
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session.prepare(model, optimizer)
        for loop in range(2):
            time.sleep(self.BETWEEN_S * loop)
            for x, y, _ in session.batches(Rows(self.size), batch_size=self.batch_size, epochs=1):
                optimizer.zero_grad()
                mean_square(model, x, y).backward()
                optimizer.step()


def test_a_server_that_is_killed_between_two_phases_is_killed_once(tmp_path):
    scenario = cluster(*SPEEDS, events=event("server_crash", 2.0))  # the first phase takes 0.4 s
    job = Twice(tmp_path, 40, 1, BATCH, evaluates=False)
    done = launch(job, tmp_path, scenario=scenario, checkpoint_every="4v")
    lines = list(journal.read(done.journal))
    assert done.summary.samples_used == 80
    assert len([line for line in lines if isinstance(line, journal.Header)]) == 2
    (struck,) = [line for line in lines if isinstance(line, Observation) and line.what == "scenario"]
    assert struck.data["kind"] == "server_crash"
    assert replay(done.journal).difference is None
