"""Scripts as people write them: loops they leave, gradients made by hand, modules with masks and moving buffers."""

import contextlib
import copy
import os
import pickle
import signal
import sys
import threading
import time

import pytest
import torch
from clusters import EVEN, Rows, cluster, event, mean_square, network
from torch.utils.data import TensorDataset

import paceline
from paceline import strategies
from paceline.core.errors import OptionError, ScriptError, UserError
from paceline.core.events import Pushed
from paceline.records.journal import Decision, Lines, Observation

ROWS = Rows()
STRATEGIES = ["bsp", "asp", "dasp", "balanced", "fastest_k:k=2", "adaptive_sync"]


def launch(script, scenario=None, **settings):
    lines = Lines()
    return paceline.launch(script, engine="sim", scenario=scenario or cluster(*EVEN), sink=lines, **settings), lines


def start(session, **options):
    model = network()
    return session.prepare(model, torch.optim.SGD(model.parameters(), **{"lr": 0.01, **options}))


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    mean_square(model, x, y).backward()
    optimizer.step()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_everybody_may_leave_the_loop(strategy):
    def script():
        session = paceline.init()
        model, optimizer = start(session)
        for _ in range(2):
            for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=5, epochs=3)):
                if number >= 2:
                    break
                step(model, optimizer, x, y)

    run, _ = launch(script, strategy=strategy)
    assert run.ended == "done"
    assert run.summary.versions > 0


def test_a_peek_at_a_batch():
    def script():
        session = paceline.init()
        model, optimizer = start(session)
        next(iter(session.batches(ROWS, batch_size=5)))
        for x, y, _ in session.batches(ROWS, batch_size=5, epochs=1):
            step(model, optimizer, x, y)

    assert launch(script)[0].summary.samples_used == 50


def test_a_script_that_loops_until_it_has_seen_enough_ends_with_the_run():
    def script():
        session = paceline.init()
        model, optimizer = start(session)
        seen = 0
        while seen < 10_000:
            for x, y, _ in session.batches(ROWS, batch_size=5):
                step(model, optimizer, x, y)
                seen += 1

    run, _ = launch(script, max_versions=3)
    assert run.ended == "limit"


def swallowing():
    """What the others go on with; worker 1 does not come back from here, whatever ends it."""
    session = paceline.init()
    model, optimizer = start(session)
    while session.worker == 1:
        try:
            for x, y, _ in session.batches(ROWS, batch_size=5, epochs=4):
                step(model, optimizer, x, y)
        except:  # noqa: E722
            pass
    return session, model, optimizer


def test_a_script_that_swallows_its_end_is_left_behind_with_a_word():
    def script():
        session, model, optimizer = swallowing()
        for x, y, _ in session.batches(ROWS, batch_size=5, epochs=4):
            step(model, optimizer, x, y)

    run, _ = launch(script, cluster(*EVEN, events=event("crash", 0.12, worker=1)))
    assert any("swallows its own end" in text for text in run.summary.warnings)


@pytest.mark.parametrize("how", ["fails", "is interrupted"])
def test_what_is_said_of_scripts_that_swallow_their_end_comes_before_the_last_line(how):
    def script():
        session, model, optimizer = swallowing()
        for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=5, epochs=4)):
            step(model, optimizer, x, y)
            if session.worker == 0 and number == 1:
                if how == "fails":
                    raise ValueError("no such column")
                os.kill(os.getpid(), signal.SIGINT)

    lines = Lines()
    with pytest.raises(ScriptError) if how == "fails" else contextlib.nullcontext():
        paceline.launch(script, engine="sim", scenario=cluster(*EVEN), sink=lines)
    said = [line for line in lines if isinstance(line, Observation)]
    assert any("swallows its own end" in line.data.get("text", "") for line in said)
    assert (said[-1].what, lines[-1]) == ("end", said[-1])


def test_a_script_that_computes_at_the_second_interrupt_is_not_said_to_swallow_its_end():
    go_on, busy = threading.Event(), []

    def script():
        session = paceline.init()
        model, optimizer = start(session)
        for x, y, _ in session.batches(ROWS, batch_size=5, epochs=4):
            step(model, optimizer, x, y)
            if session.worker == 0:
                busy.append(threading.current_thread())
                while not session._endpoint.poll():  # until the link is closed
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                    time.sleep(0.5)
                go_on.wait()

    lines = Lines()
    assert paceline.launch(script, engine="sim", scenario=cluster(*EVEN), sink=lines).ended == "interrupted"
    warned = [line.data["text"] for line in lines if isinstance(line, Observation) and line.what == "warning"]
    assert [text for text in warned if "thread was left behind" in text] == [
        "the script of worker 0 was computing at the second interrupt: its thread was left behind"
    ]
    go_on.set()
    busy[0].join()


def test_masks_of_infinities_and_buffers_that_forward_replaces():
    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()
            self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            if self.training:
                self.seen = self.seen + 1.0
            return self.body(x) + self.mask[0]

    def script():
        session = paceline.init()
        torch.manual_seed(0)
        model = Masked()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        for x, y, _ in session.batches(ROWS, batch_size=5, epochs=2):
            step(model, optimizer, x, y)

    run, _ = launch(script)
    assert run.model_state["mask"].tolist() == [0.0, float("-inf")]
    assert run.model_state["seen"] > 0
    assert run.summary.samples_used == 100


@pytest.mark.parametrize("name", strategies.names())
@pytest.mark.parametrize("batch_size", [2, 3, 5])
def test_batch_norm_trains_under_every_strategy(name, batch_size):
    def script():
        session = paceline.init()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        for x, y, _ in session.batches(Rows(63), batch_size=batch_size, epochs=2):
            assert len(x) >= 2
            optimizer.zero_grad()
            loss = mean_square(model, x, y)
            loss.backward()
            session.report(loss=loss)
            optimizer.step()

    spec = f"{name}:k=2" if name in ("fastest_k", "k_async") else name
    assert launch(script, strategy=spec)[0].summary.samples_used == 126


@pytest.mark.parametrize(("sampling", "used"), [("epoch", 65), ("shard", 64), ("replacement", 64)])
def test_batch_norm_meets_no_single_sample_at_the_end_of_epochs_and_shards(sampling, used):
    lengths = []

    def script():
        session = paceline.init()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        batches = session.batches(Rows(63), batch_size=5, epochs=64 / 63, sampling=sampling)
        lengths.append(len(batches))
        for x, y, _ in batches:
            assert len(x) >= 2
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()

    run, lines = launch(script)
    assert run.summary.samples_used >= used
    (phase,) = [line for line in lines if isinstance(line, Observation) and line.what == "phase"]
    assert {phase.data["rounds"]} == set(lengths)
    if sampling == "epoch":
        assert run.summary.samples_used == used == round(phase.data["epochs"] * 63)


@pytest.mark.parametrize("name", strategies.names())
@pytest.mark.parametrize("passes", [2, 3])
def test_accumulation_trains_under_every_strategy(name, passes):
    def script():
        session = paceline.init()
        model, optimizer = start(session)
        for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=4, epochs=3), 1):
            loss = mean_square(model, x, y) / passes
            loss.backward()
            session.report(loss=loss)
            if number % passes == 0:
                optimizer.step()
                optimizer.zero_grad()

    spec = f"{name}:k=2" if name in ("fastest_k", "k_async") else name
    assert launch(script, cluster(1.0, 0.5, 0.25), strategy=spec)[0].summary.samples_used == 150


def test_gradients_made_by_hand_are_pushed():
    def script():
        session = paceline.init()
        model, optimizer = start(session)
        for x, y, _ in session.batches(ROWS, batch_size=5, epochs=1):
            optimizer.zero_grad()
            gradients = torch.autograd.grad(mean_square(model, x, y), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()

    assert launch(script)[0].summary.samples_used == 50


@pytest.mark.parametrize("forgotten", ["backward", "step", "both"])
def test_a_script_that_trains_nothing_is_told_so(forgotten):
    def script():
        session = paceline.init()
        model, optimizer = start(session)
        for x, y, _ in session.batches(ROWS, batch_size=5, epochs=1):
            optimizer.zero_grad()
            if forgotten == "step":
                mean_square(model, x, y).backward()
            elif forgotten == "backward":
                optimizer.step()

    warnings = launch(script)[0].summary.warnings
    assert any("no gradient was ever pushed" in text or "samples were lost" in text for text in warnings)


def test_steps_that_are_skipped_now_and_then_do_not_swallow_the_data():
    """As a gradient scaler does: the gradient is there, the step is not made."""

    def script():
        session = paceline.init()
        model, optimizer = start(session)
        for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=5, epochs=4)):
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            if session.worker != 1 or number % 4:
                optimizer.step()

    run, lines = launch(script)
    pushes = [line.event for line in lines if isinstance(line, Decision) and isinstance(line.event, Pushed)]
    assert run.summary.samples_used > 100
    assert sum(event.worker == 1 for event in pushes) > 3


@pytest.mark.parametrize(("code", "fails"), [(None, False), (0, False), (3, True)])
def test_sys_exit(code, fails):
    def script():
        session = paceline.init()
        model, optimizer = start(session)
        for x, y, _ in session.batches(ROWS, batch_size=5, epochs=1):
            step(model, optimizer, x, y)
        sys.exit(code)

    if fails:
        with pytest.raises(ScriptError, match="exited with 3"):
            launch(script)
    else:
        assert launch(script)[0].ended == "done"


def test_schedulers_keep_to_the_length_of_the_loop_when_workers_leave():
    lengths = []

    def script():
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        session.prepare(model, optimizer, scheduler)
        batches = session.batches(ROWS, batch_size=5, epochs=4)
        lengths.append(len(batches))
        for x, y, _ in batches:
            step(model, optimizer, x, y)
            scheduler.step()
        assert scheduler.last_epoch <= 10

    events = event("crash", 0.12, worker=2) + event("crash", 0.2, worker=3)
    assert launch(script, cluster(*EVEN, events=events))[0].summary.samples_used == 200
    assert lengths == [10] * 4


def test_chained_schedulers_follow_the_run():
    def script():
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        parts = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]
        chained = torch.optim.lr_scheduler.ChainedScheduler(parts, optimizer)
        session.prepare(model, optimizer, chained)
        for x, y, _ in session.batches(ROWS, batch_size=5, epochs=2):
            optimizer.zero_grad()
            (mean_square(model, x, y) * 0.0).backward()
            optimizer.step()
            chained.step()
        assert optimizer.param_groups[0]["lr"] == 0.5**5

    launch(script)


def test_one_session_a_worker():
    def script():
        paceline.init()
        paceline.init()

    with pytest.raises(UserError, match=r"init\(\) was called a second time in worker \d: .* keep what"):
        launch(script)


def test_a_prepared_model_can_be_copied_and_pickled():
    def script():
        session = paceline.init()
        model, optimizer = start(session)
        for x, y, _ in session.batches(ROWS, batch_size=5, epochs=1):
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            twin = copy.deepcopy(model)
            twin.zero_grad()
            assert all(parameter.grad is not None for parameter in model.parameters())
            assert pickle.loads(pickle.dumps(model)) is not None
            optimizer.step()

    assert launch(script)[0].summary.samples_used == 50


def test_second_steps_are_remarked_on():
    def script():
        session = paceline.init()
        model, optimizer = start(session)
        for x, y, _ in session.batches(ROWS, batch_size=5, epochs=1):
            for _ in range(2):
                step(model, optimizer, x, y)

    assert any("again for one batch" in text for text in launch(script)[0].summary.warnings)


def test_changes_beside_the_optimizer_are_refused():
    def script():
        session = paceline.init()
        model, optimizer = start(session)
        for x, y, _ in session.batches(ROWS, batch_size=5, epochs=1):
            step(model, optimizer, x, y)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.01, 0.01)

    with pytest.raises(UserError, match="beside the optimizer"):
        launch(script)


def test_a_batch_may_be_none():
    def script():
        session = paceline.init()
        model, optimizer = start(session)
        for batch in session.batches(ROWS, batch_size=5, collate_fn=lambda rows: None if rows[0][2] % 2 else rows):
            if batch is None:
                continue
            x, y = torch.stack([row[0] for row in batch]), torch.stack([row[1] for row in batch])
            step(model, optimizer, x, y)

    run, _ = launch(script)
    assert run.ended == "done"
    assert 0 < run.summary.samples_used < 50


def test_init_in_a_thread_of_the_scripts_own():
    caught = []

    def script():
        start(paceline.init())

        def elsewhere():
            try:
                paceline.init()
            except UserError as error:
                caught.append(str(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    run, _ = launch(script, cluster(1.0))
    assert "in a thread of its own" in caught[0]
    assert any("no worker called session.batches()" in text for text in run.summary.warnings)


@pytest.mark.parametrize(
    ("model", "optimizer", "message"),
    [
        (torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2, dtype=torch.cfloat))]), None, "complex64"),
        (3, None, "takes a torch module and a torch optimizer, not int and"),
    ],
)
def test_what_cannot_be_trained(model, optimizer, message):
    def script():
        session = paceline.init()
        parameters = model.parameters() if isinstance(model, torch.nn.Module) else [torch.nn.Parameter(torch.ones(1))]
        session.prepare(model, optimizer or torch.optim.SGD(parameters, lr=0.1))

    with pytest.raises(OptionError, match=message):
        launch(script, cluster(1.0))


def test_groups_added_later_and_unknown_loader_options():
    def grows():
        session = paceline.init()
        model, optimizer = start(session)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.1})
        for x, y, _ in session.batches(ROWS, batch_size=5):
            step(model, optimizer, x, y)

    with pytest.raises(UserError, match=r"add_param_group\(\) was called after prepare"):
        launch(grows, cluster(1.0))

    def misspells():
        session = paceline.init()
        start(session)
        session.batches(ROWS, batch_size=5, num_worker=2)

    with pytest.raises(OptionError, match="did you mean 'num_workers'"):
        launch(misspells, cluster(1.0))


def test_evaluations_go_on_in_a_larger_phase():
    def script():
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        session.prepare(model, optimizer, evaluate=lambda _: {"x": 1.0})
        for size, epochs in ((10, 10), (100, 1)):
            data = TensorDataset(torch.randn(size, 6).double(), torch.randn(size, 1).double())
            for x, y in session.batches(data, batch_size=5, epochs=epochs):
                step(model, optimizer, x, y)

    _, lines = launch(script, cluster(1.0), evaluate_every="0.1e", strategy="asp")
    epochs = [line.data["epoch"] for line in lines if getattr(line, "what", "") == "evaluation"]
    assert sum(epoch > 10 for epoch in epochs) == 10


@pytest.mark.slow
def test_a_newcomer_passes_through_hundreds_of_finished_phases():
    passed = {}

    def script():
        session = paceline.init()
        model, optimizer = start(session)
        for phase in range(400):
            for x, y, _ in session.batches(Rows(6), batch_size=2):
                step(model, optimizer, x, y)
                passed.setdefault(session.worker, []).append(phase)

    run, _ = launch(script, cluster(1.0, 1.0, events=event("join", 15.0)))
    assert run.summary.samples_used == 2400
    assert passed[2][:300] == list(range(300))  # one batch of each
    assert passed[2][-1] == 399
