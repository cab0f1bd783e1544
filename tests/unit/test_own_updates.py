"""A worker's own update, made on its side: a worker that pulls once trains the model that plain PyTorch trains."""

import pytest
import torch
from clusters import Rows, mean_square, network
from one_worker import Buffered, Odd, assert_same, server, sgd, trained

from paceline import strategies
from paceline.core.errors import UserError
from paceline.model.mass_optimizer import OptimizerSpec, group_options, is_plain
from paceline.model.store import Gradient, Store
from paceline.worker.replica import spec_of

ROWS = Rows()
KINDS = ["memory", "slots", "alternating", "staged late"]  # see `one_worker.server`


@pytest.fixture(params=KINDS)
def link(request, monkeypatch):
    """A link to a server that lets its only worker go on from what it has for nine clocks."""
    made = server(request.param, monkeypatch)
    made.engine.run.coordinator.strategy = strategies.build("ssp:staleness=8,cache=true", 0)
    made.pulls = 0
    publish = made.engine.publish

    def counted(*args, **given):
        made.pulls += 1
        return publish(*args, **given)

    made.engine.publish = counted
    return made


def script_of(make, step, batch_size=10, **options):
    def script(prepare, batches):
        torch.manual_seed(0)
        model = make()
        model, optimizer = prepare(model, sgd(model, momentum=0.0, **{"weight_decay": 0.0, **options}))
        for number, (x, y, _) in enumerate(batches(ROWS, batch_size=batch_size, epochs=3)):
            step(model, optimizer, x, y, number)
        return model

    return script


def plain_step(model, optimizer, x, y, _):
    optimizer.zero_grad()
    mean_square(model, x, y).backward()
    optimizer.step()


def detour(model, optimizer, x, y, number):
    model.detour = number % 4 == 1
    plain_step(model, optimizer, x, y, number)


def never_zeroed(model, optimizer, x, y, _):
    mean_square(model, x, y).backward()
    optimizer.step()


def zeroed_after(model, optimizer, x, y, _):
    mean_square(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def slower_and_slower(model, optimizer, x, y, number):
    optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
    plain_step(model, optimizer, x, y, number)


CASES = [(Odd, detour), (Buffered, plain_step), (network, never_zeroed), (network, zeroed_after)]


@pytest.mark.parametrize(("make", "step"), [*CASES, (network, slower_and_slower)])
def test_it_is_the_step_that_torch_makes(link, make, step):
    assert_same(*trained(script_of(make, step), link))
    assert link.pulls == 4  # the first model, two of fifteen clocks, and the last


def test_a_short_push_weighs_what_it_has(link, monkeypatch):
    """The last push of an epoch has 1 sample of 7."""
    pulls = server("memory", monkeypatch)
    pulls.engine.run.coordinator.strategy = strategies.build("ssp:staleness=8", 0)
    (kept, _), (pulled, _) = (trained(script_of(network, plain_step, 7), each) for each in (link, pulls))
    assert_same(kept, pulled)


def test_a_maximized_loss(link):
    def step(model, optimizer, x, y, _):
        optimizer.zero_grad()
        (-mean_square(model, x, y)).backward()
        optimizer.step()

    assert_same(*trained(script_of(network, step, maximize=True), link))


def test_weight_decay_pulls_at_every_clock(link):
    assert_same(*trained(script_of(network, plain_step, weight_decay=0.1), link))
    assert link.pulls == 1 + 15 + 1


def test_a_change_beside_the_optimizer_is_found_on_a_kept_model_too(link):
    def step(model, optimizer, x, y, number):
        plain_step(model, optimizer, x, y, number)
        if number == 1:
            with torch.no_grad():
                model[0].weight.clamp_(-0.01, 0.01)

    with pytest.raises(UserError, match="beside the optimizer"):
        trained(script_of(network, step), link)


@pytest.mark.parametrize(("dtype", "plain"), [(torch.float32, True), (torch.float64, True), (torch.bfloat16, False)])
def test_a_server_with_a_higher_precision_makes_steps_that_a_worker_cannot(dtype, plain):
    model = torch.nn.Linear(2, 1).to(dtype)
    spec = spec_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    store = Store(spec, [p.detach() for p in model.parameters()], [], statistics=False)
    flat = store.layout.zeros()
    options = group_options(torch.optim.SGD(model.parameters(), lr=0.1))
    assert store.merge([Gradient(flat, frozenset(), options)], [0.5], [4], stock=False).plain is plain
    both = [Gradient(flat, frozenset(), options)] * 2
    assert not store.merge(both, [0.5, 0.5], [4, 4], stock=False).plain


@pytest.mark.parametrize(
    ("name", "options", "plain"),
    [
        ("SGD", {"momentum": 0.0, "weight_decay": 0}, True),
        ("SGD", {"momentum": 0.9, "weight_decay": 0}, False),
        ("SGD", {"momentum": 0, "weight_decay": 0.1}, False),
        ("Adam", {"weight_decay": 0}, False),
        ("mine:SGD", {}, False),
        ("SGD+SGD", {"momentum": 0, "weight_decay": 0}, True),
        ("SGD+Adam", {"momentum": 0, "weight_decay": 0}, False),
        ("", {}, False),
    ],
)
def test_only_the_step_of_plain_sgd_follows_from_the_gradient_alone(name, options, plain):
    assert is_plain(OptimizerSpec(name, (options,), ((0,),)), [options]) is plain
