"""Small jobs for real processes: each says in a file of its own which samples it was given."""

import json
from pathlib import Path

import torch
from clusters import Rows, mean_square, network

import paceline
from paceline.core.actions import Apply
from paceline.core.events import Pushed
from paceline.records.journal import Decision


def evaluate_on(rows):
    def evaluate(model):
        return {"loss": float(mean_square(model, rows.x, rows.y))}

    return evaluate


class Job:
    """A regression job; `notes` is the folder where every worker writes the samples of its batches."""

    def __init__(self, notes, size=50, epochs=2.0, batch_size=4, make_optimizer=None, evaluates=True, sampling="epoch"):
        self.notes = str(notes)
        self.size = size
        self.epochs = epochs
        self.batch_size = batch_size
        self.make_optimizer = make_optimizer
        self.evaluates = evaluates
        self.sampling = sampling
        self.loading = {}  # further settings of the DataLoader

    def before_batch(self, worker, number):
        """For jobs that wait for something."""

    def __call__(self):
        torch.manual_seed(1)
        session = paceline.init()
        rows, model = Rows(self.size), network()
        make = self.make_optimizer or (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
        optimizer = make(model.parameters())
        session.prepare(model, optimizer, evaluate=evaluate_on(rows) if self.evaluates else None)
        settings = {"batch_size": self.batch_size, "epochs": self.epochs, "sampling": self.sampling, **self.loading}
        with (Path(self.notes) / f"worker-{session.worker}.jsonl").open("a") as file:
            for number, (x, y, index) in enumerate(session.batches(rows, **settings)):
                self.before_batch(session.worker, number)
                optimizer.zero_grad()
                loss = mean_square(model, x, y)
                loss.backward()
                session.report(loss=loss)
                print(json.dumps(index.tolist()), file=file, flush=True)
                optimizer.step()


def batches_of(notes):
    """What each worker's script was given, in its order."""
    return {
        int(file.stem.split("-")[1]): [json.loads(line) for line in file.read_text().splitlines()]
        for file in Path(notes).glob("worker-*.jsonl")
    }


def unions(lines, batches):
    """Which samples each version is made of, from the journal and the scripts' own notes."""
    progress = dict.fromkeys(batches, 0)
    pieces, found = {}, []
    for line in lines:
        if not isinstance(line, Decision):
            continue
        if isinstance(line.event, Pushed):
            worker = line.event.worker
            have = pieces.setdefault(line.event.push, [])
            while len(have) < line.event.samples:
                have += batches[worker][progress[worker]]
                progress[worker] += 1
            assert len(have) == line.event.samples
        found += [
            [i for push in action.pushes for i in pieces[push]] for action in line.actions if isinstance(action, Apply)
        ]
    return found
