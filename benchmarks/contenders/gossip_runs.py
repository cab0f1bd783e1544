"""One training run without a server, in virtual time: an MLP on MNIST or a small convolutional net on CIFAR-10.

The learning rate follows the position of the whole run, so that slow nodes and newcomers have the rate of the others.
"""

import functools
import math
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch
from torch import nn
from torch.nn import functional

import paceline
from paceline import scenario
from paceline.core.peer_events import Sent, Stepped
from paceline.records import journal
from paceline.tasks import cifar, mnist

SHARED = Path(__file__).parents[3] / "shared" / "data"
FOLDERS = {"mnist": ("MNIST", "mnist"), "cifar": ("CIFAR", "cifar10")}  # variable that overrides, folder in SHARED
SECONDS_PER_SAMPLE = 0.001
PARTS = 20  # of a run, whose bytes are counted apart
SLOW = 0.25  # speed of the slow node

Data = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Size(msgspec.Struct, frozen=True):
    """What is trained on how many nodes."""

    samples: int
    epochs: float
    workers: int = 8
    batch: int = 16
    hidden: int = 64
    test: int = 10_000
    task: str = "mnist"

    @property
    def seconds(self) -> float:
        """Of virtual time that a run takes where nothing waits."""
        return self.samples * self.epochs * SECONDS_PER_SAMPLE / self.workers


class Job(msgspec.Struct, frozen=True):
    """One run to be made."""

    strategy: str
    rate: float
    schedule: str
    seed: int
    size: Size
    momentum: float = 0.0
    mbps: float | None = None
    slow: bool = False  # the last node computes at the speed SLOW
    faults: bool = False  # two nodes crash, and two others join


class Ran(msgspec.Struct, frozen=True):
    """What became of it."""

    accuracy: float
    loss: float
    bytes: int
    exchanges: int
    seconds: float
    consensus: float
    course: list[int]  # bytes sent in each part of the run
    pace: float = 0.0  # steps per second of all nodes but the last, together
    waiting: float = 0.0  # share of their time in which they waited
    nodes: float = 0.0  # accuracy of the nodes' own final models: mean
    worst: float = 0.0  # least


def folder(task: str) -> Path:
    """Where the data of a task lies."""
    variable, name = FOLDERS[task]
    return Path(os.environ.get(variable, str(SHARED / name)))


def factor(schedule: str, progress: float) -> float:
    """Of the learning rate, after that share of the run."""
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return 1.0 if progress < 0.5 else 0.1


def run(job: Job) -> Ran:
    """Train once; a run that diverges has the accuracy of guessing."""
    torch.set_num_threads(1)
    lines = journal.Lines()
    done = paceline.launch(
        lambda: train(job), engine="sim", scenario=scenario.parse(cluster(job), "gossip", Path()),
        strategy=job.strategy, seed=job.seed, sink=lines, evaluate_every=f"{job.size.epochs:g}e",
    )  # fmt: skip
    report = done.summary
    consensus, own = 0.0, None
    if report.peers is not None:
        consensus, own = report.peers.consensus or 0.0, report.peers.nodes.get("accuracy")
    return Ran(
        report.accuracy or 0.0, report.loss or math.inf, report.bytes_up, report.exchanges or 0, report.seconds,
        consensus, course(lines, report.seconds), *pace(lines, job.size.workers - 1),
        nodes=own.mean if own is not None else 0.0, worst=own.min if own is not None else 0.0,
    )  # fmt: skip


def cluster(job: Job) -> str:
    """The scenario of a job."""
    size = job.size
    network = "" if job.mbps is None else f"[network]\nbandwidth_mbps = {job.mbps}"
    last = f"[[workers]]\nspeed = {SLOW if job.slow else 1.0}"
    events = ""
    if job.faults:
        events = "".join(
            f'[[events]]\nkind = "{kind}"\nat = {share * size.seconds}\n{what}\n'
            for kind, share, what in (
                ("crash", 0.3, "worker = 1"), ("crash", 0.4, f"worker = {size.workers - 2}"),
                ("join", 0.5, "count = 1"), ("join", 0.6, "count = 1"),
            )
        )  # fmt: skip
    return f"""
seed = {job.seed}
[compute]
seconds_per_sample = {SECONDS_PER_SAMPLE}
jitter = "lognormal:0.1"
{network}
[[workers]]
count = {size.workers - 1}
{last}
{events}
"""


def train(job: Job) -> None:
    """The script of a node."""
    session, size = paceline.init(), job.size
    images, labels, test_images, test_labels = session.once("data", lambda: data(size))
    torch.manual_seed(job.seed)
    model = build(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.rate, momentum=job.momentum)
    rounds = math.ceil(size.samples * size.epochs / (size.batch * size.workers))
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(job.schedule, step / rounds))

    def evaluate(module: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            scores = torch.cat([module(part) for part in test_images.split(1000)])
        right = (scores.argmax(dim=1) == test_labels).float().mean()
        return {"accuracy": float(right), "loss": float(functional.cross_entropy(scores, test_labels))}

    model, optimizer = session.prepare(model, optimizer, scheduler=decay, evaluate=evaluate)
    rows = torch.utils.data.TensorDataset(images, labels)
    for x, y in session.batches(rows, batch_size=size.batch, epochs=size.epochs):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        session.report(loss=loss)
        optimizer.step()
        decay.step()


def build(size: Size) -> nn.Module:
    """The model of a task."""
    return cifar.build() if size.task == "cifar" else mnist.build("mlp", size.hidden)


@functools.cache  # a process makes many runs, and decoding takes longer than some of them
def data(size: Size) -> Data:
    """Images and labels to train with and to test with."""
    where = folder(size.task)
    if size.task == "cifar":
        index = cifar.load_index(where)
        parts = [cifar.load(where, index, cifar.choose(index, test, count)).tensors
                 for test, count in ((False, size.samples), (True, size.test))]  # fmt: skip
        return (*parts[0], *parts[1])  # type: ignore[return-value]
    training, test = (mnist.load(where, part).tensors for part in ("train", "t10k"))
    return (*(t[: size.samples] for t in training), *(t[: size.test] for t in test))  # type: ignore[return-value]


def course(lines: Iterable[journal.Line], seconds: float) -> list[int]:
    """Bytes that all nodes sent to each other or exchanged with the centre, by part of the run."""
    counts = [0] * PARTS
    for line in lines:
        if isinstance(line, journal.PeerDecision) and isinstance(line.event, Sent):
            at, sent = line.event.at, line.event.bytes
        elif isinstance(line, journal.Observation) and line.what == "exchange":
            at, sent = line.at, line.data["bytes"]
        else:
            continue
        counts[min(PARTS - 1, int(PARTS * at / seconds))] += sent
    return counts


def pace(lines: Iterable[journal.Line], nodes: int) -> tuple[float, float]:
    """Steps per second of the first so many nodes, and the share of their time in which they waited."""
    steps, waited, computed, ended = 0, 0.0, 0.0, {0: 0.0}
    for line in lines:
        if isinstance(line, journal.PeerDecision) and isinstance(line.event, Stepped) and line.node < nodes:
            steps, waited, computed = steps + 1, waited + line.event.wait_s, computed + line.event.compute_s
            ended[line.node] = line.event.at
    return steps / (max(ended.values()) or 1.0), waited / ((waited + computed) or 1.0)
