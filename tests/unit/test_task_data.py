"""The files that the tasks read: idx, JPEG coefficients, and what is known of the real data sets."""

import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest
from task_stand_ins import idx_bytes, write_cifar, write_mnist

from paceline.core.errors import DataError
from paceline.tasks import cifar, jpeg, mnist, svmlight, topics


def test_idx_files_plain_and_compressed(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    (tmp_path / "plain").write_bytes(idx_bytes(array))
    (tmp_path / "zipped.gz").write_bytes(gzip.compress(idx_bytes(array)))
    for name in ("plain", "zipped"):
        assert np.array_equal(mnist.read_idx(mnist.find_idx(tmp_path, name)), array)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a", b"\x00\x00\x0d\x01\x00\x00\x00\x00", "starts with 00000d01"),
        ("a", b"", "starts with"),
        ("a", b"\x00\x00\x08\x02\x00\x00", "ends within its header of 12 bytes"),
        ("a", idx_bytes(np.zeros(5, np.uint8))[:-1], "4 values where its header promises 5"),
        ("a.gz", b"not compressed", "cannot be read"),
        ("a.gz", gzip.compress(idx_bytes(np.zeros(5, np.uint8)), mtime=0)[:-9], "cannot be read"),
    ],
)
def test_a_damaged_idx_file_is_a_data_error(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        mnist.read_idx(tmp_path / name)


@pytest.mark.parametrize("damage", ["cut short", "overwritten"])
def test_a_damaged_compressed_file_of_examples_or_words_is_a_data_error(tmp_path: Path, damage: str) -> None:
    for name, text, read in (
        ("a9a.gz", b"1 3:1 7:0.5\n" * 500, lambda: svmlight.load(tmp_path / "a9a.gz")),
        ("ap.dat.gz", b"2 0:1 5:2\n" * 500, lambda: topics.load_corpus(tmp_path)),
    ):
        whole = gzip.compress(text, mtime=0)
        (tmp_path / name).write_bytes(whole)
        read()
        (tmp_path / name).write_bytes(whole[:-12] if damage == "cut short" else whole[:12] + b"\xff" * 20)
        with pytest.raises(DataError, match=f"{name} is cut short or damaged .*; fetch it again"):
            read()


@pytest.mark.parametrize("number", [0, -4])
def test_a_feature_below_the_first_is_named_with_its_line(tmp_path: Path, number: int) -> None:
    (tmp_path / "x").write_text(f"1 3:1\n-1 {number}:1 2:1\n")
    message = rf"x, line 2: feature numbers must be >= 1, not {number}; number features from 1"
    with pytest.raises(DataError, match=message):
        svmlight.load(tmp_path / "x")


def test_mnist_with_labels_of_another_size(tmp_path: Path) -> None:
    mnist_folder = write_mnist(tmp_path)
    (mnist_folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(np.zeros(39, np.uint8))))
    with pytest.raises(DataError, match=r"shape \(40, 28, 28\), not \(39, 28, 28\)"):
        mnist.load(mnist_folder, "train")


@pytest.mark.shared
def test_mnist_files_hold_what_is_known_of_them(shared: Path) -> None:
    train_set = mnist.load(shared / "data" / "mnist", "train")
    assert train_set.tensors[0].shape == (60_000, 1, 28, 28)
    assert train_set.tensors[1][:5].tolist() == [5, 0, 4, 1, 9]
    assert float(train_set.tensors[0].double().mean()) / 255 == pytest.approx(0.1307, abs=1e-4)
    assert mnist.load(shared / "data" / "mnist", "t10k").tensors[1][:3].tolist() == [7, 2, 1]


def test_zigzag_visits_every_cell_once_along_the_diagonals() -> None:
    order = [8 * row + column for row, column in jpeg.zigzag()]
    assert order[:10] == [0, 1, 8, 16, 9, 2, 3, 10, 17, 24]
    assert order[-5:] == [54, 47, 55, 62, 63]
    assert sorted(order) == list(range(64))


def test_flat_colours_are_decoded_exactly() -> None:
    steps = np.full((2, 64), 8)
    coefficients = np.zeros((1, 24, 64), np.int16)
    coefficients[0, :16, 0] = 10  # 8 * 10 / 8: luma 138
    coefficients[0, 16:20, 0] = -20  # blue difference -20
    coefficients[0, 20:, 0] = 30  # red difference +30
    image = jpeg.decode(coefficients, steps)
    assert image.shape == (1, 3, 32, 32)
    expected = [round(138 + 1.402 * 30), round(138 + 0.344136 * 20 - 0.714136 * 30), round(138 - 1.772 * 20)]
    assert np.array_equal(image[0], np.broadcast_to(np.array(expected)[:, None, None], (3, 32, 32)))


def test_a_grey_image_survives_the_transform_there_and_back() -> None:
    row, column = np.mgrid[:32, :32]
    picture = np.rint(120 + 60 * np.sin(row / 5) + 40 * np.cos(column / 3 + row / 7))
    coefficients = np.zeros((1, 24, 64), np.int16)
    for block in range(16):
        top, left = 8 * (block // 4), 8 * (block % 4)
        pixels = picture[top : top + 8, left : left + 8] - 128
        for position, (u, v) in enumerate(jpeg.zigzag()):
            y, x = np.mgrid[:8, :8]
            wave = np.cos((2 * y + 1) * u * np.pi / 16) * np.cos((2 * x + 1) * v * np.pi / 16)
            scale = 0.25 * (2**-0.5 if u == 0 else 1) * (2**-0.5 if v == 0 else 1)
            coefficients[0, block, position] = np.rint(scale * (pixels * wave).sum())
    image = jpeg.decode(coefficients, np.ones((2, 64), np.int64))[0].astype(float)
    assert np.abs(image - picture).max() <= 2


def test_chroma_is_enlarged_by_a_triangle() -> None:
    """A step between two chroma blocks is spread over 3/4 and 1/4, and the borders stay as they are."""
    coefficients = np.zeros((1, 24, 64), np.int16)
    coefficients[0, [20, 22], 0] = -40
    coefficients[0, [21, 23], 0] = 40
    red = jpeg.decode(coefficients, np.full((2, 64), 8))[0, 0].astype(int)
    assert (red == red[0]).all()
    difference = [-40] * 15 + [-20, 20] + [40] * 15
    assert red[0].tolist() == [round(128 + 1.402 * value) for value in difference]


def test_cifar_reads_the_chosen_images_only(tmp_path: Path) -> None:
    index = cifar.load_index(write_cifar(tmp_path))
    data = cifar.load(tmp_path, index, np.array([11, 2]))
    assert data.tensors[0][:, 0, 0, 0].tolist() == [128 + 22, 128 + 4]
    assert data.tensors[1].tolist() == [1, 2]


def test_a_damaged_cifar_folder_is_a_data_error(tmp_path: Path) -> None:
    cifar_folder = write_cifar(tmp_path)
    index = cifar.load_index(cifar_folder)
    (cifar_folder / "cifar10_jpegcoef_i16.xz").write_bytes(lzma.compress(b"\0" * 100))
    with pytest.raises(DataError, match="does not hold the coefficients of 12 images"):
        cifar.load(cifar_folder, index, np.array([0]))
    (cifar_folder / "cifar10_index.npz").write_bytes(b"nothing")
    with pytest.raises(DataError, match="not the index of this data set"):
        cifar.load_index(cifar_folder)


@pytest.mark.shared
def test_decoded_cifar_images_are_close_to_the_lossless_ones(shared: Path) -> None:
    folder = shared / "data" / "cifar10"
    index = cifar.load_index(folder)
    with lzma.open(folder / "cifar10_lossless_first4000.bin.xz") as file:
        records = np.frombuffer(file.read(200 * 3073), np.uint8).reshape(200, 3073)
    train = np.flatnonzero(~index["is_test"].astype(bool))
    members = {label: iter(train[index["label"][train] == label]) for label in range(10)}
    chosen = np.array([next(members[label]) for label in records[:, 0]])  # within a class the orders are equal
    images, labels = cifar.load(folder, index, chosen).tensors
    assert labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    squares = (images.numpy().astype(float) - records[:, 1:].reshape(200, 3, 32, 32)) ** 2
    ratio = 10 * np.log10(255**2 / squares.mean(axis=(1, 2, 3)))
    assert ratio.mean() == pytest.approx(30.5, abs=0.5)
    assert ratio.min() > 23
