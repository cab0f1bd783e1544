"""Small jobs without a server for real processes, and what to ask of their journals."""

import os
import time
from pathlib import Path

import torch
from clusters import Rows, cluster, mean_square, network
from launching import launch, lines_of

import paceline
from paceline.records.journal import Observation, PeerDecision

ROWS = Rows(96)
EVEN = cluster(1.0, 1.0, 1.0, 1.0)


class Job:
    """A small regression; `batches` says after how many batches a worker leaves its loop, and `awaits` whom the others
    wait for at their twelfth batch."""

    def __init__(self, epochs=4, batches=None, notes=None, awaits=None):
        self.epochs = epochs
        self.batches = batches or {}
        self.awaits = awaits
        self.notes = None if notes is None else str(notes)

    def __call__(self):
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=session.option("lr", 0.02), momentum=0.5)
        session.prepare(model, optimizer, evaluate=evaluate)
        for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=4, epochs=self.epochs), 1):
            if self.notes is not None:
                (Path(self.notes) / f"pid-{session.worker}").write_text(str(os.getpid()))
            if number >= 12 and self.awaits not in (None, session.worker):
                self.await_first_batch()
            optimizer.zero_grad()
            loss = mean_square(model, x, y)
            loss.backward()
            session.report(loss=loss)
            optimizer.step()
            if number == self.batches.get(session.worker):
                break
        if self.notes is not None:
            torch.save(model.state_dict(), Path(self.notes) / f"model-{session.worker}.pt")

    def await_first_batch(self):
        """Not standing still: a newcomer is given a model between two steps."""
        until = time.monotonic() + 0.5
        while time.monotonic() < until and not (Path(self.notes) / f"pid-{self.awaits}").exists():
            time.sleep(0.01)


def evaluate(model):
    return {"loss": float(mean_square(model, ROWS.x, ROWS.y))}


def nodes(strategy, folder, job=None, **settings):
    """A run without a server, of four even nodes unless told otherwise, and its journal."""
    if "workers" not in settings:
        settings.setdefault("scenario", EVEN)
    done = launch(job or Job(), folder, strategy=strategy, **settings)
    return done, lines_of(done)


def decided(lines, kind):
    return [line for line in lines if isinstance(line, PeerDecision) and isinstance(line.event, kind)]


def actions(lines, kind):
    return [
        (line.node, a) for line in lines if isinstance(line, PeerDecision) for a in line.actions if isinstance(a, kind)
    ]


def observed(lines, what):
    return [line for line in lines if isinstance(line, Observation) and line.what == what]
