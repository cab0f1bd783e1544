"""Who is let in at a listening socket: members in their roles. All others get nothing, are logged, and cost little."""

import contextlib
import logging
import os
import socket
import threading
import time

import leaks
import pytest
import torch
import zmq

from paceline.core.errors import InternalError
from paceline.engines.hosts.agent import JoinSettings
from paceline.engines.hosts.messages import LOST_S
from paceline.engines.local.addresses import LOOPBACK
from paceline.transport import address_filter, gatekeeper, security, zeromq
from paceline.transport.address_filter import set_filter
from paceline.transport.base import Lost
from paceline.transport.join_token import new_token
from paceline.transport.mail import Box, PeerHeader
from paceline.transport.mail_zeromq import ZeromqMail
from paceline.transport.messages import Cancelled, More
from paceline.transport.refusals import LOG_BURST, LOG_EVERY_S, MOST_LOGGED, RefusalLog
from paceline.transport.security import Security
from paceline.transport.zeromq import ZeromqEndpoint, ZeromqHub

PATIENCE_S = 20.0
TOKEN = new_token()
MODES = {"curve": Security(TOKEN), "trusted": Security(TOKEN, encrypted=False)}
OTHER_RUN = {"curve": Security(new_token()), "trusted": Security(new_token(), encrypted=False)}


def until(condition):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def port_of(address):
    return int(address.rpartition(":")[2])


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


@pytest.fixture
def hub(mode):
    watch = leaks.Watch()
    hub = ZeromqHub(LOOPBACK, MODES[mode])
    yield hub
    hub.close()
    del hub
    watch.require_nothing_left()


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def null(_client, _mode):
    """A client that knows of no keys."""


def other_run(client, mode):
    OTHER_RUN[mode].connect_as(client, "worker", to="server")


def other_mode(client, mode):
    MODES["trusted" if mode == "curve" else "curve"].connect_as(client, "worker", to="server")


def other_role(client, mode):
    MODES[mode].connect_as(client, "node", to="server")


def of_server(client, mode):
    MODES[mode].connect_as(client, "server", to="server")


def own_key(client, mode):
    """A client that has found out the server's public key, and has a key or password that it made itself."""
    if mode == "curve":
        client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
        client.curve_serverkey = TOKEN.keys("server").public
    else:
        client.plain_username, client.plain_password = b"worker", b"0" * 64


def name_alone(client, mode):
    if mode == "curve":
        null(client, mode)
    else:
        client.plain_username, client.plain_password = b"worker", b"worker"


@pytest.mark.parametrize("pose", [null, other_run, other_mode, other_role, of_server, own_key, name_alone])
def test_who_is_no_member_in_that_role_gets_nothing_and_is_logged(hub, mode, pose, context, caplog):
    server = hub.expect("worker")
    server.deliver(Cancelled(1))
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.ROUTING_ID, b"worker")
    client.setsockopt(zmq.RECONNECT_IVL, 3_600_000)
    pose(client, mode)
    with caplog.at_level(logging.WARNING, "paceline"):
        client.connect(hub.address)
        with contextlib.suppress(zmq.Again):  # refused already
            client.send(b"\x00", zmq.NOBLOCK)
        until(lambda: hub.pump() or "a connection from 127.0.0.1" in caplog.text)
    assert not server.linked
    assert not hub._strangers
    assert not client.poll(0)
    client.close(linger=0)
    worker = ZeromqEndpoint(hub.address, "worker", security=MODES[mode])
    until(lambda: hub.pump() or server.linked)
    assert worker.receive() == Cancelled(1)
    worker.close()


@pytest.mark.parametrize(
    "words", [b"", b"GET / HTTP/1.0\r\n\r\n" * 20, b"\xff" + bytes(8) + b"\x01", b"\xad\x8b\x17" * 133]
)
def test_who_does_not_speak_the_protocol_is_logged(hub, words, caplog, mode):
    with (
        caplog.at_level(logging.WARNING, "paceline"),
        socket.create_connection(("127.0.0.1", port_of(hub.address))) as s,
    ):
        mine = s.getsockname()[1]
        with contextlib.suppress(OSError):  # it may be hung up on meanwhile
            s.sendall(words)
            s.shutdown(socket.SHUT_WR)
        until(lambda: caplog.text)
    assert f"a connection from 127.0.0.1:{mine} was refused" in caplog.text


def test_a_worker_with_keys_of_another_run_is_told_that_it_was_refused(hub, mode):
    worker = ZeromqEndpoint(hub.address, "worker", security=OTHER_RUN[mode], knocking_s=0.3)
    with pytest.raises(Lost):
        worker.receive()
    assert worker.refused
    assert worker.refused  # asking takes nothing away
    assert worker.poll()
    with pytest.raises(Lost):
        worker.receive()
    worker.close()


def test_a_worker_that_is_hung_up_during_the_handshake_connects_again(hub, mode):
    """As a listener does that has more strangers than descriptors for them."""
    server = hub.expect("worker")
    with HangsUp(port_of(hub.address), [0, 10, 64, 70]) as relay:
        worker = ZeromqEndpoint(relay.address, "worker", security=MODES[mode])
        server.deliver(Cancelled(1))
        until(lambda: hub.pump() or worker.poll(0.01))
        assert worker.receive() == Cancelled(1)
        assert not worker.refused
        worker.close()
    assert relay.hung_up == 4


def test_a_worker_knocks_as_long_as_it_was_told_to_however_its_attempts_end(monkeypatch):
    """Attempts that are hung up on, or not answered, count by their time alone; those that nobody listens to do not."""
    now = [100.0]
    monkeypatch.setattr(zeromq.time, "monotonic", lambda: now[0])
    for event, seconds in ((zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 0.5), (zmq.EVENT_CONNECT_RETRIED, 1.5)):
        attempts, allowed = zeromq._Attempts(60.0), 0
        now[0] += seconds
        while attempts.allow(event):
            allowed += 1
            now[0] += seconds
        assert allowed == 60.0 / seconds - 1
    attempts = zeromq._Attempts(60.0)
    assert [attempts.allow(zmq.EVENT_CLOSED) for _ in range(zeromq.UNREACHED)] == [True, True, False]
    for certain in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_DISCONNECTED):
        assert not zeromq._Attempts(60.0).allow(certain)


@pytest.fixture
def brief(monkeypatch):
    """A worker that does not wait as long for each answer as in earnest."""
    for module in (security, zeromq):
        monkeypatch.setattr(module, "ANSWER_MS", 300)


def test_a_worker_that_is_not_heard_at_first_gets_in(hub, mode, brief):
    """As behind the address of a flood: nobody answers for a while, and then there is no time for its first attempt."""
    server = hub.expect("worker")
    with HangsUp(port_of(hub.address), [10], deaf_s=1.2) as relay:
        worker = ZeromqEndpoint(relay.address, "worker", security=MODES[mode])
        server.deliver(Cancelled(1))
        until(lambda: hub.pump() or worker.poll(0.01))
        assert worker.receive() == Cancelled(1)
        worker.close()
    assert relay.hung_up == 1


def test_a_worker_that_is_never_heard_learns_so(mode, brief):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        set_filter(deaf.fileno(), ["127.0.0.1"])
        address = f"tcp://127.0.0.1:{deaf.getsockname()[1]}"
        worker = ZeromqEndpoint(address, "worker", security=MODES[mode], knocking_s=0.5)
        with pytest.raises(Lost):
            worker.receive()
        assert not worker.refused
        worker.close()


def test_an_address_without_keys_is_not_heard_at_the_socket_and_members_do_not_count(hub, mode, monkeypatch):
    monkeypatch.setattr(address_filter, "FORGIVEN_S", 0.0)
    knocks, place = hub._gatekeeper._knocks, ("127.0.0.1", port_of(hub.address))
    server = hub.expect("worker")
    worker = ZeromqEndpoint(hub.address, "worker", security=MODES[mode])
    until(lambda: hub.pump() or server.linked)
    until(lambda: not knocks._counts)
    with contextlib.ExitStack() as opened:
        for _ in range(address_filter.MOST_KNOCKS + 1):
            opened.enter_context(socket.create_connection(place))
        until(lambda: knocks.deaf_to)
        late = opened.enter_context(socket.socket())
        late.settimeout(10 * gatekeeper.LOOK_S)
        with pytest.raises(TimeoutError):
            late.connect(place)
        worker.send(More(1))
        until(lambda: hub.pump() or server._intake.whole)
    worker.close()


def test_a_worker_waits_several_times_as_long_as_an_address_is_not_heard():
    assert zeromq.KNOCKING_S > 4 * address_filter.LONGEST_S
    assert JoinSettings(address="").wait_s > 4 * address_filter.LONGEST_S
    assert LOST_S > 2 * address_filter.LONGEST_S


def test_who_has_begun_to_speak_is_hung_up_on_after_those_who_are_silent(hub):
    """A member on a busy machine may need a while from its first bytes to its key."""
    hub._gatekeeper._most_unfinished = 5
    place = ("127.0.0.1", port_of(hub.address))
    with contextlib.ExitStack() as opened:
        slow = opened.enter_context(socket.create_connection(place))
        slow.sendall(b"\xff" + bytes(8))
        silent = [opened.enter_context(socket.create_connection(place)) for _ in range(20)]
        for each in silent[:10]:
            each.settimeout(gatekeeper.HANDSHAKE_MS / 2000)
            with contextlib.suppress(ConnectionResetError):
                while each.recv(100):
                    pass  # what ZeroMQ says first
        slow.settimeout(0.1)
        with contextlib.suppress(TimeoutError):  # it is not hung up on
            while slow.recv(100):
                pass
            pytest.fail("the connection was closed")


def test_a_worker_of_a_server_that_is_gone_learns_so(mode):
    worker = ZeromqEndpoint("tcp://127.0.0.1:1", "worker", security=MODES[mode])
    with pytest.raises(Lost):
        worker.receive()
    assert not worker.refused
    worker.close()


def test_a_worker_that_lost_its_server_was_not_refused(mode):
    hub = ZeromqHub(LOOPBACK, MODES[mode])
    server = hub.expect("worker")
    worker = ZeromqEndpoint(hub.address, "worker", security=MODES[mode])
    until(lambda: hub.pump() or server.linked)
    hub.close()
    with pytest.raises(Lost):
        worker.receive()
    assert not worker.refused
    worker.close()


@pytest.mark.parametrize("encrypted", [True, False])
def test_members_come_and_go_without_a_word(encrypted, caplog):
    hub = ZeromqHub(LOOPBACK, Security(TOKEN, encrypted=encrypted))
    for number in range(20):
        server = hub.expect(f"w{number}")
        worker = ZeromqEndpoint(hub.address, f"w{number}", security=Security(TOKEN, encrypted=encrypted))
        until(lambda server=server: hub.pump() or server.linked)
        worker.send(More(number))
        worker.close()
        hub.drain(server)
        assert server.collect() == More(number)
    hub.close()
    assert not caplog.records


@pytest.mark.parametrize("kind", MODES)
@pytest.mark.parametrize("pose", [None, "worker", "other run"])
def test_a_mailbox_takes_from_nodes_alone_while_its_process_computes(kind, pose, caplog):
    """Nobody collects while the strangers come: the thread beside the mailbox sees to them."""
    one, other = (ZeromqMail(LOOPBACK, MODES[kind]) for _ in range(2))
    context = zmq.Context()
    client = context.socket(zmq.PUSH)
    if pose == "worker":
        MODES[kind].connect_as(client, "worker", to="node")
    elif pose == "other run":
        OTHER_RUN[kind].connect_as(client, "node", to="node")
    with caplog.at_level(logging.WARNING, "paceline"):
        client.connect(other.address)
        until(lambda: "was refused" in caplog.text)
    one.add_peer(Box(2, 0, other.address, other.key))
    assert one.post(2, PeerHeader("", 1, 0, "model"), [torch.ones(3)])
    until(lambda: one.departed())
    (delivered,) = other.collect(PATIENCE_S)
    assert delivered.header.sender == 1
    client.close(linger=0)
    context.term()
    one.close()
    other.close()


def test_what_is_sent_cannot_be_read_on_the_wire():
    """A relay between worker and server sees every byte: with encryption none of the text, without it all."""
    text = "a remark that somebody might read"
    for encrypted in (True, False):
        hub = ZeromqHub(LOOPBACK, Security(TOKEN, encrypted=encrypted))
        server = hub.expect("w")
        with Relay(port_of(hub.address)) as relay:
            worker = ZeromqEndpoint(relay.address, "w", security=Security(TOKEN, encrypted=encrypted))
            until(lambda hub=hub, server=server: hub.pump() or server.linked)
            worker._socket.send(text.encode())
            until(relay.idle)
            assert (text.encode() in relay.seen) is not encrypted
            assert TOKEN.reveal().encode() not in relay.seen
            worker.close()
        hub.close()


class HangsUp:
    """Passes connections on to a port, but hears nobody at first, and hangs up on some after so many bytes each."""

    def __init__(self, port, bytes_of_each, deaf_s=0.0):
        self._listener = socket.create_server(("127.0.0.1", 0))
        set_filter(self._listener.fileno(), ["127.0.0.1"] if deaf_s else [])
        self._to, self._bytes, self._deaf_s = port, bytes_of_each, deaf_s
        self.hung_up = 0
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self):
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._listener.shutdown(socket.SHUT_RD)  # nobody may have come
        self._thread.join()
        self._listener.close()

    def _accept(self):
        time.sleep(self._deaf_s)
        set_filter(self._listener.fileno(), [])
        for most in [*self._bytes, None]:
            one, _ = self._listener.accept()
            with one, socket.create_connection(("127.0.0.1", self._to)) as other:
                ends = [threading.Thread(target=copy, args=pair) for pair in ((one, other, most), (other, one, None))]
                for end in ends:
                    end.start()
                for end in ends:
                    end.join()
            self.hung_up += most is not None


def copy(source, sink, most):
    """Copy bytes, at most so many, and then end both connections."""
    with contextlib.suppress(OSError):
        while most != 0 and (data := source.recv(1 if most is not None else 65536)):
            sink.sendall(data)
            most = None if most is None else most - 1
    for each in (source, sink):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


class Relay:
    """Copies one connection to a port, and keeps what it copies."""

    def __init__(self, port):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._to = port
        self._sockets = [self._listener]
        self.seen = b""
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self):
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        return self

    def __exit__(self, *_):
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()

    def idle(self):
        before = len(self.seen)
        time.sleep(0.05)
        return 300 < before == len(self.seen)

    def _accept(self):
        one, _ = self._listener.accept()
        other = socket.create_connection(("127.0.0.1", self._to))
        self._sockets += [one, other]
        for source, sink in ((one, other), (other, one)):
            self._threads.append(threading.Thread(target=self._copy, args=(source, sink)))
            self._threads[-1].start()

    def _copy(self, source, sink):
        try:
            while data := source.recv(65536):
                self.seen += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def test_a_forked_process_leaves_the_socket_to_its_parent():
    security = Security(TOKEN)
    hub = ZeromqHub(LOOPBACK, security)
    server = hub.expect("w")
    child = os.fork()
    if child == 0:
        hub.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    worker = ZeromqEndpoint(hub.address, "w", security=security)
    until(lambda: hub.pump() or server.linked)
    worker.close()
    hub.close()


def test_without_an_answer_about_credentials_nobody_gets_in(monkeypatch):
    monkeypatch.setattr(gatekeeper, "HANDSHAKE_MS", 300)
    hub = ZeromqHub(LOOPBACK, MODES["curve"])
    hub._socket.disable_monitor()
    hub._gatekeeper._end()
    worker = ZeromqEndpoint(hub.address, "w", security=MODES["curve"], knocking_s=1.0)
    with pytest.raises(Lost):
        worker.receive()
    hub.pump()
    assert not hub._strangers
    worker.close()
    monkeypatch.setattr(hub._gatekeeper, "_end", lambda: None)
    hub.close()


@pytest.mark.parametrize("make", [ZeromqHub, ZeromqMail])
def test_a_socket_of_the_host_takes_no_keys(make, tmp_path):
    with pytest.raises(InternalError, match="keys are for TCP"):
        make(f"ipc://{tmp_path}/socket", MODES["curve"])


def test_refusals_are_logged_one_by_one_then_counted(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(gatekeeper.time, "monotonic", lambda: now[0])
    log = RefusalLog()
    for number in range(50_000):
        now[0] += 60.0 / 50_000
        log.warn(f"a connection from 10.1.2.3:{number} was refused: it does not know this run's keys")
    log.close()
    counts = [record for record in caplog.records if "more refusals, the last" in record.message]
    assert len(caplog.records) <= LOG_BURST * 2 + 60.0 / LOG_EVERY_S + 1
    assert sum(int(record.message.split()[0]) for record in counts) + len(caplog.records) - len(counts) == 50_000
    assert len(caplog.text) < 100_000
    caplog.clear()
    now[0] += 2 * LOG_EVERY_S
    log.flush()
    log.warn("x" * 10 * MOST_LOGGED)
    assert len(caplog.records[-1].message) == MOST_LOGGED
    log.warn("after a quiet time a refusal is told at once again")
    assert "after a quiet time" in caplog.text
