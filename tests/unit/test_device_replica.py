"""Tensors on a device with memory of its own, with a stand-in for the device: what is sent when, and what is not."""

import io

import pytest
import torch
from clusters import Rows, mean_square, network
from one_worker import Buffered, Odd, StandInCopies, region_of, sgd

from paceline.core.errors import OptionError
from paceline.model.store import Parameters
from paceline.worker.device_replica import DeviceStage, device_of, stage_on
from paceline.worker.replica import spec_of
from paceline.worker.shared_replica import SlotReplica, Stage

ROWS = Rows()
CPU = torch.device("cpu")


class Worker:
    """A replica on a stage, and a way to see what it sends."""

    def __init__(self, model, monkeypatch, early=1, late=False):
        monkeypatch.setattr("paceline.worker.shared_replica.HOOKED", 1)
        monkeypatch.setattr("paceline.worker.device_replica.EARLY", early)
        self.model, self.optimizer = model, sgd(model)
        spec = spec_of(model, self.optimizer)
        self.region = region_of(spec)
        self.copies = StandInCopies(late)
        self.replica = SlotReplica(model, self.optimizer, spec, self.region, DeviceStage(self.region, CPU, self.copies))
        self.replica.watch_backward()
        self.replica.mark()

    def backward(self, zero=True):
        if zero:
            self.optimizer.zero_grad()
            self.replica.mark()
        self.copies.downloads.clear()
        mean_square(self.model, ROWS.x, ROWS.y).backward()
        return list(self.copies.downloads)

    def push(self):
        self.replica.news()
        self.replica.add(50, last=True)
        self.copies.downloads.clear()
        gradient = self.replica.take(None)
        for place, (parameter, view) in enumerate(zip(self.replica.parameters, gradient.views, strict=True)):
            wanted = torch.zeros_like(parameter) if place in gradient.missing else parameter.grad
            assert torch.equal(view, wanted)
        return list(self.copies.downloads)


@pytest.mark.parametrize("late", [False, True])
def test_what_was_sent_early_is_not_sent_again(late, monkeypatch):
    worker = Worker(network(), monkeypatch, late=late)
    for _ in range(3):
        assert sorted(worker.backward()) == [1, 8, 8, 48]
        assert worker.push() == []


def test_small_gradients_go_together_in_the_end(monkeypatch):
    worker = Worker(network(), monkeypatch, early=1000)
    assert worker.backward() == []
    assert worker.push() == [48 + 16 + 16 + 16]  # with the padding between them
    worker = Worker(network(), monkeypatch, early=48)
    assert worker.backward() == [48]
    assert worker.push() == [16 + 16 + 16]


def test_gradients_that_were_changed_are_sent_again_and_not_early_until_left_alone(monkeypatch):
    worker = Worker(network(), monkeypatch)
    assert len(worker.backward()) == 4
    worker.model[0].weight.grad.mul_(0.5)
    assert worker.push() == [48]
    assert len(worker.backward()) == 3
    assert worker.push() == [48]
    assert len(worker.backward()) == 4
    assert worker.push() == []


@pytest.mark.parametrize("sign", [-1.0, 0.5])
@pytest.mark.parametrize("late", [False, True])
def test_changes_that_torch_does_not_count_are_found(late, sign, monkeypatch):
    worker = Worker(network(), monkeypatch, late=late)
    worker.backward()
    version = worker.model[0].weight.grad._version
    worker.model[0].weight.grad.data.mul_(sign)
    assert worker.model[0].weight.grad._version == version
    assert worker.push() == [48]
    for _ in range(2):
        assert sorted(worker.backward()) == [1, 8, 8]
        assert worker.push() == [48]


def test_a_gradient_and_its_negative_are_told_apart(monkeypatch):
    """Of two classes each row of the last layer's gradient is the other's negative: the same bits, elsewhere."""
    model = torch.nn.Linear(6, 2).double()
    worker = Worker(model, monkeypatch)
    (model(ROWS.x) * torch.tensor([1.0, -1.0])).sum().backward()
    assert torch.equal(model.weight.grad[0], -model.weight.grad[1])
    model.weight.grad.data.neg_()
    assert worker.push() == [12 + 4]


def test_several_pieces_are_sent_as_their_mean(monkeypatch):
    worker = Worker(network(), monkeypatch)
    wanted = [torch.zeros_like(parameter) for parameter in worker.replica.parameters]
    for number in range(3):
        worker.optimizer.zero_grad()
        worker.replica.mark()
        (mean_square(worker.model, ROWS.x, ROWS.y) * (number + 1)).backward()
        for total, parameter in zip(wanted, worker.replica.parameters, strict=True):
            total.add_(parameter.grad, alpha=1 / 3)
        worker.replica.news()
        worker.replica.add(50, last=number == 2)
    gradient = worker.replica.take(None)
    for view, mean in zip(gradient.views, wanted, strict=True):
        torch.testing.assert_close(view, mean)


def test_what_never_has_a_gradient_is_sent_once_to_each_slot(monkeypatch):
    worker = Worker(Odd(), monkeypatch, early=1000)
    sizes = []
    for slot in (0, 0, 1, 1, 0):
        worker.replica.use(slot, extends=False)
        worker.backward()
        sizes.append(sum(worker.push()))
    assert sizes[0] == sizes[2] > sizes[1] == sizes[3] == sizes[4]


def test_nothing_is_known_of_a_slot_that_the_server_wrote_to(monkeypatch):
    worker = Worker(Odd(), monkeypatch, early=1000)
    worker.backward()
    whole = sum(worker.push())
    worker.replica.use(0, extends=True)
    worker.backward()
    worker.push()
    for flat in worker.region.slots[0].flat:
        flat.fill_(3.0)
    worker.replica.use(0, extends=False)
    worker.backward()
    assert sum(worker.push()) == whole


def test_gradients_of_a_void_grant_leave_no_trace_in_the_slot(monkeypatch):
    worker = Worker(Odd(), monkeypatch)
    worker.backward()
    worker.push()
    worker.model.detour = True
    worker.backward()  # what the other passes do not use was sent early, too
    worker.model.detour = False
    worker.replica.forget()
    worker.replica.use(1, extends=False)
    worker.backward()
    worker.push()
    worker.replica.use(0, extends=False)
    worker.backward()
    worker.push()


def test_early_copies_are_of_the_slot_they_went_to(monkeypatch):
    worker = Worker(network(), monkeypatch)
    worker.backward()
    worker.replica.use(1, extends=False)
    assert sum(worker.push()) == 48 + 16 + 16 + 16


def test_versions_come_in_and_the_first_one_goes_out(monkeypatch):
    model = Buffered()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    worker = Worker(model, monkeypatch)
    values, buffers = worker.replica.values()
    for (name, _), value in zip([*model.named_parameters(), *model.named_buffers()], [*values, *buffers], strict=True):
        assert torch.equal(value, start[name])
    for part in [*worker.region.flat, *worker.region.buffers]:
        part.fill_(2)
    worker.replica.load(Parameters(1, worker.region.flat, worker.region.buffers))
    assert all(bool((tensor == 2).all()) for tensor in model.state_dict().values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_parameter_is_saved_without_the_others(dtype, monkeypatch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5000), torch.nn.Linear(5000, 3)).to(dtype)
    Worker(model, monkeypatch)
    stored = io.BytesIO()
    torch.save(model[1].bias, stored)
    assert stored.getbuffer().nbytes < 4000
    assert all(parameter.is_contiguous() for parameter in model.parameters())


def test_empty_parameters(monkeypatch):
    model = network()
    model.register_parameter("nothing", torch.nn.Parameter(torch.empty(0, dtype=torch.float64)))
    worker = Worker(model, monkeypatch)
    worker.backward()
    worker.push()


def test_a_worker_computes_on_one_device_that_it_knows():
    here, nowhere = torch.zeros(1), torch.zeros(1, device="meta")
    assert device_of([here, here]) == CPU
    with pytest.raises(OptionError, match=r"on 2 devices \(cpu, meta\).*model.to\(session.device\)"):
        device_of([here, nowhere])
    with pytest.raises(OptionError, match="is on meta and a worker computes on cpu or cuda"):
        device_of([nowhere])


def test_the_host_needs_no_copies():
    model = network()
    region = region_of(spec_of(model, sgd(model)))
    stage = stage_on(CPU, region)
    assert type(stage) is Stage
    assert stage.flat is region.flat
