"""Input that cannot work on real processes: a clear error that names value, bound and fix, and nothing left behind."""

import pytest
import torch
from clusters import Rows, mean_square, network
from launching import launch
from local_jobs import Job

import paceline
from paceline.core.errors import OptionError, ScriptError, UserError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]


class Odd:
    """A script in which one thing is wrong; `what` says which."""

    def __init__(self, what):
        self.what = what

    def __call__(self):
        session = paceline.init()
        rows, model = Rows(12), network()
        first = session.worker == 0
        match self.what:
            case "shape":
                model = (
                    network() if first else torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 1)).double()
                )
            case "name":
                model = torch.nn.ModuleDict({"a" if first else "b": torch.nn.Linear(6, 1)}).double()
            case "dtype":
                model = network(dtype=torch.float64 if first else torch.float32)
            case "memory":
                model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1).expand(10**12))])
            case "lbfgs":
                session.prepare(model, torch.optim.LBFGS(model.parameters()))
            case "init":
                paceline.init()
            case "raise" if not first:
                raise ZeroDivisionError("on purpose")
            case "exit" if not first:
                raise SystemExit(7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        for x, y, _ in session.batches(rows, batch_size=4, epochs=2):
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            if self.what == "nan" and not first:
                model[0].weight.grad[0, 0] = float("nan")
            optimizer.step()


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("shape", OptionError, r"worker 1 has 0.weight \[9, 6\] torch.float64 where worker 0 has 0.weight \[8, 6\]"),
        pytest.param(
            "init", UserError, r"init\(\) was called a second time in worker \d.*keep what", marks=pytest.mark.soak
        ),
        pytest.param(
            "name", OptionError, "worker 1 has b.weight .* where worker 0 has a.weight", marks=pytest.mark.soak
        ),
        pytest.param(
            "dtype", OptionError, "worker 1 has 0.weight .* torch.float32 where worker 0 has", marks=pytest.mark.soak
        ),
        ("memory", UserError, "needs .* GiB .* only .* available: use fewer workers or a smaller model"),
        pytest.param("lbfgs", OptionError, "LBFGS cannot be stepped by a strategy", marks=pytest.mark.soak),
        ("raise", ScriptError, "the script raised ZeroDivisionError in worker 1, batch 0: on purpose"),
        pytest.param("exit", ScriptError, "worker 1 exited with 7", marks=pytest.mark.soak),
    ],
)
def test_a_clear_error_ends_the_run(what, error, words):
    with pytest.raises(UserError if issubclass(error, UserError) else error, match=words):
        launch(Odd(what))


def test_gradients_that_are_not_finite_are_refused_with_worker_and_step(tmp_path):
    done = launch(Odd("nan"))
    assert done.ended == "done"
    assert any("worker 1 at its step 1 is not finite" in text for text in done.summary.warnings)
    assert all(torch.isfinite(value).all() for value in done.model_state.values())
    stopped = launch(Odd("nan"), on_nonfinite="stop")
    assert (stopped.ended, stopped.exit_code) == ("divergence", 3)


def test_fewer_samples_than_workers_are_settled_by_some_of_them(tmp_path):
    done = launch(Job(tmp_path, size=2, epochs=3, batch_size=4, evaluates=False), workers=3)
    assert (done.ended, done.summary.samples_used) == ("done", 6)
    with pytest.raises(UserError, match="a row per worker: 3 workers, but 2 samples"):
        launch(Job(tmp_path, size=2, evaluates=False, sampling="shard"), workers=3)
