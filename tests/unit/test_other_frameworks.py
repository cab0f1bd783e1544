"""Parts of other frameworks in a script: what is unwrapped trains to the same bits, the rest is refused.

Accelerate and Lightning Fabric are used where they are installed; everywhere, small classes with the names and
attributes of theirs stand in for them.
"""

import contextlib
import importlib.util
import logging

import pytest
import torch
from clusters import EVEN, Rows, cluster, mean_square, network
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import paceline
from paceline.core.errors import OptionError, UserError
from paceline.engines.local.child import torchrun_variables
from paceline.records.journal import Lines, Observation
from paceline.worker import other_frameworks


def named(module, name, bases=(), **members):
    """A class that looks as if it came from that module."""
    return type(name, bases, {"__module__": module, **members})


def stand_in_optimizer(module, name, inner):
    """A wrapper that steps what it wraps, as both packages' do."""

    def step(self, closure=None):
        return self.optimizer.step(closure)

    wrapper = named(
        module, name, (torch.optim.Optimizer,), step=step, zero_grad=lambda self: self.optimizer.zero_grad()
    )
    made = object.__new__(wrapper)
    made.optimizer, made.scaler = inner, None
    return made


class FabricModule(torch.nn.Module):
    """As Fabric's: the module is inside, and gives the output."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


FABRIC_MODULE = named("lightning.fabric.wrappers", "_FabricModule", (FabricModule,))
FABRIC_LOADER = named("lightning_fabric.wrappers", "_FabricDataLoader")


@contextlib.contextmanager
def group_of_one():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def train(wrap, use_loader=False):
    """Train alone with what `wrap(model, optimizer, scheduler, loader)` makes of the script's objects."""
    torch.manual_seed(1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    loader = DataLoader(Rows(), batch_size=5)
    session = paceline.init()
    given = wrap(model, optimizer, scheduler, loader)
    wrapped_model, wrapped_optimizer, wrapped_scheduler, wrapped_loader = given
    back = session.prepare(wrapped_model, wrapped_optimizer, wrapped_scheduler)
    assert back[0] is wrapped_model
    assert back[1] is wrapped_optimizer
    for x, y, _ in session.batches(wrapped_loader if use_loader else loader, epochs=2):
        wrapped_optimizer.zero_grad()
        mean_square(wrapped_model, x, y).backward()
        wrapped_optimizer.step()
        wrapped_scheduler.step()
    return {**model.state_dict(), "lr": torch.tensor(optimizer.param_groups[0]["lr"])}


WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="DataParallel moves its inputs to CUDA")


def as_they_are(*given):
    return given


def in_ddp(model, *rest):
    return DistributedDataParallel(model), *rest


def in_data_parallel(model, *rest):
    return DataParallel(model), *rest


def in_stand_ins_of_accelerate(model, optimizer, scheduler, loader):
    wrapper = named("accelerate.scheduler", "AcceleratedScheduler", step=lambda self: self.scheduler.step())()
    wrapper.scheduler = scheduler
    shard = named("accelerate.data_loader", "DataLoaderShard")()
    shard.base_dataloader = loader
    optimizer = stand_in_optimizer("accelerate.optimizer", "AcceleratedOptimizer", optimizer)
    return model, optimizer, wrapper, shard


def in_stand_ins_of_fabric(model, optimizer, scheduler, loader):
    wrapped = FABRIC_LOADER()
    wrapped._dataloader = loader
    optimizer = stand_in_optimizer("lightning.fabric.wrappers", "_FabricOptimizer", optimizer)
    return FABRIC_MODULE(model), optimizer, scheduler, wrapped


def in_accelerate(model, optimizer, scheduler, loader):
    accelerate = pytest.importorskip("accelerate")
    model, optimizer, loader, scheduler = accelerate.Accelerator(cpu=True).prepare(model, optimizer, loader, scheduler)
    return model, optimizer, scheduler, loader


def in_fabric(model, optimizer, scheduler, loader):
    name = next((n for n in ("lightning_fabric", "lightning.fabric") if _is_installed(n)), None)
    if name is None:
        pytest.skip("neither lightning nor lightning-fabric is installed")
    fabric = importlib.import_module(name).Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(model, optimizer)
    return model, optimizer, scheduler, fabric.setup_dataloaders(loader)


def _is_installed(name):
    return importlib.util.find_spec(name.partition(".")[0]) is not None


CASES = {
    "DDP": (in_ddp, ["DistributedDataParallel (torch) is not used but for what it wraps: the run merges gradients"]),
    "DataParallel": (in_data_parallel, ["DataParallel (torch) is not used"]),
    "like accelerate": (
        in_stand_ins_of_accelerate, ["AcceleratedOptimizer (accelerate)", "AcceleratedScheduler", "DataLoaderShard"],
    ),
    "like fabric": (in_stand_ins_of_fabric, ["_FabricModule (lightning)", "_FabricOptimizer", "_FabricDataLoader"]),
    "accelerate": (in_accelerate, ["AcceleratedOptimizer (accelerate)", "AcceleratedScheduler", "DataLoaderShard"]),
    "fabric": (in_fabric, ["_FabricModule (lightning)", "_FabricOptimizer", "_FabricDataLoader"]),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=WITHOUT_CUDA if name == "DataParallel" else ()) for name in CASES]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_what_is_unwrapped_trains_to_the_same_bits_and_says_so(case, caplog):
    wrap, remarks = CASES[case]
    plain = train(as_they_are)
    with caplog.at_level(logging.WARNING, "paceline"), group_of_one() if case == "DDP" else contextlib.nullcontext():
        found = train(wrap, use_loader=True)
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    for remark in remarks:
        assert remark in caplog.text


@WITHOUT_CUDA
def test_in_a_run_the_wrapped_module_is_the_one_that_workers_share():
    lines = Lines()

    def script():
        session = paceline.init()
        model = DataParallel(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session.prepare(model, optimizer)
        for x, y, _ in session.batches(Rows(), batch_size=5):
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()

    run = paceline.launch(script, engine="sim", scenario=cluster(*EVEN), sink=lines)
    assert list(run.model_state) == list(network().state_dict())
    texts = [line.data["text"] for line in lines if isinstance(line, Observation) and line.what == "warning"]
    assert len([text for text in texts if text.startswith("DataParallel (torch) is not used")]) == 1


def test_a_distributed_sampler_is_replaced_and_set_epoch_stays_harmless(caplog):
    sampler = DistributedSampler(Rows(), num_replicas=4, rank=1)
    loader = DataLoader(Rows(), batch_size=5, sampler=sampler)
    session = paceline.init()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session.prepare(model, optimizer)
    seen = []
    with caplog.at_level(logging.WARNING, "paceline"):
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for x, y, rows in session.batches(loader):
                seen += rows.tolist()
                optimizer.zero_grad()
                mean_square(model, x, y).backward()
                optimizer.step()
    assert sorted(seen) == sorted([*range(50)] * 2)
    assert "the DataLoader's DistributedSampler is not used" in caplog.text


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        ("torch.distributed.fsdp", "FullyShardedDataParallel", "a FullyShardedDataParallel holds only a part"),
        ("torch.distributed.fsdp", "FSDPModule", r"a FSDPModule holds only a part .* leave fully_shard\(\) out"),
        ("deepspeed.runtime.engine", "DeepSpeedEngine", r"that deepspeed.initialize\(\) was given"),
    ],
)
def test_models_that_are_not_whole_are_refused(module, name, message):
    model = named(module, name, (torch.nn.Linear,))(2, 1)
    with pytest.raises(OptionError, match=message):
        paceline.init().prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_wrappers_that_cannot_be_opened_are_refused():
    scaled = stand_in_optimizer("accelerate.optimizer", "AcceleratedOptimizer", None)
    scaled.scaler = object()
    with pytest.raises(OptionError, match="mixed_precision='fp16', whose scaler steps by itself: use 'bf16'"):
        other_frameworks.unwrapped(scaled)
    with pytest.raises(OptionError, match="this version's _FabricDataLoader has no attribute _dataloader: give"):
        other_frameworks.unwrapped(FABRIC_LOADER())


def test_classes_of_the_same_name_from_elsewhere_are_left_alone():
    thing = named("mine.parallel", "DataParallel")()
    assert other_frameworks.unwrapped(thing) == (thing, [])


# -- launchers and process groups ------------------------------------------------------------------------------------

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize("environ", [TORCHRUN, {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "host"}])
def test_a_launcher_that_starts_several_processes_is_refused(environ):
    expected = rf"process {environ['RANK']} of 4 .*paceline run --workers 4 'my train.py' --lr 0.1`"
    with pytest.raises(UserError, match=expected):
        other_frameworks.require_no_launcher(environ, ["my train.py", "--lr", "0.1"])


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**TORCHRUN, "WORLD_SIZE": "1"},
        {**TORCHRUN, "WORLD_SIZE": "many"},
        {"WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"},
        {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"},  # a program that a worker starts has these
    ],
)
def test_other_environments_are_let_through(environ):
    other_frameworks.require_no_launcher(environ, ["train.py"])


def test_init_looks_at_the_environment_outside_of_a_run_alone(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="paceline run --workers 4"):
        paceline.init()

    def script():
        paceline.init()

    paceline.launch(script, engine="sim", scenario=cluster(*EVEN))


@pytest.mark.parametrize(("devices", "local"), [(0, "2"), (1, "0"), (4, "2")])
def test_local_rank_is_a_device_that_the_process_sees(monkeypatch, devices, local):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    assert torchrun_variables(2, 3) == {"RANK": "2", "LOCAL_RANK": local, "WORLD_SIZE": "3"}


def test_a_process_group_of_several_is_refused_at_init_and_prepare(monkeypatch):
    session = paceline.init()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    with pytest.raises(UserError, match=r"paceline.init\(\) was called in a process group of 3 .* remove the call"):
        paceline.init()
    model = network()
    with pytest.raises(UserError, match=r"prepare\(\) was called in a process group of 3"):
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        ({"backend": "gloo"}, True),
        ({"backend": "gloo", "rank": 0, "world_size": 2}, True),
        ({"backend": "gloo", "no_such_argument": 1}, True),
        ({"backend": "gloo", "rank": 0, "world_size": 1}, False),
    ],
)
def test_a_run_refuses_process_groups_of_several_and_puts_the_function_back(monkeypatch, arguments, refused):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    real = torch.distributed.init_process_group
    made = []

    def script():
        store = {} if refused else {"store": torch.distributed.HashStore()}
        torch.distributed.init_process_group(**arguments, **store)
        made.append(torch.distributed.get_world_size())
        torch.distributed.destroy_process_group()
        paceline.init()

    expected = pytest.raises(UserError, match=r"init_process_group\(\) was called in worker 0: the run connects")
    with expected if refused else contextlib.nullcontext():
        paceline.launch(script, engine="sim", scenario=cluster(1.0, 1.0))
    assert made == ([] if refused else [1, 1])
    assert torch.distributed.init_process_group is real


def test_outside_of_a_run_process_groups_are_let_through():
    with other_frameworks.process_groups_refused(lambda: None), group_of_one():
        assert torch.distributed.get_world_size() == 1
