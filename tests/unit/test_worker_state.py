"""What a checkpoint holds of a worker: its random generators and what its script keeps, put back at their moment."""

import random

import numpy as np
import pytest
import torch
from clusters import Rows, mean_square, network
from one_worker import Conversation, work, worker

from paceline.core.errors import OptionError
from paceline.transport.messages import Over, Push, SavedState, Standing
from paceline.worker.state_codec import unpack

ROWS = Rows()
LAST = Over(0, None, 3.0, run_over=True)


@pytest.fixture(params=[False, True], ids=["memory", "region"])
def talk(request):
    return lambda *answers, **options: Conversation(*answers, region=request.param, **options)


class Counter:
    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def draw():
    return (float(torch.rand(())), float(np.random.rand()), random.random())


def drawing(link, early=True):
    """A script that draws for every batch and counts them."""
    drawn, counter = [], Counter()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    with worker(link) as session:
        if early:
            session.keep("counter", counter)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer)
        if not early:
            session.keep("counter", counter)
        for phase in range(2):
            for x, y, _ in session.batches(ROWS, batch_size=5):
                counter.count += 1
                drawn.append((phase, counter.count, *draw()))
                optimizer.zero_grad()
                mean_square(model, x, y).backward()
                optimizer.step()
            drawn.append((phase, "between", *draw()))
            counter.count += 100
    return drawn


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("at", ["first", "second", "over", "next phase"])
def test_a_resumed_worker_goes_on_as_if_never_interrupted(talk, at, early):
    tags = {"first": 1, "second": 2, "over": "over", "next phase": 3}

    def save(tag):
        return 9 if tags[at] == tag else None

    link = talk(
        work(1, 5, save=save(1)), work(2, 5, save=save(2)), Over(0, None, 1.0, save=save("over")),
        work(3, 5, save=save(3)), LAST,
    )  # fmt: skip
    whole = drawing(link, early)
    (state,) = link.sent_of(SavedState)
    assert state.number == 9
    before = [type(m) for m in link.sent[: link.sent.index(state)]]
    assert before.count(Push) == {"first": 0, "second": 1, "over": 2, "next phase": 2}[at]

    left = {"first": [work(1, 5), work(2, 5)], "second": [work(2, 5)], "over": [], "next phase": []}[at]
    again = talk(*left, Over(0, None, 1.0), work(3, 5), LAST, welcomes=[{"state": state.data}])
    resumed = drawing(again, early)
    tail = {"first": 5, "second": 4, "over": 3, "next phase": 2}[at]
    assert resumed[-tail:] == whole[-tail:]


def test_the_state_that_is_sent(talk):
    link = talk(work(1, 5, save=4), LAST)
    with worker(link) as session:
        session.keep("counter", Counter())
        model = network()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        list(session.batches(ROWS, batch_size=5))
    (state,) = link.sent_of(SavedState)
    plain = unpack(state.data)
    assert (plain["phase"], plain["over"], plain["kept"]) == (0, False, {"counter": {"count": 0}})


@pytest.mark.parametrize("run_over", [False, True])
def test_a_run_that_ends_in_mid_phase_is_resumed_in_it(talk, run_over):
    link = talk(work(1, 5), Over(0, None, 1.0, run_over=run_over, save=4), LAST)
    drawing(link)
    (state,) = link.sent_of(SavedState)
    plain = unpack(state.data)
    assert (plain["phase"], plain["over"]) == (0, not run_over)


@pytest.mark.parametrize(
    ("name", "thing", "message"),
    [
        ("", Counter(), "name that is not empty, not ''"),
        (3, Counter(), "name that is not empty, not 3"),
        ("taken", Counter(), "two objects called 'taken'"),
        ("list", [1], "state_dict.* which list has not"),
    ],
)
def test_what_cannot_be_kept(talk, name, thing, message):
    with worker(talk()) as session:
        session.keep("taken", Counter())
        with pytest.raises(OptionError, match=message):
            session.keep(name, thing)


@pytest.mark.parametrize("rounds_done", [0.0, 2.5])
def test_the_first_push_has_the_learning_rate_of_the_runs_rounds(talk, rounds_done):
    stepped = Standing(stepped=("ExponentialLR",))
    link = talk(
        Over(0, None, rounds_done, standing=stepped),
        work(1, 5, rounds_done=rounds_done, standing=Standing(began=rounds_done)), LAST,
    )  # fmt: skip

    def scheduler(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    with worker(link) as session:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer, scheduler(optimizer))
        for _ in range(2):
            for x, y, _ in session.batches(ROWS, batch_size=5):
                optimizer.zero_grad()
                mean_square(model, x, y).backward()
                optimizer.step()
    (push,) = link.sent_of(Push)
    assert push.gradient.options[0]["lr"] == 0.5 ** int(rounds_done)
