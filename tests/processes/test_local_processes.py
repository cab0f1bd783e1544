"""Processes of a run that come, go, and die at awkward moments."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from clusters import cluster, event
from launching import launch
from local_jobs import Job

from paceline.core.errors import CheckpointError, PeerError
from paceline.core.events import Joined, Left
from paceline.records import journal
from paceline.records.journal import Decision, Observation
from paceline.records.metrics import fold
from paceline.records.replay import replay

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

SIZE, EPOCHS = 60, 3


class Dying(Job):
    """One worker's process, or every one's, kills itself once, at its third batch."""

    def __init__(self, notes, workers, **settings):
        super().__init__(notes, SIZE, EPOCHS, 4, evaluates=False, **settings)
        self.workers = workers

    def before_batch(self, worker, number):
        mark = Path(self.notes) / f"died-{worker}"
        if worker in self.workers and number == 2 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Slow(Job):
    """Takes its time, so that others can come meanwhile."""

    def before_batch(self, worker, number):
        time.sleep(0.02)


def events_of(run):
    return [line.event for line in journal.read(run.journal) if isinstance(line, Decision)]


def check(run):
    assert run.ended == "done"
    assert run.summary.samples_used == SIZE * EPOCHS
    assert replay(run.journal).difference is None
    for present, accounted in fold(journal.read(run.journal)).time_law().values():
        assert accounted == pytest.approx(present, rel=0.05, abs=0.02)


@pytest.mark.parametrize(
    ("victims", "transport"),
    [
        pytest.param((1,), "zeromq", id="one-zeromq"),
        pytest.param((0, 1), "shm", id="all-shm"),
        pytest.param((1,), "shm", id="one-shm", marks=pytest.mark.soak),
        pytest.param((0, 1), "zeromq", id="all-zeromq", marks=pytest.mark.soak),
    ],
)
def test_the_dead_come_back_with_respawn(tmp_path, victims, transport):
    done = launch(Dying(tmp_path, victims), tmp_path, respawn=True, transport=transport)
    check(done)
    events = events_of(done)
    assert {e.worker for e in events if isinstance(e, Left) and e.cause == "crash"} == set(victims)


@pytest.mark.parametrize("start", ["spawn", pytest.param("fork", marks=pytest.mark.soak)])
def test_loaders_of_a_killed_worker_leave_nothing(tmp_path, start):
    job = Dying(tmp_path, (1,))
    job.loading = {"num_workers": 2, "multiprocessing_context": start}
    check(launch(job, tmp_path))


def test_all_workers_dead_is_no_success(tmp_path):
    with pytest.raises(PeerError, match="every worker's process has died"):
        launch(Dying(tmp_path, (0, 1)))


CHANGES = {
    "crash and rejoin": event("crash", 0.2, worker=1) + event("rejoin", 0.21, worker=1),
    "leave and join": event("leave", 0.2, worker=1) + event("join", 0.2),
    "leave and rejoin": event("leave", 0.1, worker=0) + event("rejoin", 0.3, worker=0),
}
ORDINARY = {"leave and rejoin"}


@pytest.mark.parametrize(
    "events",
    [pytest.param(e, id=name, marks=() if name in ORDINARY else pytest.mark.soak) for name, e in CHANGES.items()],
)
def test_processes_that_change_places(tmp_path, events):
    scenario = cluster(1.0, 0.5, events=events)
    done = launch(Job(tmp_path, SIZE, EPOCHS, 4, evaluates=False), tmp_path, scenario=scenario)
    check(done)
    assert [e for e in events_of(done) if isinstance(e, Left) and e.cause in ("crash", "leave")]


def test_a_server_that_dies_while_versions_are_evaluated(tmp_path):
    scenario = cluster(1.0, 0.5, events=event("server_crash", 0.5))
    settings = {"evaluate_every": "5v", "checkpoint_every": "4v"}
    done = launch(Job(tmp_path, SIZE, EPOCHS, 4), tmp_path, scenario=scenario, **settings)
    check(done)
    measured = [line.data["version"] for line in journal.read(done.journal) if _is(line, "evaluation")]
    assert done.summary.versions in measured
    assert 0 in measured


def test_a_server_that_dies_after_the_evaluator_left(tmp_path):
    scenario = cluster(1.0, 0.5, events=event("server_crash", 0.5))
    settings = {"evaluate_every": "5v", "checkpoint_every": "4v"}
    check(launch(Job(tmp_path, SIZE, EPOCHS, 4, evaluates=False), tmp_path, scenario=scenario, **settings))


class KillingTheServer(Job):
    """Worker 0 kills the server once: before it prepares its model, or in its first batch."""

    def __init__(self, notes, moment):
        super().__init__(notes, SIZE, EPOCHS, 4, evaluates=False, make_optimizer=self.optimizer)
        self.moment = moment

    def optimizer(self, parameters):
        if self.moment == "prepare":
            self.kill()
        return torch.optim.SGD(parameters, lr=0.05)

    def before_batch(self, worker, number):
        if self.moment == "batch" and worker == 0:
            self.kill()

    def kill(self):
        mark = Path(self.notes) / "killed"
        with contextlib.suppress(FileExistsError):
            mark.touch(exist_ok=False)
            for each in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    parent = int((each / "stat").read_text().rpartition(")")[2].split()[1])
                    if parent == os.getppid() and (each / "cmdline").read_bytes().startswith(b"paceline: server"):
                        os.kill(int(each.name), signal.SIGKILL)


@pytest.mark.parametrize(
    ("moment", "settings"),
    [("prepare", {}), ("batch", {"checkpoint_every": "1000v"}), ("prepare", {"respawn": True, "transport": "zeromq"})],
)
def test_a_server_that_dies_before_anything_was_trained_starts_the_run_over(tmp_path, caplog, moment, settings):
    done = launch(KillingTheServer(tmp_path, moment), tmp_path, **settings)
    check(done)
    assert (tmp_path / "killed").exists()
    assert any("was killed by SIGKILL before there was anything" in text for text in caplog.messages)
    headers = [line for line in journal.read(done.journal) if isinstance(line, journal.Header)]
    assert len(headers) == 1, "the journal has begun anew"


def test_a_server_that_dies_after_training_without_checkpoints_ends_the_run(tmp_path):
    """What was trained is lost, so it is not trained again without being asked for."""
    with pytest.raises(PeerError, match="SIGKILL, and there is no checkpoint to go on from: --checkpoint-every"):
        launch(KillingTheServer(tmp_path, "batch"), tmp_path)


def test_a_pause_that_outlasts_the_run_does_not_hold_it_up(tmp_path):
    scenario = cluster(1.0, 1.0, events=event("pause", 0.05, worker=1, for_=600.0))
    settings = {"strategy": "asp", "max_seconds": 0.5}
    done = launch(Job(tmp_path, SIZE, EPOCHS, 4, evaluates=False), tmp_path, scenario=scenario, **settings)
    assert done.ended == "limit"


def test_a_resumed_run_keeps_its_seed_and_refuses_another(tmp_path):
    settings = {"folder": tmp_path, "checkpoint_every": "5v"}
    part = launch(Job(tmp_path, SIZE, 1, 4, evaluates=False), **settings, seed=3, max_versions=5)
    saved = [line for line in journal.read(part.journal) if _is(line, "checkpoint")]
    assert [line.data["version"] for line in saved] == [0, 5]
    with pytest.raises(CheckpointError, match="with seed 3, not 4: leave --seed out"):
        launch(Job(tmp_path, SIZE, 1, 4, evaluates=False), **settings, seed=4, resume=part.folder)
    with pytest.raises(CheckpointError, match="under bsp, not asp: leave --strategy out"):
        launch(Job(tmp_path, SIZE, 1, 4, evaluates=False), **settings, strategy="asp", resume=part.folder)
    for file in tmp_path.glob("worker-*.jsonl"):
        file.unlink()
    rest = launch(Job(tmp_path, SIZE, 1, 4, evaluates=False), **settings, resume=part.folder)
    assert rest.summary.seed == 3
    assert rest.summary.samples_used == SIZE
    assert next(e for e in events_of(rest) if isinstance(e, Joined))


def _is(line, what):
    return isinstance(line, Observation) and line.what == what
