"""The built-in tasks, run on a stand-in session: one worker, one process, no engine."""

import gzip
import lzma
import math
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import paceline
from paceline import tasks
from paceline.errors import DataError, OptionError
from paceline.tasks import bounds, cifar, digits, idx, jpeg, linreg, mnist, shakespeare

DOCS = Path(__file__).parents[1] / "docs" / "tasks.md"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slowed down by a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


@pytest.fixture
def mnist_folder(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for part, count in (("train", 40), ("t10k", 20)):
        images = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx_bytes(images))
        labels = gzip.compress(idx_bytes(np.arange(count, dtype=np.uint8) % 10))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(labels)
    return tmp_path


@pytest.fixture
def cifar_folder(tmp_path: Path) -> Path:
    """12 images of flat grey: image i has luma 128 + 2 i; the first 4 are test images."""
    coefficients = np.zeros((64, 24, 12), "<i2")
    coefficients[0, :16] = np.arange(12)
    (tmp_path / "cifar10_jpegcoef_i16.xz").write_bytes(lzma.compress(coefficients.tobytes()))
    steps = np.full((2, 64), 16, np.uint16)
    np.savez(tmp_path / "cifar10_index.npz", label=np.arange(12) % 10, is_test=np.arange(12) < 4, quant_zigzag=steps)
    return tmp_path


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    (tmp_path / "input.txt").write_text("the quick brown fox. " * 200)
    return tmp_path


# -- the registry ----------------------------------------------------------------------------------------------------


def test_every_task_is_listed_described_and_there() -> None:
    assert tasks.names() == ["cifar", "digits", "linreg", "mnist", "shakespeare"]
    for name in tasks.names():
        assert tasks.describe(name)
        assert tasks.get(name).__module__ == f"paceline.tasks.{name}"


def test_an_unknown_task_is_answered_with_the_nearest() -> None:
    with pytest.raises(OptionError, match=r"no task 'mnits'.*did you mean 'mnist'"):
        tasks.get("mnits")
    with pytest.raises(OptionError, match="the tasks are cifar, digits"):
        tasks.describe("zzz")


def test_listing_tasks_loads_no_heavy_library() -> None:
    code = "import sys, paceline.tasks as t; print(*map(t.describe, t.names()), {'torch', 'sklearn'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("set()")


def documented_options(task: str) -> dict[str, str]:
    section = DOCS.read_text().split(f"\n## {task}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", section, re.MULTILINE))


@pytest.mark.parametrize("task", ["digits", "linreg", "mnist", "cifar", "shakespeare"])
def test_the_documentation_has_every_option_with_its_default(
    task: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {"mnist": "mnist_folder", "cifar": "cifar_folder", "shakespeare": "text_folder"}
    session = PlainSession(request.getfixturevalue(folders[task]) if task in folders else None, max_batches=1)
    session.run(task, monkeypatch)
    documented = documented_options(task)
    assert documented.keys() == session.asked.keys()
    for name, default in session.asked.items():
        depends_on_the_data = name in {"samples", "test_samples"} and task in folders
        if not depends_on_the_data and documented[name] != "rows per worker":
            assert documented[name] == str(default), name


# -- options ---------------------------------------------------------------------------------------------------------


def test_an_option_out_of_bounds_is_named_with_its_bound() -> None:
    assert bounds.within("hidden", 1, low=1) == 1
    assert bounds.within("samples", 9, low=1, high=9) == 9
    with pytest.raises(OptionError, match=r"hidden must be >= 1, not 0"):
        bounds.within("hidden", 0, low=1)
    with pytest.raises(OptionError, match=r"samples must lie between 1 and 9, not 10"):
        bounds.within("samples", 10, low=1, high=9)
    with pytest.raises(OptionError, match=r"noise must be >= 0.0, not nan"):
        bounds.within("noise", math.nan, low=0.0)
    with pytest.raises(OptionError, match=r"model must be one of mlp, cnn, not 'cnm'; give --set model=cnn"):
        bounds.one_of("model", "cnm", ("mlp", "cnn"))


# -- linreg ----------------------------------------------------------------------------------------------------------


def test_linreg_is_the_problem_of_the_publication() -> None:
    x, y = linreg.make_data(2000, 100, noise=1.0, seed=0).tensors
    assert x.shape == (2000, 100)
    assert x.dtype == y.dtype == torch.float64
    assert set(x.unique().tolist()) == set(range(1, 11))
    weights = linreg.best_weights(*linreg.make_data(2000, 100, noise=0.0, seed=0).tensors)
    torch.testing.assert_close(weights, weights.round(), atol=1e-9, rtol=0)
    assert weights.min() >= 1 - 1e-9
    assert weights.max() <= 100 + 1e-9
    assert (y - x @ weights.round()).std() == pytest.approx(1.0, abs=0.05)


def test_linreg_error_is_the_loss_above_the_exact_minimum() -> None:
    x, y = linreg.make_data(200, 10, noise=1.0, seed=3).tensors
    normal_equations = torch.linalg.solve(x.T @ x, x.T @ y)
    torch.testing.assert_close(linreg.best_weights(x, y), normal_equations)
    session = PlainSession(samples=200, features=10, data_seed=3, max_batches=5)
    with pytest.MonkeyPatch.context() as patch:
        result = session.run("linreg", patch)
    (weight,) = session.model.parameters()
    loss = float((x @ weight.detach() - y).square().mean() / 2)
    minimum = float((x @ normal_equations - y).square().mean() / 2)
    assert result["loss"] == pytest.approx(loss, rel=1e-9)
    assert result["error"] == pytest.approx(loss - minimum, rel=1e-9)


def test_linreg_reaches_a_ten_thousandth_of_its_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    session = PlainSession()
    result = session.run("linreg", monkeypatch)
    assert session.sampling == "shard"
    assert result["error"] <= 1e-4 * session.first["error"]


def test_linreg_gives_each_worker_its_share_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    session = PlainSession(workers=8, max_batches=1)
    session.run("linreg", monkeypatch)
    assert session.batch_size == 250
    with pytest.raises(OptionError, match=r"samples must be >= 8, not 7"):
        PlainSession(workers=8, samples=7).run("linreg", monkeypatch)


# -- digits ----------------------------------------------------------------------------------------------------------


def test_digits_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    session = PlainSession(epochs=8)
    result = session.run("digits", monkeypatch)
    assert session.shapes[0] == ((16, 64), (16,))
    assert session.first["accuracy"] < 0.3
    assert result["accuracy"] >= 0.93
    assert result["loss"] < 0.4


def test_digits_learns_with_the_batch_of_eight_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PlainSession(batch_size=128).run("digits", monkeypatch)["accuracy"] >= 0.93


def test_digits_always_holds_out_the_same_images() -> None:
    torch.manual_seed(1)
    (train_set, held_out), (again, _) = digits.load(), digits.load()
    assert (len(train_set), len(held_out)) == (1400, 397)
    assert torch.equal(train_set.tensors[0], again.tensors[0])
    assert train_set.tensors[0].max() == 1.0


def test_digits_without_scikit_learn_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'paceline\[tasks\]'"):
        digits.load()


# -- mnist -----------------------------------------------------------------------------------------------------------


def test_idx_files_plain_and_compressed(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    (tmp_path / "plain").write_bytes(idx_bytes(array))
    (tmp_path / "zipped.gz").write_bytes(gzip.compress(idx_bytes(array)))
    for name in ("plain", "zipped"):
        assert np.array_equal(idx.read_idx(idx.find_idx(tmp_path, name)), array)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a", b"\x00\x00\x0d\x01\x00\x00\x00\x00", "starts with 00000d01"),
        ("a", b"", "starts with"),
        ("a", b"\x00\x00\x08\x02\x00\x00", "ends within its header of 12 bytes"),
        ("a", idx_bytes(np.zeros(5, np.uint8))[:-1], "4 values where its header promises 5"),
        ("a.gz", b"not compressed", "cannot be read"),
        ("a.gz", gzip.compress(idx_bytes(np.zeros(5, np.uint8)))[:-9], "cannot be read"),
    ],
)
def test_a_damaged_idx_file_is_a_data_error(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        idx.read_idx(tmp_path / name)


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_mnist_trains_either_model(mnist_folder: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = PlainSession(mnist_folder, model=model, samples=32, batch_size=8, epochs=12, lr=0.01)
    result = session.run("mnist", monkeypatch)
    assert session.shapes[0] == ((8, 1, 28, 28), (8,))
    assert len(session.train_set) == 32
    assert set(result) == {"accuracy", "loss"}
    assert np.mean(session.losses[-4:]) < np.mean(session.losses[:4])


def test_mnist_with_labels_of_another_size(mnist_folder: Path) -> None:
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


# -- cifar -----------------------------------------------------------------------------------------------------------


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


def test_cifar_reads_the_chosen_images_only(cifar_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = cifar.load_index(cifar_folder)
    data = cifar.load(cifar_folder, index, np.array([11, 2]))
    assert data.tensors[0][:, 0, 0, 0].tolist() == [128 + 22, 128 + 4]
    assert data.tensors[1].tolist() == [1, 2]
    session = PlainSession(cifar_folder, samples=6, test_samples=3, batch_size=4, max_batches=2)
    assert set(session.run("cifar", monkeypatch)) == {"accuracy", "loss"}
    assert session.shapes == [((4, 3, 32, 32), (4,)), ((2, 3, 32, 32), (2,))]
    lumas = {(value - 128) // 2 for value in session.train_set.tensors[0][:, 0, 0, 0].tolist()}
    assert len(lumas) == 6
    assert lumas <= set(range(4, 12))


def test_a_damaged_cifar_folder_is_a_data_error(cifar_folder: Path) -> None:
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


# -- shakespeare -----------------------------------------------------------------------------------------------------


def test_stretches_pair_each_character_with_the_one_that_follows() -> None:
    inputs, targets = shakespeare.stretches(torch.arange(11), context=3).tensors
    assert inputs.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert torch.equal(targets, inputs + 1)
    with pytest.raises(DataError, match=r"3 characters are too few for context=3"):
        shakespeare.stretches(torch.arange(3), context=3)


def test_the_transformer_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    model = shakespeare.Transformer(characters=7, context=8, layers=2, heads=2, width=8)
    text = torch.randint(0, 7, (1, 8))
    changed = text.clone()
    changed[0, 5] = (text[0, 5] + 1) % 7
    before, after = model(text), model(changed)
    assert before.shape == (1, 8, 7)
    torch.testing.assert_close(before[0, :5], after[0, :5])
    assert not torch.allclose(before[0, 5:], after[0, 5:])


def test_shakespeare_learns(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = PlainSession(text_folder, context=16, width=16, heads=2, layers=1, batch_size=8, epochs=3, lr=0.01)
    result = session.run("shakespeare", monkeypatch)
    characters = len(set("the quick brown fox. "))
    assert session.first["loss"] == pytest.approx(math.log(characters), abs=0.5)
    assert result["loss"] < 0.7 * session.first["loss"]
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))


def test_shakespeare_refuses_a_width_that_heads_cannot_share(
    text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OptionError, match=r"width must be a multiple of heads=3, not 16"):
        PlainSession(text_folder, width=16, heads=3).run("shakespeare", monkeypatch)


# -- missing data ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "file"),
    [
        ("mnist", "train-images-idx3-ubyte or train-images-idx3-ubyte.gz"),
        ("cifar", "cifar10_index.npz"),
        ("shakespeare", "input.txt"),
    ],
)
def test_missing_data_is_named(task: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=rf"task {task} needs a data folder with .* --data-dir \.\./shared"):
        PlainSession(None).run(task, monkeypatch)
    with pytest.raises(DataError, match=r"absent is not a folder: check --data-dir"):
        PlainSession(tmp_path / "absent").run(task, monkeypatch)
    with pytest.raises(DataError) as caught:
        PlainSession(tmp_path).run(task, monkeypatch)
    assert f"{file} is missing in {tmp_path.resolve()}" in str(caught.value)


def test_more_samples_than_there_are_is_an_error(mnist_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"samples must lie between 1 and 40, not 41"):
        PlainSession(mnist_folder, samples=41).run("mnist", monkeypatch)


def test_scores_do_not_depend_on_the_chunks() -> None:
    torch.manual_seed(0)
    model = digits.build(hidden=4)
    data = TensorDataset(torch.rand(2300, 64), torch.randint(0, 10, (2300,)))
    result = digits.score(model, data)
    output = model(data.tensors[0])
    assert result["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(output, data.tensors[1]).detach()))
    assert result["accuracy"] == pytest.approx(float((output.argmax(1) == data.tensors[1]).double().mean()))
