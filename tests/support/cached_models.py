"""Jobs on a model whose workers keep a cache, and one process that computes what such a run must come to."""

import time

import torch

import paceline
from paceline.core.actions import Apply, Grant
from paceline.core.events import Joined, Pushed
from paceline.records.journal import Decision

BATCH = 2


class CountingJob:
    """A coordinate for each worker, to which each of its clocks adds one: what a worker reads says whose clocks it saw.

    A worker that is missing clocks which the bound promises, or any of its own, raises. Everybody must be there from
    the start to the end, so that clocks are batches and each weighs as much.
    """

    def __init__(self, clocks, staleness, delay_s=0.0):
        self.clocks, self.staleness, self.delay_s = clocks, staleness, delay_s

    def __call__(self):
        session = paceline.init()
        model = torch.nn.Module()
        model.counts = torch.nn.Parameter(torch.zeros(session.workers, dtype=torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), lr=session.workers)
        session.prepare(model, optimizer)
        rows = torch.utils.data.TensorDataset(torch.zeros(self.clocks * session.workers * BATCH, 1))
        for done, _ in enumerate(session.batches(rows, batch_size=BATCH, epochs=1)):
            seen = model.counts.detach().clone()
            own, least = float(seen[session.worker]), float(seen.min())
            assert abs(own - done) < 1e-9, f"worker {session.worker} sees {own} of its own {done}"
            assert least > done - self.staleness - 1e-9, f"{done} clocks done, bound {self.staleness}: {seen.tolist()}"
            time.sleep(self.delay_s * (1 + session.worker % 3))
            optimizer.zero_grad()
            (-model.counts[session.worker]).backward()
            optimizer.step()


class PullingJob:
    """Each worker pulls the parameters to a point of its own, whatever the samples, with two learning rates."""

    RATES = (0.3, 0.05)
    SHAPES = ((7, 3), (11,))

    def __init__(self, clocks, make_optimizer=torch.optim.SGD, epochs=1, spare=0, **options):
        """`spare` rows more than whole rounds make the last pushes of each epoch short."""
        self.clocks, self.make_optimizer, self.options = clocks, make_optimizer, options
        self.epochs, self.spare = epochs, spare

    def __call__(self):
        session = paceline.init()
        model = torch.nn.ParameterList([torch.zeros(shape) for shape in self.SHAPES])
        groups = [{"params": [p], "lr": lr} for p, lr in zip(model, self.RATES, strict=True)]
        optimizer = self.make_optimizer(groups, lr=1.0, **self.options)
        session.prepare(model, optimizer)
        points = points_of(session.worker)
        rows = torch.utils.data.TensorDataset(torch.zeros(self.clocks * session.workers * BATCH + self.spare, 1))
        for _ in session.batches(rows, batch_size=BATCH, epochs=self.epochs):
            optimizer.zero_grad()
            sum(((p - point) ** 2).sum() / 2 for p, point in zip(model, points, strict=True)).backward()
            optimizer.step()


def points_of(worker):
    """Where a worker pulls the parameters of a `PullingJob`."""
    generator = torch.Generator().manual_seed(worker)
    return [torch.randn(shape, generator=generator) for shape in PullingJob.SHAPES]


def stepped(values, worker, at, apply, factor):
    """The values after a step on the worker's gradient at `at`."""
    (mass,) = apply.weights
    values = [value.clone() for value in values]
    of_rate, of_gradient = (1.0, mass) if apply.stock else (mass, 1.0)
    optimizer = torch.optim.SGD(
        [{"params": [v], "lr": lr * factor * of_rate} for v, lr in zip(values, PullingJob.RATES, strict=True)],
        fused=True,
    )
    for value, read, point in zip(values, at, points_of(worker), strict=True):
        value.grad = (read - point) * of_gradient
    optimizer.step()
    return [value.detach() for value in values]


def recomputed(lines, factor=1.0):
    """Make a `PullingJob`'s run again from its decisions: the last model, and how many clocks went without a pull.

    `factor` is what `scale_lr` multiplies the learning rates by.
    """
    server = [torch.zeros(shape) for shape in PullingJob.SHAPES]
    reads, own, granted, pushed = {}, {}, {}, {}
    kept = 0
    for line in lines:
        if not isinstance(line, Decision):
            continue
        event = line.event
        if isinstance(event, Joined):
            own.pop(event.worker, None)
        elif isinstance(event, Pushed):
            worker = event.worker
            reads[worker] = granted[worker] if event.bytes_down else own[worker]
            kept += not event.bytes_down
            pushed[event.push] = worker
        for action in line.actions:
            if isinstance(action, Apply):
                (push,) = action.pushes
                worker = pushed.pop(push)
                own[worker] = stepped(reads[worker], worker, reads[worker], action, factor)
                server = stepped(server, worker, reads[worker], action, factor)
            elif isinstance(action, Grant):
                granted[action.worker] = server
    return server, kept
