"""Every bound on strangers and members is in force, and is the one that SECURITY.md states."""

import select
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import zmq
from hosts import free_ports

from paceline.engines.hosts import join_listener
from paceline.engines.hosts import messages as m
from paceline.engines.hosts.agent import JoinSettings, LauncherLink
from paceline.engines.hosts.join_listener import JoinedHost, JoinListener, Requirements
from paceline.engines.local import control
from paceline.engines.local.addresses import LOOPBACK
from paceline.server import run
from paceline.transport import address_filter, gatekeeper, limits, mail, mail_zeromq, refusals, security, zeromq
from paceline.transport.gatekeeper import Backlog
from paceline.transport.join_token import new_token
from paceline.transport.mail import Box, PeerHeader
from paceline.transport.mail_zeromq import ZeromqMail
from paceline.transport.messages import More
from paceline.transport.refusals import Refusals
from paceline.transport.security import Security
from paceline.transport.zeromq import HANDSHAKE, ZeromqEndpoint, ZeromqHub

PAGE = " ".join((Path(__file__).parents[2] / "SECURITY.md").read_text(encoding="utf-8").split())
TOKEN = new_token()
SECURITY = Security(TOKEN)
MIB = 1 << 20
STATED = {
    "ten lines, then a count every ten seconds": [(refusals.LOG_BURST, 10), (refusals.LOG_EVERY_S, 10.0)],
    "A handshake has five seconds": [(gatekeeper.HANDSHAKE_MS, 5_000)],
    "at most a quarter of the descriptors": [(gatekeeper.UNFINISHED_SHARE, 4)],
    "and 16 KiB each": [(gatekeeper.FIRST_BYTES, 16 << 10)],
    "An address with more than 128 connections": [(address_filter.MOST_KNOCKS, 128)],
    "20 are forgiven a second": [(address_filter.FORGIVEN_S, 20.0)],
    "not heard for 2 s, then 4 s, then 8 s each time": [(address_filter.FIRST_S, 2.0), (address_filter.LONGEST_S, 8.0)],
    "as `join --wait` says (a minute)": [(JoinSettings(address="").wait_s, 60.0), (zeromq.KNOCKING_S, 60.0)],
    "20 MiB that it has received and not read": [(zeromq.UNREAD_BYTES // MIB, 20)],
    "ZeroMQ stops reading at 16 frames of 1 MiB": [(zeromq.UNREAD_FRAMES, 16), (zeromq.FRAME // MIB, 1)],
    "which is looked for every 50 ms": [(gatekeeper.LOOK_S, 0.05)],
    "of at most 32 MiB and 8 times the model": [(limits.SPARE_BYTES, 32 * MIB), (limits.PER_MODEL, 8)],
    "A machine that joins has 20 MiB at the launcher": [(join_listener.UNREAD_BYTES, 20 * MIB)],
    "three messages of its model's size and 4 MiB": [(mail.UNREAD, 2), (mail_zeromq.SPARE_BYTES // MIB, 4)],
    "at most 100, of 500 letters each": [(run.MOST_REMARKS, 100), (run.REMARK_LETTERS, 500)],
}


@pytest.mark.parametrize("words", STATED)
def test_the_page_on_security_states_the_bounds_that_are_in_force(words):
    assert words in PAGE
    for found, stated in STATED[words]:
        assert found == stated


@pytest.fixture
def hub():
    hub = ZeromqHub(LOOPBACK, SECURITY)
    yield hub
    hub.close()


@pytest.fixture
def listener():
    listener = JoinListener(f"127.0.0.1:{free_ports()}", SECURITY, Requirements(0, "", {}), Ends())
    yield listener
    listener.close("the test is over", failed=False)


class Ends:
    """A launcher that only notes which processes are gone."""

    def __init__(self):
        self.ends = []

    def on_end(self, process):
        self.ends.append(process)


@pytest.fixture
def box():
    box = ZeromqMail(LOOPBACK, SECURITY)
    yield box
    box.close()


def until(condition):
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.002)


# -- options of the sockets --------------------------------------------------------------------------------------------


def has(socket, **options):
    """Compare a socket's options with these."""
    assert {name: socket.getsockopt(getattr(zmq, name)) for name in options} == options


@pytest.mark.parametrize("kind", ["hub", "listener", "box"])
def test_every_listening_socket_bounds_handshakes_and_frames_and_what_is_unread(kind, request):
    found = request.getfixturevalue(kind)
    has(found._socket, HANDSHAKE_IVL=5_000, BACKLOG=128, ZAP_ENFORCE_DOMAIN=1)
    frame = m.LONGEST if kind == "listener" else zeromq.FRAME
    unread = {"hub": zeromq.UNREAD_FRAMES, "listener": m.UNREAD, "box": mail.UNREAD}[kind]
    has(found._socket, MAXMSGSIZE=frame, RCVHWM=unread)
    assert (m.LONGEST, m.UNREAD) == (MIB, 16)
    assert found._gatekeeper._growth is not None
    assert found._gatekeeper._events.getsockopt(zmq.RCVHWM) == 10_000


def test_links_between_hosts_end_when_nothing_comes(hub, box):
    worker = ZeromqEndpoint(hub.address, "w", security=SECURITY)
    for end in (hub._socket, worker._socket):
        has(end, HEARTBEAT_IVL=5_000, HEARTBEAT_TIMEOUT=30_000, HEARTBEAT_TTL=30_000, MAXMSGSIZE=zeromq.FRAME)
    has(worker._socket, CONNECT_TIMEOUT=1_000, HANDSHAKE_IVL=5_000)
    worker.close()
    other = ZeromqMail(LOOPBACK, SECURITY)
    other.add_peer(Box(1, 0, box.address, box.key))
    ((_, link),) = other._peers.values()
    for end in (box._socket, link):
        has(end, TCP_KEEPALIVE=1, TCP_KEEPALIVE_IDLE=10, TCP_KEEPALIVE_INTVL=5, TCP_KEEPALIVE_CNT=3)
    has(link, SNDHWM=mail.UNREAD, RECONNECT_IVL_MAX=5_000, CONNECT_TIMEOUT=1_000, MAXMSGSIZE=zeromq.FRAME)
    other.close()
    assert security.ANSWER_MS < gatekeeper.HANDSHAKE_MS


def test_a_machine_that_joins_takes_no_longer_message_than_a_launcher_sends():
    context = zmq.Context()
    link = LauncherLink(context, f"127.0.0.1:{free_ports()}", control.Secret(TOKEN.reveal()))
    has(link._socket, MAXMSGSIZE=m.LONGEST, RECONNECT_IVL_MAX=2_000, HANDSHAKE_IVL=5_000)
    link.close()
    context.term()


# -- strangers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "most"), [(400, 100), (100_000, 1_024)])
def test_connections_without_a_key_have_a_share_of_the_descriptors(monkeypatch, limit, most):
    monkeypatch.setattr(gatekeeper.descriptors, "raise_limit", lambda: limit)
    hub = ZeromqHub(LOOPBACK, SECURITY)
    assert hub._gatekeeper._most_unfinished == most
    hub.close()


def test_a_stranger_may_send_little(hub, caplog):
    """It announces a long command of the handshake, and sends some of it."""
    greeting = b"\xff" + bytes(7) + b"\x01\x7f\x03\x00" + b"CURVE".ljust(20, b"\x00") + bytes(32)
    place = ("127.0.0.1", int(hub.address.rpartition(":")[2]))
    with socket.create_connection(place) as modest, socket.create_connection(place) as greedy:
        for stranger, nbytes in ((modest, gatekeeper.FIRST_BYTES - 500), (greedy, gatekeeper.FIRST_BYTES + 500)):
            stranger.sendall(greeting + b"\x06" + (900_000).to_bytes(8, "big") + bytes(nbytes))
        held = []
        while "bytes that nobody has read" not in caplog.text:
            assert len(held) < 100
            held.append(bytearray(b"x") * MIB)  # this process grows
            time.sleep(gatekeeper.LOOK_S / 4)
        assert f"{greedy.getsockname()[1]} was refused: it has sent" in caplog.text
        assert "the most are 16384" in caplog.text
        assert f"{modest.getsockname()[1]} was refused: it has sent" not in caplog.text


@pytest.mark.parametrize("is_member", [True, False])
def test_a_member_that_sends_at_once_is_not_taken_for_a_stranger(monkeypatch, is_member):
    """ZeroMQ's thread may finish a handshake, and receive a model, while the gatekeeper looks at memory."""
    name, ended = ("10.0.0.1", 7), []
    monkeypatch.setattr(gatekeeper, "received_by", lambda *_: 9 * MIB)
    monkeypatch.setattr(gatekeeper, "waiting_in", lambda *_: 8 * MIB)  # the kernel's to hold
    monkeypatch.setattr(gatekeeper, "hang_up", lambda descriptor, _: bool(ended.append(descriptor)) or True)
    keeper = SimpleNamespace(
        _growth=SimpleNamespace(look=lambda: True), _visitors={5: gatekeeper._Visitor(name)}, _admitted={},
        _backlogs={}, _of_member=2 * MIB, _refusals=SimpleNamespace(refuse=lambda *_: None),
        _take_events=lambda: keeper._admitted.update({5: name} if is_member else {}),
    )  # fmt: skip
    gatekeeper.Gatekeeper._bound_unread(keeper)
    assert ended == ([] if is_member else [5])


def test_heartbeats_add_little_to_what_may_be_unread(monkeypatch):
    one, other = socket.socketpair()
    backlog = Backlog(one.fileno(), 1_000, encrypted=True)
    began = time.monotonic()
    monkeypatch.setattr(gatekeeper.time, "monotonic", lambda: began + 24 * 3600)
    assert 24 * 3600 / 5 * 2 * 50 < backlog.most_unread < 4 * MIB  # two of 50 bytes in 5 s
    for end in (one, other):
        end.close()


def test_a_minute_of_refusals_with_the_longest_words_fits_the_log_that_is_allowed(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(refusals.time, "monotonic", lambda: now[0])
    log = refusals.RefusalLog()
    for _ in range(600):
        now[0] += 0.1
        log.warn("x" * MIB)
    assert sum(len(record.message) for record in caplog.records) < 100_000


def test_names_and_refusals_wait_for_each_other_in_bounded_memory_and_time(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(refusals.time, "monotonic", lambda: now[0])
    found = Refusals()
    found.ended.close()
    found.ended = SimpleNamespace(take=lambda: [("10.0.0.1", port) for port in range(5_000)], reported=True)
    found.look()
    assert len(found._strangers) == 1_000
    found._strangers.clear()
    found.ended = SimpleNamespace(take=list, reported=True)
    found.close_one(("10.0.0.2", 7), unfinished=True)
    now[0] += 0.9
    found.look()
    assert not caplog.records
    now[0] += 0.2
    found.look()
    assert "10.0.0.2:7 was refused" in caplog.text


# -- members -----------------------------------------------------------------------------------------------------------


def test_unknown_tokens_are_forgotten_and_so_are_those_of_dropped_links(hub, monkeypatch, caplog):
    now = [time.monotonic()]
    monkeypatch.setattr(zeromq.time, "monotonic", lambda: now[0])
    for number in range(1_500):
        hub.expect(f"w{number}").close()
    assert len(hub._left) == 1_024
    hub._strangers[b"waits"] = (now[0], None)
    hub._socket = SimpleNamespace(recv=lambda: HANDSHAKE)
    now[0] += 4.9
    hub._refuse(SimpleNamespace(bytes=b"one"))
    assert set(hub._strangers) == {b"waits", b"one"}
    now[0] += 0.2
    hub._refuse(SimpleNamespace(bytes=b"two"))
    assert set(hub._strangers) == {b"one", b"two"}
    assert "b'waits' was refused" in caplog.text


def test_one_pump_takes_a_share_of_what_a_worker_has_sent(hub, monkeypatch):
    assert zeromq.TURN == join_listener.TURN == 256
    end = hub.expect("w")
    worker = ZeromqEndpoint(hub.address, "w", security=SECURITY)
    until(lambda: hub.pump() or end.linked)
    monkeypatch.setattr(zeromq, "TURN", 3)
    before, taken = end._backlog.unread(), []
    for number in range(10):
        worker.send(More(number))
    until(lambda: end._backlog.unread() >= before + 10 * (2 + 33 + 2))  # all of them have come
    while sum(taken) < 10:
        assert select.select([hub.fileno()], [], [], 20)[0]  # a pump that leaves something asks for the next
        hub.pump()
        taken.append(len(end._intake.whole))
        end._intake.whole.clear()
    assert max(taken) == 3
    worker.close()


def test_a_machine_that_does_not_end_its_process_or_says_nothing_is_lost(listener, monkeypatch):
    now = [time.monotonic()]
    monkeypatch.setattr(join_listener.time, "monotonic", lambda: now[0])
    asked = m.JoinAsked(format=m.FORMAT, wire=0, workload="", host="lab1", kernel="", versions={})
    monkeypatch.setattr(listener, "_post", lambda identity, message: True)
    for waits_s in (5.0, 30.0):
        host = listener.hosts[b"1"] = JoinedHost(b"1", asked, now[0])
        process = listener.start(host, 0)
        if waits_s == 5.0:
            process.signal(signal.SIGKILL)
        now[0] += waits_s - 0.1
        listener.tick()
        assert process.alive
        now[0] += 1.2  # the next beat
        listener.tick()
        assert listener._events.ends.pop() is process
        assert not listener.hosts


def test_a_process_of_this_host_that_says_nothing_holds_the_launcher_up_for_two_seconds(
    listener, tmp_path, monkeypatch
):
    waited = []
    monkeypatch.setattr(join_listener.Channel, "receive", lambda _, seconds: waited.append(seconds))
    listener.open_locally(tmp_path)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(tmp_path / "attach"))
        listener.accept()
    assert waited == [2.0]


def test_mail_that_does_not_leave_is_not_waited_for(box, monkeypatch):
    other = ZeromqMail(LOOPBACK, SECURITY)
    other.add_peer(Box(1, 0, f"tcp://127.0.0.1:{free_ports()}", box.key))
    assert other.post(1, PeerHeader("", 2, 0, "model"), [torch.ones(3)])
    assert other.on_their_way == 1
    began = time.perf_counter()
    monkeypatch.setattr(mail_zeromq.time, "perf_counter", lambda: began + 2.1)
    assert other.on_their_way == 0
    assert len(other.remove_peer(1)) == 1
    other.close()
