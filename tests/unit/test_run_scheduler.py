"""A scheduler given to prepare(): it stands where the run does, forward and back, and stays an ordinary object."""

import copy
import io
import math
import pickle
import types

import pytest
import torch
from clusters import Rows, mean_square, network
from one_worker import Conversation, work, worker
from torch.optim import lr_scheduler

from paceline.core.errors import OptionError
from paceline.transport.base import Lost
from paceline.transport.messages import Over, Push, SavedState
from paceline.worker.run_scheduler import RunScheduler
from paceline.worker.state_codec import unpack

ROWS = Rows()
LAST = Over(0, None, 3.0, run_over=True)

SCHEDULERS = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, gamma=0.5),
    "several steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.1),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "function": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=4),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[4],
    ),
    "chain": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.1, 4), lr_scheduler.ExponentialLR(optimizer, 0.9)], optimizer
    ),
}


def optimizer_of(rate=0.1):
    first, second = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    groups = [{"params": [first]}, {"params": [second], "lr": rate * 2}]
    optimizer = torch.optim.SGD(groups, lr=rate, momentum=0.9)
    optimizer._opt_called = True  # as a prepared one has it
    return optimizer


def options(optimizer):
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


class Run:
    """A scheduler and the rounds that it follows."""

    def __init__(self, make, rate=0.1):
        self.optimizer = optimizer_of(rate)
        self.rounds_done = 0.0
        self.scheduler = make(self.optimizer)
        self.follower = RunScheduler(self.scheduler, self.optimizer, lambda: self.rounds_done)

    def step_at(self, rounds_done):
        self.rounds_done = rounds_done
        self.scheduler.step()
        return options(self.optimizer), self.scheduler.get_last_lr()


def stepped(make, steps, rate=0.1):
    """What the scheduler makes of the options by itself."""
    optimizer = optimizer_of(rate)
    scheduler = make(optimizer)
    for _ in range(steps):
        scheduler.step()
    return options(optimizer), scheduler.get_last_lr()


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_it_goes_back_with_the_run_and_on_again(kind):
    run = Run(SCHEDULERS[kind])
    for rounds_done in (1.0, 4.5, 9.0, 3.7, 3.9, 0.0, 7.0, 6.9, 12.0):
        assert run.step_at(rounds_done) == stepped(SCHEDULERS[kind], int(rounds_done))


def test_a_rate_that_is_a_tensor_goes_back_in_place():
    make = SCHEDULERS["exponential"]
    run = Run(make, torch.tensor(0.1))
    rate = run.optimizer.param_groups[0]["lr"]
    run.step_at(6.0)
    run.step_at(2.0)
    assert run.optimizer.param_groups[0]["lr"] is rate
    torch.testing.assert_close(rate, torch.tensor(0.1 * 0.9**2))


def test_options_that_no_step_changes_are_the_scripts():
    run = Run(SCHEDULERS["exponential"])
    run.step_at(5.0)
    run.optimizer.param_groups[0]["weight_decay"] = 0.25
    run.step_at(2.0)
    assert run.optimizer.param_groups[0]["weight_decay"] == 0.25


def test_a_scheduler_that_the_script_moved_goes_back_to_there_at_most():
    run = Run(SCHEDULERS["exponential"])
    run.step_at(1.0)
    state = {**run.scheduler.state_dict(), "last_epoch": 100}
    run.scheduler.load_state_dict(state)
    run.step_at(3.0)
    assert run.scheduler.last_epoch == 102
    run.step_at(0.0)
    assert run.scheduler.last_epoch == 100


class Counting:
    """A scheduler of one's own, which has no state to put back."""

    def __init__(self):
        self.steps = 0

    def step(self):
        self.steps += 1


def test_one_without_a_state_waits_until_the_run_is_there_again():
    counting = Counting()
    follower = RunScheduler(counting, optimizer_of(), lambda: 0.0)
    for rounds_done, steps in ((3.0, 3), (1.0, 3), (2.5, 3), (4.0, 4)):
        follower.move_to(rounds_done)
        assert counting.steps == steps


@pytest.mark.parametrize("wrapped", ["class", "attribute", "namespace"])
def test_whatever_has_a_step_can_follow(wrapped):
    counting = Counting()
    scheduler = counting
    if wrapped == "attribute":
        counting.step = counting.step
    elif wrapped == "namespace":
        scheduler = types.SimpleNamespace(step=counting.step)
    RunScheduler(scheduler, optimizer_of(), lambda: 3.0)
    scheduler.step()
    scheduler.step()
    assert counting.steps == 3


def test_what_cannot_follow_is_refused():
    with pytest.raises(OptionError, match="int has none"):
        RunScheduler(3, optimizer_of(), lambda: 0.0)
    with pytest.raises(OptionError, match="ReduceLROnPlateau decides by a metric"):
        RunScheduler(lr_scheduler.ReduceLROnPlateau(optimizer_of()), optimizer_of(), lambda: 0.0)


# -- an ordinary object ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_its_state_is_that_of_any_scheduler(kind):
    plain = SCHEDULERS[kind](optimizer_of())
    run = Run(SCHEDULERS[kind])
    assert isinstance(run.scheduler, type(plain))
    assert type(run.scheduler).__name__ == type(plain).__name__
    assert run.scheduler.state_dict() == plain.state_dict()
    saved = io.BytesIO()
    torch.save(run.scheduler.state_dict(), saved)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_a_copy_counts_its_own_calls(copied):
    run = Run(SCHEDULERS["exponential"])
    run.step_at(2.0)
    other = copied(run.scheduler)
    assert type(other) is lr_scheduler.ExponentialLR
    other.optimizer._opt_called = True
    other.step()
    assert (other.last_epoch, run.scheduler.last_epoch) == (3, 2)
    assert other.optimizer is not run.optimizer


def test_a_prepared_optimizer_can_be_copied_and_saved():
    with worker(Conversation(LAST)) as session:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        session.prepare(model, optimizer, scheduler)
        for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert type(other) is torch.optim.SGD
            assert "step" not in vars(other)
            assert "zero_grad" not in vars(other)
            other.step()  # its own, outside of any loop
        saved = io.BytesIO()
        torch.save([optimizer.state_dict(), scheduler.state_dict()], saved)
        saved.seek(0)
        rates, place = torch.load(saved)
        assert (rates["param_groups"][0]["lr"], place["last_epoch"]) == (0.5, 0)


# -- in a run ----------------------------------------------------------------------------------------------------------


def pushed_rates(link, keeps=(), steps=math.inf):
    """The learning rates of a script's pushes, which steps its scheduler after each of the first so many."""
    with worker(link) as session:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        things = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        for name in keeps:
            session.keep(f"early {name}", things[name])
        session.prepare(model, optimizer, scheduler)
        for name in keeps:
            session.keep(name, things[name])
        for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=5)):
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()
            if number < steps:
                scheduler.step()
    return [push.gradient.options[0]["lr"] for push in link.sent_of(Push)]


@pytest.mark.parametrize("region", [False, True])
@pytest.mark.parametrize(("steps", "places"), [(math.inf, [0, 3, 6, 2, 5]), (2, [0, 3, 6, 2, 2])])
def test_a_server_that_went_back_takes_the_learning_rate_with_it(region, steps, places):
    rounds = [0.0, 3.0, 6.0]
    link = Conversation(
        *[work(ticket, 5, rounds_done=rounds_done) for ticket, rounds_done in enumerate(rounds, 1)],
        Lost,
        *[work(ticket, 5, rounds_done=rounds_done) for ticket, rounds_done in enumerate([2.0, 5.0], 4)],
        LAST,
        region=region,
    )
    assert pushed_rates(link, steps=steps) == [0.5**place for place in places]


def test_what_the_run_restores_may_be_kept_and_is_restored_once():
    """A state loaded into scheduler or optimizer besides would count twice; one loaded into the model would overwrite
    the version that was granted."""
    keeps = ("model", "optimizer", "scheduler")
    first = Conversation(work(1, 5), work(2, 5, rounds_done=4.0, save=7), LAST, region=True)
    assert pushed_rates(first, keeps) == [1.0, 0.5**4]
    (state,) = first.sent_of(SavedState)
    assert unpack(state.data)["kept"] == {}
    again = Conversation(
        lambda link: work(2, 5, rounds_done=4.0, parameters=link.version(2, 0.25)),
        work(3, 5, rounds_done=5.0),
        LAST,
        region=True,
        welcomes=[{"state": state.data}],
    )
    assert pushed_rates(again, keeps) == [0.5**4, 0.5**5]
    assert all(bool((part == 0.25).all()) for part in again.region.parameters)


def test_an_optimizer_without_a_scheduler_is_kept_like_anything_else():
    def script(link, rate):
        with worker(link) as session:
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            session.prepare(model, optimizer)
            session.keep("optimizer", optimizer)
            if rate is not None:
                optimizer.param_groups[0]["lr"] = rate
            for x, y, _ in session.batches(ROWS, batch_size=5):
                optimizer.zero_grad()
                mean_square(model, x, y).backward()
                optimizer.step()
        return [push.gradient.options[0]["lr"] for push in link.sent_of(Push)]

    first = Conversation(work(1, 5, save=7), LAST)
    assert script(first, 0.125) == [0.125]
    (state,) = first.sent_of(SavedState)
    assert script(Conversation(work(1, 5), LAST, welcomes=[{"state": state.data}]), None) == [0.125]
