"""Clusters of unequal workers on which strategies are judged, and one training run on one of them in virtual time.

A cell is a cluster with its trouble: speeds, a line to the server, interference, stalls, recorded times. The task is an
MLP on a part of MNIST; `run` trains it once and says when it was at the target and what that took.

8/4x is 4 workers at speed 1, 2 at 1/2 and 2 at 1/4; 16/8x is 8 at 1, 4 at 1/2, 2 at 1/4 and 2 at 1/8. In the same
manner 8/8x is 4 at 1, 2 at 1/2, 1 at 1/4 and 1 at 1/8, and 16/4x is 8 at 1, 4 at 1/2 and 4 at 1/4. How the sizes were
chosen stands in bench_unevenness.py.
"""

import functools
import itertools
import math
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import nn
from torch.nn import functional

import paceline
from paceline import scenario
from paceline.core.actions import Mark
from paceline.core.errors import UserError
from paceline.core.scenario.jitter import Jitter
from paceline.records import journal
from paceline.scenario import Scenario
from paceline.tasks import cifar, mnist

SHARED = Path(__file__).parents[3] / "shared" / "data"
ALIBABA = SHARED / "trace_alibaba_minibatch"

SECONDS_PER_SAMPLE = 0.002  # at speed 1
BATCH = 64
FAST_S = BATCH * SECONDS_PER_SAMPLE  # of computing, for a push of the fastest worker; virtual
HIDDEN = 32
GROUP = 32  # images of a sample that cannot be split

RESAMPLED_SEED = 20261118  # committed before anything was measured on these clusters
RESAMPLED_WORKERS, RESAMPLED_TRACES = (8, 8, 12, 16, 16), 2
PIECE, PIECES = 25, 40  # iterations of a job that stay together, and how many of these a worker's times consist of

Trouble = Literal["none", "interference", "stalls"]
SLOWER, SLOW_S, SLOW_EVERY_S = 4.0, 3.0, 5.0  # interference: a node's factor, for how long, and how often
STALL_S, STALL_EVERY_S = 0.5, 1.0  # pauses of one worker or another
TROUBLED_S = 600.0  # virtual seconds for which there are such events


Task = Literal["mnist", "cifar"]


class Size(msgspec.Struct, frozen=True):
    """What is trained, as small as it may be."""

    images: int  # to train on
    tested: int  # of an evaluation
    target: float  # accuracy, by the mean of three evaluations in a row
    batch: int = BATCH
    step_rounds: float = 1.5  # nominal rounds of all workers' summed speed between two evaluations


SIZES: dict[Task, Size] = {"mnist": Size(16_000, 2_000, 0.91), "cifar": Size(12_000, 500, 0.4, batch=16, step_rounds=4)}


class Cell(msgspec.Struct, frozen=True):
    """A cluster."""

    name: str
    speeds: tuple[float, ...]
    line: float = 0.0  # what a round of all pushes takes on the server's line, in fast compute times; 0: no time
    trouble: Trouble = "none"
    trace: str = ""  # file of recorded times, in place of the jitter
    whole: bool = False  # samples cannot be split: two groups of images, which BatchNorm needs at least
    jitter: str = "lognormal:0.1"
    task: Task = "mnist"

    @property
    def size(self) -> Size:
        """What is trained."""
        return SIZES[self.task]

    @property
    def images(self) -> int:
        """Of one sample."""
        return GROUP if self.whole else 1


def mix(*groups: tuple[int, float]) -> tuple[float, ...]:
    """Speeds of all workers from counts and speeds of groups."""
    return tuple(itertools.chain.from_iterable([speed] * count for count, speed in groups))


EQUAL8 = mix((8, 1.0))
MIX8_2X = mix((4, 1.0), (4, 0.5))
MIX8_4X = mix((4, 1.0), (2, 0.5), (2, 0.25))
MIX8_8X = mix((4, 1.0), (2, 0.5), (1, 0.25), (1, 0.125))
MIX16_4X = mix((8, 1.0), (4, 0.5), (4, 0.25))
MIX16_8X = mix((8, 1.0), (4, 0.5), (2, 0.25), (2, 0.125))

JUDGED = (
    Cell("w8_4x", MIX8_4X),
    Cell("w8_8x", MIX8_8X),
    Cell("w16_4x", MIX16_4X),
    Cell("w16_8x", MIX16_8X),
    Cell("w8_4x_line03", MIX8_4X, line=0.3),
    Cell("w8_4x_line10", MIX8_4X, line=1.0),
    Cell("w16_8x_line03", MIX16_8X, line=0.3),
    Cell("w16_8x_line10", MIX16_8X, line=1.0),
    Cell("interference", EQUAL8, trouble="interference"),
    Cell("stalls", EQUAL8, trouble="stalls"),
    Cell("whole", MIX8_4X, whole=True),
    Cell("alibaba1", EQUAL8, trace="job_1_norm.csv"),
)
REPORTED = (
    Cell("equal", EQUAL8),
    Cell("w8_2x", MIX8_2X),
    Cell("alibaba2", EQUAL8, trace="job_2_norm.csv"),
    Cell("alibaba3", EQUAL8, trace="job_3_norm.csv"),
    Cell("cifar", MIX8_4X, task="cifar"),
)


def resampled(seed: int) -> tuple[Cell, ...]:
    """Clusters that nobody has chosen: speeds between 1 and 1/8, and times put together from pieces of all jobs."""
    chance = random.Random(seed)
    made = []
    for number, workers in enumerate(RESAMPLED_WORKERS):
        speeds = sorted((round(2 ** -chance.uniform(0, 3), 3) for _ in range(workers)), reverse=True)
        made.append(Cell(f"mix{number}", (1.0, *speeds[1:])))
    names = (f"pieces{number}" for number in range(RESAMPLED_TRACES))
    return (*made, *(Cell(name, EQUAL8, trace=f"resampled:{chance.randrange(1000)}") for name in names))


RESAMPLED = resampled(RESAMPLED_SEED)
CELLS = {cell.name: cell for cell in (*JUDGED, *REPORTED, *RESAMPLED)}


class Trial(msgspec.Struct, frozen=True):
    """One run to be made."""

    cell: str
    strategy: str
    rate: float  # for a round of all workers' nominal work, as everywhere
    momentum: float
    seed: int  # of the model's start, of the order of samples, and of the cluster's times and events
    batch: int = BATCH  # images of a push; the cell says how they make up samples
    limit_s: float = 300.0  # virtual
    to_the_end: bool = False  # go on at the target, until the limit


class Outcome(msgspec.Struct, frozen=True):
    """What became of it; all seconds are virtual but the processor's."""

    reached_s: float | None  # None: missed within the limit
    seconds: float
    accuracy: float  # the last one measured
    versions: int
    updates: int  # pushes
    samples: int
    staleness: float
    staleness_p95: float
    waiting: float  # share of the workers' time
    changes: int  # of a node's state, where the strategy has states
    states: dict[str, float]  # share of the nodes' time in each of them
    evaluations: int
    cpu_s: float
    ended: str


class Watch:
    """Counts what the report does not have; a sink."""

    def __init__(self) -> None:
        self.accuracy = 0.0
        self.changes = 0
        self.evaluations = 0
        self._seconds: dict[str, float] = {}
        self._since: dict[int, tuple[str, float]] = {}

    def write(self, line: journal.Line) -> None:
        if isinstance(line, journal.Decision):
            for action in line.actions:
                if isinstance(action, Mark):
                    self._mark(action.worker, action.state, line.event.at)
        elif isinstance(line, journal.Observation) and line.what == "evaluation":
            self.evaluations += 1
            self.accuracy = float(line.data["metrics"]["accuracy"])

    def _mark(self, worker: int, state: str, at: float) -> None:
        self.changes += worker in self._since
        before, since = self._since.get(worker, (state, at))
        self._seconds[before] = self._seconds.get(before, 0.0) + at - since
        self._since[worker] = (state, at)

    def shares(self, end: float) -> dict[str, float]:
        """Of the time of the nodes that ever had a state, until then."""
        for worker, (state, _) in list(self._since.items()):
            self._mark(worker, state, end)
            self.changes -= 1
        whole = sum(self._seconds.values()) or 1.0
        return {state: round(seconds / whole, 4) for state, seconds in sorted(self._seconds.items())}


def run(trial: Trial, cell: Cell | None = None) -> Outcome:
    """Train once; `cell` stands in for the trial's where it is none of the table."""
    torch.set_num_threads(1)
    cell = cell or CELLS[trial.cell]
    data(cell.task, cell.images)
    began = time.process_time()
    watch = Watch()
    settings = {} if trial.to_the_end else {"target": f"accuracy>={cell.size.target}"}
    try:
        done = paceline.launch(
            functools.partial(train, trial, cell), engine="sim", scenario=cluster(cell, trial.seed),
            strategy=trial.strategy, seed=trial.seed, sink=watch, epochs=10_000, max_seconds=trial.limit_s,
            evaluate_every=f"{step_s(cell):g}s", on_divergence="stop", **settings,
        )  # fmt: skip
    except UserError as error:  # what is not finite is refused
        spent = time.process_time() - began
        return Outcome(None, trial.limit_s, watch.accuracy, 0, 0, 0, 0.0, 0.0, 0.0, 0, {}, watch.evaluations, spent,
                       type(error).__name__)  # fmt: skip
    report = done.summary
    reached = report.target.reached_at_seconds if report.target is not None and done.ended == "target" else None
    return Outcome(
        reached, report.seconds, report.accuracy or 0.0, report.versions, report.pushes, report.samples_used,
        report.staleness.mean or 0.0, report.staleness.p95 or 0.0, report.wait_fraction or 0.0, watch.changes,
        watch.shares(report.seconds), watch.evaluations, time.process_time() - began, done.ended,
    )  # fmt: skip


def step_s(cell: Cell) -> float:
    """Virtual seconds between evaluations: so long all workers together need for some nominal rounds, undisturbed."""
    return (
        cell.size.step_rounds
        * SECONDS_PER_SAMPLE
        * cell.size.batch
        * max(len(cell.speeds) / sum(cell.speeds), 2 * cell.line)
    )


def train(trial: Trial, cell: Cell) -> None:
    """The script of a worker."""
    session = paceline.init()
    (images, labels), (test_images, test_labels) = data(cell.task, cell.images)
    torch.manual_seed(trial.seed)
    model = build(cell)
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.rate, momentum=trial.momentum)

    def evaluate(module: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            scores = module(test_images)
        return {"accuracy": float((scores.argmax(dim=1) == test_labels).float().mean())}

    model, optimizer = session.prepare(model, optimizer, evaluate=evaluate)
    rows = torch.utils.data.TensorDataset(images, labels)
    for x, y in session.batches(rows, batch_size=trial.batch // cell.images, epochs=1):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x.flatten(0, -4)), y.flatten())
        loss.backward()
        session.report(loss=loss)
        optimizer.step()


def build(cell: Cell) -> nn.Sequential:
    """The task's model for pixels that are floats, with BatchNorm where samples cannot be split."""
    model = nn.Sequential(*list(whole_model(cell.task))[1:])
    if cell.whole:
        model.insert(2, nn.BatchNorm1d(HIDDEN))
    return model


def whole_model(task: Task) -> nn.Sequential:
    """The MLP, or a small convolutional net for CIFAR-10; the first layer makes floats of bytes.

    That layer is applied once, to all images: it learns nothing, and takes as long as the rest of an evaluation.
    """
    model = cifar.build() if task == "cifar" else mnist.build("mlp", HIDDEN)
    if not isinstance(model, nn.Sequential):
        raise TypeError(f"the model of {task} is no sequence of layers")
    return model


def bytes_of(cell: Cell) -> int:
    """Of a model or a gradient on the line."""
    return sum(p.nbytes for p in build(cell).parameters())


Tensors = tuple[torch.Tensor, torch.Tensor]


@functools.cache  # a process makes many runs
def data(task: Task, group: int) -> tuple[Tensors, Tensors]:
    """Images and labels to train with, in groups if they are samples of several, and those to test with."""
    where = folder(task)
    if not where.is_dir():
        raise SystemExit(f"{task} is missing: {where}; set the variable {task.upper()} to its folder")
    size = SIZES[task]
    if task == "cifar":
        index = cifar.load_index(where)
        parts = [cifar.load(where, index, cifar.choose(index, test, count)).tensors
                 for test, count in ((False, size.images), (True, size.tested))]  # fmt: skip
    else:
        parts = [mnist.load(where, part).tensors for part in ("train", "t10k")]
    (images, labels), (test, right) = parts
    floats = whole_model(task)[:1]
    images, labels = floats(images[: size.images]), labels[: size.images]
    test, right = floats(test[: size.tested]), right[: size.tested]
    if group > 1:
        images, labels = images.unflatten(0, (-1, group)), labels.unflatten(0, (-1, group))
    return (images, labels), (test, right)


def folder(task: Task) -> Path:
    """Where the images lie."""
    return Path(os.environ.get(task.upper(), str(SHARED / {"mnist": "mnist", "cifar": "cifar10"}[task])))


def cluster(cell: Cell, seed: int) -> Scenario:
    """The scenario of a cell."""
    network = ""
    if cell.line:
        mbps = 8 * bytes_of(cell) * len(cell.speeds) / (cell.line * FAST_S) / 1e6
        network = f"[network]\nbandwidth_mbps = {mbps:.6f}"
    own = cell.trace.startswith("resampled:")
    jitter = "none" if own else f"trace:{cell.trace}" if cell.trace else cell.jitter
    text = f"""
seed = {seed}
[compute]
seconds_per_sample = {SECONDS_PER_SAMPLE * cell.images}
jitter = "{jitter}"
{network}
"""
    text += "".join(f"[[workers]]\ncount = {count}\nspeed = {speed}\n" for count, speed in alike(cell.speeds))
    found = scenario.parse(text + events(cell, seed), cell.name, ALIBABA)
    return found if not own else with_times(found, pieces(int(cell.trace.partition(":")[2]), len(cell.speeds)))


def with_times(found: Scenario, rows: Sequence[tuple[float, ...]]) -> Scenario:
    """The scenario with these factors, worker by worker, in place of its jitter."""
    jitter = Jitter("trace:resampled", "trace", rows=tuple(rows))
    workers = tuple(msgspec.structs.replace(worker, jitter=jitter) for worker in found.workers)
    return msgspec.structs.replace(found, workers=workers)


@functools.cache
def pieces(seed: int, workers: int) -> tuple[tuple[float, ...], ...]:
    """For each worker pieces of the recorded times of any worker of any job, each over the median of its job."""
    chance = random.Random(seed)
    jobs = [scenario.parse(
        f'[compute]\nseconds_per_sample = 1\njitter = "trace:{file.name}"\n[[workers]]\n', file.name, ALIBABA
    ).compute.jitter.rows for file in sorted(ALIBABA.glob("job_*_norm.csv"))]  # fmt: skip
    made = []
    for _ in range(workers):
        row: list[float] = []
        while len(row) < PIECES * PIECE:
            times = chance.choice(chance.choice(jobs))
            begin = chance.randrange(max(1, len(times) - PIECE))
            row += times[begin : begin + PIECE]
        made.append(tuple(row))
    return tuple(made)


def alike(speeds: Sequence[float]) -> list[tuple[int, float]]:
    """Groups of workers of one speed, with their number."""
    return [(len(list(found)), speed) for speed, found in itertools.groupby(speeds)]


def events(cell: Cell, seed: int) -> str:
    """One node after the other is disturbed; `seed` chooses which and when."""
    if cell.trouble == "none":
        return ""
    kind, lasts, every, more = (
        ("slow", SLOW_S, SLOW_EVERY_S, f"factor = {SLOWER}\n")
        if cell.trouble == "interference"
        else ("pause", STALL_S, STALL_EVERY_S, "")
    )
    chance, last, found = random.Random(f"{cell.trouble} {seed}"), -1, []
    for number in range(math.ceil(TROUBLED_S / every)):
        at = every * number + (every - lasts) * chance.random()
        last = chance.choice([worker for worker in range(len(cell.speeds)) if worker != last])
        found.append(f'[[events]]\nkind = "{kind}"\nworker = {last}\nat = {at:.4f}\nfor = {lasts}\n{more}')
    return "".join(found)
