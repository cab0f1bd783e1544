"""The task of the races on a lab: MNIST's convolutional net, and what every rank of a contender does alike.

A rank says when it is ready and begins when all may. The first rank shows the model to the judge, which stands outside
the hosts: it writes the values to a file, whose evaluation costs the contender nothing.
"""

import dataclasses
import json
import os
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import TensorDataset

HIDDEN = 32
TRAIN_SAMPLES = 20_000  # the files are in random order
HELD_OUT = 1000
CHUNK = 100  # images per forward pass of an evaluation
GO = "go"
PAUSE_S = 0.005  # between two looks whether all may begin
TIME = struct.Struct("d")


@dataclasses.dataclass(frozen=True)
class LabRace:
    """What a contender is asked: train until somebody ends it."""

    data: str
    lr: float
    momentum: float
    seed: int
    sizes: list[int]  # samples of a step, by rank
    every: int  # samples of all ranks between two evaluations
    port: int
    options: dict[str, Any]

    @property
    def workers(self) -> int:
        return len(self.sizes)

    @property
    def batch_size(self) -> int:
        return self.sizes[0]


def save(path: Path, mnist: Path) -> None:
    """Write what the races need of MNIST's files."""
    from paceline.tasks import mnist as task

    train, held_out = task.load(mnist, "train").tensors, task.load(mnist, "t10k").tensors
    torch.save({"train": [part[:TRAIN_SAMPLES].clone() for part in train],
                "held_out": [part[:HELD_OUT].clone() for part in held_out]}, path)  # fmt: skip


def load(path: str, part: str) -> TensorDataset:
    """Pictures as bytes, and labels, of `train` or `held_out`."""
    return TensorDataset(*torch.load(path, weights_only=True)[part])


def build(seed: int) -> nn.Module:
    """The net of `paceline run --task mnist --set model=cnn`, on pixels from 0 to 1."""
    torch.manual_seed(seed)
    first = (nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(256, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of a batch."""
    return functional.cross_entropy(model(x.float() / 255), y)


@torch.no_grad()
def accuracy(model: nn.Module, held_out: TensorDataset) -> float:
    """The share of right answers."""
    inputs, labels = held_out.tensors
    parts = zip(inputs.split(CHUNK), labels.split(CHUNK), strict=True)
    return sum(int((model(x.float() / 255).argmax(dim=1) == y).sum()) for x, y in parts) / len(labels)


def batches(data: TensorDataset, task: LabRace, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A rank's part of one shuffle of the data after the other, without end; ranks never share a sample."""
    x, y = data.tensors
    total, begin, epoch = sum(task.sizes), sum(task.sizes[:rank]), 0
    while True:
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1000 * task.seed + epoch))
        for start in range(0, len(y) - total + 1, total):
            rows = order[start + begin : start + begin + task.sizes[rank]]
            yield x[rows], y[rows]
        epoch += 1


class RankPlace:
    """One rank's place in a race."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._shown = 0
        self.task = LabRace(**json.loads((folder / "task.json").read_text()))
        torch.set_num_threads(1)

    def wait(self) -> None:
        """Wait until all ranks are ready; what follows is timed."""
        (self._folder / f"ready-{self._rank}").touch()
        while not (self._folder / GO).exists():
            time.sleep(PAUSE_S)
        _place(self._folder / f"began-{self._rank}", TIME.pack(time.monotonic()))

    def show(self, model: nn.Module, samples: int) -> None:
        """Let the model be evaluated, if it is time; `samples` were used for it."""
        if self._rank or samples < self._shown + self.task.every:
            return
        self._shown = samples
        values = parameters_to_vector(model.parameters()).detach().numpy()
        _place(self._folder / f"snapshot-{samples:09d}", TIME.pack(time.monotonic()) + values.tobytes())


def _place(path: Path, content: bytes) -> None:
    """Write a file that is never seen half written."""
    draft = path.with_name(f"draft-{path.name}")
    draft.write_bytes(content)
    os.replace(draft, path)  # noqa: PTH105


def began_at(folder: Path, ranks: int) -> float:
    """When the first rank began."""
    return min(TIME.unpack((folder / f"began-{rank}").read_bytes())[0] for rank in range(ranks))


def restore(snapshot: Path, model: nn.Module) -> tuple[float, int]:
    """Put a snapshot's values into the model; when it was made, and of how many samples."""
    content = snapshot.read_bytes()
    values = torch.frombuffer(bytearray(content[TIME.size :]), dtype=torch.float32)
    vector_to_parameters(values, model.parameters())
    return TIME.unpack_from(content)[0], int(snapshot.name.rpartition("-")[2])


def _count_steps() -> None:
    """How many steps a host makes by itself in so many seconds: `python -m contenders.lab_mnist FOLDER RANK S`."""
    folder, rank, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    place = RankPlace(folder, rank)
    task, model = place.task, build(place.task.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=task.momentum)
    data = load(task.data, "train")
    place.wait()
    until, steps = time.monotonic() + seconds, 0
    for x, y in batches(data, task, rank):
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()
        steps += 1
        if time.monotonic() >= until:
            break
    _place(folder / f"steps-{rank}", str(steps).encode())


if __name__ == "__main__":
    _count_steps()
