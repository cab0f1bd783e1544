"""MNIST with an MLP (`model=mlp`, `hidden` units) or a small convolutional net (`model=cnn`).

Reads the four idx files, plain or compressed, from the data folder; other data sets of 28x28 images in the same files
(Fashion-MNIST, KMNIST) work as well. Evaluates `accuracy` and `loss` on the test images.
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline
from paceline.core.errors import DataError
from paceline.tasks.bounds import one_of, within
from paceline.tasks.folders import require_folder
from paceline.tasks.idx import find_idx, read_idx
from paceline.tasks.pixels import Pixels
from paceline.tasks.scoring import score


def load(folder: Path, part: str) -> TensorDataset:
    """Images (n, 1, 28, 28) as bytes and labels of one part, `train` or `t10k`."""
    images_path = find_idx(folder, f"{part}-images-idx3-ubyte")
    images, labels = read_idx(images_path), read_idx(find_idx(folder, f"{part}-labels-idx1-ubyte"))
    if images.shape != (len(labels), 28, 28):
        raise DataError(f"{images_path} has shape {images.shape}, not ({len(labels)}, 28, 28) as its labels call for")
    return TensorDataset(torch.tensor(images).unsqueeze(1), torch.tensor(labels, dtype=torch.int64))


def build(kind: str, hidden: int) -> nn.Module:
    """28x28 bytes to 10 classes."""
    pixels = Pixels(mean=0.0, deviation=1.0)  # from 0 to 1: a centred background bears only half the learning rate
    if kind == "mlp":
        return nn.Sequential(pixels, nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    return nn.Sequential(
        pixels,
        *(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, hidden), nn.ReLU(), nn.Linear(hidden, 10)),
    )


def train() -> None:
    """Entry point of `paceline run --task mnist`."""
    session = paceline.init()
    contents = "the idx files of MNIST (train-images-idx3-ubyte and so on, plain or .gz)"
    folder = require_folder("mnist", session.data_dir, contents, "../shared/data/mnist")
    whole_set = session.once(f"mnist-train-{folder}", lambda: load(folder, "train"))
    test_set = session.once(f"mnist-test-{folder}", lambda: load(folder, "t10k"))
    samples = within("samples", session.option("samples", len(whole_set)), low=1, high=len(whole_set))
    train_set = TensorDataset(*(tensor[:samples] for tensor in whole_set.tensors))  # the files are in random order
    kind = one_of("model", session.option("model", "mlp"), ("mlp", "cnn"))
    hidden = within("hidden", session.option("hidden", 32), low=1)
    lr = session.option("lr", 0.1)
    momentum = session.option("momentum", 0.9)
    batch_size = session.option("batch_size", 64)
    epochs = session.option("epochs", 2.0)

    def evaluate(model: nn.Module) -> dict[str, float]:
        return score(model, test_set)

    model = build(kind, hidden).to(session.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    session.prepare(model, optimizer, evaluate=evaluate)
    for x, y in session.batches(train_set, batch_size=batch_size, epochs=epochs):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x.to(session.device)), y.to(session.device))
        loss.backward()
        session.report(loss=loss)
        optimizer.step()
