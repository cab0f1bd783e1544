"""Collective calls in virtual time and alone: what comes back, who is waited for, what is an error and not a hang."""

import numpy as np
import pytest
import torch
from clusters import Rows, cluster, event, mean_square, network
from one_worker import Conversation, worker

import paceline
from paceline.core.errors import OptionError, UserError
from paceline.server import collectives
from paceline.transport.base import Lost
from paceline.transport.messages import CollectiveAnswer, CollectiveCall, CollectiveKept, Hello
from paceline.transport.value_codec import pack_value

THREE = (1.0, 1.0, 0.3)


def launch(train, speeds=THREE, events="", **settings):
    return paceline.launch(train, engine="sim", scenario=cluster(*speeds, events=events), **settings)


def start(session):
    model = network()
    return session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))


def loop(session, model, optimizer, epochs=1, leave_after=None):
    passes = 0
    for x, y, _ in session.batches(Rows(48), batch_size=4, epochs=epochs):
        optimizer.zero_grad()
        mean_square(model, x, y).backward()
        optimizer.step()
        passes += 1
        if passes == leave_after:
            break
    return passes


def test_a_script_alone_gets_its_own_value():
    session = paceline.init()
    given = {"loss": 2, "parts": (1.5, torch.tensor([1.0, 2.0]))}
    (back,) = session.gather(given)
    assert back == {"loss": 2, "parts": [1.5, back["parts"][1]]}
    assert torch.equal(back["parts"][1], given["parts"][1])
    assert back["parts"][1] is not given["parts"][1]
    assert session.mean(3) == 3.0
    session.barrier()
    model, optimizer = start(session)
    passes = loop(session, model, optimizer)
    assert session.gather(passes) == [12]


@pytest.mark.parametrize("strategy", ["bsp", "asp", "ssp", "gossip", "local_sgd", "elastic"])
def test_all_workers_get_all_values_before_between_and_after_loops(strategy):
    found = {}

    def train():
        session = paceline.init()
        mine = found[session.worker] = []
        mine.append(session.gather([session.worker, "words"]))
        model, optimizer = start(session)
        mine.append(session.mean(session.worker))
        for _ in range(2):
            passes = loop(session, model, optimizer)
            session.barrier()
            mine.append(sum(session.gather(passes)))
        mine.append(session.mean({"a": torch.full((2,), float(session.worker)), "b": [session.worker == 0]}))

    launch(train, strategy=strategy)
    assert sorted(found) == [0, 1, 2]
    for mine in found.values():
        assert mine[:4] == [[[0, "words"], [1, "words"], [2, "words"]], 1.0, 12, 12]
        assert mine[4]["a"].tolist() == [1.0, 1.0]
        assert mine[4]["b"] == [pytest.approx(1 / 3)]


def test_a_mean_of_tensors_keeps_their_type_and_whole_numbers_become_double():
    found = {}
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
    whole = [torch.int8, torch.int64, torch.bool]

    def train():
        session = paceline.init()
        one = torch.tensor([session.worker > 0])
        found[session.worker] = session.mean([one.to(kind) for kind in kinds + whole])

    launch(train)
    for mine in found.values():
        assert [tensor.dtype for tensor in mine] == [*kinds, *[torch.float64] * 3]
        for tensor in mine:
            assert complex(tensor).real == pytest.approx(2 / 3, rel=1e-2)
    assert found[0][0] is not found[1][0]  # else one worker's change would show in another


def test_inside_a_loop_it_is_an_error_that_says_what_to_do():
    for call in ("mean", "gather", "barrier"):

        def train(call=call):
            session = paceline.init()
            model, optimizer = start(session)
            for _ in session.batches(Rows(48), batch_size=4):
                getattr(session, call)(*([] if call == "barrier" else [1]))
            optimizer.zero_grad(model)

        with pytest.raises(UserError, match=rf"{call}\(\) inside a batches\(\) or steps\(\) loop: .* after the loop"):
            launch(train)


def test_after_leaving_a_loop_early_a_worker_waits_for_the_others():
    found = {}

    def train():
        session = paceline.init()
        model, optimizer = start(session)
        passes = loop(session, model, optimizer, leave_after=2 if session.worker == 1 else None)
        found[session.worker] = session.gather(passes)

    launch(train)
    assert found[0] == found[1] == found[2]
    assert found[0][1] == 2
    assert sum(found[0]) >= 12


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("another call", r"worker 0 waits in mean\(\), call 1 of its script, worker 1 in gather\(\), call 1"),
        ("prepare", r"worker 0 waits in mean\(\), call 1 of its script, and worker 1 has come to prepare\(\)"),
        ("loop", r"worker 0 waits in mean\(\), call 1 of its script, and worker 1 has come to its next loop"),
        ("end", r"worker 0 waits in mean\(\), call 1 of its script, and the script of worker 1 has ended without it"),
        ("table", r"worker 0 waits in mean\(\), call 1 of its script, and worker 1 has come to table\(\)"),
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["worker 0 first", "worker 1 first"])
def test_workers_that_do_different_things_are_an_error(where, message, first):
    def train():
        session = paceline.init()
        prepared = start(session) if where == "loop" else None
        other = session.worker == 1
        if not first and where != "loop":  # virtual workers run in turn: let worker 0 begin when worker 1 waits
            other = session.worker == 0
        if not other:
            session.mean(1.0)
        elif where == "another call":
            session.gather(1.0)
        elif where == "prepare":
            start(session)
        elif where == "loop":
            loop(session, *prepared)
        elif where == "table":
            session.table("t", 4)

    if not first and where != "loop":
        message = message.replace("worker 0", "W").replace("worker 1", "worker 0").replace("W", "worker 1")
        if where == "another call":
            message = r"worker 0 waits in gather\(\), call 1 of its script, worker 1 in mean\(\), call 1"
    with pytest.raises(UserError, match=message + r".*same calls of mean\(\), gather\(\) and barrier\(\) in the same"):
        launch(train, speeds=(1.0, 1.0))


def test_a_worker_that_crashes_is_no_longer_waited_for():
    found = {}

    def train():
        session = paceline.init()
        model, optimizer = start(session)
        passes = loop(session, model, optimizer, epochs=4)
        found[session.worker] = session.gather([session.worker, passes])

    launch(train, events=event("crash", 0.5, worker=1))
    assert sorted(found) == [0, 2]
    assert found[0] == found[2]
    assert [worker for worker, _ in found[0]] == [0, 2]


def test_a_value_of_a_worker_that_dies_while_it_waits_is_left_out():
    found = {}

    def train():
        session = paceline.init()
        model, optimizer = start(session)
        loop(session, model, optimizer, epochs=4, leave_after=1 if session.worker == 1 else None)
        found[session.worker] = session.gather(session.worker)

    launch(train, events=event("crash", 0.5, worker=1))
    assert found == {0: [0, 2], 2: [0, 2]}


def test_a_worker_that_comes_back_or_joins_late_gets_the_answers_of_the_others():
    found = {}

    def train():
        session = paceline.init()
        first = session.gather(session.worker)
        model, optimizer = start(session)
        second = session.mean(float(session.worker))
        passes = loop(session, model, optimizer, epochs=8)
        found.setdefault(session.worker, []).append((first, second, session.gather([session.worker, passes])))

    events = event("crash", 0.2, worker=1) + event("rejoin", 0.4, worker=1) + event("join", 0.5, count=1)
    launch(train, events=events)
    assert sorted(found) == [0, 1, 2, 3]
    for (mine,) in found.values():
        assert mine[:2] == ([0, 1, 2], 1.0)
        assert [worker for worker, _ in mine[2]] == [0, 1, 2, 3]


def test_answers_beyond_the_limit_are_dropped_and_asking_for_them_is_an_error(monkeypatch):
    monkeypatch.setattr(collectives, "KEPT_BYTES", 1 << 20)

    def train():
        session = paceline.init()
        session.gather(torch.zeros(50_000))  # 3 of them take 0.6 MB
        session.gather(torch.zeros(50_000))
        loop(session, *start(session), epochs=8)

    events = event("crash", 0.2, worker=1) + event("rejoin", 0.4, worker=1)
    with pytest.raises(UserError, match=r"worker 1 asks for the answer to call 1 of its script, gather\(\).* 1 MiB"):
        launch(train, events=events)


def test_after_the_run_is_over_calls_still_work():
    found = {}

    def train():
        session = paceline.init()
        model, optimizer = start(session)
        for _ in range(3):
            passes = loop(session, model, optimizer)
            found.setdefault(session.worker, []).append(session.mean(passes))

    run = launch(train, max_versions=3)
    assert run.ended == "limit"
    assert found[0] == found[1] == found[2]
    assert [value > 0 for value in found[0]] == [True, False, False]


def test_values_that_differ_in_form_name_the_place_and_both_workers():
    def train():
        session = paceline.init()
        session.mean({"loss": [1.0] * (1 + session.worker)})

    expected = r"mean\(\): value\['loss'\] is a list of 2 in worker 1 and a list of 1 in worker 0"
    with pytest.raises(OptionError, match=expected):
        launch(train)


def test_what_has_no_mean_is_refused_where_it_stands():
    session = paceline.init()
    with pytest.raises(OptionError, match=r"mean\(\): value\['a'\]\[1\] is text, which has no mean"):
        session.mean({"a": [1, "b"]})
    with pytest.raises(OptionError, match=r"mean\(\): value is None"):
        session.mean(None)
    with pytest.raises(OptionError, match=r"gather\(\): value\[0\] is a ndarray, which is not sent; give numbers"):
        session.gather([np.zeros(3)])
    assert session.gather(1) == [1]  # a refused call does not count


def test_on_tables_calls_come_before_the_work_and_barrier_keeps_its_meaning():
    found = {}

    def train():
        session = paceline.init()
        width = max(session.gather(1 + session.worker))
        table = session.table("sums", 2, width)
        session.mean(1.0)
        table.inc(0, np.ones(width, dtype=np.float32))
        session.clock()
        session.barrier()
        found[session.worker] = table.get(0).tolist()
        session.mean(1.0)

    with pytest.raises(UserError, match=r"mean\(\) after the work on tables has begun: .* share the value in a table"):
        launch(train, strategy="ssp:staleness=3")
    assert [3.0, 3.0, 3.0] in found.values()


# -- a server that is lost --------------------------------------------------------------------------------------------


def answer(number, *values):
    packed = [pack_value(value, "test") for value in values]
    return CollectiveAnswer(number, "gather", [p.data for p in packed], [p.tensors for p in packed])


def test_a_call_is_repeated_to_a_restarted_server_after_the_last_answer():
    endpoint = Conversation(answer(0, 7), Lost, answer(1, 8), Lost, answer(2, 9))
    with worker(endpoint) as session:
        assert session.gather(1) == [7]
        assert session.gather(2) == [8]
        start(session)
        assert session.gather(3) == [9]
    kinds = [type(message) for message in endpoint.sent]
    assert kinds == [
        CollectiveCall, CollectiveCall, CollectiveKept, CollectiveCall,  # before `prepare`
        Hello, CollectiveCall, CollectiveKept, Hello, CollectiveCall,
    ]  # fmt: skip
    assert [message.number for message in endpoint.sent if not isinstance(message, Hello)] == [0, 1, 0, 1, 2, 1, 2]


def test_a_restarted_server_passes_a_lost_answer_on():
    sent = {}
    engine = type("Engine", (), {"send": lambda _, worker, message: sent.setdefault(worker, message)})()
    workers = type("Table", (), {"records": {}, "alive": {0, 1}, "waiting": {}})()
    run = type("Run", (), {"engine": engine, "workers": workers, "has_come": lambda *_: None, "resumption": None})()
    calls = collectives.Collectives(run)
    calls.on_call(0, object(), CollectiveCall(2, "gather", *pack_value(5, "test")))
    given = answer(2, 5, 6)
    calls.on_kept(CollectiveKept(given.number, given.call, given.values, given.tensors))
    assert sent == {0: given}
    with pytest.raises(UserError, match=r"worker 1 asks for the answer to call 2 .* restarted server the last one"):
        calls.on_call(1, object(), CollectiveCall(1, "gather", b"", []))
    with pytest.raises(UserError, match=r"worker 1 calls mean\(\) as call 3 .* where the others called gather\(\)"):
        calls.on_call(1, object(), CollectiveCall(2, "mean", b"", []))
