"""Several models, optimizers of a user's own class and the run's settings, on real processes."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from clusters import Rows
from launching import launch

import paceline
from paceline.core.errors import OptionError, UserError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

OWN = """
import torch

class Signed(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])
"""


class Adversaries:
    """Two models with an optimizer each, one of them measured."""

    def __init__(self, notes):
        self.notes = str(notes)

    def __call__(self):
        session = paceline.init()
        maker = torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.BatchNorm1d(6)).double()
        judge = torch.nn.Linear(6, 1).double()
        for_maker = torch.optim.Adam(maker.parameters(), lr=0.01)
        for_judge = torch.optim.SGD(judge.parameters(), lr=0.02, momentum=0.9)
        session.prepare(maker, for_maker)
        session.prepare(judge, for_judge, evaluate=lambda module: {"sum": module.weight.sum().item()})
        for x, _, _ in session.batches(Rows(48), batch_size=4, epochs=3):
            made = maker(x[:, :2])
            for_judge.zero_grad()
            ((judge(x) - 1).square().mean() + judge(made.detach()).square().mean()).backward()
            for_judge.step()
            for_maker.zero_grad()
            (judge(made) - 1).square().mean().backward()
            for_maker.step()
        held = for_maker.state_dict()["state"]
        told = {"steps": float(held[0]["step"]), "sum": judge.weight.sum().item(), "groups": len(held)}
        (Path(self.notes) / f"{session.worker}.json").write_text(json.dumps(told))


def told(folder):
    return [json.loads(file.read_text()) for file in sorted(folder.glob("?.json"))]


@pytest.mark.parametrize("settings", [{}, {"transport": "zeromq"}, {"strategy": "ssp"}], ids=["shm", "zeromq", "ssp"])
def test_adversaries_train_on_processes(tmp_path, settings):
    run = launch(Adversaries(tmp_path), tmp_path, evaluate_every="5v", **settings)
    first, second = told(tmp_path)
    assert first == second
    assert first["groups"] == 4
    assert run.summary.metrics["sum"] == pytest.approx(first["sum"])
    assert {key.partition(".")[0] for key in run.model_state} == {"Sequential", "Linear"}


def test_adversaries_resume_where_they_stood(tmp_path):
    whole, part, rest = (tmp_path / name for name in ("whole", "part", "rest"))
    for folder in (whole, part, rest):
        folder.mkdir()
    launch(Adversaries(whole), whole)
    run = launch(Adversaries(part), part, max_versions=10, checkpoint_every="4v")
    launch(Adversaries(rest), rest, resume=run.folder)
    assert told(rest) == told(whole)


def trained_by_signs(kind):
    """Train with an optimizer that steps by signs; return it."""
    session = paceline.init()
    model = torch.nn.Linear(6, 1).double()
    optimizer = kind(model.parameters(), lr=0.25)
    session.prepare(model, optimizer)
    start = model.weight.detach().clone()
    for x, y, _ in session.batches(Rows(16), batch_size=4, epochs=1):
        optimizer.zero_grad()
        (model(x).squeeze(-1) - y).square().mean().backward()
        optimizer.step()
    steps = (model.weight.detach() - start) / 0.25
    assert torch.allclose(steps, steps.round(), atol=1e-9)
    return optimizer


def own_steps():
    from own_signed import Signed

    assert trained_by_signs(Signed).state_dict()["state"][0]["steps"] == 2


def test_the_server_steps_with_a_class_that_it_can_import(tmp_path, monkeypatch):
    (tmp_path / "own_signed.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = launch(own_steps, strategy="bsp")
    assert any("own_signed:Signed: an update of mass m" in text for text in run.summary.warnings)
    sys.modules.pop("own_signed", None)


def with_hidden_class():
    """A script with a class that nobody can import, and the class."""

    class Signed(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.sign_()
            return super().step(closure)

    return partial(trained_by_signs, Signed), Signed


def test_one_that_it_cannot_is_refused_unless_it_is_handed_over():
    train, signed = with_hidden_class()
    with pytest.raises(UserError, match="the server cannot import the optimizer .*Signed.*launch.optimizers="):
        launch(train)
    assert launch(train, optimizers=[signed]).summary.versions == 2
    with pytest.raises(OptionError, match="optimizers must be classes of torch optimizers, and 'SGD' is none"):
        launch(train, optimizers=["SGD"])
