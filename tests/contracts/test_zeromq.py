"""The transport over ZeroMQ, on sockets of the host and over TCP: the contract, and what only its ends promise."""

import logging
import os
import select
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import leaks
import numpy as np
import pytest
import torch
import zmq

from contracts.contract import PATIENCE_S, SPEC, ProcessContract, same, values_of
from paceline.core.errors import PeerError
from paceline.engines.local.addresses import LOOPBACK
from paceline.model.mass_optimizer import NO_OPTIMIZER, OptimizerSpec
from paceline.model.spec import ModelSpec
from paceline.model.store import Gradient, Parameters, Store, Unwritten
from paceline.transport.base import Closed, Lost
from paceline.transport.join_token import new_token
from paceline.transport.messages import Allotment, Cancelled, Hello, More, Push, Work
from paceline.transport.security import Security
from paceline.transport.zeromq import (
    CHUNK,
    GATHERED,
    LEAVING_MS,
    TURN,
    ZeromqEndpoint,
    ZeromqHub,
    chunks_of,
    end_context,
)


def until(condition):
    """Wait for what must come."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class TestZeromq(ProcessContract):
    security = None

    @pytest.fixture(autouse=True)
    def _leave_nothing_behind(self, tmp_path):
        watch = leaks.Watch()
        self.folder = tmp_path
        self.hub = self.listen("hub")
        self.workers = []
        yield
        while self.workers:
            self.workers.pop().close()
        self.hub.close()
        del self.hub
        watch.require_nothing_left()
        assert not list(tmp_path.iterdir())

    def address(self, name):
        return f"ipc://{self.folder / name}"

    def listen(self, name):
        return ZeromqHub(self.address(name), self.security)

    def connect(self, address, token, relink=None):
        return ZeromqEndpoint(address, token, relink, self.security)

    def make(self):
        token = uuid.uuid4().hex
        server = self.hub.expect(token)
        worker = self.connect(self.hub.address, token)
        self.workers.append(worker)
        until(lambda: self.hub.pump() or server.linked)
        return worker, server

    def pump(self, server):
        self.hub.pump()

    def test_a_mirror_is_memory_of_its_own(self):
        worker, server = self.make()
        region = worker.adopt(SPEC)
        worker.send(Hello(SPEC, values_of(SPEC.parameters, 1), values_of(SPEC.buffers, 2)))
        self.take(server)
        assert same(server.region.parameters, region.parameters)
        region.flat[0].fill_(7.0)
        assert not same(server.region.flat, region.flat)

    def test_an_ordinary_selector_misses_nothing(self):
        (first, at_first), (second, at_second) = self.make(), self.make()
        poller = select.poll()
        poller.register(self.hub, select.POLLIN)
        for number in range(200):
            first.send(More(number))
            at_second.deliver(Cancelled(number))  # sending may swallow the signal of what just arrived
            while (got := at_first.collect()) is None:
                assert poller.poll(PATIENCE_S * 1000), "the descriptor never became readable"
                self.hub.pump()
            assert got == More(number)
            assert second.receive() == Cancelled(number)

    def test_sending_to_nobody_swallows_no_signal(self):
        worker, server = self.make()
        poller = select.poll()
        poller.register(self.hub, select.POLLIN)
        for number in range(200):
            assert not poller.poll(0)
            worker.send(More(number))
            assert poller.poll(PATIENCE_S * 1000)  # it is there, and nobody has looked yet
            assert not self.hub.post(b"gone", None, b"?")
            while (got := server.collect()) is None:
                assert poller.poll(PATIENCE_S * 1000), "the descriptor never became readable"
                self.hub.pump()
            assert got == More(number)

    def test_pumping_in_turns_leaves_the_descriptor_readable(self):
        worker, _ = self.make()
        count = 1000
        for number in range(count):
            worker.send(More(number))
        got = []
        poller = select.poll()
        poller.register(self.hub, select.POLLIN)
        while len(got) < count:
            assert poller.poll(PATIENCE_S * 1000)
            for end in self.hub.pump():
                while (message := end.collect()) is not None:
                    got.append(message.ticket)
        assert got == list(range(count))

    def test_a_worker_may_be_there_before_it_is_expected(self):
        token = uuid.uuid4().hex
        worker = self.connect(self.hub.address, token)
        self.workers.append(worker)
        until(lambda: self.hub.pump() or self.hub._strangers)
        server = self.hub.expect(token)
        worker.send(More(3))
        assert self.take(server) == More(3)

    def test_words_to_a_worker_that_is_not_there_yet_wait_for_it(self):
        token = uuid.uuid4().hex
        server = self.hub.expect(token)
        server.deliver(Cancelled(4))
        worker = self.connect(self.hub.address, token)
        self.workers.append(worker)
        until(lambda: self.hub.pump() or server.linked)
        assert worker.receive() == Cancelled(4)

    def test_strangers_are_dropped_with_a_warning(self, caplog):
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.ROUTING_ID, b"nobody")
        if self.security is not None:
            self.security.connect_as(stranger, "worker", to="server")
        stranger.connect(self.hub.address)
        with caplog.at_level(logging.WARNING, "paceline"):
            stranger.send_multipart([b"let", b"me", b"in"])
            until(lambda: self.hub.pump() or caplog.records)
            assert "b'nobody' was dropped: no worker has this token" in caplog.text
        worker, server = self.make()
        worker.send(More(1))
        assert self.take(server) == More(1)
        stranger.close(linger=0)
        context.term()

    def test_a_worker_that_never_gets_in_is_named_at_the_end(self, caplog):
        worker = self.connect(self.hub.address, "wrong")
        self.workers.append(worker)
        until(lambda: self.hub.pump() or self.hub._strangers)
        with caplog.at_level(logging.WARNING, "paceline"):
            self.hub.close()
        assert "b'wrong' was refused" in caplog.text

    def test_a_worker_that_left_is_lost_after_its_last_word(self):
        worker, server = self.make()
        worker.send(More(1))
        worker.close()
        assert self.take(server) == More(1)
        with pytest.raises(Lost):
            self.take(server)
        server.deliver(Cancelled(1))  # goes nowhere

    @pytest.mark.parametrize("killed", [False, True])
    def test_all_that_a_process_had_sent_is_heard_before_its_end(self, killed):
        (worker, server), (other, at_other) = self.make(), self.make()
        count = TURN * 5
        for number in range(count):
            worker.send(More(number))
        other.send(More(count))
        if killed:  # the kernel hangs up, and nobody says a last word
            worker._hang_up(LEAVING_MS)
            worker._context.term()
        else:
            worker.close()
        ready = self.hub.drain(server)
        assert [server.collect() for _ in range(count)] == [More(number) for number in range(count)]
        with pytest.raises(Lost):
            server.collect()
        assert server in ready
        assert self.take(at_other) == More(count)
        other.send(More(0))
        poller = select.poll()
        poller.register(self.hub, select.POLLIN)
        assert poller.poll(PATIENCE_S * 1000)

    def test_a_process_that_never_came_has_said_nothing(self):
        assert self.hub.drain(self.hub.expect("nobody")) == []

    def test_what_comes_after_the_end_of_a_link_is_dropped_without_a_word(self, caplog):
        worker, server = self.make()
        server.close()
        worker.send(More(1))
        with pytest.raises(Closed):
            worker.receive()
        other, at_other = self.make()
        other.send(More(2))
        with caplog.at_level(logging.WARNING, "paceline"):
            assert self.take(at_other) == More(2)
        assert not caplog.records

    def test_a_server_that_died_is_lost_and_may_come_back(self):
        second = self.listen("second")
        fresh = second.expect("second")
        first = self.listen("first")
        old = first.expect("first")
        worker = self.connect(first.address, "first", lambda: (second.address, "second"))
        until(lambda: first.pump() or old.linked)
        region = worker.adopt(SPEC)
        worker.send(Hello(SPEC, region.parameters, region.buffers))
        old.deliver(Cancelled(1))
        first.close()
        assert worker.receive() == Cancelled(1)
        with pytest.raises(Lost):
            worker.receive()
        assert worker.poll()
        worker.send(More(1))  # goes nowhere
        worker.reconnect()
        until(lambda: second.pump() or fresh.linked)
        worker.send(Hello(SPEC, region.parameters, region.buffers))
        while fresh.collect() is None:
            second.pump()
        worker.close()
        second.close()

    def test_no_server_at_the_address_is_a_lost_link(self):
        hub = self.listen("closed")
        address = hub.address
        hub.close()
        worker = self.connect(address, "early")
        worker.send(More(1))
        with pytest.raises(Lost):
            worker.receive()
        with pytest.raises(Closed):
            worker.reconnect()
        worker.close()

    def test_a_malformed_message_is_blamed_on_its_sender_alone(self):
        (bad, at_bad), (good, at_good) = self.make(), self.make()
        bad.poll()
        bad._socket.send(b"\x03nonsense")
        good.send(More(5))
        assert self.take(at_good) == More(5)
        with pytest.raises(PeerError, match="malformed Push"):
            self.take(at_bad)
        with pytest.raises(Lost):
            self.take(at_bad)

    @pytest.mark.parametrize("size", [10, CHUNK])
    def test_chunks_of_the_wrong_size_are_named(self, size):
        worker, server = self.make()
        data, _ = worker._codec.encode(Push(1, 1, Gradient([torch.ones(GATHERED)], frozenset(), [])))
        worker.poll()
        worker._socket.send(data)
        worker._socket.send(bytes(size))
        with pytest.raises(PeerError, match=f"a chunk of {size} bytes arrived where {GATHERED * 4} were announced"):
            self.take(server)

    def test_a_version_is_written_to_the_region_as_it_is_sent(self):
        worker, server = self.make()
        region = worker.adopt(SPEC)
        worker.send(Hello(SPEC, values_of(SPEC.parameters, 4), values_of(SPEC.buffers, 5)))
        self.take(server)
        stored = [torch.arange(flat.numel()).to(flat.dtype) for flat in server.region.flat]
        server.region.buffers[0].fill_(7)
        unwritten = Unwritten(zip(server.region.flat, stored, strict=True))
        parameters = Parameters(3, server.region.flat, server.region.buffers, unwritten)
        server.deliver(Work(1, Allotment(0, 1, np.array([0])), parameters, 0.0, 0))
        assert not unwritten.left
        for flat in stored:
            flat.zero_()  # what the store does next
        assert worker.receive().parameters.version == 3
        for flat in region.flat:
            assert torch.equal(flat, torch.arange(flat.numel()).to(flat.dtype))
        assert bool((region.buffers[0] == 7).all())

    def test_a_version_is_sent_from_the_store_whatever_becomes_of_it(self):
        spec = ModelSpec(
            (("weight", (3_000_000,), "torch.float32"),),
            (),
            OptimizerSpec("SGD", ({"lr": 0.1},), ((0,),)),
            (("weight", 0),),
        )
        worker, server = self.make()
        region = worker.adopt(spec)
        worker.send(Hello(spec, [torch.arange(3_000_000.0)], []))
        hello = self.take(server)
        store = Store(spec, hello.values, hello.buffers, False)
        place = store._flat[0].data_ptr()
        sent = store.hand_out(server.region.flat, server.region.buffers)
        server.deliver(Work(1, Allotment(0, 1, np.array([0])), sent, 0.0, 0))
        store.overwrite([torch.zeros(3_000_000)], [])  # while the version may be on its way
        del sent
        assert worker.receive().parameters.version == 0
        assert torch.equal(region.flat[0], torch.arange(3_000_000.0))
        assert store._flat[0].data_ptr() != place
        until = time.monotonic() + 10
        while store._lending.read and time.monotonic() < until:  # pyzmq's thread lets go of what was sent
            time.sleep(0.001)
        assert not store._lending.read

    @pytest.mark.parametrize("worst", [1.0, float("nan")])
    def test_a_push_is_copied_to_its_slot_as_it_is_sent_and_measured_as_it_arrives(self, worst):
        spec = ModelSpec(
            (("weight", (700_001,), "torch.float32"), ("bias", (9,), "torch.float32")), (), NO_OPTIMIZER, ()
        )
        worker, server = self.make()
        region = worker.adopt(spec)
        worker.send(Hello(spec, values_of(spec.parameters, 4), []))
        self.take(server)
        slot, computed = region.slots[1], torch.arange(700_001.0)
        computed[-1] = worst
        slot.views[1].fill_(2)
        unwritten = Unwritten([(slot.views[0], computed)])
        gradient = Gradient(slot.flat, frozenset(), [], slot=1, views=slot.views, unwritten=unwritten)
        worker.send(Push(1, 1, gradient, [np.arange(50_000)], None, 0.0, 0.0))  # of which the indices come first
        assert not unwritten.left
        assert torch.equal(slot.views[0], computed) or worst != worst
        arrived = self.take(server).gradient
        assert torch.equal(arrived.flat[0].nan_to_num(), slot.flat[0].nan_to_num())
        expected = torch.linalg.vector_norm(slot.flat[0].double())
        assert arrived.norm == pytest.approx(float(expected), rel=1e-5, nan_ok=True)


def test_tensors_are_cut_into_chunks_and_small_ones_travel_together():
    sizes = [5, 0, GATHERED - 1, CHUNK * 2 + 3, 7, 8]
    views = [memoryview(bytes([number]) * size) for number, size in enumerate(sizes)]
    chunks = chunks_of(views)
    assert [[len(part) for part in chunk] for chunk in chunks] == [[5, GATHERED - 1], [CHUNK], [CHUNK], [3], [7, 8]]
    assert b"".join(part for chunk in chunks for part in chunk) == b"".join(views)


def test_many_small_tensors_fill_chunks_and_not_one_long_one():
    chunks = chunks_of([memoryview(bytes(GATHERED - 1))] * 200)
    assert max(sum(map(len, chunk)) for chunk in chunks) < CHUNK + GATHERED


class TestOverTcp(TestZeromq):
    """The same at a port of the loopback."""

    def address(self, name):
        return LOOPBACK


@pytest.fixture(autouse=True, scope="module")
def patience():
    """Nobody reads when workers are closed here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.transport.zeromq.PARTED_S", 0.1)
        yield


class TestEncrypted(TestOverTcp):
    """The same with keys of a join token."""

    security = Security(new_token())


class TestOnTrustedNetwork(TestOverTcp):
    """The same with passwords of a join token, and without encryption."""

    security = Security(new_token(), encrypted=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_who_finds_the_socket_is_turned_away(tmp_path):
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)  # as if the private folder were open
    hub = ZeromqHub(f"ipc://{folder}/hub")
    (folder / "hub").chmod(0o777)
    try:
        for user, heard in ((23_001, False), (0, True)):
            knock(user, hub.address)
            end = time.monotonic() + (PATIENCE_S if heard else 0.5)
            while not hub._strangers and time.monotonic() < end:
                hub.pump()
                time.sleep(0.001)
            assert bool(hub._strangers) is heard
    finally:
        hub.close()
        folder.rmdir()


KNOCK = """
import os, sys, zmq
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
context = zmq.Context()
socket = context.socket(zmq.DEALER)
socket.setsockopt(zmq.ROUTING_ID, b"nobody")
socket.connect(sys.argv[2])
socket.send(b"\\x00")
socket.close(linger=300)
context.term()
"""


def knock(user, address):
    """Send a handshake as this user, and go."""
    subprocess.run([sys.executable, "-c", KNOCK, str(user), address], check=True)


def test_a_context_that_does_not_end_is_left_and_nobody_waits_for_it(monkeypatch):
    monkeypatch.setattr("paceline.transport.zeromq.ENDING_S", 0.05)
    context = zmq.Context()
    keeps_it = context.socket(zmq.PAIR)
    end_context(context)
    keeps_it.close(linger=0)
    until(lambda: context.closed)
