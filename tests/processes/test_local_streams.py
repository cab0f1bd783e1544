"""Streams and epoch loops on real processes: resumed, respawned, and with a server that crashes."""

import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from clusters import Rows, cluster, event, mean_square, network
from launching import launch, lines_of
from torch.utils.data import IterableDataset

import paceline
from paceline.core.events import Left
from paceline.records.journal import Decision, Header, Observation
from paceline.records.replay import replay

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

ROWS = Rows(48)


class Counted(IterableDataset):
    """The rows `0`, `1`, ... over and over, with a position of its own where `state` says so."""

    def __init__(self, count):
        self.count, self.at = count, 0

    def __iter__(self):
        while self.at < self.count:
            self.at += 1
            yield (*ROWS[(self.at - 1) % len(ROWS)][:2], self.at - 1)
        self.at = 0


class Positioned(Counted):
    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Streams:
    """Trains on a stream in each worker and writes down what it read."""

    def __init__(self, notes, counts, kind=Counted, steps=None, pause=None):
        self.notes, self.counts, self.kind, self.steps, self.pause = str(notes), counts, kind, steps, pause

    def __call__(self):
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        file = (Path(self.notes) / f"worker-{session.worker}.jsonl").open("a")
        stream = self.kind(self.counts[session.worker])
        with file:
            for x, y, numbers in session.batches(stream, batch_size=4, steps=self.steps):
                if self.pause is not None:
                    time.sleep(self.pause)
                optimizer.zero_grad()
                mean_square(model, x, y).backward()
                print(json.dumps(numbers.tolist()), file=file, flush=True)
                optimizer.step()
        if session.is_main:
            torch.save(model.state_dict(), Path(self.notes) / "model.pt")


def read(notes, worker):
    file = Path(notes) / f"worker-{worker}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def warnings(run, *words):
    return [text for text in run.summary.warnings if all(word in text for word in words)]


@pytest.mark.parametrize("strategy", ["bsp", "asp", "ssp", "fastest_k:k=2", "dasp", "balanced", "gossip", "local_sgd"])
def test_streams_that_end_at_different_times(tmp_path, strategy):
    run = launch(Streams(tmp_path, [36, 8, 20]), tmp_path, workers=3, strategy=strategy)
    assert run.ended == "done"
    assert [len(read(tmp_path, worker)) for worker in range(3)] == [9, 2, 5]
    assert run.summary.streams
    saved = torch.load(tmp_path / "model.pt")
    assert all(torch.equal(saved[name], value) for name, value in run.model_state.items())
    assert replay(run.journal).difference is None


@pytest.mark.parametrize("transport", ["shm", "zeromq"])
def test_steps_are_made_by_who_has_data(tmp_path, transport):
    run = launch(Streams(tmp_path, [8, 4000], steps=10), tmp_path, strategy="asp", transport=transport)
    assert run.summary.samples_used == 10 * 2 * 4
    assert len(read(tmp_path, 0)) <= 2
    assert len(read(tmp_path, 1)) >= 18


@pytest.mark.parametrize("kind", [Counted, Positioned])
def test_a_resumed_stream_goes_on_where_it_stood_if_it_can(tmp_path, kind):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    part = launch(Streams(first, [4000, 4000], kind, steps=12), first, checkpoint_every="2v", max_versions=6)
    assert part.ended == "limit"
    rest = launch(Streams(second, [4000, 4000], kind, steps=12), second, resume=part.folder)
    assert rest.ended == "done"
    assert rest.summary.samples_used == 12 * 2 * 4
    begins = [read(second, worker)[0][0] for worker in range(2)]
    assert begins == ([24, 24] if kind is Positioned else [0, 0])
    assert len(warnings(rest, "cannot be rewound")) == (kind is Counted)


@pytest.mark.parametrize("strategy", ["bsp", "gossip"])
def test_a_run_is_resumed_after_one_of_its_streams_has_ended(tmp_path, strategy):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    part = launch(
        Streams(first, [8, 80], Positioned, pause=0.02), first, checkpoint_every="2v", max_versions=8,
        strategy=strategy,
    )  # fmt: skip
    assert part.ended == "limit"
    assert len(read(first, 0)) == 2
    rest = launch(Streams(second, [8, 80], Positioned), second, resume=part.folder, strategy=strategy)
    assert rest.ended == "done"
    assert read(second, 0) == []  # it had read all
    assert read(second, 1)[-1][-1] == 79
    assert read(second, 1)[0][0] > 0
    lines = lines_of(part)
    left = [isinstance(line, Decision) and line.event == Left(line.event.at, 0, "done") for line in lines].index(True)
    after = [line.data for line in lines[left:] if isinstance(line, Observation) and line.what == "checkpoint"]
    assert len(after) > 1
    assert not any(0 in data.get("without_state_of", []) for data in after)  # although it gets no grant any more


@pytest.mark.parametrize("strategy", ["bsp", "gossip"])
def test_a_worker_that_waits_for_the_others_outlives_a_crash_of_the_server(tmp_path, strategy):
    scenario = cluster(1.0, 0.5, events=event("server_crash", 0.8))
    run = launch(
        Streams(tmp_path, [8, 80], Positioned), tmp_path, scenario=scenario, checkpoint_every="2v", strategy=strategy
    )  # fmt: skip
    assert run.ended == "done"
    assert read(tmp_path, 1)[-1][-1] == 79
    assert len([line for line in lines_of(run) if isinstance(line, Header)]) == 2


class Epochs:
    """An epoch loop that uses the loss of its last batch, with all that a resumed run must bring back."""

    def __init__(self, notes, by_session, kill_at=None):
        self.notes, self.by_session, self.kill_at = str(notes), by_session, kill_at

    def __call__(self):
        session = paceline.init()
        torch.manual_seed(5)
        layers = [torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)]
        model = torch.nn.Sequential(*layers).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
        torch.manual_seed(session.worker)
        session.prepare(model, optimizer, scheduler)
        notes = Path(self.notes) / f"epochs-{session.worker}.jsonl"
        for epoch in session.epochs(4) if self.by_session else range(4):
            count = 0
            for x, y, _ in session.batches(ROWS, batch_size=4, epochs=1):
                noise = 0.01 * (random.random() + np.random.rand() * 0.1)
                optimizer.zero_grad()
                loss = mean_square(model, x + noise, y)
                loss.backward()
                session.report(loss=loss)
                optimizer.step()
                scheduler.step()
                count += 1
                if (session.worker, epoch, count) == self.kill_at and not (Path(self.notes) / "killed").exists():
                    (Path(self.notes) / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            with notes.open("a") as file:
                print(json.dumps([epoch, count, float(loss.detach())]), file=file)


def epochs_of(folder, worker):
    return [json.loads(line) for line in (folder / f"epochs-{worker}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("by_session", [True, False])
@pytest.mark.parametrize("stop_at", [15, 18])  # in the third epoch, at its end
def test_an_epoch_loop_that_is_resumed_ends_as_one_that_never_was_interrupted(tmp_path, by_session, stop_at):
    folders = [tmp_path / name for name in ("whole", "part", "rest")]
    for folder in folders:
        folder.mkdir()
    jobs = [Epochs(folder, by_session) for folder in folders]
    whole = launch(jobs[0], folders[0])
    part = launch(jobs[1], folders[1], checkpoint_every="3v", max_versions=stop_at)
    rest = launch(jobs[2], folders[2], resume=part.folder)
    assert (part.ended, rest.ended) == ("limit", "done")
    assert rest.summary.versions == whole.summary.versions == 24
    assert rest.summary.samples_used == whole.summary.samples_used
    for name, value in whole.model_state.items():
        assert torch.equal(value, rest.model_state[name]), name
    assert replay(rest.journal).difference is None
    noted = epochs_of(folders[2], 0)
    assert noted[-1] == epochs_of(folders[0], 0)[-1]
    if by_session:
        assert [epoch for epoch, _, _ in noted] == [2, 3]
        assert not warnings(rest, "without effect")
    else:
        assert [(epoch, count) for epoch, count, _ in noted][:2] == [(0, 1), (1, 1)]
        assert len(warnings(rest, "without effect", "session.epochs(n)")) == 1


@pytest.mark.parametrize("strategy", ["asp", "gossip"])
@pytest.mark.parametrize("by_session", [True, False])
def test_a_respawned_worker_passes_the_epochs_that_are_over(tmp_path, by_session, strategy):
    job = Epochs(tmp_path, by_session, kill_at=(1, 2, 1))
    run = launch(job, tmp_path, respawn=True, strategy=strategy)
    assert run.ended == "done"
    assert (tmp_path / "killed").exists()
    assert run.summary.samples_used == 4 * 48
    noted = epochs_of(tmp_path, 1)
    assert noted[-1][0] == 3
    again = [epoch for epoch, _, _ in noted[2:]]
    assert again[0] == (0 if not by_session else again[0])
    assert 0 not in again or not by_session
    assert not any(line.what == "error" for line in lines_of(run) if isinstance(line, Observation))


def test_what_epochs_leaves_is_known_after_a_resumption(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    part = launch(Epochs(first, True), first, checkpoint_every="3v", max_versions=15, epochs=3)
    rest = launch(Epochs(second, True), second, resume=part.folder, epochs=3)
    assert rest.ended == "done"
    assert [epoch for epoch, _, _ in epochs_of(second, 0)] == [2]
    assert rest.summary.samples_used == 3 * 48
    assert not warnings(rest, "--epochs")
