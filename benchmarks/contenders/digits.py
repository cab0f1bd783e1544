"""The task of the races: handwritten digits and a small MLP, from a file that needs nothing but torch to be read."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

PIXELS = 64
HIDDEN = 32


def save(path: Path) -> None:
    """Write paceline's own digits task, split as it splits them, to a file."""
    from paceline.tasks import digits

    train_set, held_out = digits.load()
    torch.save({"train": train_set.tensors, "held_out": held_out.tensors}, path)


def load(path: str) -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out pictures."""
    tensors = torch.load(path, weights_only=True)
    return TensorDataset(*tensors["train"]), TensorDataset(*tensors["held_out"])


def build() -> nn.Module:
    """The digits task's model."""
    return nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def loss(model: nn.Module, held_out: TensorDataset) -> float:
    """The mean loss on held-out pictures: unlike their accuracy it says much the same whatever the seed was."""
    x, y = held_out.tensors
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x), y))
