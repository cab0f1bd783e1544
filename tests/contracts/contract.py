"""What every transport promises. A transport is tested by giving `TransportContract` a way to make links."""

import copy
import threading
import time

import msgspec
import numpy as np
import pytest
import torch

from paceline.core.events import HostLoad
from paceline.core.ledger import Allotment
from paceline.model.mass_optimizer import OptimizerSpec
from paceline.model.regions import RegionLayout
from paceline.model.spec import ModelSpec
from paceline.model.store import Gradient, Parameters
from paceline.tables import messages as tables
from paceline.tables.table_spec import TableSpec
from paceline.transport.base import Closed
from paceline.transport.messages import (
    Cancelled,
    Done,
    Ended,
    Evaluate,
    Evaluated,
    Extra,
    Failed,
    Hello,
    More,
    Note,
    OptionAsked,
    Over,
    Push,
    Ready,
    Remark,
    SavedState,
    Stop,
    Welcome,
    Work,
)

PATIENCE_S = 30.0  # a message that takes longer was lost
LARGE = 3_000_000  # elements: more than any socket takes at once

SPEC = ModelSpec(
    (("weight", (300, 40), "torch.float32"), ("bias", (7,), "torch.float64"), ("half", (5,), "torch.bfloat16")),
    (("mean", (3,), "torch.float32"), ("count", (), "torch.int64"), ("empty", (0,), "torch.float32")),
    OptimizerSpec("Adam", ({"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "maximize": False},), ((0, 1, 2),)),
    (("weight", 0), ("bias", 1), ("half", 2), ("mean", 3)),
)


MATRIX = np.arange(30_000, dtype=np.float64).reshape(10_000, 3)
TABLE = TableSpec("t", 10_000, 3, "float64", 2, "add", True)
TABLE_MESSAGES_UP = [
    tables.OpenTable(TABLE),
    tables.TableInit(1, MATRIX),
    tables.Measures(),
    tables.Fetch(1, 7, np.array([3, 1, 2])),
    tables.Fetch(1, 8, None),
    tables.Forget(1, np.array([9])),
    tables.Tick(
        5, 100, [tables.TableLog(0, None, MATRIX), tables.TableLog(1, np.array([4]), np.ones((1, 2), dtype=np.int32))],
        0.5, 0.25, [(0, 2, [3, 0, 1])], 3,
    ),
    tables.Tick(6, 1, []),
    tables.AtBarrier(2, 6),
]  # fmt: skip
TABLE_MESSAGES_DOWN = [
    tables.Opened(1, True),
    tables.ClockRoster(3, [0, 2]),
    tables.Entered(4, 3.0, float("inf"), [tables.ClockRoster(0, [1])], True, b"state"),
    tables.Rows(1, np.array([3, 1]), MATRIX[:2], 4, 5, 6),
    tables.Rows(1, None, MATRIX.astype(np.float32), 4, 5, None),
    tables.Clocked(0.5),
    tables.Included(7),
    tables.Passed(2, 6),
    tables.Save(3),
    tables.EvaluateTables(4, ["a", "b"], [MATRIX, np.empty((0, 2), dtype=np.int64)]),
]


def alike(one, other):
    """Equal, arrays included."""
    if isinstance(other, np.ndarray):
        return isinstance(one, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(other, msgspec.Struct):
        return type(one) is type(other) and all(
            alike(getattr(one, f), getattr(other, f)) for f in other.__struct_fields__
        )
    return one == other


def values_of(entries, seed):
    """Tensors of these shapes and dtypes, different for every seed."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(shape, generator=generator) * 10).to(getattr(torch, dtype.removeprefix("torch.")))
        for _, shape, dtype in entries
    ]


def same(one, other):
    return len(one) == len(other) and all(
        a is b is None or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in zip(one, other, strict=True)
    )


class TransportContract:
    """Whole messages, in order, each delivered once, both ways; a closed link says so."""

    def make(self):
        """A worker's end and the server's end of one link."""
        raise AssertionError("a subclass makes the link")

    def pump(self, server):
        """Whatever the server's loop does when something can be read."""

    def take(self, server):
        """The server's next message, which was sent."""
        until = time.monotonic() + PATIENCE_S
        while True:
            self.pump(server)
            message = server.collect()
            if message is not None:
                return message
            assert time.monotonic() < until, "no message came"

    def test_messages_reach_the_server_whole_and_in_order(self):
        worker, server = self.make()
        sent = [
            Ready(0, 10, 2, 1.0, "epoch", 1),
            More(3),
            Note("x", 1.5),
            Done(0),
            Stop("enough"),
            Remark("é"),
            OptionAsked("width"),
            SavedState(4, b"\x00\xff"),
            Evaluated(2, {"accuracy": 0.5, "loss": float("inf")}),
            Failed("script", "ValueError: x", "Traceback ..."),
            Ended(),
        ]
        for message in sent:
            worker.send(message)
        assert [self.take(server) for _ in sent] == sent
        self.pump(server)
        assert server.collect() is None

    def test_messages_reach_the_worker_whole_and_in_order(self):
        worker, server = self.make()
        sent = [Work(number, Allotment(0, 1, np.array([number])), None, 0.5) for number in range(50)]
        for message in [*sent, Extra(None), Over(0, None, 1.0)]:
            server.deliver(message)
        for message in sent:
            got = worker.receive()
            assert (got.ticket, got.allotment.indices.tolist()) == (message.ticket, message.allotment.indices.tolist())
        assert worker.receive() == Extra(None)
        assert worker.receive() == Over(0, None, 1.0)

    def test_a_grant_keeps_all_that_it_says(self):
        worker, server = self.make()
        server.deliver(Work(9, Allotment(2, 3, np.array([7, 8, 1 << 40])), None, 0.5, 1, 0.25, 0.125, 6))
        got = worker.receive()
        assert (got.ticket, got.rounds_done, got.slot, got.save) == (9, 0.5, 1, 6)
        assert (got.delay_s, got.compute_s) == (0.25, 0.125)
        assert (got.allotment.epoch, got.allotment.samples) == (2, 3)
        assert got.allotment.indices.tolist() == [7, 8, 1 << 40]
        torch.from_numpy(got.allotment.indices)  # which warns of arrays that may not be written to
        server.deliver(Extra(Allotment(1, 2, np.array([5, 6])), 0.5))
        extra = worker.receive()
        assert (extra.allotment.epoch, extra.allotment.indices.tolist(), extra.compute_s) == (1, [5, 6], 0.5)
        for message in (Cancelled(9), Over(1, None, 2.0, True, 3), Work(1, Allotment(0, 4, None), None, 0.0)):
            server.deliver(message)
            assert worker.receive() == message

    def test_a_push_carries_its_tensors_unchanged(self):
        worker, server = self.make()
        values = torch.arange(1000, dtype=torch.float32)
        worker.send(Push(7, 3, Gradient([values.clone()], frozenset({2}), [{"lr": 0.1}], [], 0.25)))
        got = self.take(server)
        assert torch.equal(got.gradient.flat[0], values)
        assert (got.gradient.missing, got.gradient.options, got.gradient.loss) == (frozenset({2}), [{"lr": 0.1}], 0.25)

    def test_a_push_keeps_all_that_it_says(self):
        worker, server = self.make()
        options = [{"lr": 0.1, "betas": (0.9, 0.999), "step": 3, "fused": None, "nesterov": True}, {}]
        flat = values_of(SPEC.parameters, 1)
        change = [None, torch.tensor(4), torch.ones(2, 3)]
        kept = [np.array([1, 5]), np.empty(0, dtype=np.int64)]
        worker.send(
            Push(
                8,
                2,
                Gradient(flat, frozenset({0, 2}), options, change, None, 1.5),
                kept,
                64,
                0.5,
                0.125,
                HostLoad(1.5, 0.25),
            )
        )
        worker.send(Push(9, 0, None))
        got = self.take(server)
        assert same(got.gradient.flat, flat)
        assert same(got.gradient.buffer_change, change)
        assert (got.gradient.options, got.gradient.norm, got.gradient.loss) == (options, 1.5, None)
        assert isinstance(got.gradient.options[0]["betas"], tuple)
        assert [indices.tolist() for indices in got.kept] == [[1, 5], []]
        assert (got.nominal, got.compute_s, got.overrun_s, got.host) == (64, 0.5, 0.125, HostLoad(1.5, 0.25))
        empty = self.take(server)
        assert (empty.ticket, empty.gradient, empty.kept) == (9, None, None)

    def test_messages_longer_than_any_frame_arrive_whole(self):
        worker, server = self.make()
        state = bytes(range(256)) * 14_000  # some 3.5 MB in one field
        got = []

        def work():
            worker.send(SavedState(1, state))
            worker.send(More(2))
            got.extend(worker.receive() for _ in range(2))

        thread = threading.Thread(target=work)
        thread.start()
        assert self.take(server) == SavedState(1, state)
        assert self.take(server) == More(2)
        server.deliver(Welcome(None, state))
        server.deliver(Extra(None))
        while thread.is_alive():
            self.flush(server)
            thread.join(0.001)
        assert got == [Welcome(None, state), Extra(None)]

    def test_models_travel_both_ways(self):
        worker, server = self.make()
        values, buffers = values_of(SPEC.parameters, 2), values_of(SPEC.buffers, 3)
        worker.send(Hello(SPEC, values, buffers))
        got = self.take(server)
        assert got.spec == SPEC
        assert same(got.values, values)
        assert same(got.buffers, buffers)
        parameters = Parameters(5, values, buffers)
        for message in (Welcome(parameters, b"state"), Evaluate(3, parameters), Over(1, parameters, 0.5, True)):
            server.deliver(message)
            back = worker.receive()
            assert type(back) is type(message)
            assert back.parameters.version == 5
            assert same(back.parameters.flat, values)
            assert same(back.parameters.buffers, buffers)
        server.deliver(Welcome(parameters, b"state"))
        back = worker.receive()
        assert back.state == b"state"

    def test_tensors_larger_than_a_socket_takes_cross_each_other(self):
        worker, server = self.make()
        up, down = torch.randn(LARGE), torch.randn(LARGE)
        got, taken = [], threading.Event()

        def work():
            worker.send(Push(1, 1, Gradient([up], frozenset(), [])))
            got.append(worker.receive())
            while not taken.is_set():  # the server's may have come first, and the rest of ours goes out in such calls
                worker.poll(0.001)

        thread = threading.Thread(target=work)
        thread.start()
        server.deliver(Work(2, Allotment(0, 1, np.array([0])), Parameters(1, [down], []), 0.0))
        try:
            push = self.take(server)
        finally:
            taken.set()
        while thread.is_alive():
            self.flush(server)
            thread.join(0.001)
        assert torch.equal(push.gradient.flat[0], up)
        assert torch.equal(got[0].parameters.flat[0], down)

    def test_messages_about_tables_keep_all_that_they_say(self):
        worker, server = self.make()
        for message in TABLE_MESSAGES_UP:
            worker.send(message)
            assert alike(self.take(server), message)
        for message in TABLE_MESSAGES_DOWN:
            server.deliver(message)
            assert alike(worker.receive(), message)

    def test_rows_of_any_size_come_one_after_the_other_unchanged(self):
        worker, server = self.make()
        chance = np.random.default_rng(1)
        sent = [chance.random((int(size), 3)) for size in chance.integers(0, 60_000, 60)]
        got = []
        thread = threading.Thread(target=lambda: got.extend(copy.deepcopy(worker.receive()) for _ in sent))
        thread.start()
        for number, values in enumerate(sent):
            server.deliver(tables.Rows(0, np.arange(len(values)), values, number, 0, None))
            self.flush(server)
        while thread.is_alive():
            self.flush(server)
            thread.join(0.001)
        assert [message.slowest for message in got] == list(range(len(sent)))
        for message, values in zip(got, sent, strict=True):
            np.testing.assert_array_equal(message.values, values)

    def flush(self, server):
        """Whatever the server's loop does when something can be written."""
        if getattr(server, "wants_write", False):
            server.flush()

    def test_receive_waits_for_a_message(self):
        worker, server = self.make()
        got = []
        thread = threading.Thread(target=lambda: got.append(worker.receive()))
        thread.start()
        server.deliver(Extra(None))
        thread.join(PATIENCE_S)
        assert got == [Extra(None)]

    def test_poll_says_whether_receive_would_wait_and_takes_nothing(self):
        worker, server = self.make()
        assert not worker.poll()
        assert not worker.poll(0.003)
        server.deliver(Extra(None))
        while not worker.poll(0.01):
            pass
        assert worker.poll()
        assert worker.receive() == Extra(None)
        assert not worker.poll()

    def test_no_message_is_lost_or_doubled_however_they_interleave(self):
        worker, server = self.make()
        count = 2000

        def work():
            for number in range(count):
                worker.send(Note("n" * (number % 700), float(number)))
            worker.receive()

        thread = threading.Thread(target=work)
        thread.start()
        assert [self.take(server).value for _ in range(count)] == [float(number) for number in range(count)]
        server.deliver(Extra(None))
        thread.join(PATIENCE_S)
        self.pump(server)
        assert server.collect() is None

    def test_links_do_not_mix(self):
        links = [self.make() for _ in range(4)]
        for number, (worker, server) in enumerate(links):
            worker.send(Note("from", float(number)))
            server.deliver(Cancelled(number))
        for number, (worker, server) in enumerate(links):
            assert self.take(server) == Note("from", float(number))
            assert worker.receive() == Cancelled(number)

    def test_a_closed_link_ends_whoever_waits_and_whoever_comes_later(self):
        worker, server = self.make()
        ended = threading.Event()

        def wait():
            try:
                worker.receive()
            except Closed:
                ended.set()

        thread = threading.Thread(target=wait)
        thread.start()
        server.close()
        thread.join(PATIENCE_S)
        assert ended.is_set()
        assert worker.poll()
        with pytest.raises(Closed):
            worker.receive()
        with pytest.raises(Closed):
            worker.send(More(1))
        with pytest.raises(Closed):
            worker.reconnect()

    def test_closing_is_no_exception_a_script_could_swallow(self):
        assert not issubclass(Closed, Exception)


class ProcessContract(TransportContract):
    """What those promise besides that join processes."""

    def test_what_was_sent_belongs_to_its_sender_again(self):
        worker, server = self.make()
        gradient = torch.ones(LARGE)
        thread = threading.Thread(target=lambda: (worker.send(Push(1, 1, Gradient([gradient], frozenset(), []))),
                                                  gradient.zero_(), worker.poll(PATIENCE_S)))  # fmt: skip
        thread.start()
        got = self.take(server)
        server.deliver(Extra(None))
        thread.join(PATIENCE_S)
        assert torch.equal(got.gradient.flat[0], torch.ones(LARGE))

    def test_what_was_said_before_the_end_is_heard(self):
        worker, server = self.make()
        server.deliver(Cancelled(1))
        server.close()
        assert worker.receive() == Cancelled(1)
        with pytest.raises(Closed):
            worker.receive()

    def test_a_region_is_the_same_on_both_sides(self):
        worker, server = self.make()
        region = worker.adopt(SPEC)
        assert region.layout.nbytes == RegionLayout(SPEC).nbytes
        values, buffers = values_of(SPEC.parameters, 4), values_of(SPEC.buffers, 5)
        worker.send(Hello(SPEC, values, buffers))
        hello = self.take(server)
        assert same(hello.values, values)
        assert same(hello.buffers, buffers)
        assert all(a is b for a, b in zip(hello.values, server.region.parameters, strict=True))
        for round_number in range(4):
            self.exchange(worker, server, region, round_number)

    def exchange(self, worker, server, region, number):
        """One grant and its push, all through the region."""
        for flat in server.region.flat:
            flat.fill_(number + 1)
        server.region.buffers[0].fill_(number)
        parameters = Parameters(number, server.region.flat, server.region.buffers)
        server.deliver(Work(number, Allotment(0, 1, np.array([0])), parameters, 0.0, number % 2))
        work = worker.receive()
        assert work.parameters.flat is region.flat
        assert all(bool((tensor == number + 1).all()) for tensor in region.parameters)
        assert bool((region.buffers[0] == number).all())
        slot = region.slots[work.slot]
        gradients = values_of(SPEC.parameters, number)
        for view, gradient in zip(slot.views, gradients, strict=True):
            view.copy_(gradient)
        slot.changes[0].fill_(number - 0.5)
        change = [slot.changes[0], None, None]
        gradient = Gradient(slot.flat, frozenset(), [{"lr": 0.1}], change, 0.5, 2.0, work.slot)
        worker.send(Push(number, 1, gradient))
        push = self.take(server)
        assert push.gradient.slot == work.slot
        assert same(push.gradient.views, gradients)
        assert push.gradient.flat is server.region.slots[work.slot].flat
        assert push.gradient.buffer_change[1:] == [None, None]
        assert bool((push.gradient.buffer_change[0] == number - 0.5).all())
