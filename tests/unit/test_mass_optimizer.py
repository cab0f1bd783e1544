"""The mass rule: n steps of mass 1/n forget as much, and move as far, as one step of mass 1."""

import inspect
import math
import sys

import pytest
import torch

from paceline.core.errors import OptionError
from paceline.model import own_optimizer
from paceline.model.mass_optimizer import MassOptimizer, OptimizerSpec, describe, mean_options
from paceline.model.own_optimizer import class_of

torch.set_default_dtype(torch.float32)


def make(name, options, start=1.0):
    parameter = torch.tensor([start, -2.0], dtype=torch.float64, requires_grad=True)
    reference = getattr(torch.optim, name)([parameter], **options)
    groups = tuple({k: v for k, v in g.items() if k != "params"} for g in reference.param_groups)
    spec = OptimizerSpec(name, groups, ((0,),))
    mine = torch.tensor([start, -2.0], dtype=torch.float64, requires_grad=True)
    return parameter, reference, mine, MassOptimizer(spec, [mine]), groups


def step(optimizer, parameter, gradient, mass, groups, stock=False):
    parameter.grad = gradient.clone()
    optimizer.step(mass, groups, stock=stock)


CASES = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.01}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_mass_one_is_a_stock_step(name, options):
    reference, torch_optimizer, mine, optimizer, groups = make(name, options)
    for number in range(5):
        gradient = torch.tensor([0.5, -1.0 + number], dtype=torch.float64)
        reference.grad = gradient.clone()
        torch_optimizer.step()
        step(optimizer, mine, gradient, 1.0, groups)
    torch.testing.assert_close(mine, reference, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_options_that_stay_in_force_are_those_of_the_step(name, options):
    remembering, forgetting = make(name, options)[2:], make(name, options)[2:]
    for number, (mass, rate, stock) in enumerate(
        [(1.0, 0.1, False), (0.25, 0.1, False), (0.25, 0.1, False), (0.25, 0.2, False), (0.25, 0.2, True)] * 2
    ):
        gradient = torch.tensor([0.5, -1.0 + number], dtype=torch.float64)
        for mine, optimizer, groups in (remembering, forgetting):
            step(optimizer, mine, gradient, mass, [{**group, "lr": rate} for group in groups], stock)
        forgetting[1]._in_force = (math.nan, False, [])
    assert torch.equal(remembering[0], forgetting[0])


def test_plain_sgd_adds_weighted_gradients():
    _, _, mine, optimizer, groups = make("SGD", {"lr": 0.1})
    gradient = torch.tensor([1.0, 2.0], dtype=torch.float64)
    for mass in (0.25, 0.5, 0.25):
        step(optimizer, mine, gradient, mass, groups)
    torch.testing.assert_close(mine.detach(), torch.tensor([0.9, -2.2], dtype=torch.float64))


def test_momentum_follows_the_formula_and_the_velocity_forgets_by_mass():
    _, _, mine, optimizer, groups = make("SGD", {"lr": 0.1, "momentum": 0.9})
    velocity, weight = torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, -2.0], dtype=torch.float64)
    for number, mass in enumerate([0.25, 1.0, 0.5, 2.0]):
        gradient = torch.tensor([1.0, number - 1.0], dtype=torch.float64)
        gain = (1 - 0.9**mass) / (1 - 0.9)
        velocity = 0.9**mass * velocity + gain * gradient
        weight = weight - 0.1 * mass * velocity
        step(optimizer, mine, gradient, mass, groups)
    torch.testing.assert_close(mine.detach(), weight, rtol=1e-9, atol=1e-9)
    # The same gradient over mass 1, in one piece or four, builds up the same velocity.
    _, _, split, quarter, groups = make("SGD", {"lr": 0.1, "momentum": 0.9})
    for _ in range(4):
        step(quarter, split, torch.ones(2, dtype=torch.float64), 0.25, groups)
    buffer = quarter.torch.state[split]["momentum_buffer"]
    torch.testing.assert_close(buffer, torch.ones(2, dtype=torch.float64))


def test_nesterov_and_l2_keep_to_the_formula_on_the_first_step():
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.5}
    _, _, mine, optimizer, groups = make("SGD", options)
    gradient, mass = torch.tensor([1.0, 1.0], dtype=torch.float64), 0.5
    gain = (1 - 0.9**mass) / (1 - 0.9)
    start = torch.tensor([1.0, -2.0], dtype=torch.float64)
    full = gain * (gradient + 0.5 * start)
    expected = start - 0.1 * mass * (full + 0.9**mass * full)
    step(optimizer, mine, gradient, mass, groups)
    torch.testing.assert_close(mine.detach(), expected)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_adam_counts_mass_instead_of_steps(name):
    """A constant gradient's bias-corrected moments are exact at any mass, so every step moves lr times mass."""
    _, _, mine, optimizer, groups = make(name, {"lr": 0.01, "weight_decay": 0.0})
    gradient = torch.tensor([3.0, -0.2], dtype=torch.float64)
    total = 0.0
    for mass in (0.125, 0.5, 1.0, 0.25, 2.0, 1.0):
        step(optimizer, mine, gradient, mass, groups)
        total += mass
        state = optimizer.torch.state[mine]
        first = (1 - 0.9**total) * gradient
        torch.testing.assert_close(state["exp_avg"], first, rtol=1e-9, atol=1e-12)
    expected = torch.tensor([1.0 - 0.01 * total, -2.0 + 0.01 * total], dtype=torch.float64)
    torch.testing.assert_close(mine.detach(), expected, rtol=1e-5, atol=1e-6)


def test_adamw_decays_weights_by_mass():
    _, _, mine, optimizer, groups = make("AdamW", {"lr": 0.1, "weight_decay": 0.5})
    for mass in (0.25, 0.25, 0.5):
        step(optimizer, mine, torch.zeros(2, dtype=torch.float64), mass, groups)
    torch.testing.assert_close(mine.detach(), torch.tensor([0.95, -1.9], dtype=torch.float64))


@pytest.mark.parametrize(("name", "options"), [("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adam", {"lr": 0.01})])
def test_stock_form_is_a_torch_step_on_the_weighted_gradient(name, options):
    reference, torch_optimizer, mine, optimizer, groups = make(name, options)
    for _ in range(3):
        gradient = torch.tensor([0.5, -1.0], dtype=torch.float64)
        if name == "SGD":
            reference.grad = gradient * 0.125
        else:  # Adam's step does not depend on the gradient's scale: its learning rate carries the weight
            reference.grad = gradient.clone()
            torch_optimizer.param_groups[0]["lr"] = 0.01 * 0.125
        torch_optimizer.step()
        step(optimizer, mine, gradient, 0.125, groups, stock=True)
    torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-8)


def test_other_elementwise_optimizers_scale_the_rate_with_a_notice():
    assert make("RMSprop", {"lr": 0.1})[3].notice is not None
    assert make("SGD", {"lr": 0.1})[3].notice is None
    _, _, mine, optimizer, groups = make("RMSprop", {"lr": 0.1})
    step(optimizer, mine, torch.ones(2, dtype=torch.float64), 0.5, groups)
    assert optimizer.torch.param_groups[0]["lr"] == pytest.approx(0.05)


def test_options_of_a_group_are_averaged_by_samples():
    first = [{"lr": 0.1, "betas": (0.9, 0.99), "nesterov": False}]
    pushes = [first, [{"lr": 0.3, "betas": (0.8, 0.99), "nesterov": False}]]
    mean = mean_options(pushes, [30, 10])[0]
    assert mean["lr"] == pytest.approx(0.15)
    assert mean["betas"][0] == pytest.approx(0.875)
    assert mean["nesterov"] is False
    assert mean_options(pushes[:1] * 2, [1, 1]) is pushes[0]
    assert math.isclose(mean_options(pushes, [0, 0])[0]["lr"], 0.1)
    assert mean_options([[{"lr": 1}], [{"lr": 0.5}]], [1, 1])[0]["lr"] == pytest.approx(0.75)


class Plain(torch.optim.SGD):
    """A user's own class, whose steps are SGD's."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.25, momentum=0.5)


class Signed(torch.optim.Optimizer):
    """A user's own class with a step of its own: the sign of a running mean."""

    def __init__(self, parameters, lr, beta=0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 1 - group["beta"])
                    parameter.sub_(mean.sign(), alpha=group["lr"])


class Demanding(Signed):
    """Needs a closure."""

    def step(self, closure):
        closure()


class NotOwn(torch.optim.LBFGS):
    """LBFGS stays LBFGS."""

    def step(self, closure):
        return super().step(closure)


@pytest.mark.parametrize(
    ("make_optimizer", "why"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS evaluates the loss several times in one step"),
        (lambda p: torch.optim.SparseAdam(p), "SparseAdam takes sparse gradients only"),
        (lambda p: NotOwn(p), "NotOwn evaluates the loss several times in one step"),
        (lambda p: Demanding(p, lr=0.1), "Demanding needs a closure at every step"),
        (lambda p: Signed(p, lr=0.1, beta=len), "option beta of .*Signed is a builtin_function_or_method"),
    ],
)
def test_optimizers_that_cannot_be_stepped_elsewhere_are_refused_with_the_reason(make_optimizer, why):
    parameter = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(OptionError, match=why):
        describe(make_optimizer([parameter]), {id(parameter): 0})


def test_a_users_own_class_is_stepped_as_it_is():
    mine, theirs = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    spec = describe(Signed([mine], lr=0.25), {id(mine): 0})
    assert spec.name == f"{__name__}:Signed"
    ours, plain = MassOptimizer(spec, [mine.data]), Signed([theirs], lr=0.25)
    assert "scales the learning rate by m" in ours.notice
    for gradient in (torch.tensor([1.0, -1.0]), torch.tensor([-3.0, 0.5])):
        theirs.grad = gradient
        plain.step()
        ours.step(1.0, spec.groups, stock=False, gradients=[gradient])
    assert torch.equal(mine.data, theirs.data)
    assert torch.equal(ours.state()[0]["0.mean"], plain.state[theirs]["mean"])
    before = mine.data.clone()
    ours.step(0.5, spec.groups, stock=False, gradients=[torch.ones(2)])
    assert torch.equal((before - mine.data).abs(), torch.full((2,), 0.125))


def test_a_class_is_imported_where_it_is_not_known():
    assert class_of("torch.optim.sgd:SGD") is torch.optim.SGD
    for name, why in [
        ("__main__:Mine", "in the script itself"),
        ("no_such_module:Mine", "No module named"),
        ("torch.optim.sgd:Mine", "has no attribute"),
    ]:
        with pytest.raises(OptionError, match=f"the server cannot import the optimizer {name} .*{why}"):
            class_of(name)
    with pytest.raises(OptionError, match="torch:ones is not an optimizer class"):
        class_of("torch:ones")


def test_where_workers_are_of_other_hosts_only_named_classes_are_imported(monkeypatch):
    monkeypatch.setattr(own_optimizer, "_importable", None)
    own_optimizer.import_only(["torch.optim.sgd:SGD"])
    assert class_of("torch.optim.sgd:SGD") is torch.optim.SGD
    sys.modules.pop("this", None)
    with pytest.raises(OptionError, match="does not import the optimizer this:Mine .*--own-optimizers this:Mine"):
        class_of("this:Mine")
    assert "this" not in sys.modules


def test_a_constructor_that_wants_more_is_named():
    class Greedy(Signed):
        def __init__(self, parameters, lr, secret):
            super().__init__(parameters, lr)

    parameter = torch.nn.Parameter(torch.ones(2))
    spec = describe(Greedy([parameter], 0.1, "x"), {id(parameter): 0})
    with pytest.raises(OptionError, match=r"could not make the optimizer .*Greedy .*secret"):
        MassOptimizer(spec, [parameter.data])


def test_a_class_that_steps_as_its_parent_is_its_parent():
    parameter = torch.nn.Parameter(torch.ones(2))
    spec = describe(Plain([parameter]), {id(parameter): 0})
    assert spec.name == "SGD"
    assert (spec.groups[0]["lr"], spec.groups[0]["momentum"]) == (0.25, 0.5)


def test_it_is_so_too_where_no_instance_of_its_parent_was_made_before(monkeypatch):
    """Torch wraps the step of the class that is made first, so the derived one then has another than its parent."""
    monkeypatch.setattr(torch.optim.SGD, "step", inspect.unwrap(torch.optim.SGD.step))

    class First(torch.optim.SGD):
        pass

    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = First([parameter], lr=0.25)
    assert First.step is not torch.optim.SGD.step
    assert describe(optimizer, {id(parameter): 0}).name == "SGD"


def test_a_parameter_that_is_not_the_models_is_refused():
    stranger = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(OptionError, match="not the model's"):
        describe(torch.optim.SGD([stranger], lr=0.1), {})
