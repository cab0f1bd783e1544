"""Schedulers on real processes: a resumed run and a worker that was killed have the rates that they would have had."""

import json
import math
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from clusters import Rows, mean_square, network
from launching import launch
from torch.optim import lr_scheduler

import paceline

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

RATE, PHASES, ROUNDS = 0.01, 4, 6  # rounds of each phase: 48 rows, two workers, batches of 4


class Scheduled:
    """A loop of epochs with a schedule of its own by rounds, one by epochs, or one by evaluations.

    Every worker notes, of each batch, its place in the schedule and the rate that it pushes with.
    """

    def __init__(self, notes, by, given=False, victim=None):
        self.notes, self.by, self.given, self.victim = str(notes), by, given, victim

    def __call__(self):
        session = paceline.init()
        torch.manual_seed(5)
        rows, model = Rows(48), network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        scheduler = self.schedule(optimizer) if self.given else None
        evaluate = (lambda _: {"loss": 1.0}) if self.by == "evaluations" else None
        session.prepare(model, optimizer, scheduler, evaluate=evaluate)
        scheduler = scheduler or self.schedule(optimizer)
        session.keep("optimizer", optimizer)
        session.keep("scheduler", scheduler)
        with (Path(self.notes) / f"rates-{session.worker}.jsonl").open("a") as file:
            for phase in range(PHASES):
                for x, y, _ in session.batches(rows, batch_size=4):
                    self.die(session.worker, phase)
                    evaluations = session._schedules.position.standing.evaluations
                    rounds = math.floor(session.progress.rounds + 1e-9)
                    place = {"rounds": rounds, "epochs": phase, "evaluations": evaluations}[self.by]
                    if session.progress.fraction < 1:  # else the phase is over, and the batch has no effect
                        print(json.dumps([place, optimizer.param_groups[0]["lr"]]), file=file, flush=True)
                    optimizer.zero_grad()
                    mean_square(model, x, y).backward()
                    optimizer.step()
                    if self.by == "rounds":
                        scheduler.step()
                if self.by == "epochs":
                    scheduler.step()

    def schedule(self, optimizer):
        if self.by == "evaluations":
            return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
        return lr_scheduler.CosineAnnealingLR(optimizer, PHASES * (ROUNDS if self.by == "rounds" else 1))

    def die(self, worker, phase):
        """Kill the victim in its third phase; the other one waits there until it is back."""
        died, back = Path(self.notes) / "died", Path(self.notes) / "back"
        if self.victim is None or phase < 2:
            return
        if worker == self.victim and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if worker == self.victim:
            back.touch()
        while not back.exists():
            time.sleep(0.01)

    def plain(self, count):
        """What the scheduler does by itself."""
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=RATE)
        optimizer._opt_called = True
        scheduler, rates = self.schedule(optimizer), []
        for _ in range(count + 1):
            rates.append(optimizer.param_groups[0]["lr"])
            scheduler.step(*([1.0] if self.by == "evaluations" else []))
        return rates

    def check(self):
        """Return the places seen, each of which had its rate on every worker."""
        lines = [line for file in Path(self.notes).glob("rates-*") for line in file.read_text().splitlines()]
        seen = [json.loads(line) for line in lines]
        rates = self.plain(max(place for place, _ in seen))
        assert [rate for _, rate in seen] == [rates[place] for place, _ in seen]
        return {place for place, _ in seen}


def folder(tmp_path, name):
    made = tmp_path / name
    made.mkdir()
    return made


@pytest.mark.parametrize(
    ("by", "given", "stop_at"),
    [
        ("rounds", False, 8),  # in the second phase
        ("rounds", True, 8),
        ("epochs", False, 15),
        ("epochs", True, 15),
        pytest.param("rounds", False, 6, marks=pytest.mark.soak),  # between two phases
        pytest.param("epochs", False, 18, marks=pytest.mark.soak),
    ],
)
def test_a_resumed_run_goes_on_with_its_rates(tmp_path, by, given, stop_at):
    jobs = {name: Scheduled(folder(tmp_path, name), by, given) for name in ("whole", "part", "rest")}
    whole = launch(jobs["whole"], tmp_path, checkpoint_every="3v")
    part = launch(jobs["part"], tmp_path, checkpoint_every="3v", max_versions=stop_at)
    assert (whole.ended, part.ended) == ("done", "limit")
    rest = launch(jobs["rest"], tmp_path, resume=part.folder)
    assert rest.summary.versions == whole.summary.versions == PHASES * ROUNDS
    assert jobs["rest"].check() < jobs["whole"].check()
    for name, value in whole.model_state.items():
        assert torch.equal(value, rest.model_state[name]), name


def test_a_plateau_of_a_resumed_run_goes_on_with_its_evaluations(tmp_path):
    jobs = {name: Scheduled(folder(tmp_path, name), "evaluations", given=True) for name in ("part", "rest")}
    settings = {"checkpoint_every": "3v", "evaluate_every": "1v"}
    part = launch(jobs["part"], tmp_path, max_versions=12, **settings)
    launch(jobs["rest"], tmp_path, resume=part.folder, **settings)
    assert min(jobs["rest"].check()) > 1
    assert max(jobs["rest"].check()) >= max(jobs["part"].check()) > 2


@pytest.mark.parametrize(("by", "given"), [("rounds", False), ("epochs", True), ("evaluations", True)])
def test_a_worker_that_was_killed_comes_back_with_the_runs_rate(tmp_path, by, given):
    job = Scheduled(folder(tmp_path, "notes"), by, given, victim=1)
    every = "1v" if by == "evaluations" else "off"
    done = launch(job, tmp_path, strategy="asp", respawn=True, evaluate_every=every)
    assert done.ended == "done"
    assert (tmp_path / "notes" / "back").exists()
    assert len(job.check()) > 2
