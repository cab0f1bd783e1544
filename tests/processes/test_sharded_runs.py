"""Runs whose weights are in several processes: the same model as with one, whatever dies and whoever goes on."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from clusters import mean_square
from launching import launch, lines_of, named_children

import paceline
from paceline.core.errors import OptionError, PeerError
from paceline.records.journal import Header, Observation
from paceline.records.replay import replay

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

SIZE = 120


class Job:
    """Batch statistics, momentum, a schedule; `kills`: the name of a process that worker 0 kills once, at a batch."""

    def __init__(self, notes, kills=None, at=9, optimizer=torch.optim.AdamW):
        self.notes = str(notes)
        self.kills, self.at = kills, at
        self.optimizer = optimizer

    def __call__(self):
        session = paceline.init()
        torch.manual_seed(2)
        layers = [torch.nn.Linear(6, 200), torch.nn.BatchNorm1d(200), torch.nn.ReLU(), torch.nn.Linear(200, 20)]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(20, 1))
        optimizer = self.optimizer(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
        session.prepare(model, optimizer, scheduler, evaluate=lambda model: {"size": float(len(list(model)))})
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(SIZE, 6, generator=generator)
        rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        for number, (inputs, wanted) in enumerate(session.batches(rows, batch_size=5, epochs=2)):
            if self.kills is not None and (session.worker, number) == (0, self.at):
                self.kill_once()
            optimizer.zero_grad()
            mean_square(model, inputs, wanted).backward()
            optimizer.step()
            scheduler.step()

    def kill_once(self):
        note = Path(self.notes) / "killed"
        if not note.exists():
            note.touch()
            os.kill(named_children(os.getppid())[self.kills], signal.SIGKILL)


class TableJob:
    """Tables of every rule, of which one is eager and one has fewer rows than there are shards; `kills` as above."""

    kill_once = Job.kill_once

    def __init__(self, notes, kills=None, at=9, clocks=16):
        self.notes = str(notes)
        self.kills, self.at, self.clocks = kills, at, clocks

    def __call__(self):
        session = paceline.init()
        steps = session.table("steps", 2_000, 8, update="adagrad:rate=0.5", init=lambda *shape: np.ones(shape, "f4"))
        clipped = session.table("clipped", 2, 2, dtype="float64", update="clip:limit=0.3")
        counts = session.table("counts", 7, 2, dtype="int64", eager=True)
        session.measure(lambda tables: {"size": float(tables["counts"].sum())})
        while session.clocks < self.clocks:
            chance = np.random.default_rng((session.worker, session.clocks))
            if (session.worker, session.clocks) == (0, self.at) and self.kills is not None:
                self.kill_once()
            rows = chance.integers(0, 2_000, 1_500) if session.clocks % 3 else slice(None)
            seen = steps.get(rows)
            steps.inc(rows, (0.01 * seen + chance.standard_normal(seen.shape)).astype(np.float32))
            clipped.inc(None, chance.standard_normal((2, 2)) + clipped.get())
            counts.inc([session.worker, 5], counts.get([5, 1]) * 0 + 1)
            if not session.clock():
                return
        session.barrier()


def assert_same_tables(one, other):
    assert one.summary.versions == other.summary.versions
    assert one.tables.keys() == other.tables.keys()
    for name, values in one.tables.items():
        assert np.array_equal(values, other.tables[name]), name


def assert_same(one, other):
    assert one.summary.versions == other.summary.versions
    assert one.summary.samples_used == other.summary.samples_used
    for name, value in one.model_state.items():
        assert torch.equal(value, other.model_state[name]), name


@pytest.mark.parametrize("transport", ["shm", "zeromq"])
def test_bsp_is_bit_identical_whatever_the_number_of_shards(tmp_path, transport):
    whole = launch(Job(tmp_path), workers=3)
    shared = launch(Job(tmp_path), tmp_path, workers=3, servers=3, evaluate_every="4v", transport=transport)
    assert_same(shared, whole)
    assert shared.summary.metrics == {"size": 5.0}
    assert replay(shared.journal).difference is None
    (spent,) = [line.data for line in lines_of(shared) if isinstance(line, Observation) and line.what == "server"]
    assert spent["cpu_s"] >= spent["apply_s"] > 0


@pytest.mark.parametrize("transport", ["shm", "zeromq"])
def test_after_a_shards_death_all_go_back_to_the_last_checkpoint(tmp_path, caplog, transport):
    whole = launch(Job(tmp_path), workers=2)
    job = Job(tmp_path, kills="shard 1")
    done = launch(job, tmp_path, servers=2, checkpoint_every="3v", transport=transport)
    assert (tmp_path / "killed").exists()
    assert_same(done, whole)
    assert "shard 1 of the server was killed by SIGKILL: going on from" in caplog.text
    assert [line for line in lines_of(done) if isinstance(line, Header) and line.restored is not None]
    assert replay(done.journal).difference is None


def test_a_shard_that_dies_without_a_checkpoint_ends_the_run(tmp_path):
    with pytest.raises(PeerError, match=r"shard 0 of the server was killed by SIGKILL, and there is no checkpoint"):
        launch(Job(tmp_path, kills="shard 0"), servers=2)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_a_run_is_resumed_with_another_number_of_shards(tmp_path, before, after):
    whole = launch(Job(tmp_path), workers=2)
    part = launch(Job(tmp_path), tmp_path, servers=before, checkpoint_every="4v", max_versions=10)
    assert part.ended == "limit"
    names = {path.name for path in next(iter((part.folder / "checkpoints").iterdir())).iterdir()}
    assert {"model.safetensors", *(f"optimizer-{shard}.safetensors" for shard in range(before))} <= names
    rest = launch(Job(tmp_path), tmp_path, servers=after, resume=part.folder)
    assert_same(rest, whole)


@pytest.mark.parametrize("transport", ["shm", "zeromq"])
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_tables_are_bit_identical_whatever_the_number_of_shards(tmp_path, transport, workers):
    whole = launch(TableJob(tmp_path), workers=workers)
    split = launch(TableJob(tmp_path), tmp_path, workers=workers, servers=3, evaluate_every="4v", transport=transport)
    assert_same_tables(split, whole)
    assert (split.summary.bytes_up, split.summary.bytes_down) == (whole.summary.bytes_up, whole.summary.bytes_down)
    assert split.summary.metrics == {"size": float(whole.tables["counts"].sum())}
    assert replay(split.journal).difference is None


@pytest.mark.parametrize("transport", ["shm", pytest.param("zeromq", marks=pytest.mark.soak)])
def test_after_a_shards_death_tables_go_back_to_the_last_checkpoint_and_lack_nothing(tmp_path, caplog, transport):
    whole = launch(TableJob(tmp_path), workers=2)
    job = TableJob(tmp_path, kills="shard 1")
    done = launch(job, tmp_path, servers=2, checkpoint_every="3v", transport=transport)
    assert (tmp_path / "killed").exists()
    assert "shard 1 of the server was killed by SIGKILL: going on from" in caplog.text
    assert_same_tables(done, whole)
    assert replay(done.journal).difference is None


@pytest.mark.parametrize(("before", "after"), [(2, 3), pytest.param(3, 1, marks=pytest.mark.soak)])
def test_tables_are_resumed_with_another_number_of_shards(tmp_path, before, after):
    whole = launch(TableJob(tmp_path), workers=2)
    part = launch(TableJob(tmp_path), tmp_path, servers=before, checkpoint_every="4v", max_versions=8)
    assert part.ended == "limit"
    names = {path.name for path in next(iter((part.folder / "checkpoints").iterdir())).iterdir()}
    assert {f"tables-{shard}.safetensors" for shard in range(before)} <= names
    assert "tables.safetensors" not in names
    rest = launch(TableJob(tmp_path), tmp_path, servers=after, resume=part.folder)
    assert_same_tables(rest, whole)


def test_what_shards_cannot_do_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"--servers 2: under gossip each node has its own model"):
        launch(Job(tmp_path), strategy="gossip", servers=2)
    with pytest.raises(OptionError, match=r"--servers is not supported by the sim engine"):
        launch(Job(tmp_path), engine="sim", servers=2, workers=8)
    with pytest.raises(OptionError, match=r"whole number >= 1, <= 64, not 65"):
        launch(Job(tmp_path), servers=65)
