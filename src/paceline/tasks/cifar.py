"""CIFAR-10 with a small convolutional net and momentum: a task on which stale gradients hurt.

Reads a folder with `cifar10_index.npz` (`label`, `is_test`, `quant_zigzag`) and `cifar10_jpegcoef_i16.xz` (quantized
JPEG coefficients, see `jpeg.py`), and decodes only the images in use. Evaluates `accuracy` and `loss` on test images.
"""

import lzma
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.core.errors import DataError
from paceline.tasks import jpeg
from paceline.tasks.classification import Pixels, fit
from paceline.tasks.inputs import require_file, require_folder, within

CHUNK = 1000  # images decoded at once; bounds the memory of the float stages
SUBSET_SEED = 0

Index = dict[str, npt.NDArray[np.generic]]


def load_index(folder: Path) -> Index:
    """Read the labels, the train/test split and the quantization steps of all images in the folder."""
    path = require_file(folder, "cifar10_index.npz")
    try:
        with np.load(path) as stored:
            return {name: stored[name] for name in ("label", "is_test", "quant_zigzag")}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not the index of this data set: {error}; fetch the file again") from error


def choose(index: Index, test: bool, count: int) -> npt.NDArray[np.intp]:
    """Return `count` image numbers of one part, always the same; drawn, because the files are sorted by class."""
    part = np.flatnonzero(index["is_test"] == test)
    return np.random.default_rng(SUBSET_SEED).permutation(part)[:count]


def read_coefficients(folder: Path, chosen: npt.NDArray[np.intp], total: int) -> npt.NDArray[np.int16]:
    """Return (chosen, 24, 64) coefficients; the file is read plane by plane, so only chosen images stay in memory."""
    path = require_file(folder, "cifar10_jpegcoef_i16.xz")
    kept = np.empty((len(chosen), jpeg.BLOCKS, 64), np.int16)
    plane_bytes = jpeg.BLOCKS * total * 2
    try:
        with lzma.open(path) as file:
            for number in range(64):
                plane = np.frombuffer(file.read(plane_bytes), "<i2").reshape(jpeg.BLOCKS, total)
                kept[:, :, number] = plane[:, chosen].T
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise DataError(f"{path} does not hold the coefficients of {total} images: {error}; fetch it again") from error
    return kept


def load(folder: Path, index: Index, chosen: npt.NDArray[np.intp]) -> TensorDataset:
    """Decode the chosen images to (n, 3, 32, 32) bytes, with their labels."""
    coefficients = read_coefficients(folder, chosen, total=len(index["label"]))
    steps = index["quant_zigzag"].astype(np.int64)
    images = np.empty((len(chosen), 3, 32, 32), np.uint8)
    for start in range(0, len(chosen), CHUNK):
        images[start : start + CHUNK] = jpeg.decode(coefficients[start : start + CHUNK], steps)
    return TensorDataset(torch.from_numpy(images), torch.from_numpy(index["label"][chosen].astype(np.int64)))


def build() -> nn.Module:
    """Map 32x32 colour bytes to 10 classes; strides instead of pooling keep it at about 0.15 ms a sample on a core."""
    return nn.Sequential(
        Pixels(mean=0.4733, deviation=0.2504),  # of the training images, all channels together
        *(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def train() -> None:
    """Entry point of `paceline run --task cifar`."""
    session = paceline.init()
    contents = "cifar10_index.npz and cifar10_jpegcoef_i16.xz"
    folder = require_folder("cifar", session.data_dir, contents, "../shared/data/cifar10")
    index = session.once(f"cifar-index-{folder}", lambda: load_index(folder))
    tests = int(index["is_test"].sum())
    trains = len(index["label"]) - tests
    samples = within("samples", session.option("samples", trains), low=1, high=trains)
    test_samples = within("test_samples", session.option("test_samples", min(2000, tests)), low=1, high=tests)
    lr = session.option("lr", 0.02)
    momentum = session.option("momentum", 0.9)
    batch_size = session.option("batch_size", 32)
    epochs = session.option("epochs", 4.0)

    chosen = np.concatenate([choose(index, False, samples), choose(index, True, test_samples)])
    key = f"cifar-{folder}-{samples}-{test_samples}"
    images, labels = session.once(key, lambda: load(folder, index, chosen)).tensors
    train_set = TensorDataset(images[:samples], labels[:samples])
    test_set = TensorDataset(images[samples:], labels[samples:])
    fit(session, build(), train_set, test_set, lr, momentum, batch_size, epochs)
