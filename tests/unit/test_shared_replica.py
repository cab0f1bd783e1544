"""The slots of a worker's region: what lies in them after backward passes, pieces, pushes and changes of slot."""

import math

import pytest
import torch
from clusters import Rows, mean_square, network
from one_worker import Buffered, Odd, region_of, sgd

from paceline.model.store import Parameters, gradient_norm
from paceline.worker.replica import News, Replica, spec_of
from paceline.worker.shared_replica import SlotReplica, Stage

ROWS = Rows()


def replica(model, hooked, monkeypatch):
    monkeypatch.setattr("paceline.worker.shared_replica.HOOKED", 1 if hooked else 1 << 30)
    optimizer = sgd(model)
    spec = spec_of(model, optimizer)
    region = region_of(spec)
    made = SlotReplica(model, optimizer, spec, region, Stage(region))
    made.watch_backward()
    made.mark()
    return made


def expected(model, optimizer, pieces):
    """What the replica for links without memory makes of the same pieces."""
    by_reference = Replica(model, optimizer)
    by_reference.load(Parameters(0, by_reference.layout.pack([p.data for p in model.parameters()]), []))
    for x, y in pieces:
        optimizer.zero_grad()
        mean_square(model, x, y).backward()
        by_reference.add(len(x), last=False)
    return by_reference.take(None)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_several_pieces_make_their_mean(hooked, dtype, monkeypatch):
    x, y = ROWS.x.to(dtype), ROWS.y.to(dtype)
    pieces = [(x[:3], y[:3]), (x[3:10], y[3:10]), (x[10:12], y[10:12])]
    made = replica(network(dtype=dtype), hooked, monkeypatch)
    for number, (x, y) in enumerate(pieces):
        made.optimizer.zero_grad()
        mean_square(made.model, x, y).backward()
        assert made.news() is not News.NONE
        made.add(len(x), last=number == 2)
    gradient = made.take(0.5)
    model = network(dtype=dtype)
    wanted = expected(model, sgd(model), pieces)
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(gradient.flat[0], wanted.flat[0], **tolerance)
    assert gradient.norm == pytest.approx(float(gradient.flat[0].double().norm()), rel=1e-5)
    assert (gradient.loss, gradient.slot, gradient.missing) == (0.5, 0, frozenset())


def test_pieces_whose_last_one_was_skipped_make_their_mean_too(monkeypatch):
    made = replica(network(), False, monkeypatch)
    pieces = [(ROWS.x[:3], ROWS.y[:3]), (ROWS.x[3:10], ROWS.y[3:10])]
    for x, y in pieces:
        made.optimizer.zero_grad()
        mean_square(made.model, x, y).backward()
        made.news()
        made.add(len(x), last=False)
    gradient = made.take(None)
    model = network()
    torch.testing.assert_close(gradient.flat[0], expected(model, sgd(model), pieces).flat[0])
    assert made.take(None) is None


@pytest.mark.parametrize("hooked", [False, True])
def test_what_has_no_gradient_is_zero_in_the_slot(hooked, monkeypatch):
    made = replica(Odd(), hooked, monkeypatch)
    model = made.model
    names = [name for name, _, _ in made.spec.parameters]

    def push(detour, throw_away=False):
        if throw_away:
            made.optimizer.zero_grad()
            model.detour = True
            mean_square(model, ROWS.x, ROWS.y).backward()
        made.optimizer.zero_grad()
        model.detour = detour
        mean_square(model, ROWS.x, ROWS.y).backward()
        made.news()
        made.add(50, last=True)
        gradient = made.take(None)
        missing = {names[place] for place in gradient.missing}
        assert ("sometimes.weight" in missing) is not detour
        for place in gradient.missing:
            assert not made.region.slots[gradient.slot].views[place].any()
        return gradient

    for detour in (True, False, False, True, False):
        push(detour)
    push(False, throw_away=True)
    # The server adds a held push to an extension, in the extension's slot: nothing is known to be zero after that.
    made.use(1, extends=True)
    held = push(False)
    for flat in held.flat:
        flat.fill_(3.0)
    made.use(0, extends=False)
    push(False)
    made.use(1, extends=False)
    push(False)


@pytest.mark.parametrize("hooked", [False, True])
def test_gradients_move_with_the_slot(hooked, monkeypatch):
    made = replica(network(), hooked, monkeypatch)
    mean_square(made.model, ROWS.x, ROWS.y).backward()
    made.news()
    before = [parameter.grad.clone() for parameter in made.parameters]
    made.use(1, extends=False)
    assert made.news() is News.NONE
    first, second = made.region.slots
    for parameter, view, old in zip(made.parameters, second.views, before, strict=True):
        assert parameter.grad is view
        assert torch.equal(view, old)
    made.optimizer.zero_grad(set_to_none=False)
    mean_square(made.model, ROWS.x, ROWS.y).backward()
    for view, old in zip(first.views, before, strict=True):
        assert torch.equal(view, old)


@pytest.mark.parametrize("hooked", [False, True])
def test_news(hooked, monkeypatch):
    made = replica(network(), hooked, monkeypatch)

    def backward():
        mean_square(made.model, ROWS.x, ROWS.y).backward()

    assert made.news() is News.NONE
    backward()
    assert made.news() is News.ADDED
    assert made.news() is News.NONE
    backward()
    assert made.news() is News.ADDED
    made.model.zero_grad()
    assert made.news() is News.NONE
    backward()
    assert made.news() is News.ADDED
    made.model.zero_grad()
    backward()
    assert made.news() is News.FRESH
    made.model.zero_grad()
    backward()
    made.model.zero_grad()
    assert made.news() is News.NONE
    made.optimizer.zero_grad()
    made.mark()
    backward()
    assert made.news() is News.ADDED


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["gradient", "buffer"])
def test_what_is_not_finite_shows_in_the_norm(where, value, monkeypatch):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1)).double()
    made = replica(model, False, monkeypatch)
    mean_square(model, ROWS.x, ROWS.y).backward()
    made.news()
    made.add(50, last=True)
    gradient = made.take(None)
    assert gradient.norm == pytest.approx(gradient_norm(gradient), rel=1e-12)
    if where == "gradient":
        model[1].weight.grad[0, 3] = value
    else:
        model[0].running_mean[2] = value
    made.news()
    made.add(50, last=True)
    assert not math.isfinite(made.take(None).norm)


def test_the_norm_of_half_precision_does_not_overflow(monkeypatch):
    made = replica(network(dtype=torch.float16), False, monkeypatch)
    for parameter in made.parameters:
        parameter.grad = torch.full_like(parameter, 60000.0)
    made.news()
    made.add(1, last=True)
    count = sum(parameter.numel() for parameter in made.parameters)
    assert made.take(None).norm == pytest.approx(60000.0 * math.sqrt(count), rel=1e-3)


def test_options_are_the_same_object_until_they_change(monkeypatch):
    made = replica(network(), False, monkeypatch)
    first = made.options()
    assert made.options() is first
    made.optimizer.param_groups[0]["lr"] = 0.5
    assert made.options()[0]["lr"] == 0.5
    made.optimizer.param_groups[0]["mine"] = 1
    assert made.options()[0]["mine"] == 1
    made.optimizer.param_groups[0]["lr"] = rate = torch.tensor(0.25)
    assert made.options()[0]["lr"] == 0.25
    rate.fill_(0.125)
    assert made.options()[0]["lr"] == 0.125


def test_inline_versions_are_brought_into_the_region(monkeypatch):
    made = replica(Buffered(), False, monkeypatch)
    twin = region_of(made.spec)
    for part in [*twin.flat, *twin.buffers]:
        part.fill_(2)
    made.load(Parameters(1, twin.flat, twin.buffers))
    assert all(bool((tensor == 2).all()) for tensor in [*made.model.parameters(), *made.model.buffers()])
    assert all(bool((flat == 2).all()) for flat in made.region.flat)
