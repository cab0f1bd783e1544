"""The transport of one host: the contract, and what only shared memory promises."""

import copy
import os
import socket
import struct
import threading

import leaks
import numpy as np
import pytest
import torch

from contracts.contract import SPEC, ProcessContract, same, values_of
from paceline.core.errors import PeerError, UserError
from paceline.core.ledger import Allotment
from paceline.model import memory_budget as available_memory
from paceline.model.regions import RegionLayout
from paceline.model.store import Gradient, Parameters
from paceline.tables.messages import EvaluateTables, Fetch, Rows, TableLog, Tick
from paceline.transport.base import Closed, Lost
from paceline.transport.codec import Codec
from paceline.transport.messages import Cancelled, Extra, Hello, More, Push, Work
from paceline.transport.shm import Channel, ShmEndpoint, ShmServerEnd


def linked(relink=None):
    ours, theirs = Channel.pair()
    return ShmEndpoint(ours, relink), ShmServerEnd(theirs)


class TestShm(ProcessContract):
    @pytest.fixture(autouse=True)
    def _leave_nothing_behind(self):
        watch = leaks.Watch()
        self.links = []
        yield
        while self.links:
            for end in self.links.pop():
                end.close()
        end = None
        watch.require_nothing_left()

    def make(self):
        self.links.append(linked())
        return self.links[-1]

    def test_rows_of_a_table_go_through_memory_and_not_over_the_socket(self):
        worker, server = self.make()
        values = np.random.default_rng(2).random((10_000, 20), dtype=np.float32)
        for number in range(20):  # the ring goes round
            server.deliver(Rows(0, None, values, number, 0, None))
            assert not server.wants_write
            got = worker.receive()
            assert got.slowest == number
            assert not got.values.flags.owndata  # it is read where it lies
            assert np.array_equal(got.values, values)

    def test_a_ring_that_nobody_reads_from_is_not_overwritten(self):
        worker, server = self.make()
        sent = [np.full((10_000, 20), number, dtype=np.float32) for number in range(40)]
        for number, values in enumerate(sent):
            server.deliver(Rows(0, None, values, number, 0, None))
        thread = threading.Thread(target=lambda: got.extend(copy.deepcopy(worker.receive()) for _ in sent))
        got = []
        thread.start()
        while thread.is_alive():
            self.flush(server)
            thread.join(0.001)
        for message, values in zip(got, sent, strict=True):
            assert np.array_equal(message.values, values)

    def test_what_may_be_kept_is_not_overwritten_when_the_ring_goes_round(self):
        worker, server = self.make()
        ticks, evaluations = [], []
        for number in range(20):
            values = np.full((10_000, 20), number, dtype=np.float32)
            worker.send(Tick(number, 1, [TableLog(0, None, values)]))
            ticks.append(self.take(server))
            server.deliver(EvaluateTables(number, ["a"], [values]))
            evaluations.append(worker.receive())
        assert [set(tick.logs[0].sums.flat) for tick in ticks] == [{number} for number in range(20)]
        assert [set(evaluation.values[0].flat) for evaluation in evaluations] == [{number} for number in range(20)]

    def test_a_grant_of_many_samples_comes_through_the_ring_beside_a_model_that_stays_where_it_is(self):
        worker, server = self.make()
        region = worker.adopt(SPEC)
        worker.send(Hello(SPEC, region.parameters, region.buffers))
        self.take(server)
        granted = []
        for number in range(60):
            parameters = Parameters(number, server.region.flat, server.region.buffers)
            server.deliver(Work(number, Allotment(0, 1, np.arange(number, 20_000 + number)), parameters, 0.0))
            assert not server.wants_write
            granted.append(worker.receive())
        assert all(work.parameters.flat is region.flat for work in granted)
        assert [int(work.allotment.indices[0]) for work in granted] == list(range(60))

    def test_a_place_that_there_is_not_is_the_peers_fault(self):
        worker, server = self.make()
        data, _ = Codec().encode(Fetch(0, 1, np.arange(10_000)))
        frame = [bytes([129]), struct.pack("<I", len(data)), data, struct.pack("<QQQ", 1 << 40, 16, 64)]
        worker._channel.send(frame)
        with pytest.raises(PeerError, match="points outside the ring buffer"):
            self.take(server)

    def test_a_push_moves_no_byte(self):
        worker, server = self.make()
        region = worker.adopt(SPEC)
        worker.send(Hello(SPEC, region.parameters, region.buffers))
        self.take(server)
        slot = region.slots[1]
        worker.send(Push(1, 1, Gradient(slot.flat, frozenset(), [], [], None, 1.0, 1)))
        push = self.take(server)
        slot.flat[0].fill_(3.0)
        assert bool((push.gradient.flat[0] == 3.0).all())

    def test_a_model_made_elsewhere_is_copied_into_the_region_by_hello(self):
        worker, server = self.make()
        worker.adopt(SPEC)
        values = values_of(SPEC.parameters, 1)
        worker.send(Hello(SPEC, values, values_of(SPEC.buffers, 2)))
        self.take(server)
        assert same(server.region.parameters, values)

    def test_a_region_outlives_both_ends_of_its_link(self):
        worker, server = linked()
        region = worker.adopt(SPEC)
        worker.send(Hello(SPEC, region.parameters, region.buffers))
        self.take(server)
        mapped = server.region
        worker.close()
        server.close()
        region.flat[0].fill_(5.0)
        assert bool((mapped.flat[0] == 5.0).all())

    def test_a_worker_that_died_is_lost_after_its_last_word(self):
        worker, server = self.make()
        worker.send(More(1))
        worker.close()
        assert self.take(server) == More(1)
        with pytest.raises(Lost):
            server.collect()
        server.deliver(Cancelled(1))  # goes nowhere

    def test_a_server_that_died_is_lost_and_may_come_back(self):
        fresh = []

        def relink():
            ours, theirs = Channel.pair()
            fresh.append(ShmServerEnd(theirs))
            return ours

        ours, theirs = Channel.pair()
        worker = ShmEndpoint(ours, relink)
        region = worker.adopt(SPEC)
        worker.send(Hello(SPEC, region.parameters, region.buffers))
        theirs.close()
        worker.send(More(1))  # goes nowhere
        assert worker.poll()
        with pytest.raises(Lost):
            worker.receive()
        worker.reconnect()
        worker.send(Hello(SPEC, region.parameters, region.buffers))
        self.take(fresh[0])
        region.flat[0].fill_(2.0)
        assert bool((fresh[0].region.flat[0] == 2.0).all())
        self.links.append((worker, fresh[0]))

    def test_without_anybody_to_relink_a_lost_link_is_closed(self):
        ours, theirs = Channel.pair()
        worker = ShmEndpoint(ours)
        theirs.close()
        with pytest.raises(Closed):
            worker.reconnect()
        with pytest.raises(Closed):
            worker.receive()
        worker.close()

    def test_a_worker_that_does_not_read_does_not_hold_the_server_up(self):
        worker, server = self.make()
        while not server.wants_write:
            server.deliver(Extra(None))
        server.deliver(Cancelled(7))
        server.flush()
        assert server.wants_write
        while (message := worker.receive()) == Extra(None):
            server.flush()
        assert message == Cancelled(7)
        assert not server.wants_write

    def test_a_region_that_does_not_fit_its_model_is_refused(self):
        worker, server = self.make()
        worker.adopt(SPEC)
        other = os.memfd_create("paceline")
        os.ftruncate(other, 4096)
        codec = Codec()
        codec.region = worker._codec.region
        data, _ = codec.encode(Hello(SPEC, [], []))
        worker._channel.send(data, [other])
        with pytest.raises(PeerError, match=f"4096 bytes, its model takes {RegionLayout(SPEC).nbytes}"):
            self.take(server)
        os.ftruncate(other, RegionLayout(SPEC).nbytes)
        worker._channel.send(data, [other])
        with pytest.raises(PeerError, match="not sealed"):
            self.take(server)
        worker._channel.send(data)
        with pytest.raises(PeerError, match="without passing its descriptor"):
            self.take(server)
        os.close(other)

    @pytest.mark.parametrize("data", [b"", b"\x80", b"\x80\x00\x00\x00\x00", b"\x80\xff\xff\x00\x00abc", b"\x03\x93"])
    def test_what_is_no_message_is_named(self, data):
        ours, theirs = Channel.pair()
        server = ShmServerEnd(theirs)
        ours.send(data)
        with pytest.raises(PeerError):
            server.collect()
        ours.close()
        server.close()

    def test_tensors_must_have_the_size_that_was_announced(self):
        ours, theirs = Channel.pair()
        server = ShmServerEnd(theirs)
        data, _ = Codec().encode(Push(1, 1, Gradient([torch.ones(4)], frozenset(), [])))
        ours.send([b"\x80", len(data).to_bytes(4, "little"), data, b"short"])
        with pytest.raises(PeerError, match="announced 16 bytes of tensors and brought 5"):
            server.collect()
        ours.send(data)
        with pytest.raises(PeerError, match="announced 16 bytes of tensors and brought 0"):
            server.collect()
        ours.close()
        server.close()

    def test_too_little_memory_is_an_error_with_the_size_needed(self, monkeypatch):
        worker, _ = self.make()
        monkeypatch.setattr(available_memory, "available_bytes", lambda: 1 << 10)
        with pytest.raises(UserError, match=r"needs .* GiB of shared memory per worker .* fewer workers or a smaller"):
            worker.adopt(SPEC)

    def test_memory_that_the_system_refuses_is_the_same_error(self, monkeypatch):
        def refuse(*_):
            raise OSError(28, "No space left on device")

        worker, _ = self.make()
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(UserError, match="of shared memory per worker"):
            worker.adopt(SPEC)

    def test_without_memfd_a_file_without_a_name_does(self, monkeypatch):
        monkeypatch.delattr(os, "memfd_create")
        worker, server = self.make()
        region = worker.adopt(SPEC)
        worker.send(Hello(SPEC, region.parameters, region.buffers))
        self.take(server)
        region.flat[0].fill_(4.0)
        assert bool((server.region.flat[0] == 4.0).all())


def test_the_socket_is_not_inherited_by_programs_that_a_script_starts():
    one, other = Channel.pair()
    assert not os.get_inheritable(one.fileno())
    assert not os.get_inheritable(other.fileno())
    one.close()
    other.close()


def test_a_channel_takes_over_a_socket():
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    assert channel.fileno() == ours.fileno()
    channel.close()
    theirs.close()
