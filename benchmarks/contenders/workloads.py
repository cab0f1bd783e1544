"""Models and data of the training questions; every contender builds them from here."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

SEED = 5
CLASSES = 10
SAMPLES = 2048  # of a data set, which is gone through as often as needed


def cnn() -> tuple[nn.Module, tuple[int, ...]]:
    """A small CNN on 32x32 pictures."""
    layers = [
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 8 * 8, 64), nn.ReLU(), nn.Linear(64, CLASSES),
    ]  # fmt: skip
    return nn.Sequential(*layers), (3, 32, 32)


def mlp() -> tuple[nn.Module, tuple[int, ...]]:
    """A small MLP, 0.8 M parameters."""
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 256),
                         nn.ReLU(), nn.Linear(256, CLASSES)), (784,)  # fmt: skip


def wide() -> tuple[nn.Module, tuple[int, ...]]:
    """25 M parameters, most of them in two matrices."""
    return nn.Sequential(nn.Linear(1024, 8192), nn.ReLU(), nn.Linear(8192, 2032), nn.ReLU(),
                         nn.Linear(2032, CLASSES)), (1024,)  # fmt: skip


def tiny() -> tuple[nn.Module, tuple[int, ...]]:
    """Next to no arithmetic: what is left is the cost of a step as such."""
    return nn.Linear(16, CLASSES), (16,)


BUILDERS = {"cnn": cnn, "mlp": mlp, "wide": wide, "tiny": tiny}


def build(name: str) -> nn.Module:
    """The model with its initial values, the same ones each time."""
    torch.manual_seed(SEED)
    return BUILDERS[name]()[0]


def dataset(name: str, samples: int) -> TensorDataset:
    """So many samples of noise: speed is asked for, not accuracy."""
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(samples, *BUILDERS[name]()[1], generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (samples,), generator=generator))
