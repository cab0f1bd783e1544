"""Workers on real processes that hang, come back, die of a sample, or spoil their model."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from clusters import Rows, mean_square, network
from launching import launch, lines_of

import paceline
from paceline.core.errors import ScriptError
from paceline.core.events import Joined, Left
from paceline.engines.local import launcher
from paceline.laws.checker import check
from paceline.records.journal import Decision

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

ROWS = Rows(size=240)


class Job:
    """A regression in which `act` does something to a worker at each batch, and `after` when its loop is over."""

    def __init__(self, act=lambda session, number, rows: None, after=lambda session: None, step_s=0.0):
        self.act, self.after, self.step_s = act, after, step_s

    def __call__(self):
        session = paceline.init()
        model = network()
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5))
        for number, (x, y, rows) in enumerate(session.batches(ROWS, batch_size=6, epochs=1)):
            time.sleep(self.step_s)
            self.act(session, number, set(rows.tolist()))
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()
            self.spoil(session, number, model)
        self.after(session)

    def spoil(self, session, number, model):
        """For jobs that spoil their model."""


class Spoiling(Job):
    def spoil(self, session, number, model):
        if session.worker == 1 and number == 4:
            with torch.no_grad():
                model[0].weight.fill_(float("nan"))


def hang(how):
    def act(session, number, rows):
        del rows
        if session.worker == 1 and number == 5:
            if how == "sleep":
                time.sleep(1e9)
            elif how == "pause" and not os.fork():
                time.sleep(2.5)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)

    return act


@pytest.mark.parametrize(
    ("strategy", "how", "transport"),
    [
        ("bsp", "sleep", "shm"),
        ("bsp", "stop", "zeromq"),
        ("local_sgd:period=3", "stop", "shm"),
        ("gossip", "stop", "shm"),
    ],
)
def test_a_hung_worker_is_taken_out(tmp_path, strategy, how, transport):
    settings = {"strategy": strategy, "worker_timeout": "1..10", "workers": 3, "transport": transport}
    done = launch(Job(hang(how), step_s=0.02), tmp_path, **settings)
    assert (done.ended, done.summary.samples_used, done.summary.faults.timeouts) == ("done", len(ROWS), 1)
    assert any(text.startswith("worker 1 has sent nothing for") for text in done.summary.warnings)
    assert [line.event.worker for line in left(done)] == [1]


def left(done):
    decisions = [line for line in lines_of(done) if isinstance(line, Decision)]
    return [line for line in decisions if isinstance(line.event, Left) and line.event.cause == "timeout"]


@pytest.mark.parametrize("strategy", ["bsp", "local_sgd:period=3"])
def test_a_worker_that_was_only_stopped_comes_back(tmp_path, strategy):
    job = Job(hang("pause"), step_s=0.15)
    done = launch(job, tmp_path, strategy=strategy, worker_timeout="1..1", workers=3)
    silent = [line.event.worker for line in left(done)]
    assert 1 in silent  # on a busy machine others may be silent for a second, too
    assert (done.summary.samples_used, done.summary.faults.timeouts) == (len(ROWS), len(silent))
    assert any("worker 1 is back after" in text for text in done.summary.warnings)
    lines = lines_of(done)
    joined = [line.event.worker for line in lines if isinstance(line, Decision) and isinstance(line.event, Joined)]
    assert joined.count(1) > 1
    assert strategy != "bsp" or check(lines) == []


def test_a_script_that_does_not_end_after_its_loop_is_ended_and_the_model_is_there(tmp_path):
    job = Job(after=lambda session: time.sleep(1e9 if session.worker == 1 else 0))
    with pytest.raises(ScriptError, match="the script of worker 1 did not end after the run and was ended"):
        launch(job, tmp_path, worker_timeout="1..3")
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "model.safetensors").exists()
    assert "had not ended" in (folder / "report.json").read_text()


def test_a_process_that_outlives_its_script_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "PATIENCE_S", 1.0)  # more than the three seconds of the setting only costs time

    def linger(session):
        import atexit

        if session.worker == 1:
            atexit.register(time.sleep, 1e9)

    with pytest.raises(ScriptError, match="the script of worker 1 did not end after the run and was ended"):
        launch(Job(after=linger), tmp_path, worker_timeout="1..3")


@pytest.mark.parametrize(("strategy", "ends"), [("bsp", -9), ("gossip", 0)])
def test_a_sample_that_kills_is_found_and_left_out(tmp_path, strategy, ends):
    def act(session, number, rows):
        del session, number
        if 17 in rows:
            os.kill(os.getpid(), signal.SIGKILL) if ends < 0 else os._exit(ends)

    done = launch(Job(act), tmp_path, strategy=strategy, workers=3, respawn=True)
    assert (done.ended, done.summary.samples_used) == ("done", len(ROWS) - 1)
    assert done.summary.faults.killers == [17]
    assert strategy != "bsp" or check(lines_of(done)) == []


def test_processes_that_are_killed_cost_no_sample(tmp_path):
    notes = Path(tmp_path)

    def act(session, number, rows):
        del rows
        mark = notes / f"died-{session.worker}-{number}"
        if number in (2, 7) and session.worker and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    done = launch(Job(act), tmp_path, workers=3, respawn=True)
    assert (done.summary.samples_used, done.summary.faults.killers) == (len(ROWS), [])
    assert len(list(notes.glob("died-*"))) >= 2


def test_sys_exit_in_the_middle_of_a_loop_is_said(tmp_path):
    def act(session, number, rows):
        del rows
        if session.worker == 1 and number == 3:
            raise SystemExit

    done = launch(Job(act), tmp_path, workers=3)
    assert done.summary.samples_used == len(ROWS)
    said = "the script of worker 1 ended by sys.exit() in the middle of its loop; the others go on"
    assert said in done.summary.warnings


def test_a_script_whose_workers_all_end_by_sys_exit_in_their_loops_is_done(tmp_path):
    """As one that stops by itself when it has learnt enough."""

    def act(session, number, rows):
        del rows
        if number == 3:
            raise SystemExit

    done = launch(Job(act), tmp_path, workers=2)
    assert done.ended == "done"


@pytest.mark.parametrize("strategy", ["gossip", "elastic:period=2", "local_sgd:period=3"])
def test_a_node_whose_model_breaks_goes_on_from_anothers(tmp_path, strategy):
    done = launch(Spoiling(step_s=0.01), tmp_path, strategy=strategy, workers=3)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in done.model_state.values())
    assert done.summary.faults.not_finite == 1
    assert done.summary.samples_used >= len(ROWS) - 6


def test_a_hung_worker_on_tables_is_ended(tmp_path):
    def script():
        session = paceline.init()
        table = session.table("w", 8, 2)
        for number in range(40):
            if session.worker == 1 and number == 6:
                os.kill(os.getpid(), signal.SIGSTOP)
            table.get(range(8))
            table.inc(range(8), torch.ones(8, 2).numpy())
            session.clock()

    done = launch(script, tmp_path, strategy="ssp:staleness=1", workers=3, worker_timeout="1..10")
    assert (done.ended, done.summary.faults.timeouts) == ("done", 1)
    assert [worker.clock for worker in done.summary.per_worker] == [40, 6, 40]
