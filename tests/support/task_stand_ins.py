"""What the tests of the tasks share: a stand-in session, and small data folders in the real formats."""

import gzip
import lzma
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline
from paceline import tasks


class PlainSession:
    """What a script sees of a session, with plain single-process training behind it."""

    def __init__(self, data_dir: Path | None = None, workers: int = 1, max_batches: int | None = None, **given: Any):
        self.data_dir, self.workers, self.worker = data_dir, workers, 0
        self.device = torch.device("cpu")
        self.given, self.asked = given, dict[str, Any]()
        self.max_batches = max_batches
        self.shapes: list[tuple[torch.Size, torch.Size]] = []
        self.losses: list[float] = []
        self.made: dict[str, Any] = {}
        self.first: dict[str, float] = {}

    def option(self, name: str, default: Any) -> Any:
        self.asked[name] = default
        return type(default)(self.given.get(name, default))

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def prepare(self, model: Any, optimizer: Any, scheduler: Any = None, evaluate: Any = None) -> tuple[Any, Any]:
        self.model, self.evaluate = model, evaluate
        self.first = evaluate(model)
        return model, optimizer

    def batches(self, data: Any, batch_size: int, epochs: float, sampling: str = "epoch") -> Iterator[Any]:
        self.sampling, self.batch_size, self.train_set = sampling, batch_size, data
        count = 0
        for _ in range(math.ceil(epochs)):
            for rows in torch.randperm(len(data)).split(batch_size):
                if count == self.max_batches:
                    return
                x, y = data[rows]
                self.shapes.append((x.shape, y.shape))
                yield x, y
                count += 1

    def report(self, loss: torch.Tensor) -> None:
        self.losses.append(float(loss.detach()))

    def run(self, name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
        """Train the task and evaluate what came out."""
        monkeypatch.setattr(paceline, "init", lambda: self, raising=False)
        torch.manual_seed(0)
        tasks.get(name)()
        return self.evaluate(self.model)


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder: Path) -> Path:
    """40 training and 20 test images of noise; images plain, labels compressed."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 40), ("t10k", 20)):
        images = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx_bytes(images))
        labels = gzip.compress(idx_bytes(np.arange(count, dtype=np.uint8) % 10))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(labels)
    return folder


def write_cifar(folder: Path) -> Path:
    """12 images of flat grey: image i has luma 128 + 2 i; the first 4 are test images."""
    coefficients = np.zeros((64, 24, 12), "<i2")
    coefficients[0, :16] = np.arange(12)
    (folder / "cifar10_jpegcoef_i16.xz").write_bytes(lzma.compress(coefficients.tobytes()))
    steps = np.full((2, 64), 16, np.uint16)
    np.savez(folder / "cifar10_index.npz", label=np.arange(12) % 10, is_test=np.arange(12) < 4, quant_zigzag=steps)
    return folder


def write_text(folder: Path) -> Path:
    """4,200 characters that repeat themselves."""
    (folder / "input.txt").write_text("the quick brown fox. " * 200)
    return folder
