"""What a script may do with its gradients: under paceline, with tensors by reference and in a region, and in plain
PyTorch, it comes to the same model."""

import copy
import io
import math
import pickle

import pytest
import torch
from clusters import Rows, mean_square, network
from one_worker import KINDS, Buffered, Odd, RegionLink, assert_same, server, sgd, trained, worker
from torch.utils.data import TensorDataset

from paceline.core.errors import UserError
from paceline.worker.replica import News, Replica, spec_of

ROWS = Rows()
BATCHES = {"batch_size": 10, "epochs": 3}


@pytest.fixture(params=KINDS)
def link(request, monkeypatch):
    return server(request.param, monkeypatch)


@pytest.fixture(params=KINDS[1:])
def region_link(request, monkeypatch):
    return server(request.param, monkeypatch)


def looping(make, step, **options):
    """A script that makes a model and calls `step(model, optimizer, x, y, number)` on every batch."""

    def script(prepare, batches):
        torch.manual_seed(0)
        model, optimizer = make(), None
        model, optimizer = prepare(model, sgd(model))
        for number, (x, y, _) in enumerate(batches(ROWS, **{**BATCHES, **options})):
            step(model, optimizer, x, y, number)
        return model

    return script


def plain_step(model, optimizer, x, y, _):
    optimizer.zero_grad()
    mean_square(model, x, y).backward()
    optimizer.step()


@pytest.mark.parametrize("form", ["none", "zero", "model", "model in place", "by hand", "after"])
def test_every_form_of_zeroing(link, form):
    def step(model, optimizer, x, y, _):
        if form == "by hand":
            for parameter in model.parameters():
                parameter.grad = None
        elif form.startswith("model"):
            model.zero_grad(set_to_none=form == "model")
        elif form != "after":
            optimizer.zero_grad(set_to_none=form == "none")
        mean_square(model, x, y).backward()
        optimizer.step()
        if form == "after":
            optimizer.zero_grad(set_to_none=False)

    assert_same(*trained(looping(network, step), link))


def test_gradients_that_are_never_zeroed_add_up(link):
    def step(model, optimizer, x, y, _):
        mean_square(model, x, y).backward()
        optimizer.step()

    assert_same(*trained(looping(network, step), link))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_over_several_passes(link, set_to_none):
    def step(model, optimizer, x, y, number):
        (mean_square(model, x, y) / 3).backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    assert_same(*trained(looping(network, step, batch_size=5, epochs=3), link))


def test_two_backward_passes_on_one_batch(link):
    def step(model, optimizer, x, y, _):
        optimizer.zero_grad()
        mean_square(model, x, y).backward()
        model(x).abs().mean().backward()
        optimizer.step()

    assert_same(*trained(looping(network, step), link))


@pytest.mark.parametrize("clip", [torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_])
def test_clipping(link, clip):
    def step(model, optimizer, x, y, _):
        optimizer.zero_grad()
        mean_square(model, x, y).backward()
        clip(model.parameters(), 0.05)
        optimizer.step()

    assert_same(*trained(looping(network, step), link))


@pytest.mark.parametrize("bad", [(), (0,), (2, 3)])
def test_gradient_scaling_skips_steps(link, bad):
    def script(prepare, batches):
        model = network(dtype=torch.float32)
        model, optimizer = prepare(model, sgd(model))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number, (x, y, _) in enumerate(batches(ROWS, batch_size=10, epochs=2)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = mean_square(model, x.float(), y.float())
            scaler.scale(loss * (math.inf if number in bad else 1.0)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return model

    assert_same(*trained(script, link), rtol=1e-5, atol=1e-6)


def test_fused_optimizers_leave_unscaling_to_the_scaler(link):
    def script(prepare, batches):
        model = network(dtype=torch.float32)
        model, optimizer = prepare(model, sgd(model, fused=True))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number, (x, y, _) in enumerate(batches(ROWS, batch_size=10, epochs=2)):
            optimizer.zero_grad()
            loss = mean_square(model, x.float(), y.float())
            scaler.scale(loss * (math.inf if number == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        return model

    assert_same(*trained(script, link), rtol=1e-5, atol=1e-6)


def test_autocast(link):
    def script(prepare, batches):
        model = network(dtype=torch.float32)
        model, optimizer = prepare(model, sgd(model))
        for x, y, _ in batches(ROWS, **BATCHES):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = mean_square(model, x.float(), y.float())
            loss.backward()
            optimizer.step()
        return model

    assert_same(*trained(script, link), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["memory", "hooked"])
def test_compiled_modules_train_and_go_by_their_plain_names(kind, monkeypatch):
    link = server(kind, monkeypatch)

    def script(prepare, batches):
        plain = network(dtype=torch.float32)
        model = torch.compile(plain, backend="aot_eager")  # what hooks and names meet, without the code generator
        model, optimizer = prepare(model, sgd(model))
        for x, y, _ in batches(ROWS, batch_size=10, epochs=1):
            optimizer.zero_grad()
            mean_square(model, x.float(), y.float()).backward()
            optimizer.step()
        return plain

    assert_same(*trained(script, link), rtol=1e-5, atol=1e-6)
    spec = link.store.spec
    assert [name for name, _, _ in spec.parameters] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [key for key, _ in spec.keys] == list(network().state_dict())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_tied_frozen_and_sometimes_unused_parameters(link, set_to_none):
    def step(model, optimizer, x, y, number):
        model.detour = number % 3 == 1
        optimizer.zero_grad(set_to_none=set_to_none)
        mean_square(model, x, y).backward()
        optimizer.step()

    assert_same(*trained(looping(Odd, step, batch_size=5), link))


def test_layers_frozen_and_thawed_on_the_way(link):
    def step(model, optimizer, x, y, number):
        model[0].requires_grad_(number % 4 < 2)
        plain_step(model, optimizer, x, y, number)

    assert_same(*trained(looping(network, step, batch_size=5), link))


class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.single = torch.nn.Linear(6, 5)
        self.last = torch.nn.Linear(5, 1).double()

    def forward(self, x):
        return self.last(self.single(x.float()).double())


def test_models_of_several_dtypes(link):
    assert_same(*trained(looping(Mixed, plain_step), link), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_other_dtypes_come_to_the_same_as_by_reference(kind, dtype, monkeypatch):
    def script(prepare, batches):
        model = network(dtype=dtype)
        model, optimizer = prepare(model, sgd(model))
        for x, y, _ in batches(ROWS, **BATCHES):
            plain_step(model, optimizer, x.to(dtype), y.to(dtype), 0)
        return model

    by_reference, _ = trained(script, server("memory", monkeypatch))
    state, _ = trained(script, server(kind, monkeypatch))
    assert_same(state, by_reference, rtol=0, atol=0)


def test_channels_last(link):
    data = torch.randn(20, 3, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def script(prepare, batches):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3)).double()
        model = model.to(memory_format=torch.channels_last)
        model, optimizer = prepare(model, sgd(model))
        for (x,) in batches(TensorDataset(data), batch_size=6, epochs=2):
            optimizer.zero_grad()
            model(x.to(memory_format=torch.channels_last)).square().mean().backward()
            optimizer.step()
        return model

    assert_same(*trained(script, link))


def test_gradients_made_by_hand(link):
    def step(model, optimizer, x, y, _):
        gradients = torch.autograd.grad(mean_square(model, x, y), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    assert_same(*trained(looping(network, step), link))


@pytest.mark.parametrize("way", ["the same tensors", "in place"])
def test_gradients_made_by_hand_in_the_same_memory_every_time(region_link, way):
    kept = {}

    def step(model, optimizer, x, y, _):
        gradients = torch.autograd.grad(mean_square(model, x, y), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            if way == "the same tensors":
                parameter.grad = kept.setdefault(parameter, torch.empty_like(gradient)).copy_(gradient)
            elif parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.copy_(gradient)
        optimizer.step()

    assert_same(*trained(looping(network, step), region_link))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_with_a_graph(link):
    def step(model, optimizer, x, y, _):
        optimizer.zero_grad()
        mean_square(model, x, y).backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in model.parameters())
        gradients = torch.autograd.grad(penalty, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = parameter.grad.detach() + 0.01 * gradient
        optimizer.step()

    assert_same(*trained(looping(network, step), link))


def test_sparse_gradients_are_made_dense_with_a_word(link, caplog):
    data = torch.randint(0, 9, (30, 4), generator=torch.Generator().manual_seed(1))

    def script(prepare, batches):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(9, 3, sparse=True), torch.nn.Linear(3, 1)).double()
        model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for (x,) in batches(TensorDataset(data), batch_size=6, epochs=2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return model

    assert_same(*trained(script, link))
    words = [record.getMessage() for record in caplog.records if "sparse gradient" in record.getMessage()]
    assert len(words) == 1
    assert "0.weight" in words[0]


def test_module_buffers(link):
    assert_same(*trained(looping(Buffered, plain_step, batch_size=10), link), rtol=1e-6, atol=1e-7)
    if isinstance(link, RegionLink):
        moved = [change is not None for change in link.pushes[-1].buffer_change]
        names = [name for name, _, _ in link.store.spec.buffers]
        still = [name for name, changed in zip(names, moved, strict=True) if not changed]
        assert still == ["mask", "still"]


def test_copies_and_files_hold_one_layer_and_no_more(link):
    def step(model, optimizer, x, y, number):
        optimizer.zero_grad()
        mean_square(model, x, y).backward()
        twin = copy.deepcopy(model)
        twin.zero_grad()
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert pickle.loads(pickle.dumps(model)) is not None
        stored = io.BytesIO()
        torch.save(model[0].bias, stored)
        assert stored.getbuffer().nbytes < 4000
        optimizer.step()
        assert all(parameter.grad is not None for parameter in model.parameters())

    assert_same(*trained(looping(network, step), link))


def clamp(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.01, 0.01)


def replace(model):
    values = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(values * 0.5, model.parameters())


def load(model):
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def change_uncounted(model):
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def step_beside(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize(
    ("change", "when", "message"),
    [
        (clamp, 0, "beside the optimizer"),
        (clamp, 7, r"changes parameters \(0.weight\)"),
        (replace, 7, "beside the optimizer"),
        (load, 7, "beside the optimizer"),
        (step_beside, 7, "beside the optimizer"),
        (change_uncounted, 1, "beside the optimizer"),
    ],
)
def test_changes_beside_the_optimizer_are_refused_at_the_step_that_follows(link, change, when, message):
    passed = []

    def script(session):
        model = network()
        model, optimizer = session.prepare(model, sgd(model))
        for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=5, epochs=2)):
            plain_step(model, optimizer, x, y, 0)
            passed.append(number)
            if number == when:
                change(model)

    with worker(link) as session, pytest.raises(UserError, match=message):
        script(session)
    assert passed[-1] == when


def test_a_model_that_was_moved_after_it_was_prepared_is_refused(link):
    with worker(link) as session:
        model = network()
        session.prepare(model, sgd(model))
        model.half()
        with pytest.raises(UserError, match=r"is torch.float16 on cpu and was torch.float64 .* before prepare\(\)"):
            list(session.batches(ROWS, batch_size=5))


def test_what_is_changed_and_restored_before_the_step_is_no_change(link):
    def step(model, optimizer, x, y, number):
        kept = copy.deepcopy(model.state_dict())
        if number < 3:
            clamp(model)
            model.load_state_dict(kept)
        plain_step(model, optimizer, x, y, number)

    assert_same(*trained(looping(network, step), link))


def test_what_torch_does_not_count_is_found_now_and_then(link, monkeypatch):
    monkeypatch.setattr("paceline.worker.batch_loop.EDITS_EVERY", 4)
    passed = []

    def script(session):
        model = network()
        model, optimizer = session.prepare(model, sgd(model))
        for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=5, epochs=9)):
            if number > 4:
                change_uncounted(model)
            plain_step(model, optimizer, x, y, 0)
            passed.append(number)

    with worker(link) as session, pytest.raises(UserError, match="beside the optimizer"):
        script(session)
    assert passed[-1] == 7


def test_a_gradient_that_takes_the_place_of_a_freed_one_is_not_taken_for_it():
    model = network()
    optimizer = sgd(model)
    replica = Replica(model, optimizer, spec_of(model, optimizer))
    replica.watch_backward()
    for _ in range(20):
        model.zero_grad()
        replica.mark_batch()
        model(ROWS.x).sum().backward()
        assert replica.news() is News.FRESH
    model(ROWS.x).sum().backward()
    assert replica.news() is News.ADDED
