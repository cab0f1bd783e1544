"""Workers on a CUDA device: the same scripts come to the same models, and copies beside computing are never torn."""

import gc
import io
import json
import logging
import math
from pathlib import Path

import pytest
import torch
from clusters import Rows, mean_square, network
from local_jobs import batches_of, unions
from one_worker import Buffered, Odd, RegionLink, assert_same, region_of, sgd, trained, worker
from torch.utils.data import TensorDataset

import paceline
from paceline.core.errors import OptionError
from paceline.model.regions import private_region
from paceline.model.store import Parameters
from paceline.records import journal
from paceline.worker.cuda_copies import CudaCopies
from paceline.worker.device_replica import DeviceStage
from paceline.worker.replica import spec_of
from paceline.worker.shared_replica import SlotReplica

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: no device was found")

CUDA = torch.device("cuda", 0)
ROWS = Rows()
NEAR = {"rtol": 1e-8, "atol": 1e-10}  # sums of the device and of the host differ in their order
SINGLE = {"rtol": 1e-4, "atol": 1e-5}


class CudaLink(RegionLink):
    """A region in memory of whole pages, as the transports have it."""

    def adopt(self, spec):
        self.engine.worker_region = private_region(spec)
        return self.engine.worker_region


@pytest.fixture(params=["together", "early", "early, alternating"])
def link(request, monkeypatch):
    if request.param != "together":
        monkeypatch.setattr("paceline.worker.shared_replica.HOOKED", 1)
        monkeypatch.setattr("paceline.worker.device_replica.EARLY", 1)
    return CudaLink(alternate=request.param.endswith("alternating"))


def looping(make, step, **options):
    def script(prepare, batches):
        torch.manual_seed(0)
        model = make().to(CUDA)
        model, optimizer = prepare(model, sgd(model))
        for number, (x, y, _) in enumerate(batches(ROWS, **{"batch_size": 10, "epochs": 3, **options})):
            step(model, optimizer, x.to(CUDA), y.to(CUDA), number)
        assert all(parameter.device == CUDA for parameter in model.parameters())
        return model

    return script


@pytest.mark.parametrize("form", ["none", "zero", "model", "after", "never"])
def test_every_form_of_zeroing(link, form):
    def step(model, optimizer, x, y, _):
        if form == "model":
            model.zero_grad()
        elif form in ("none", "zero"):
            optimizer.zero_grad(set_to_none=form == "none")
        mean_square(model, x, y).backward()
        optimizer.step()
        if form == "after":
            optimizer.zero_grad(set_to_none=False)

    assert_same(*trained(looping(network, step), link), **NEAR)


def test_accumulation(link):
    def step(model, optimizer, x, y, number):
        (mean_square(model, x, y) / 3).backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

    assert_same(*trained(looping(network, step, batch_size=5), link), **NEAR)


@pytest.mark.parametrize("way", ["norm", "value", "data"])
def test_clipping(link, way):
    def step(model, optimizer, x, y, _):
        optimizer.zero_grad()
        mean_square(model, x, y).backward()
        if way == "norm":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        elif way == "value":
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        else:
            for parameter in model.parameters():
                parameter.grad.data.clamp_(-0.05, 0.05)
        optimizer.step()

    assert_same(*trained(looping(network, step), link), **NEAR)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [(), (2, 3)])
def test_gradient_scaling(link, bad, fused):
    def script(prepare, batches):
        model = network(dtype=torch.float32).to(CUDA)
        model, optimizer = prepare(model, sgd(model, fused=fused))
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        for number, (x, y, _) in enumerate(batches(ROWS, batch_size=10, epochs=2)):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = mean_square(model, x.float().to(CUDA), y.float().to(CUDA))
            scaler.scale(loss * (math.inf if number in bad else 1.0)).backward()
            if not fused:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return model

    assert_same(*trained(script, link), rtol=1e-3, atol=1e-4)


def test_module_buffers(link):
    def step(model, optimizer, x, y, _):
        optimizer.zero_grad()
        mean_square(model, x, y).backward()
        optimizer.step()

    assert_same(*trained(looping(Buffered, step), link), rtol=1e-6, atol=1e-7)
    names = [name for name, _, _ in link.store.spec.buffers]
    moved = zip(names, link.pushes[-1].buffer_change, strict=True)
    assert [name for name, change in moved if change is None] == ["mask", "still"]


def test_tied_frozen_and_sometimes_unused_parameters(link):
    def step(model, optimizer, x, y, number):
        model.detour = number % 3 == 1
        optimizer.zero_grad()
        mean_square(model, x, y).backward()
        optimizer.step()

    assert_same(*trained(looping(Odd, step, batch_size=5), link), **NEAR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(link, dtype):
    def script(prepare, batches):
        model = network(dtype=dtype).to(CUDA)
        model, optimizer = prepare(model, sgd(model))
        for x, y, _ in batches(ROWS, batch_size=10, epochs=3):
            optimizer.zero_grad()
            mean_square(model, x.to(CUDA, dtype), y.to(CUDA, dtype)).backward()
            optimizer.step()
        return model

    # Half-precision parameters have masters of single precision on the server; torch's own are rounded at every step.
    assert_same(*trained(script, link), **(SINGLE if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.05}))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_modules(link):
    data = TensorDataset(ROWS.x.float(), ROWS.y.float())

    def script(prepare, batches):
        plain = network(dtype=torch.float32).to(CUDA)
        model = torch.compile(plain)
        model, optimizer = prepare(model, sgd(model))
        for x, y in batches(data, batch_size=10):
            optimizer.zero_grad()
            mean_square(model, x.to(CUDA), y.to(CUDA)).backward()
            optimizer.step()
        return plain

    assert_same(*trained(script, link), **SINGLE)


def large_replica(copies):
    """Matrices that take the device longer to multiply than the host to start the next operation."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(6)]).to(CUDA)
    optimizer = sgd(model)
    spec = spec_of(model, optimizer)
    region = private_region(spec)
    made = SlotReplica(model, optimizer, spec, region, DeviceStage(region, CUDA, copies))
    made.watch_backward()
    made.mark()
    return made


@pytest.mark.slow
@pytest.mark.parametrize("changes", [False, True])
def test_a_push_is_never_torn(changes, monkeypatch):
    monkeypatch.setattr("paceline.worker.device_replica.EARLY", 1)
    made = large_replica(CudaCopies(CUDA))
    x = torch.randn(4096, 2048, device=CUDA)
    for number in range(40):
        made.use(number // 3 % 2, extends=False)
        made.optimizer.zero_grad(set_to_none=number % 2 == 0)
        made.mark()
        made.model(x * (number + 1)).square().mean().backward()
        if changes and number % 4:
            for parameter in made.parameters:
                parameter.grad.data.mul_(0.5) if number % 4 == 1 else parameter.grad.mul_(0.5)
        made.news()
        made.add(10, last=True)
        gradient = made.take(None)
        seen = [flat.clone() for flat in gradient.flat]  # at once: what arrives later would not be in it
        torch.cuda.synchronize()
        for flat, gathered in zip(seen, made._gathered.flat, strict=True):
            assert torch.equal(flat, gathered.cpu())
        assert gradient.norm == pytest.approx(float(seen[0].double().norm()), rel=1e-4)


def test_a_version_is_whole_before_the_device_computes_with_it():
    made = large_replica(CudaCopies(CUDA))
    for number in range(20):
        for flat in made.region.flat:
            flat.fill_(number)
        made.load(Parameters(number, made.region.flat, made.region.buffers))
        seen = [parameter.detach().mean() for parameter in made.parameters]
        made.settle()
        for flat in made.region.flat:
            flat.fill_(-1.0)  # the server writes the next one
        assert [float(mean) for mean in seen] == pytest.approx([number] * len(seen))


def test_memory_is_page_locked_for_as_long_as_the_worker_lives():
    made = large_replica(CudaCopies(CUDA))
    region = made.region
    parts = [*region.flat, *(flat for slot in region.slots for flat in slot.flat)]
    assert all(part.is_pinned() for part in parts)
    del made
    gc.collect()
    assert not any(part.is_pinned() for part in parts)


def test_memory_that_cannot_be_page_locked_is_used_all_the_same(caplog):
    first, second = CudaCopies(CUDA), CudaCopies(CUDA)
    model = network().to(CUDA)
    region = region_of(spec_of(model, sgd(model)))
    first.lock(region.flat)
    with caplog.at_level(logging.WARNING, "paceline"):
        second.lock(region.flat * 2)
    assert len([record for record in caplog.records if "could not be page-locked" in record.getMessage()]) == 1
    home = torch.zeros(region.flat[0].numel(), dtype=torch.float64, device=CUDA)
    region.flat[0].fill_(3.0)
    second.upload(home, region.flat[0])
    home.add_(1)
    second.download(region.flat[0], home)
    second.finish_downloads()
    assert bool((region.flat[0] == 4.0).all())


def test_a_layer_is_saved_without_the_others():
    made = large_replica(CudaCopies(CUDA))
    stored = io.BytesIO()
    torch.save(made.model[3].bias, stored)
    assert stored.getbuffer().nbytes < 20_000
    loaded = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(6)])
    loaded.load_state_dict(made.model.state_dict())
    assert all(torch.equal(a.cpu(), b) for a, b in zip(made.model.parameters(), loaded.parameters(), strict=True))


def test_a_model_on_the_host_stays_there():
    with worker(CudaLink()) as session:
        assert session.device == CUDA
        model = network()
        session.prepare(model, sgd(model))
        assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def test_a_model_on_several_devices_is_refused():
    with worker(CudaLink()) as session:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2).to(CUDA), torch.nn.Linear(2, 2))
        with pytest.raises(OptionError, match=r"on 2 devices \(cuda:0, cpu\)"):
            session.prepare(model, sgd(model))


class CudaJob:
    """A regression on the device; the samples of every batch are noted for the journal's unions."""

    def __init__(self, notes):
        self.notes = str(notes)

    def __call__(self):
        session = paceline.init()
        rows, model = Rows(80), network().to(session.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def evaluate(model):
            return {"loss": float(mean_square(model, rows.x.to(session.device), rows.y.to(session.device)))}

        session.prepare(model, optimizer, evaluate=evaluate)
        assert all(parameter.device.type == "cuda" for parameter in model.parameters())
        with (Path(self.notes) / f"worker-{session.worker}.jsonl").open("a") as file:
            for x, y, index in session.batches(rows, batch_size=4, epochs=5):
                optimizer.zero_grad()
                mean_square(model, x.to(session.device), y.to(session.device)).backward()
                print(json.dumps(index.tolist()), file=file, flush=True)
                optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "zeromq"])
def test_real_processes_come_to_one_process_on_the_union_batch(tmp_path, transport):
    done = paceline.launch(
        CudaJob(tmp_path), engine="local", workers=2, threads=1, transport=transport, runs_dir=tmp_path / "runs"
    )
    versions = unions(journal.read(done.journal), batches_of(tmp_path))
    rows, model = Rows(80), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for indices in versions:
        optimizer.zero_grad()
        mean_square(model, rows.x[indices], rows.y[indices]).backward()
        optimizer.step()
    assert_same(dict(done.model_state), model.state_dict(), rtol=0, atol=1e-9)
    with torch.no_grad():
        loss = float(mean_square(model, rows.x, rows.y))
    assert done.summary.metrics["loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("engine", ["alone", "sim"])
def test_exchanged_tensors_come_back_on_the_device_of_the_callers_own(engine):
    found = {}

    def script():
        session = paceline.init()
        given = {"there": torch.ones(3, device=CUDA), "here": torch.ones(2, dtype=torch.bfloat16)}
        found[session.worker] = [*session.gather(given), session.mean(given)]

    if engine == "alone":
        script()
    else:
        paceline.launch(script, engine="sim", scenario="even4")
    assert len(found) == (1 if engine == "alone" else 4)
    for values in found.values():
        assert {value["there"].device for value in values} == {CUDA}
        assert {value["here"].device.type for value in values} == {"cpu"}
        assert all(torch.equal(value["there"].cpu(), torch.ones(3)) for value in values)
