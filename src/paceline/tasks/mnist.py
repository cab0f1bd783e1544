"""MNIST with an MLP (`model=mlp`, `hidden` units) or a small convolutional net (`model=cnn`).

Reads the four idx files, plain or compressed, from the data folder; other data sets of 28x28 images in the same files
(Fashion-MNIST, KMNIST) work as well. Evaluates `accuracy` and `loss` on the test images.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.core.errors import DataError
from paceline.tasks.classification import Pixels, fit
from paceline.tasks.inputs import one_of, require_file, require_folder, within

UNSIGNED_BYTE = 0x08


def find_idx(folder: Path, name: str) -> Path:
    """Return the path of the file, plain or compressed."""
    return require_file(folder, name, f"{name}.gz")


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read the array in an idx file, decompressed if its name ends in `.gz`.

    The format: two zero bytes, a type code, the number of dimensions, their sizes (big-endian, 32 bits), then the
    values row by row. Only unsigned bytes are read, which is all that MNIST and its relatives use.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; fetch the file again") from error
    if len(content) < 4 or content[:3] != bytes((0, 0, UNSIGNED_BYTE)):
        raise DataError(f"{path} starts with {content[:4].hex()}, not with 000008, as idx files of bytes do")
    dimensions = content[3]
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise DataError(f"{path} ends within its header of {start} bytes; fetch the file again")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"{path} has {len(content) - start} values where its header promises {math.prod(shape)}; fetch it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def load(folder: Path, part: str) -> TensorDataset:
    """Read images (n, 1, 28, 28) as bytes, and labels, of one part: `train` or `t10k`."""
    images_path = find_idx(folder, f"{part}-images-idx3-ubyte")
    images, labels = read_idx(images_path), read_idx(find_idx(folder, f"{part}-labels-idx1-ubyte"))
    if images.shape != (len(labels), 28, 28):
        raise DataError(f"{images_path} has shape {images.shape}, not ({len(labels)}, 28, 28) as its labels call for")
    return TensorDataset(torch.tensor(images).unsqueeze(1), torch.tensor(labels, dtype=torch.int64))


def build(kind: str, hidden: int) -> nn.Module:
    """Map 28x28 bytes to 10 classes."""
    pixels = Pixels(mean=0.0, deviation=1.0)  # 0 to 1: with a centred background only half the learning rate is stable
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
    fit(session, build(kind, hidden), train_set, test_set, lr, momentum, batch_size, epochs)
