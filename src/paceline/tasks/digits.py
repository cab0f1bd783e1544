"""Handwritten digits of 8x8 pixels with a small MLP: the default task, bundled with scikit-learn.

1,400 of the 1,797 images train, the other 397 are held out, always the same ones. Evaluates `accuracy` and `loss`.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.core.errors import DataError
from paceline.tasks.classification import fit
from paceline.tasks.inputs import within

__all__ = ["build", "load", "train"]

TRAIN_SAMPLES = 1400
SPLIT_SEED = 0


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return training and held-out images, pixels in [0, 1]."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("task digits takes its data from scikit-learn: pip install 'paceline[tasks]'") from error
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    x = torch.as_tensor(images, dtype=torch.float32)[order] / 16  # pixels are counts from 0 to 16
    y = torch.as_tensor(labels, dtype=torch.int64)[order]
    train_set = TensorDataset(x[:TRAIN_SAMPLES], y[:TRAIN_SAMPLES])
    return train_set, TensorDataset(x[TRAIN_SAMPLES:], y[TRAIN_SAMPLES:])


def build(hidden: int) -> nn.Module:
    """Map 64 pixels to 10 classes through one hidden layer."""
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def train() -> None:
    """Entry point of `paceline run --task digits`."""
    session = paceline.init()
    hidden = within("hidden", session.option("hidden", 32), low=1)
    lr = session.option("lr", 0.1)
    momentum = session.option("momentum", 0.9)
    batch_size = session.option("batch_size", 16)  # 8 workers: 11 rounds an epoch
    epochs = session.option("epochs", 20.0)  # 8 workers reach 0.93 in about 7
    train_set, held_out = session.once("digits", load)
    fit(session, build(hidden), train_set, held_out, lr, momentum, batch_size, epochs)
