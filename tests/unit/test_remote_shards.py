"""Shards that share no memory with their coordinator hold the same model as those that do, and so do some of each."""

import contextlib
import os
import secrets
import socket
import threading

import pytest
import torch
from shard_threads import ShardDied, shard_links
from sharded_models import Elsewhere, assert_same, model, parameters, whole

from paceline.core.errors import InternalError, PeerError
from paceline.model.regions import private_region
from paceline.model.store import Gradient, Store, store_of
from paceline.shards import commands as c
from paceline.shards import messages
from paceline.shards.remote_links import RemoteShardEnd, ShardPort
from paceline.shards.sharded_endpoint import ShardedEndpoint
from paceline.shards.sharded_store import ShardedStore, ShardLinks
from paceline.transport.base import Closed, Lost
from paceline.transport.join_token import new_token
from paceline.transport.messages import Hello, Push, Welcome
from paceline.transport.security import Security
from paceline.transport.shm import anonymous_file
from paceline.transport.zeromq import ZeromqEndpoint, ZeromqHub

PLACES = [(0, 1), (0,), (1,)]  # which of two shards are far


class FarWorker(threading.Thread):
    """A worker that pushes so many gradients, and reads a version after each."""

    def __init__(self, addresses, token, security, spec, pushes):
        super().__init__()
        self._given = (addresses, token, None, security)
        self._spec, self._pushes = spec, pushes
        self.read = []

    def run(self):
        endpoint = ShardedEndpoint(*self._given)
        region = endpoint.adopt(self._spec)
        endpoint.send(Hello(self._spec, region.parameters, region.buffers))
        endpoint.receive()
        for number, slot in enumerate(region.slots[i % 2] for i in range(self._pushes)):
            for view, value in zip(slot.views, gradient_of(self._spec, number), strict=True):
                view.copy_(value)
            options = [dict(group) for group in self._spec.optimizer.groups]
            gradient = Gradient(slot.flat, frozenset(), options, [], 0.5, None, number % 2, slot.views)
            endpoint.send(Push(number, 4, gradient))
            self.read.append([flat.clone() for flat in endpoint.receive().parameters.flat])
        endpoint.close()


def gradient_of(spec, number):
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(shape, generator=generator) for _, shape, _ in spec.parameters]


class Run:
    """The coordinator's links to shards and to one worker."""

    def __init__(self, links, spec, pushes):
        self.links, self._token = links, secrets.token_hex(8)
        self._hub = ZeromqHub("tcp://127.0.0.1:*", links.security)
        self.end = self._hub.expect(self._token)
        links.expect(self._token, self.end)
        addresses = messages.BETWEEN.join([self._hub.address, *links.addresses])
        self.worker = FarWorker(addresses, self._token, links.security, spec, pushes)
        self.worker.start()
        assert isinstance(self.next(), Hello)

    def next(self):
        while (message := self.end.collect()) is None:
            self._hub.pump()
            self.links.listen()
        return message

    def step(self, store):
        """Merge the next push, and send the version back."""
        push = self.next()
        while (norm := self.links.take(self.end.region, push.ticket)) is None:
            self.links.listen()
        push.gradient.norm = norm
        merged = store.merge([push.gradient], [1.0], [4], stock=False)
        self.send(store)
        return merged

    def send(self, store):
        self.end.deliver(Welcome(store.hand_out(self.end.region.flat, self.end.region.buffers)))

    def close(self):
        self.worker.join()
        self.end.close()
        self._hub.close()


@contextlib.contextmanager
def running(links, spec, pushes):
    run = Run(links, spec, pushes)
    try:
        yield run
    finally:
        run.close()


def pushed(spec, number):
    flat = spec.layout.pack(gradient_of(spec, number))
    options = [dict(group) for group in spec.optimizer.groups]
    return Gradient(flat, frozenset(), options, [], 0.5, None)


@pytest.mark.parametrize("far", PLACES)
@pytest.mark.parametrize(("name", "dtype"), [("AdamW", torch.float32), ("SGD", torch.bfloat16)])
def test_training_saving_and_going_on_have_the_bits_of_one_store(tmp_path, far, name, dtype):
    values, spec = model(name, (dtype,))
    plain = Store(spec, values, [], True)
    with torch.no_grad():
        with shard_links(2, far) as links:
            store = ShardedStore(spec, values, [], True, links)
            with running(links, spec, 3) as run:
                run.send(store)
                for step in range(3):
                    expected = plain.merge([pushed(spec, step)], [1.0], [4], stock=False)
                    found = run.step(store)
                    assert found.norm == pytest.approx(expected.norm, rel=1e-5)
            assert_same(run.worker.read[-1], plain.read().flat)
            assert_same(parameters(store), parameters(plain))
            assert_same(store.read().flat, plain.read().flat)
            mine, theirs = store.optimizer.state(), plain.optimizer.state()
            assert mine[0].keys() == theirs[0].keys()
            assert all(torch.equal(mine[0][key], theirs[0][key]) for key in mine[0])
            saved = Elsewhere(store, tmp_path).contents
        with shard_links(2, far) as links:
            again = store_of(saved, 3, True, lambda *given: ShardedStore(*given, links))
            assert_same(whole(again), whole(plain))
            with running(links, spec, 1) as run:
                run.send(again)
                plain.merge([pushed(spec, 0)], [1.0], [4], stock=False)
                run.step(again)
            assert_same(parameters(again), parameters(plain))
            again.overwrite(values, [])
            assert_same(parameters(again), values)
            assert again.version == plain.version == 4


def test_the_files_of_far_shards_are_written_by_the_coordinator(tmp_path):
    values, spec = model("AdamW")
    with shard_links(2, (1,)) as links, torch.no_grad():
        store = ShardedStore(spec, values, [], False, links)
        names = store.contents().save(tmp_path)[0].keys()
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
        with pytest.raises(OSError, match="No such file"):
            store.contents().save(tmp_path / "missing")
        assert_same(parameters(store), values)  # answers and commands are still in step


def test_a_worker_that_shares_memory_is_no_worker_of_far_shards():
    _, spec = model()
    region = private_region(spec)
    with shard_links(2, (1,)) as links, pytest.raises(InternalError, match="shards on other machines"):
        links.share(region, spec, 0)


def test_a_worker_that_cannot_reach_a_shard_says_where(caplog):
    security, token = Security(new_token()), secrets.token_hex(8)
    hub = ZeromqHub("tcp://127.0.0.1:*", security)
    hub.expect(token)
    with socket.socket() as closed:  # nobody listens there
        closed.bind(("127.0.0.1", 0))
        missing = f"tcp://127.0.0.1:{closed.getsockname()[1]}"

        def give_up():
            raise Closed

        endpoint = ShardedEndpoint(messages.BETWEEN.join([hub.address, missing]), token, give_up, security)
        while not endpoint.lost:
            hub.pump()
        with pytest.raises(Closed):
            endpoint.reconnect()
        endpoint.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{missing} does not answer: see that this machine can reach that port"
    ]
    hub.close()


# -- the link itself ---------------------------------------------------------------------------------------------------


@pytest.fixture
def ends():
    """Both ends of one link, and what closes the shard's."""
    security, token = Security(new_token()), secrets.token_hex(8)
    port = ShardPort("tcp://127.0.0.1:*", security)
    mine, theirs = port.expect(token), []
    thread = threading.Thread(target=lambda: theirs.append(RemoteShardEnd(port.address, token, security)))
    thread.start()
    while thread.is_alive():
        port.pump()
    with contextlib.closing(port), contextlib.ExitStack() as last:
        last.callback(theirs[0].close)
        yield mine, theirs[0], last


def in_memory(data):
    descriptor = anonymous_file(len(data))
    os.pwrite(descriptor, data, 0)
    return descriptor


def test_memory_goes_with_commands_and_answers(ends):
    mine, theirs, _ = ends
    large = os.urandom(3_000_000)
    for sender, receiver in ((mine, theirs), (theirs, mine)):
        descriptors = [in_memory(b"small"), in_memory(large)]
        sender.send(b"first", descriptors)
        sender.send(b"second")
        for each in descriptors:
            os.close(each)
        frame = receiver.receive()
        assert frame.data == b"first"
        assert [os.pread(each, len(large), 0) for each in frame.descriptors] == [b"small", large]
        for each in frame.descriptors:
            os.close(each)
        assert receiver.receive() == (b"second", [])
        assert receiver.receive(0.01) is None
        assert receiver.collect() is None


def test_the_end_of_the_other_is_noticed(ends):
    mine, theirs, last = ends
    theirs.send(b"last")
    last.close()
    assert mine.receive().data == b"last"
    with pytest.raises(Lost):
        mine.receive()


def test_a_coordinator_that_closes_ends_its_shards(ends):
    mine, theirs, _ = ends
    mine.close()
    with pytest.raises(Lost):
        theirs.receive()


def test_a_shard_that_dies_while_it_is_asked_is_lost():
    values, spec = model()
    security, token = Security(new_token()), secrets.token_hex(8)
    port = ShardPort("tcp://127.0.0.1:*", security)

    def die():
        end = RemoteShardEnd(port.address, token, security)
        end.send(c.encode(c.Listens("")))
        end.receive()
        end.close()

    thread = threading.Thread(target=die)
    thread.start()

    links = ShardLinks([port.expect(token)], shards_died)
    with pytest.raises(ShardDied, match="shard 0"):
        ShardedStore(spec, values, [], False, links)
    thread.join()
    links.close()


@pytest.mark.parametrize("role", ["worker", "node"])
def test_nobody_but_a_shard_is_let_in(role):
    security = Security(new_token())
    port = ShardPort("tcp://127.0.0.1:*", security)
    port.expect("t")
    end = ZeromqEndpoint(port.address, "t", security=security, knocking_s=0.0, role=role)
    assert not end.enter()
    assert end.refused
    end.close()
    port.close()


def test_what_one_shard_sends_while_another_is_received_from_is_not_left(monkeypatch):
    """Nobody would report it: the socket that all of them share has been read."""
    port = ShardPort("tcp://127.0.0.1:*", None)
    ready, last = threading.Barrier(3), threading.Event()

    def send(token):
        end = RemoteShardEnd(port.address, token)
        end.send(c.encode(c.Listens("")))
        ready.wait()
        end.send(c.encode(c.Broken(token, "")))
        ready.wait()
        last.wait()
        end.close()

    threads = [threading.Thread(target=send, args=(token,)) for token in "ab"]
    for thread in threads:
        thread.start()
    links = ShardLinks([port.expect(token) for token in "ab"], shards_died)
    ready.wait()
    ready.wait()
    receive, looks = port.pump, iter([lambda: None])

    def receive_both():
        while not all(link._end._intake.whole for link in links._links):
            receive()

    monkeypatch.setattr(port, "pump", lambda: next(looks, receive_both)())
    links.listen()
    assert sorted(each.token for each in links.broken) == ["a", "b"]
    last.set()
    for thread in threads:
        thread.join()
    links.close()


def shards_died(shard):
    raise ShardDied(f"shard {shard}")


def test_what_no_shard_sends_ends_the_link():
    security = Security(new_token())
    port = ShardPort("tcp://127.0.0.1:*", security)
    link, end = port.expect("t"), ZeromqEndpoint(port.address, "t", security=security, role="shard")
    _, spec = model()
    thread = threading.Thread(target=lambda: end.send(Hello(spec, [], [])))
    thread.start()
    with pytest.raises(PeerError, match="Hello"):
        link.receive()
    thread.join()
    end.close()
    port.close()
