"""What a member of another host can make the server allocate: everything is judged before there is memory for it."""

import contextlib
import resource
import socket
import time
from mmap import MAP_ANONYMOUS, MAP_POPULATE, MAP_PRIVATE, mmap
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from hosts import free_ports

from contracts.contract import SPEC, TABLE, values_of
from paceline.core.errors import PacelineError, PeerError
from paceline.core.machine_limits import available_bytes
from paceline.engines.hosts.join_listener import JoinListener, Requirements
from paceline.engines.local.addresses import LOOPBACK
from paceline.model.regions import private_region
from paceline.model.store import Gradient
from paceline.tables.messages import OpenTable, TableInit
from paceline.transport import mail_zeromq
from paceline.transport.base import Lost
from paceline.transport.codec import FORMAT, Codec
from paceline.transport.gatekeeper import FIRST_BYTES, GROWN_BYTES, LOOK_S, Growth
from paceline.transport.join_token import new_token
from paceline.transport.limits import MOST_TENSORS, PER_MODEL, SPARE_BYTES, Limits
from paceline.transport.mail import UNREAD, Box, PeerHeader, encode
from paceline.transport.mail_zeromq import ZeromqMail
from paceline.transport.messages import (
    CONTROL_BYTES,
    KINDS,
    STATE_BYTES,
    CollectiveCall,
    CollectiveKept,
    Hello,
    ModelLoaded,
    More,
    Note,
    OptimizerHeld,
    Push,
    Remark,
    SavedState,
)
from paceline.transport.security import Security
from paceline.transport.zeromq import (
    CHUNK,
    HANDSHAKE,
    LONG,
    MOST_STRANGERS,
    UNREAD_BYTES,
    UNREAD_FRAMES,
    ZeromqEndpoint,
    ZeromqHub,
)

MODEL_BYTES = SPEC.nbytes


def server():
    codec = Codec(private_region)
    codec.limits = Limits()
    return codec


def framed(kind, *fields):
    """What the fields of a message would be on a wire."""
    head = bytes([KINDS[kind].number]) + (FORMAT.to_bytes(2, "little") if kind is Hello else b"")
    return bytearray(head + msgspec.msgpack.encode(fields))


def refused(codec, data, match):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(PeerError, match=match):
        codec.at_server(data)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10  # KiB


def test_messages_have_a_longest_by_their_kind():
    refused(
        server(), framed(Remark, "x" * CONTROL_BYTES), f"a Remark of .* bytes is sent, the most are {CONTROL_BYTES}"
    )
    refused(server(), framed(SavedState, 1, bytes(STATE_BYTES)), f"SavedState .* the most are {STATE_BYTES}")
    assert server().at_server(framed(SavedState, 1, bytes(STATE_BYTES - 100)))[0].number == 1


def test_a_model_raises_what_its_worker_may_send():
    codec = server()
    loaded = [["torch.float32", [MODEL_BYTES // 4]]] * (PER_MODEL + 1)
    spare = ["torch.float32", [SPARE_BYTES // 4]]
    codec.at_server(framed(ModelLoaded, 0, [spare], []))
    refused(codec, framed(ModelLoaded, 0, [spare, *loaded], []), "its tensors have more than 33554432 bytes")
    worker = Codec()
    codec.at_server(bytearray(worker.encode(Hello(SPEC, values_of(SPEC.parameters, 1), values_of(SPEC.buffers, 2)))[0]))
    codec.at_server(framed(ModelLoaded, 0, [spare, *loaded[1:]], []))
    refused(codec, framed(ModelLoaded, 0, [spare, *loaded], []), "its tensors have more than")
    codec.at_server(framed(SavedState, 1, bytes(STATE_BYTES + MODEL_BYTES)))


@pytest.mark.parametrize(
    "form", [["torch.float32", [1 << 40]], ["torch.float64", [1 << 31, 1 << 31]], ["torch.uint8", [SPARE_BYTES + 1]]]
)
def test_tensors_without_a_model_are_few_and_small(form):
    refused(server(), framed(CollectiveCall, 0, "mean", b"", [form]), "more than 33554432 bytes")
    refused(server(), framed(Push, 1, 1, [[form], [], [], [], None, None]), "more than 33554432 bytes")


def test_the_number_of_tensors_is_bounded_however_small_they_are():
    few = [["torch.uint8", [0]]] * (MOST_TENSORS + 1)
    refused(server(), framed(CollectiveCall, 0, "mean", b"", few), f"more than {MOST_TENSORS} tensors")


def test_arrays_are_bounded_as_tensors_are():
    refused(server(), framed(TableInit, 0, ["float64", [1 << 40]]), "more than 33554432 bytes")
    codec = server()
    rows = SPARE_BYTES // (8 * 3) + 1
    codec.at_server(bytearray(Codec().encode(OpenTable(msgspec.structs.replace(TABLE, rows=rows)))[0]))
    codec.at_server(framed(TableInit, 0, ["float64", [rows, 3]]))


def test_a_model_or_table_that_does_not_fit_into_memory_is_refused():
    most = available_bytes()
    large = msgspec.structs.replace(SPEC, parameters=(("w", (most, 2), "torch.float32"),))
    refused(server(), framed(Hello, large, [], [], None, False, True), "it announces .* bytes, of which the server has")
    refused(server(), framed(Hello, large, [], []), "it announces")
    refused(server(), framed(OpenTable, msgspec.structs.replace(TABLE, rows=most)), "it announces")
    negative = msgspec.structs.replace(SPEC, parameters=(("w", (-3, 2), "torch.float32"),))
    refused(server(), framed(Hello, negative, [], []), r"w has shape \[-3, 2\]")


def test_a_model_brings_no_more_than_it_announces():
    form = ["torch.float32", [MODEL_BYTES // 2]]
    refused(server(), framed(Hello, SPEC, [form], []), f"it announces {MODEL_BYTES} bytes and brings {MODEL_BYTES * 2}")


@pytest.mark.parametrize("dimensions", [65, 10_000])
def test_dimensions_are_bounded(dimensions):
    shape = [1] * dimensions
    refused(server(), framed(CollectiveCall, 0, "mean", b"", [["torch.uint8", shape]]), "at most 64 dimensions")
    deep = msgspec.structs.replace(SPEC, parameters=(("w", tuple(shape), "torch.float32"),))
    refused(server(), framed(Hello, deep, [], [], None, False, True), "w has shape")


def test_lists_that_grow_in_memory_are_bounded():
    refused(server(), framed(CollectiveKept, 0, "mean", [b""] * 1_000_000, []), "length <= 4096")
    many = msgspec.structs.replace(SPEC, optimizer=msgspec.structs.replace(SPEC.optimizer, groups=({},) * 100_000))
    refused(server(), framed(Hello, many, [], []), "length <= 4096")


def test_what_is_said_about_a_message_is_short_whatever_it_holds():
    for shape in ("x" * 100_000, [(1 << 64) - 1] * 60):
        with pytest.raises(PeerError, match="malformed") as caught:
            server().at_server(framed(CollectiveCall, 0, "mean", b"", [["torch.uint8", shape]]))
        assert len(str(caught.value)) < 1000


def test_a_parameter_that_the_model_has_not_is_refused():
    codec = server()
    codec.at_server(framed(Hello, SPEC, [], [], None, False, True))
    for missing in ([3], [-1], [0, 1 << 40]):
        refused(codec, framed(Push, 1, 1, [0, b"", missing, [], None, None]), "is not one of the model's 3")
    codec.at_server(framed(Push, 1, 1, [0, b"", [0, 2], [], None, None]))


# -- at the socket -----------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr("paceline.transport.zeromq.PARTED_S", 0.1)  # nobody reads when workers are closed here
    monkeypatch.setattr("paceline.transport.zeromq.LEAVING_MS", 100)
    hub = ZeromqHub(LOOPBACK, SECURITY)
    yield hub
    hub.close()


SECURITY = Security(new_token())


def link(hub, token):
    end = hub.expect(token)
    worker = ZeromqEndpoint(hub.address, token, security=SECURITY)
    until(lambda: hub.pump() or end.linked)
    assert not worker.poll()
    return worker, end


def look_at_every_turn(gatekeeper):
    """Compare what connections have sent with what was read whether this process has grown or not."""
    gatekeeper._growth.close()
    gatekeeper._growth = SimpleNamespace(look=lambda: True, close=lambda: None)


def until(condition):
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


def fault_of(hub, end):
    while True:
        hub.pump()
        try:
            end.collect()
        except PacelineError as error:
            return str(error)


@pytest.mark.parametrize(
    ("frames", "match"),
    [
        ([LONG], "a long message is announced by 9 bytes, not by 1"),
        ([LONG + b"\xff" * 90_000], "a long message is announced by 9 bytes, not by 90001"),
        ([LONG + bytes(8)], "a message of 0 bytes is announced as a long one"),
        ([LONG + b"\xff" * 8, bytes([8]) * CHUNK], "a Remark of 18446744073709551615 bytes is sent"),
        ([LONG + b"\xff" * 8, bytes([63]) * CHUNK], "kind 63 arrived, which this process does not know"),
        ([LONG + b"\xff" * 8, b"short"], f"a chunk of 5 bytes arrived where {CHUNK} were announced"),
    ],
)
def test_a_long_message_is_judged_by_its_first_chunk(hub, frames, match):
    worker, end = link(hub, "bad")
    for frame in frames:
        worker._socket.send(frame)
    assert match in fault_of(hub, end)
    worker.close()


def test_after_a_fault_nothing_of_that_worker_is_kept_and_others_go_on(hub):
    (bad, at_bad), (good, at_good) = link(hub, "bad"), link(hub, "good")
    bad.send(Note("before", 1.0))
    bad._socket.send(b"\x03nonsense")
    for number in range(500):
        bad.send(More(number))
        bad._socket.send(b"\x03nonsense")
    good.send(More(1))
    got = None
    while got is None:
        hub.pump()
        got = at_good.collect()
    assert got == More(1)
    assert at_bad.collect() == Note("before", 1.0)
    with pytest.raises(PeerError, match="malformed Push"):
        at_bad.collect()
    until(lambda: not hub._socket.poll(20) or hub.pump())
    with pytest.raises(Lost):
        at_bad.collect()
    assert not at_bad._intake.whole
    for worker in (bad, good):
        worker.close()


def test_a_frame_longer_than_any_of_ours_ends_its_link_before_there_is_memory_for_it(hub):
    worker, end = link(hub, "bad")
    worker._socket.send(bytes(CHUNK * 2))
    with pytest.raises(Lost):
        worker.receive()
    assert not worker.refused
    assert not hub.pump()
    assert end.collect() is None
    worker.close()


def test_members_with_unknown_tokens_are_few_in_memory(hub, monkeypatch):
    monkeypatch.setattr("paceline.transport.zeromq.MOST_STRANGERS", 3)
    assert MOST_STRANGERS > 3
    workers = [ZeromqEndpoint(hub.address, f"unknown {number}", security=SECURITY) for number in range(6)]
    until(lambda: hub.pump() or len(hub._strangers) == 3)
    until(lambda: not hub._socket.poll(50) or hub.pump())
    assert len(hub._strangers) == 3
    for worker in workers:
        worker.close()


def test_an_ordinary_push_passes_all_bounds(hub):
    worker, end = link(hub, "good")
    region = worker.adopt(SPEC)
    worker.send(Hello(SPEC, region.parameters, region.buffers))
    worker.send(Push(1, 1, Gradient(region.slots[0].flat, frozenset({1}), [{"lr": 0.1}], [], 0.5, 1.0, 0)))
    worker.send(Push(2, 1, Gradient([torch.ones(100_000)], frozenset(), []), [np.arange(100_000)]))
    got = []
    while len(got) < 3:
        hub.pump()
        message = end.collect()
        got += [] if message is None else [message]
    assert torch.equal(got[2].gradient.flat[0], torch.ones(100_000))
    worker.close()


def test_frames_that_nobody_reads_stay_with_their_sender_and_are_all_read_later(hub):
    """A server that is only slow loses no worker, and holds a bounded number of its frames."""
    worker, end = link(hub, "good")
    for _ in range(4 * UNREAD_FRAMES):
        worker._socket.send(bytes([8]) + bytes(CHUNK - 1))
    until(lambda: end._backlog.unread() > (UNREAD_FRAMES - 1) * CHUNK)
    time.sleep(4 * LOOK_S)
    assert end._backlog.unread() < UNREAD_BYTES
    assert end._backlog.is_open
    assert "is sent, the most are" in fault_of(hub, end)  # of the first frame; all others are dropped unread
    worker.close()


def said(body, flags=0):
    """One frame of ZeroMQ's protocol."""
    return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body


def by_hand(address, security, token, role="worker", kind=b"DEALER"):
    """A member that speaks the protocol itself: ZeroMQ's own sockets send no part before they have the last."""
    client = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
    password = security._token.password(role)
    client.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PLAIN".ljust(20, b"\x00") + bytes(32))
    words = [role.encode(), password]
    client.sendall(said(b"\x05HELLO" + b"".join(bytes([len(word)]) + word for word in words), 4))
    hear(client, b"WELCOME")
    metadata = b"".join(
        bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
        for name, value in ((b"Socket-Type", kind), (b"Identity", token))
    )
    client.sendall(said(b"\x08INITIATE" + metadata, 4))
    hear(client, b"READY")
    return client


def hear(client, word):
    heard = b""
    while word not in heard:
        more = client.recv(1)
        assert more
        heard += more


def send_without_end(client, caplog):
    """Send parts of one message until the log says that this was too much.

    A sender that is blocked just then may not learn of it for minutes: its window is shut, and the closed end answers.
    """
    client.settimeout(0.1)
    left, until_s, parts = b"", time.monotonic() + 60, 0
    with client, contextlib.suppress(ConnectionError):
        while "bytes that nobody has read" not in caplog.text:
            assert time.monotonic() < until_s
            assert parts < 1_000
            if not left:
                left, parts = memoryview(said(bytes(CHUNK), 1)), parts + 1
            with contextlib.suppress(TimeoutError):
                left = left[client.send(left) :]
    until(lambda: "bytes that nobody has read" in caplog.text)


def test_parts_of_one_message_without_an_end_are_hung_up_on(caplog):
    security = Security(new_token(), encrypted=False)
    hub = ZeromqHub(LOOPBACK, security)
    end = hub.expect("bad")
    client = by_hand(hub.address, security, b"bad")
    client.sendall(said(HANDSHAKE))
    until(lambda: hub.pump() or end.linked)
    send_without_end(client, caplog)
    until(lambda: not end._backlog.is_open)  # ZeroMQ's thread closes it
    hub.close()


def test_a_machine_that_joins_sends_no_message_without_an_end(caplog):
    security = Security(new_token(), encrypted=False)
    address = f"127.0.0.1:{free_ports()}"
    listener = JoinListener(address, security, Requirements(0, "", {}), None)
    send_without_end(by_hand(address, security, b"bad"), caplog)
    listener.close("the test is over", failed=False)


@pytest.mark.parametrize("reads_first", [True, False])
def test_a_node_sends_no_message_without_an_end(caplog, reads_first):
    """Its reader may have read something of it before, or compute all the while."""
    security = Security(new_token(), encrypted=False)
    mail = ZeromqMail(LOOPBACK, security)
    mail.reserve([4 * CHUNK])
    client = by_hand(mail.address, security, b"", "node", b"PUSH")
    if reads_first:
        client.sendall(said(encode(PeerHeader(mail.key, 1, 0, "asked"))))
        assert [one.header.kind for one in mail.collect(20)] == ["asked"]
    send_without_end(client, caplog)
    most = 3 * 4 * CHUNK + mail_zeromq.SPARE_BYTES
    assert f"the most are {most}" in caplog.text
    mail.close()


@pytest.mark.parametrize("encrypted", [True, False])
@pytest.mark.parametrize("parameters", [3 * CHUNK, CHUNK // 32])
def test_a_node_that_computes_for_long_loses_none_of_its_mail(encrypted, parameters, caplog):
    """Peers go on sending models until they may not; what it holds of them is bounded, and no peer is hung up on.

    The kernel's buffers take many small models besides, which are not the node's to hold.
    """
    security = Security(new_token(), encrypted=encrypted)
    one, other = (ZeromqMail(LOOPBACK, security) for _ in range(2))
    model, posted = torch.ones(parameters), 0
    other.reserve([model.nbytes])
    look_at_every_turn(other._gatekeeper)
    one.add_peer(Box(2, 0, other.address, other.key))
    tried = time.monotonic()
    while time.monotonic() < tried + 20 * LOOK_S or posted < UNREAD:
        while one.post(2, PeerHeader("", 1, 0, "model", float(posted)), [model]):
            posted += 1
        time.sleep(LOOK_S / 10)
    found = []
    until(lambda: found.extend(other.collect(0.01)) or len(found) == posted)
    assert [each.header.weight for each in found] == [float(number) for number in range(posted)]
    (backlog,) = other._gatekeeper._backlogs.values()
    assert abs(backlog.unread()) < CHUNK  # all of it was counted as read, but for the handshake
    assert "nobody has read" not in caplog.text
    one.close()
    other.close()


def test_who_is_not_expected_may_send_little(hub, caplog):
    """A member that names a token of nobody's, while the server is busy.

    Both ends are of this process, which need not grow when what one end has sent becomes free for the other.
    """
    look_at_every_turn(hub._gatekeeper)
    worker = ZeromqEndpoint(hub.address, "nobody", security=SECURITY)
    for _ in range(200):
        worker._socket.send(bytes(CHUNK))
    until(lambda: f"the most are {FIRST_BYTES}" in caplog.text)
    worker.close()


def test_a_worker_that_takes_nothing_of_what_it_asks_for_is_parted_with(hub):
    worker, end = link(hub, "bad")
    rows = torch.zeros(SPARE_BYTES // 32)
    for _ in range(100):
        end.deliver(OptimizerHeld({"rows": rows}, {}))
    assert end in hub.pump()
    with pytest.raises(PeerError, match="does not take what it asks for"):
        end.collect()
    end.close()
    until(lambda: not end._backlog.is_open)
    worker.close()


def test_a_worker_that_reads_late_gets_all_of_it(hub):
    worker, end = link(hub, "good")
    rows = torch.ones(SPARE_BYTES // 32)
    for _ in range(6):
        end.deliver(OptimizerHeld({"rows": rows}, {}))
    for _ in range(6):
        assert torch.equal(worker.receive().tensors["rows"], rows)
    assert end.collect() is None
    worker.close()


def test_memory_is_looked_at_though_no_descriptor_is_left():
    """A process that strangers keep busy may have none; the thread that answers about credentials lives on."""
    growth = Growth()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            socket.socket()
        found = growth.look()
        held = mmap(-1, 4 * GROWN_BYTES, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE)  # freed memory is not used again
        grown = growth.look()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        growth.close()
    held.close()
    assert (found, grown) == (False, True)
