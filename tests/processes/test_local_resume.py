"""A run that was interrupted and resumed ends as one that never was."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from clusters import Rows, mean_square
from launching import launch

import paceline
from paceline.core.errors import OptionError
from paceline.records import journal
from paceline.records.replay import replay
from paceline.server.checkpoint import files as checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]


class Counter:
    """Something of the script's own that a checkpoint keeps."""

    def __init__(self):
        self.drawn = []

    def state_dict(self):
        return {"drawn": list(self.drawn), "sum": torch.tensor(sum(self.drawn))}

    def load_state_dict(self, state):
        self.drawn = list(state["drawn"])
        assert float(state["sum"]) == pytest.approx(sum(self.drawn))


def plain():
    hidden = [torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Dropout(0.3)]
    return torch.nn.Sequential(*hidden, torch.nn.Linear(16, 1)).double()


class Job:
    """Everything that could make a difference: dropout, noise from three generators, a schedule, two phases."""

    def __init__(self, notes):
        self.notes = str(notes)

    def __call__(self):
        session = paceline.init()
        torch.manual_seed(5)
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(16, 1),
        ).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
        torch.manual_seed(session.worker)
        session.prepare(model, optimizer, scheduler)
        counter, rows = Counter(), Rows(48)
        session.keep("counter", counter)
        for _ in range(2):
            for x, y, _index in session.batches(rows, batch_size=4, epochs=2):
                optimizer.zero_grad()
                noise = random.random() + np.random.rand() * 0.1
                counter.drawn.append(noise)
                mean_square(model, x + 0.01 * noise, y).backward()
                optimizer.step()
                scheduler.step()
        (Path(self.notes) / f"counter-{session.worker}.json").write_text(json.dumps(counter.drawn))


def train(tmp_path, name, **settings):
    folder = tmp_path / name
    folder.mkdir()
    done = launch(Job(folder), folder, **settings)
    counters = {file.name: json.loads(file.read_text()) for file in folder.glob("counter-*.json")}
    return done, counters


@pytest.mark.parametrize(
    "stop_at",
    [
        pytest.param(7, id="first phase", marks=pytest.mark.soak),
        pytest.param(12, id="border", marks=pytest.mark.soak),
        pytest.param(17, id="second phase"),
    ],
)
def test_bsp_is_bit_identical_after_an_interruption(tmp_path, stop_at):
    whole, drawn = train(tmp_path, "whole", checkpoint_every="5v")
    assert whole.summary.versions == 24
    part, _ = train(tmp_path, "part", checkpoint_every="5v", max_versions=stop_at)
    assert part.ended == "limit"
    rest, drawn_again = train(tmp_path, "rest", resume=part.folder)
    assert rest.ended == "done"
    assert rest.summary.versions == whole.summary.versions
    assert rest.summary.samples_used == whole.summary.samples_used
    assert drawn_again == drawn
    for name, value in whole.model_state.items():
        assert torch.equal(value, rest.model_state[name]), name
    assert replay(rest.journal).difference is None
    header = next(iter(journal.read(rest.journal)))
    assert header.restored is not None


def test_the_saved_model_loads_into_the_plain_module(tmp_path):
    done, _ = train(tmp_path, "whole", checkpoint_every="10v", checkpoint_keep=2)
    plain().load_state_dict(done.model_state)
    saved = safetensors.torch.load_file(done.folder / "model.safetensors")
    plain().load_state_dict(saved)
    kept = sorted(path.name for path in (done.folder / "checkpoints").iterdir())
    assert len(kept) == 2
    newest = safetensors.torch.load_file(checkpoint.newest(done.folder) / "model.safetensors")
    assert all(torch.equal(newest[name], done.model_state[name]) for name in newest)


def test_what_is_no_checkpoint_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(OptionError, match="holds no checkpoint"):
        train(tmp_path, "rest", resume=tmp_path)
