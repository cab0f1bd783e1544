"""The worker's part of the conversation: grants that are voided, emulated times, servers that go away, evaluation."""

import contextlib

import pytest
import torch
from clusters import Rows, mean_square, network
from one_worker import Conversation, rows, work, worker

from paceline.core.errors import ScriptError, UserError
from paceline.transport.base import Closed, Lost
from paceline.transport.messages import (
    Cancelled,
    Done,
    Evaluate,
    Evaluated,
    Extra,
    Hello,
    More,
    OptionAsked,
    Over,
    Push,
    Ready,
)

ROWS = Rows()
LAST = Over(0, None, 3.0, run_over=True)


@pytest.fixture(params=[False, True], ids=["memory", "region"])
def talk(request, monkeypatch):
    """Makes a conversation on whose clock the worker lives."""

    def make(*answers, **options):
        link = Conversation(*answers, region=request.param, **options)
        monkeypatch.setattr("paceline.worker.batch_loop.perf_counter", lambda: link.now)
        return link

    return make


def run(link, during=lambda number, indices: None, batch_size=5, scheduler=None, **given):
    """A script that notes which rows it was handed; `during` is called where it computes."""
    seen = []
    with worker(link, **given) as session:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer, scheduler(optimizer) if scheduler is not None else None)
        for number, (x, y, index) in enumerate(session.batches(ROWS, batch_size=batch_size, epochs=9)):
            seen.append(index.tolist())
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            during(number, seen)
            optimizer.step()
    return seen


def pushes(link):
    return [(push.ticket, push.samples) for push in link.sent_of(Push)]


# -- voided grants ---------------------------------------------------------------------------------------------------


def test_a_grant_that_is_voided_while_it_is_computed_is_not_pushed(talk):
    link = talk(work(1, 5), work(2, 5, start=5), LAST)

    def during(number, _):
        if number == 0:
            link.late.append((link.now, Cancelled(1)))

    assert run(link, during) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert pushes(link) == [(2, 5)]


def test_a_grant_of_several_pieces_ends_at_the_next_batch_or_step(talk):
    link = talk(work(1, 15), work(2, 5, start=30), LAST)

    def during(number, _):
        if number == 1:
            link.late.append((link.now, Cancelled(1)))

    assert run(link, during) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [30, 31, 32, 33, 34]]
    assert pushes(link) == [(2, 5)]


def test_a_script_that_makes_no_step_hears_of_it_at_the_next_batch(talk):
    link = talk(work(1, 15), work(2, 5, start=30), LAST)
    seen = []
    with worker(link) as session:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer)
        for _, _, index in session.batches(ROWS, batch_size=5):
            seen.append(int(index[0]))
            if len(seen) == 2:
                link.late.append((link.now, Cancelled(1)))
    assert seen == [0, 5, 30]
    assert pushes(link) == [(2, 0)]


def test_a_voided_grant_of_long_ago_and_a_push_that_crossed_it(talk):
    """Cancelled(1) crosses push 1: it says nothing about what comes after."""
    link = talk(work(1, 5), Cancelled(1), work(2, 5, start=5), LAST)

    def during(number, _):
        if number == 1:
            link.late.append((link.now, Cancelled(1)))

    assert len(run(link, during)) == 2
    assert pushes(link) == [(1, 5), (2, 5)]


def test_the_end_of_the_phase_may_come_in_mid_computation(talk):
    link = talk(work(1, 15))
    assert len(run(link, lambda *_: link.late.append((link.now, LAST)))) == 1
    assert pushes(link) == []
    assert not link.sent_of(Done)


def test_more_on_a_grant_that_was_voided_meanwhile(talk):
    link = talk(work(1, 5), Cancelled(1), work(2, 5, start=5), Extra(None), LAST)
    with worker(link) as session:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer)
        for x, y, _ in session.batches(ROWS, batch_size=5):
            mean_square(model, x, y).backward()  # it accumulates and never comes to its step
    assert [more.ticket for more in link.sent_of(More)] == [1, 2]
    assert pushes(link) == [(2, 5)]


# -- emulated times --------------------------------------------------------------------------------------------------


def test_computing_is_slept_up_to_its_modelled_time(talk):
    link = talk(work(1, 5, delay_s=2.0, compute_s=0.5), work(2, 5), LAST)
    times = []

    def during(*_):
        times.append(link.now)
        link.now += 0.125

    run(link, during)
    first, second = link.sent_of(Push)
    assert times == [102.0, 102.5]
    assert (first.compute_s, first.overrun_s) == (0.5, 0.0)
    assert (second.compute_s, second.overrun_s) == (0.125, 0.0)


@pytest.mark.parametrize("waited_s", [0.0, 7.0])
def test_times_count_from_when_the_grant_was_read_and_its_model_was_there(talk, waited_s):
    def grant(link):
        link.now += waited_s  # no clock of another machine says when it was sent
        return work(1, 5, delay_s=0.5, compute_s=2.0)

    link = talk(grant, LAST)
    times = []

    def during(*_):
        times.append(link.now)
        link.now += 0.125

    run(link, during)
    (push,) = link.sent_of(Push)
    assert times == [100.0 + waited_s + 0.5]
    assert (push.compute_s, push.overrun_s) == (2.0, 0.0)
    assert link.now == times[0] + 2.0


def test_computing_longer_than_modelled_is_an_overrun(talk):
    link = talk(work(1, 5, compute_s=0.5), LAST)

    def during(*_):
        link.now += 0.75

    run(link, during)
    (push,) = link.sent_of(Push)
    assert (push.compute_s, push.overrun_s) == (0.75, 0.25)


def test_further_samples_take_further_time(talk):
    link = talk(work(1, 5, compute_s=0.5), Extra(rows(5, 5), 0.25), LAST)
    with worker(link) as session:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer)
        for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=5)):
            (mean_square(model, x, y) / 2).backward()
            if number == 1:
                optimizer.step()
    (push,) = link.sent_of(Push)
    assert (push.samples, push.compute_s) == (10, 0.75)


@pytest.mark.parametrize("during", ["delay", "computing"])
def test_what_arrives_ends_the_sleep(talk, during):
    times = {"delay_s": 50.0} if during == "delay" else {"compute_s": 50.0}
    link = talk(work(1, 5, **times), work(2, 5, start=5), LAST, late=[(101.0, Cancelled(1))])
    seen = run(link)
    assert link.now == 101.0
    assert pushes(link) == [(2, 5)]
    assert len(seen) == (1 if during == "delay" else 2)


def test_grants_voided_in_their_delay_one_after_the_other_do_not_pile_up(talk):
    count = 3000
    link = talk(*[work(ticket, 5, delay_s=10.0) for ticket in range(1, count + 1)], LAST)
    link.late.extend((100.0 + ticket, Cancelled(ticket)) for ticket in range(1, count))
    run(link)
    assert pushes(link) == [(count, 5)]


# -- slots and versions ----------------------------------------------------------------------------------------------


def test_a_push_names_the_slot_it_was_granted(monkeypatch):
    link = Conversation(*[work(n, 5, slot=slot) for n, slot in enumerate([0, 1, 1, 0], 1)], LAST, region=True)
    run(link)
    assert [push.gradient.slot for push in link.sent_of(Push)] == [0, 1, 1, 0]


def test_the_model_is_the_granted_version(talk):
    values = []
    link = talk(*[lambda link, n=n: work(n, 5, parameters=link.version(n, 0.25 * n)) for n in (1, 2)], LAST)
    with worker(link) as session:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer)
        for x, y, _ in session.batches(ROWS, batch_size=5):
            values.append({float(value) for p in model.parameters() for value in p.detach().flatten()})
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()
    assert values == [{0.25}, {0.5}]


@pytest.mark.parametrize(
    ("answer", "refused"),
    [(work(2, 5, start=5), True), (Cancelled(1), False), (LAST, False), (Lost, False)],
    ids=["a grant", "void", "over", "lost"],
)
def test_a_version_written_while_the_worker_computes_is_no_edit_of_the_script(answer, refused):
    """Whoever voids a grant may have written the next version before the worker hears of it."""
    rest = [] if answer is LAST else [LAST] if refused else [work(2, 5, start=5), LAST]
    first = lambda link: work(1, 5, parameters=link.version(1, 0.25))
    link = Conversation(first, answer, *rest, region=True)

    def during(number, _):
        if number == 0:
            link.region.flat[0][:3] = 0.5

    with pytest.raises(UserError, match="beside the optimizer") if refused else contextlib.nullcontext():
        run(link, during)


def after_a_break(link):
    """The samples of each batch of a second phase, the first of which was left at its first batch."""
    with worker(link) as session:
        model = network()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for _ in session.batches(ROWS, batch_size=5):
            break
        return [len(index) for _, _, index in session.batches(ROWS, batch_size=5)]


def test_the_end_of_a_phase_that_the_script_had_left_is_not_that_of_the_next(talk):
    link = talk(work(1, 5), Over(0, None, 1.0), work(2, 5), Over(1, None, 2.0), LAST)
    assert after_a_break(link) == [5]
    assert pushes(link) == [(2, 0)]


def test_a_grant_of_a_phase_that_the_script_had_left_is_none_of_the_next(talk):
    link = talk(work(1, 5, phase=0), Cancelled(1), work(2, 4, phase=0), work(3, 5, phase=1), LAST)
    assert after_a_break(link) == [5]
    assert pushes(link) == [(3, 0)]


# -- a server that goes away -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["computing", "sleeping", "after the push", "asking for more"])
def test_a_lost_server_voids_the_grant_and_is_greeted_again(talk, when):
    lost = [Lost] if when in ("after the push", "asking for more") else []
    first = work(7, 5, compute_s=50.0 if when == "sleeping" else None)
    link = talk(first, *lost, work(1, 5, start=5), LAST)
    if when == "sleeping":
        link.late.append((101.0, Lost))

    def during(number, _):
        if number == 0 and when == "computing":
            link.late.append((link.now, Lost))

    if when == "asking for more":
        with worker(link) as session:
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            session.prepare(model, optimizer)
            for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=5)):
                mean_square(model, x, y).backward()
                if number:
                    optimizer.step()
    else:
        assert run(link, during) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert link.reconnects == 1
    kinds = [type(message) for message in link.sent_of(Hello, Ready)]
    assert kinds == [Hello, Ready, Hello, Ready]
    wanted = [(7, 5), (1, 5)] if when == "after the push" else [(1, 5)]
    assert pushes(link) == wanted


def test_a_server_lost_before_and_while_it_is_greeted(talk):
    link = talk(Lost, work(1, 5), LAST, welcomes=[Lost, {}, Lost, Lost, {}])
    assert len(run(link)) == 1
    assert link.reconnects == 4
    assert [type(m) for m in link.sent_of(Hello, Ready)] == [Hello, Hello, Ready, Hello, Hello, Hello, Ready]


def test_nobody_left_to_talk_to_ends_the_script(talk):
    with pytest.raises(Closed):
        run(talk(work(1, 5)))


# -- options, devices, evaluation ------------------------------------------------------------------------------------


def test_an_option_is_announced_once(talk):
    link = talk()
    with worker(link, options={"lr": "0.5"}) as session:
        assert [session.option("lr", 0.1), session.option("lr", 0.1), session.option("n", 3)] == [0.5, 0.5, 3]
    assert link.sent == [OptionAsked("lr"), OptionAsked("n")]


@pytest.mark.parametrize(("devices", "number", "wanted"), [(0, 1, "cpu"), (2, 0, "cuda:0"), (2, 3, "cuda:1")])
def test_the_device_of_a_worker(talk, monkeypatch, devices, number, wanted):
    monkeypatch.setattr("torch.cuda.is_available", lambda: devices > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices)
    with worker(talk(), worker=number, workers=4) as session:
        assert session.device == torch.device(wanted)
    with worker(talk(), worker=number, workers=4, device="cpu") as session:
        assert session.device == torch.device("cpu")


def evaluating(link, evaluate, workers=3):
    with worker(link, worker=workers, workers=workers, evaluator=True) as session:
        assert session.worker == workers
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1)).double()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), evaluate=evaluate)
    raise AssertionError("prepare() returned in the evaluator")


def test_the_evaluator_measures_versions_until_the_link_closes(talk):
    modes = []

    def evaluate(model):
        modes.append((model.training, torch.is_grad_enabled()))
        model.train()
        return {"value": model[1].weight[0, 0].item()}

    def asked(number, value):
        return lambda link: Evaluate(number, link.version(number, value))

    link = talk(asked(1, 0.5), Lost, asked(2, 0.25))
    with pytest.raises(Closed):
        evaluating(link, evaluate)
    assert link.sent_of(Evaluated) == [Evaluated(1, {"value": 0.5}), Evaluated(2, {"value": 0.25})]
    assert len(link.sent_of(Hello)) == 2
    assert link.reconnects == 1
    assert modes == [(False, False)] * 2


def test_without_a_function_there_is_nothing_to_evaluate(talk):
    link = talk()
    with worker(link, evaluator=True) as session:
        model = torch.nn.Linear(6, 1)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))  # a later call may bring one
        with pytest.raises(Closed):
            session.batches(range(3))
    assert link.sent == []


@pytest.mark.parametrize(
    ("evaluate", "message"),
    [(lambda _: 3, "numbers by name"), (lambda _: 1 / 0, "evaluate.. raised ZeroDivisionError")],
)
def test_a_function_that_fails_is_the_scripts_fault(talk, evaluate, message):
    link = talk(lambda link: Evaluate(1, link.version(1)))
    with pytest.raises(ScriptError, match=message):
        evaluating(link, evaluate)
