"""A script's own model and optimizer between loops: what they show of the run's, and what they can give to it."""

import copy

import pytest
import torch
from clusters import EVEN, Rows, cluster, event, mean_square, network
from launching import launch
from one_worker import KINDS, assert_same, server, trained

import paceline
from paceline.core.errors import ScriptError, UserError

ROWS = Rows()
OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


def same(one, other):
    """Whether two states are equal, tensors to the last bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other


def steps(model, optimizer, batches):
    for x, y, _ in batches:
        optimizer.zero_grad()
        mean_square(model, x, y).backward()
        optimizer.step()
        yield


@pytest.fixture(params=KINDS)
def link(request, monkeypatch):
    return server(request.param, monkeypatch)


@pytest.fixture(params=["alone", *KINDS])
def everywhere(request, monkeypatch):
    return None if request.param == "alone" else server(request.param, monkeypatch)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_has_what_plain_pytorch_has(everywhere, name):
    shown = []

    def script(prepare, batches):
        torch.manual_seed(0)
        model = network()
        optimizer = OPTIMIZERS[name](model.parameters())
        prepare(model, optimizer)
        found = [copy.deepcopy(optimizer.state_dict())]
        for _ in steps(model, optimizer, batches(ROWS, batch_size=10, epochs=1)):
            found.append(copy.deepcopy(optimizer.state_dict()))
        shown.append([*found, optimizer.state_dict()])
        return model

    model, alike = trained(script, everywhere)
    ours, plain = shown
    assert len(ours) == len(plain) == 7
    assert ours[-1]["state"]
    if everywhere is None:  # to the last bit; a server's fused steps round otherwise
        assert same(model, alike)
        assert all(map(same, ours, plain))
    else:
        assert_same(model, alike)
        torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("before", [True, False], ids=["before prepare", "after prepare"])
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_what_is_loaded_goes_on_where_it_stood(link, name, before):
    def script(prepare, batches):
        torch.manual_seed(0)
        model = network()
        optimizer = OPTIMIZERS[name](model.parameters())
        for _ in steps(model, optimizer, [(ROWS.x, ROWS.y, None)] * 3):
            pass
        saved = copy.deepcopy(optimizer.state_dict())
        fresh = OPTIMIZERS[name](model.parameters())
        if before:
            fresh.load_state_dict(saved)
        prepare(model, fresh)
        if not before:
            fresh.load_state_dict(saved)
        assert same(fresh.state_dict(), saved)
        for _ in steps(model, fresh, batches(ROWS, batch_size=10, epochs=1)):
            pass
        return model

    assert_same(*trained(script, link))


def one_job(notes, loads=False):
    """Every worker looks at the optimizer's state in its loop and after it, and writes down what it saw at the end."""

    def train():
        session = paceline.init()
        model = network()
        optimizer = OPTIMIZERS["adam"](model.parameters())
        session.prepare(model, optimizer)
        for _ in steps(model, optimizer, session.batches(ROWS, batch_size=5, epochs=2)):
            assert optimizer.state_dict()["state"]
        if loads:
            state = optimizer.state_dict()
            for entry in state["state"].values():
                entry["exp_avg"].fill_(7.0)
            optimizer.load_state_dict(state)
        torch.save(optimizer.state_dict(), notes / f"{session.worker}.pt")
        if loads:
            for _ in steps(model, optimizer, session.batches(ROWS, batch_size=5, epochs=1)):
                pass

    return train


@pytest.mark.parametrize("strategy", ["bsp", "asp"])
def test_every_virtual_worker_sees_the_same_state(tmp_path, strategy):
    run = paceline.launch(one_job(tmp_path), engine="sim", scenario=cluster(*EVEN), strategy=strategy)
    found = [torch.load(tmp_path / f"{worker}.pt") for worker in range(len(EVEN))]
    assert all(same(each, found[0]) for each in found)
    rounds = ROWS.x.shape[0] * 2 / (5 * len(EVEN))
    assert [float(entry["step"]) for entry in found[0]["state"].values()] == pytest.approx([rounds] * 4)
    assert run.summary.pushes > 0


def test_between_two_loops_worker_0s_load_counts(tmp_path):
    paceline.launch(one_job(tmp_path, loads=True), engine="sim", scenario=cluster(*EVEN), strategy="bsp")
    found = [torch.load(tmp_path / f"{worker}.pt") for worker in range(len(EVEN))]
    assert all(bool((entry["exp_avg"] == 7.0).all()) for each in found[:1] for entry in each["state"].values())


def test_a_load_inside_the_loop_is_refused_at_that_line():
    def train():
        session = paceline.init()
        model = network()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        session.prepare(model, optimizer)
        for _ in steps(model, optimizer, session.batches(ROWS, batch_size=5)):
            optimizer.load_state_dict(optimizer.state_dict())

    with pytest.raises(UserError, match=r"load_state_dict\(\) inside a batches\(\) loop.*call it before the loop"):
        paceline.launch(train, engine="sim", scenario=cluster(*EVEN))


def test_a_kept_optimizer_is_saved_without_a_word_to_the_server(tmp_path):
    def train():
        session = paceline.init()
        model = network()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        session.prepare(model, optimizer)
        session.keep("optimizer", optimizer)
        for _ in steps(model, optimizer, session.batches(ROWS, batch_size=10)):
            assert session._state.capture(0, over=False)

    paceline.launch(train, engine="sim", scenario=cluster(1.0))


class OnProcesses:
    """The job as something that can be sent to a process."""

    def __init__(self, notes):
        self.notes = notes

    def __call__(self):
        one_job(self.notes)()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("transport", ["shm", "zeromq"])
def test_on_processes(tmp_path, transport):
    launch(OnProcesses(tmp_path), workers=2, strategy="asp", transport=transport)
    one, other = (torch.load(tmp_path / f"{worker}.pt") for worker in range(2))
    assert same(one, other)
    assert one["state"]


def test_a_script_error_is_not_hidden():
    def train():
        session = paceline.init()
        model = network()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        session.prepare(model, optimizer)
        optimizer.load_state_dict({"state": {}, "param_groups": []})

    with pytest.raises(ScriptError, match="different number of parameter groups"):
        paceline.launch(train, engine="sim", scenario=cluster(1.0))


def halve(model):
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def load(model):
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def replace(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


@pytest.mark.parametrize("change", [halve, load, replace])
@pytest.mark.parametrize("between", [False, True], ids=["before the first loop", "between loops"])
def test_a_model_that_is_changed_before_a_loop_is_trained_from_there(link, change, between):
    def script(prepare, batches):
        torch.manual_seed(0)
        model = network()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        prepare(model, optimizer)
        if between:
            for _ in steps(model, optimizer, batches(ROWS, batch_size=10, epochs=1)):
                pass
        change(model)
        for _ in steps(model, optimizer, batches(ROWS, batch_size=10, epochs=1)):
            pass
        return model

    assert_same(*trained(script, link))


def zeroing(only=None):
    """Every worker, or only one, sets the model to zero after a loop; the next one does nothing but end."""

    def train():
        session = paceline.init()
        model = network()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for _ in range(2):
            for _, _, _ in session.batches(ROWS, batch_size=5):
                pass
            if only in (None, session.worker):
                for parameter in model.parameters():
                    parameter.data.zero_()
        for _, _, _ in session.batches(ROWS, batch_size=5):
            pass

    return train


@pytest.mark.parametrize(("only", "zero"), [(None, True), (0, True), (1, False)])
def test_on_several_workers_worker_0s_changes_count(only, zero):
    run = paceline.launch(zeroing(only), engine="sim", scenario=cluster(*EVEN))
    assert all(bool((value == 0).all()) for value in run.model_state.values()) is zero


def test_a_worker_0_that_comes_back_repeats_its_loads_and_changes_nothing():
    """Its script runs from the beginning: what it loads there is not for the phase that the others are in."""

    def train():
        session = paceline.init()
        model = network()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        for _ in steps(model, optimizer, [(ROWS.x, ROWS.y, None)]):
            pass
        session.prepare(model, optimizer)
        load(model)
        for _ in range(2):
            for _ in steps(model, optimizer, session.batches(ROWS, batch_size=5, epochs=2)):
                pass

    events = event("crash", 0.12, worker=0) + event("rejoin", 0.2, worker=0)
    run = paceline.launch(train, engine="sim", scenario=cluster(*EVEN, events=events), strategy="asp")
    assert run.ended == "done"
    assert run.summary.samples_used == 4 * len(ROWS)
