"""The built-in tasks: what they ask for, what they learn on a stand-in session, and that they run in the simulator."""

import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from task_stand_ins import PlainSession, write_cifar, write_mnist, write_text
from torch.utils.data import TensorDataset

import paceline
from paceline import tasks
from paceline.core.errors import DataError, OptionError
from paceline.tasks import classification, digits, inputs, linreg, shakespeare

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "tasks.md"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slowed down by a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def mnist_folder(tmp_path: Path) -> Path:
    return write_mnist(tmp_path)


@pytest.fixture
def cifar_folder(tmp_path: Path) -> Path:
    return write_cifar(tmp_path)


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    return write_text(tmp_path)


# -- the registry ----------------------------------------------------------------------------------------------------


def test_every_task_is_listed_described_and_there() -> None:
    assert tasks.names() == [
        "cifar", "digits", "factorize", "lasso", "linreg", "logreg", "mnist", "shakespeare", "topics",
    ]  # fmt: skip
    for name in tasks.names():
        assert tasks.describe(name)
        assert tasks.get(name).__module__ == f"paceline.tasks.{name}"


def test_an_unknown_task_is_answered_with_the_nearest() -> None:
    with pytest.raises(OptionError, match=r"no task 'mnits'.*did you mean 'mnist'"):
        tasks.get("mnits")
    with pytest.raises(OptionError, match="choose from cifar, digits"):
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


@pytest.mark.parametrize("task", ["digits", "linreg", "mnist", "cifar", "shakespeare"])
def test_every_task_runs_on_virtual_workers(task: str, request: pytest.FixtureRequest, folder: Path) -> None:
    made_by = {"mnist": "mnist_folder", "cifar": "cifar_folder", "shakespeare": "text_folder"}
    data_dir = request.getfixturevalue(made_by[task]) if task in made_by else None
    settings = {"scenario": "even4", "strategy": "bsp", "batch_size": 2, "max_versions": 2, "data_dir": data_dir}
    run = paceline.launch(tasks.get(task), engine="sim", **settings)
    assert run.summary.versions == 2
    evaluated = {"linreg": {"error", "loss"}, "shakespeare": {"loss", "perplexity"}}
    assert run.summary.metrics.keys() == evaluated.get(task, {"accuracy", "loss"})


# -- options ---------------------------------------------------------------------------------------------------------


def test_an_option_out_of_bounds_is_named_with_its_bound() -> None:
    assert inputs.within("hidden", 1, low=1) == 1
    assert inputs.within("samples", 9, low=1, high=9) == 9
    with pytest.raises(OptionError, match=r"hidden must be >= 1, not 0"):
        inputs.within("hidden", 0, low=1)
    with pytest.raises(OptionError, match=r"samples must lie between 1 and 9, not 10"):
        inputs.within("samples", 10, low=1, high=9)
    with pytest.raises(OptionError, match=r"noise must be >= 0.0, not nan"):
        inputs.within("noise", math.nan, low=0.0)
    with pytest.raises(OptionError, match=r"model must be one of mlp, cnn, not 'cnm'; give --set model=cnn"):
        inputs.one_of("model", "cnm", ("mlp", "cnn"))


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


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_mnist_trains_either_model(mnist_folder: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = PlainSession(mnist_folder, model=model, samples=32, batch_size=8, epochs=12, lr=0.01)
    result = session.run("mnist", monkeypatch)
    assert session.shapes[0] == ((8, 1, 28, 28), (8,))
    assert len(session.train_set) == 32
    assert set(result) == {"accuracy", "loss"}
    assert np.mean(session.losses[-4:]) < np.mean(session.losses[:4])


# -- cifar -----------------------------------------------------------------------------------------------------------


def test_cifar_trains_on_drawn_subsets(cifar_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = PlainSession(cifar_folder, samples=6, test_samples=3, batch_size=4, max_batches=2)
    assert set(session.run("cifar", monkeypatch)) == {"accuracy", "loss"}
    assert session.shapes == [((4, 3, 32, 32), (4,)), ((2, 3, 32, 32), (2,))]
    lumas = {(value - 128) // 2 for value in session.train_set.tensors[0][:, 0, 0, 0].tolist()}
    assert len(lumas) == 6
    assert lumas <= set(range(4, 12))


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
    result = classification.score(model, data)
    output = model(data.tensors[0])
    assert result["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(output, data.tensors[1]).detach()))
    assert result["accuracy"] == pytest.approx(float((output.argmax(1) == data.tensors[1]).double().mean()))
