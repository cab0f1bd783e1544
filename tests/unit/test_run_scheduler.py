"""Schedulers stand where the run does, forward and back, and stay ordinary objects."""

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

from paceline.core.errors import OptionError, UserError
from paceline.transport.base import Lost
from paceline.transport.messages import (
    EvaluationsAsked,
    EvaluationsHeld,
    Over,
    Push,
    Remark,
    SavedState,
    SchedulerStepped,
    Standing,
)
from paceline.worker.run_position import RunPosition
from paceline.worker.run_scheduler import RunPlateau, RunScheduler
from paceline.worker.schedules import schedulers_on
from paceline.worker.state_codec import pack, unpack

ROWS = Rows()
LAST = Over(0, None, 3.0, run_over=True)
LAST_OF_TWO = Over(1, None, 8.0, run_over=True, standing=Standing(began=4.0))

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


def note(position, rounds_done=0.0, *, granted=True, **standing):
    """Let the position know of a grant or of the loop's end."""
    position.rounds, position.standing = rounds_done, Standing(**standing)
    position.granted = position.granted or granted


class Run:
    """A scheduler and the rounds that it follows."""

    def __init__(self, make, rate=0.1):
        self.optimizer = optimizer_of(rate)
        self.scheduler = make(self.optimizer)
        self.position = RunPosition()
        self.told, self.remarks = [], []
        self.follower = RunScheduler(
            type(self.scheduler).__name__, self.scheduler, self.optimizer, self.position, self.told.append,
            self.remarks.append,
        )  # fmt: skip

    def step_at(self, rounds_done):
        """Step it inside the first loop."""
        self.loop(0)
        self.grant(rounds_done)
        self.position.steps += 1
        self.scheduler.step()
        return options(self.optimizer), self.scheduler.get_last_lr()

    def loop(self, phase):
        if self.position.phase != phase:
            self.position.enter(phase)

    def grant(self, rounds_done, **standing):
        note(self.position, rounds_done, **standing)
        self.follower.on_standing(granted=True)

    def over(self, rounds_done, **standing):
        """End the loop."""
        note(self.position, rounds_done, granted=False, **standing)
        self.follower.on_standing(granted=False)
        self.position.inside = False

    @property
    def steps(self):
        return self.scheduler.last_epoch


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
    run = Run(lambda _: Counting())
    for rounds_done, steps in ((3.0, 3), (1.0, 3), (2.5, 3), (4.0, 4)):
        run.loop(0)
        run.grant(rounds_done)
        run.scheduler.step()
        assert run.scheduler.steps == steps


@pytest.mark.parametrize("wrapped", ["class", "attribute", "namespace"])
def test_whatever_has_a_step_can_follow(wrapped):
    counting = Counting()
    scheduler = counting
    if wrapped == "attribute":
        counting.step = counting.step
    elif wrapped == "namespace":
        scheduler = types.SimpleNamespace(step=counting.step)
    run = Run(lambda _: scheduler)
    run.loop(0)
    run.grant(3.0)
    scheduler.step()
    scheduler.step()
    assert counting.steps == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scheduler": 3}, "int has none"),
        ({"plateau": "loss"}, "plateau='loss' needs a ReduceLROnPlateau"),
        ({"plateau": 3}, "the name of a number that evaluate\\(\\) returns, not 3"),
        ({"plateau": "loss", "evaluate": lambda _: {}}, "needs a ReduceLROnPlateau as scheduler"),
    ],
)
def test_what_cannot_follow_is_refused(given, message):
    with worker(Conversation(LAST)) as session, pytest.raises(OptionError, match=message):
        session.prepare(network(), optimizer_of(), **given)


# -- where step() is called --------------------------------------------------------------------------------------------


def test_between_loops_every_call_is_one_step():
    run = Run(SCHEDULERS["cosine"])
    for phase in range(4):
        run.loop(phase)
        run.grant(100.0 * phase, began=100.0 * phase)
        assert run.steps == phase
        run.over(100.0 * (phase + 1), began=100.0 * phase)
        run.scheduler.step()
    assert (options(run.optimizer), run.scheduler.get_last_lr()) == stepped(SCHEDULERS["cosine"], 4)
    assert (run.told, run.remarks) == ([], [])


def test_nothing_is_stepped_before_a_step_was_seen():
    run = Run(SCHEDULERS["exponential"])
    run.loop(0)
    run.grant(50.0)
    run.grant(60.0)
    assert run.steps == 0


def test_a_newcomer_stands_where_the_others_do_before_its_first_push():
    others, newcomer = Run(SCHEDULERS["sequence"]), Run(SCHEDULERS["sequence"])
    others.step_at(7.5)
    assert others.told == ["SequentialLR"]
    newcomer.loop(0)
    newcomer.grant(7.5, stepped=("SequentialLR",))
    assert newcomer.steps == others.steps == 7
    assert newcomer.told == []


def test_one_that_only_others_step_follows_their_word():
    """A script may step it on worker 0 alone: the rate travels with each push, so all need it."""
    run = Run(SCHEDULERS["exponential"])
    run.loop(0)
    for rounds_done, steps in ((0.5, 0), (2.0, 2), (5.5, 5), (3.0, 3)):
        run.grant(rounds_done, stepped=("ExponentialLR",) if rounds_done > 1 else ())
        assert run.steps == steps
    assert run.told == []


def test_a_server_that_went_back_is_told_again():
    run = Run(SCHEDULERS["exponential"])
    run.step_at(4.0)
    run.grant(6.0)
    assert (run.steps, run.told) == (4, ["ExponentialLR"])
    run.grant(2.0)
    assert (run.steps, run.told) == (2, ["ExponentialLR"] * 2)


def test_phases_in_whose_loops_it_was_stepped_count_by_their_rounds():
    """A warm-up by rounds, then a schedule by epochs; one worker is there from the start, one comes in the third."""
    member, newcomer = Run(SCHEDULERS["exponential"]), Run(SCHEDULERS["exponential"])
    member.step_at(1.0)
    member.step_at(2.0)
    member.over(4.5, stepped=("ExponentialLR",))
    assert member.steps == 4
    member.loop(1)
    member.grant(4.5, began=4.5)
    assert member.steps == 4
    member.over(9.0, began=4.5)
    member.scheduler.step()
    for phase, ended in (
        (0, {"rounds_done": 4.5, "stepped": ("ExponentialLR",)}),
        (1, {"rounds_done": 9, "began": 4.5}),
    ):
        newcomer.loop(phase)
        newcomer.over(**ended)
    newcomer.scheduler.step()
    for run in (member, newcomer):
        run.loop(2)
        run.grant(10.0, began=9.0)
        assert run.steps == 5


def test_a_phase_that_another_worker_ends_counts_whole_for_one_that_left_it():
    run = Run(SCHEDULERS["exponential"])
    run.step_at(2.0)
    run.position.inside = False  # it broke out of the loop, and the others went on
    run.loop(1)
    run.grant(8.0, began=8.0)
    assert run.steps == 8


def test_calls_inside_a_loop_whose_phase_is_over_change_nothing():
    run = Run(SCHEDULERS["exponential"])
    run.loop(0)
    run.scheduler.step()
    run.over(6.0)
    assert (run.steps, run.told) == (0, [])


def test_a_cycle_is_not_stepped_beyond_its_end():
    run = Run(SCHEDULERS["one cycle"])
    run.step_at(25.0)
    assert run.steps == 20


def test_a_place_that_the_script_names_is_taken():
    run = Run(SCHEDULERS["restarts"])
    run.loop(0)
    run.grant(7.0)
    run.scheduler.step(1.5)
    assert run.scheduler.T_cur == 1.5


def test_a_scheduler_that_counts_something_else_inside_a_loop_is_remarked_upon():
    run = Run(SCHEDULERS["exponential"])
    run.step_at(1.0)
    assert run.remarks == []
    run.position.steps += 9
    run.step_at(11.0)
    assert "not called after every optimizer.step()" in run.remarks[0]


# -- by a metric -------------------------------------------------------------------------------------------------------


def plateau_of(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)


def by_metrics(values):
    optimizer = optimizer_of()
    scheduler = plateau_of(optimizer)
    for value in values:
        scheduler.step(value)
    return options(optimizer), scheduler.state_dict()


def test_a_plateau_follows_the_evaluations_forward_and_back():
    values = [3.0, 2.0, 2.5, 2.5, 2.5, 2.5, 1.0, 1.5, 1.5]
    optimizer = optimizer_of()
    scheduler, position, remarks = plateau_of(optimizer), RunPosition(), []
    follower = RunPlateau(scheduler, optimizer, position, lambda start: values[start:], remarks.append)
    for known in (1, 4, 9, 5, 5, 9):
        note(position, evaluations=known)
        follower.on_standing(granted=True)
        scheduler.step(100.0)  # the script's own metric
        assert (options(optimizer), scheduler.state_dict()) == by_metrics(values[:known])
    assert "its own step() does nothing" in remarks[0]


def test_a_plateau_without_evaluations_takes_the_scripts_metrics_between_loops():
    optimizer = optimizer_of()
    scheduler, position = plateau_of(optimizer), RunPosition()
    follower = RunPlateau(scheduler, optimizer, position, None, print)
    for value in (2.0, 3.0, 3.0):
        scheduler.step(value)
    assert (options(optimizer), scheduler.state_dict()) == by_metrics([2.0, 3.0, 3.0])
    position.enter(0)
    scheduler.step(7.0)  # a phase that is over
    note(position)
    with pytest.raises(UserError, match="inside a loop: every worker would have a metric of its own"):
        scheduler.step(7.0)
    assert (options(optimizer), scheduler.state_dict()) == by_metrics([2.0, 3.0, 3.0])
    saved, other = follower.state_dict(), optimizer_of()
    again = plateau_of(other)
    RunPlateau(again, other, RunPosition(), None, print).load_state_dict(unpack(pack(saved)))
    assert (options(other), again.state_dict()) == by_metrics([2.0, 3.0, 3.0])


# -- found on the optimizer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_the_outermost_scheduler_of_an_optimizer_is_found(kind):
    optimizer, other = optimizer_of(), optimizer_of()
    made, _ = SCHEDULERS[kind](optimizer), SCHEDULERS[kind](other)
    plateau = plateau_of(optimizer)
    assert schedulers_on(optimizer) == [made]
    assert plateau.optimizer is optimizer


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
    seen = Standing(stepped=("ExponentialLR",))
    again = Conversation(
        lambda link: work(2, 5, rounds_done=4.0, parameters=link.version(2, 0.25), standing=seen),
        work(3, 5, rounds_done=5.0, standing=seen),
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


def test_a_scheduler_that_was_not_given_is_found_at_the_next_loop():
    second = work(3, 5, rounds_done=4.0, standing=Standing(began=4.0))
    last = Over(1, None, 5.0, run_over=True, standing=Standing(began=4.0))
    link = Conversation(work(1, 5), work(2, 5, rounds_done=3.0), Over(0, None, 4.0), second, last)
    rates = []
    with worker(link) as session:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        session.keep("optimizer", optimizer)
        for _ in range(2):
            for x, y, _ in session.batches(ROWS, batch_size=5):
                optimizer.zero_grad()
                mean_square(model, x, y).backward()
                optimizer.step()
                scheduler.step()
                rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.5**3, 0.5**4, 0.5**5]
    assert link.sent_of(SchedulerStepped) == [
        SchedulerStepped(0, "ExponentialLR"),
        SchedulerStepped(1, "ExponentialLR"),
    ]


def test_two_of_a_kind_each_go_by_their_own_calls():
    """Their names tell nothing apart, so nothing is said of them."""
    link = Conversation(work(1, 5), work(2, 5, rounds_done=3.0), Over(0, None, 4.0), LAST)
    with worker(link) as session:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer)
        by_round, by_epoch = lr_scheduler.ExponentialLR(optimizer, 0.5), lr_scheduler.ExponentialLR(optimizer, 0.25)
        for x, y, _ in session.batches(ROWS, batch_size=5):
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()
            by_round.step()
        by_epoch.step()
    assert (by_round.last_epoch, by_epoch.last_epoch) == (4, 1)
    assert optimizer.param_groups[0]["lr"] == 0.5**4 * 0.25
    assert link.sent_of(SchedulerStepped) == []


def test_evaluations_are_asked_for_when_there_are_new_ones():
    values = [4.0, 3.0, 3.0, 3.0]

    class Server(Conversation):
        def send(self, message):
            super().send(message)
            if isinstance(message, EvaluationsAsked):
                self.answers.appendleft(EvaluationsHeld(values[message.start : self.known]))

        known = 0

    def grant(ticket, known):
        def made(link):
            link.known = known
            return work(ticket, 5, standing=Standing(evaluations=known))

        return made

    link = Server(grant(1, 1), grant(2, 1), grant(3, 4), LAST)
    with worker(link) as session:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer, plateau_of(optimizer), evaluate=lambda _: {"loss": 0.0}, plateau="loss")
        for x, y, _ in session.batches(ROWS, batch_size=5):
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()
    assert link.sent_of(EvaluationsAsked) == [EvaluationsAsked(start, "loss") for start in (0, 0, 1)]
    assert [push.gradient.options[0]["lr"] for push in link.sent_of(Push)] == [1.0, 1.0, 0.5]
    assert link.sent_of(Remark) == []


def test_a_scheduler_built_for_a_later_loop_starts_there_and_the_earlier_one_rests():
    first = work(1, 5, rounds_done=0.0)
    ended = Over(0, None, 4.0, standing=Standing(stepped=("ExponentialLR",)))
    second = [work(n, 5, rounds_done=r, standing=Standing(began=4.0)) for n, r in ((2, 4.0), (3, 6.0))]
    member = Conversation(first, Over(0, None, 4.0), *second, LAST_OF_TWO)
    late = work(3, 5, rounds_done=6.0, standing=Standing(began=4.0, stepped=("ExponentialLR 2",)))
    newcomer = Conversation(ended, late, LAST_OF_TWO)
    for link, pushed in ((member, [1.0, 1.0, 0.25**2]), (newcomer, [0.25**2])):
        with worker(link) as session:
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            session.prepare(model, optimizer)
            for factor in (0.5, 0.25):
                for group in optimizer.param_groups:
                    group["lr"] = 1.0
                scheduler = lr_scheduler.ExponentialLR(optimizer, factor)
                for x, y, _ in session.batches(ROWS, batch_size=5):
                    optimizer.zero_grad()
                    mean_square(model, x, y).backward()
                    optimizer.step()
                    scheduler.step()
        assert [push.gradient.options[0]["lr"] for push in link.sent_of(Push)] == pushed
    names = [SchedulerStepped(0, "ExponentialLR"), SchedulerStepped(1, "ExponentialLR 2")]
    assert member.sent_of(SchedulerStepped) == names
