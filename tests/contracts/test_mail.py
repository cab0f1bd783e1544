"""Messages between nodes, over both ways: what is posted arrives as it was then, and nobody waits for a reader."""

import os
import re
import socket
import tempfile
import time
from pathlib import Path

import leaks
import msgspec
import pytest
import torch

from paceline.core.errors import OptionError
from paceline.engines.local.addresses import LOOPBACK
from paceline.peers.messages import Box
from paceline.transport.join_token import new_token
from paceline.transport.mail import UNREAD, PeerHeader, encode
from paceline.transport.mail_shm import ShmMail
from paceline.transport.mail_zeromq import ZeromqMail
from paceline.transport.security import Security

MAILS = ["shm", "zeromq", "tcp", "curve", "trusted"]
TOKEN = new_token()
SECURITY = {"curve": Security(TOKEN), "trusted": Security(TOKEN, encrypted=False)}


@pytest.fixture
def make(tmp_path, request):
    before, boxes = leaks.descriptors(), []

    def mail(kind):
        folder = tmp_path / str(len(boxes))
        folder.mkdir()
        address = f"ipc://{folder / 'mail'}" if kind == "zeromq" else LOOPBACK
        boxes.append(ShmMail(folder) if kind == "shm" else ZeromqMail(address, SECURITY.get(kind)))
        return boxes[-1]

    yield mail
    for box in boxes:
        box.close()
    assert not list(tmp_path.glob("*/mail"))
    kinds = set(re.split(r"[^a-z]", request.node.name))
    if not kinds & {
        "zeromq",
        "tcp",
        "curve",
        "trusted",
    }:  # whose context has descriptors of its own for the process's incarnation
        assert leaks.descriptors() == before


def pair(make, kind):
    one, other = make(kind), make(kind)
    one.add_peer(box(2, other))
    other.add_peer(box(1, one))
    return one, other


def box(node, mail, incarnation=0):
    return Box(node, incarnation, mail.address, mail.key)


def header(sender=1, kind="model", **fields):
    return PeerHeader("", sender, 0, kind, **fields)


def collected(mail, count=1):
    found = []
    until = time.monotonic() + 10
    while len(found) < count and time.monotonic() < until:
        found += mail.collect(0.05)
    return found


@pytest.mark.parametrize("kind", MAILS)
def test_values_arrive_as_they_were_when_posted(make, kind):
    one, other = pair(make, kind)
    values = [torch.randn(300, 400), torch.empty(0), torch.arange(5), torch.randn(7).bfloat16()]
    assert one.post(2, header(weight=0.25, tensors=(0, 2, 5, 6)), values)
    kept = [value.clone() for value in values]
    for value in values:
        value.zero_()
    (delivered,) = collected(other)
    assert (delivered.header.sender, delivered.header.weight, delivered.header.tensors) == (1, 0.25, (0, 2, 5, 6))
    for raw, value in zip(delivered.values, kept, strict=True):
        assert torch.equal(raw.view(value.dtype).view(value.shape), value)
    other.release()


@pytest.mark.parametrize("kind", MAILS)
def test_messages_without_values_arrive_in_their_order(make, kind):
    one, other = pair(make, kind)
    kinds = ["asked", "lend"]
    for word in kinds:
        assert one.post(2, header(kind=word), [])
    assert [delivered.header.kind for delivered in collected(other, 2)] == kinds


@pytest.mark.parametrize("kind", MAILS)
def test_a_reader_that_does_not_read_is_not_waited_for_and_reads_on_when_it_does(make, kind):
    one, other = pair(make, kind)
    value = torch.ones(1 << 20)
    posted = 0
    while one.post(2, header(weight=float(posted)), [value]):
        posted += 1
        assert posted < 200
    assert posted >= UNREAD
    if kind == "shm":
        assert posted == UNREAD
    found = collected(other, posted)
    assert [delivered.header.weight for delivered in found] == [float(number) for number in range(posted)]
    assert all(torch.equal(delivered.values[0].view(torch.float32), value) for delivered in found)
    other.release()
    until = time.monotonic() + 10
    while not one.post(2, header(), [value]):
        assert time.monotonic() < until
    (again,) = collected(other)
    assert torch.equal(again.values[0].view(torch.float32), value)


def test_shared_memory_is_used_again_once_it_was_read(make):
    one, other = pair(make, "shm")
    one.reserve([4096])
    for number in range(20):
        assert one.post(2, header(), [torch.full((1024,), float(number))])
        (delivered,) = collected(other)
        assert float(delivered.values[0].view(torch.float32)[5]) == number
        other.release()
    assert len(one._slots) == 1


def test_what_a_reader_that_is_gone_has_not_read_comes_back(make):
    one, other = pair(make, "shm")
    assert one.post(2, header(weight=0.5, tensors=(3,)), [torch.arange(4.0)])
    (back,) = one.remove_peer(2)
    assert (back.header.weight, back.header.tensors) == (0.5, (3,))
    assert torch.equal(back.values[0].view(torch.float32), torch.arange(4.0))
    assert not one.post(2, header(), [torch.ones(2)])
    assert other is not None


def test_what_was_read_does_not_come_back(make):
    one, other = pair(make, "shm")
    assert one.post(2, header(), [torch.arange(4.0)])
    collected(other)
    other.release()
    assert one.remove_peer(2) == []


@pytest.mark.parametrize("kind", MAILS)
def test_messages_to_a_mailbox_that_is_closed_or_unknown_are_refused(make, kind):
    one, other = pair(make, kind)
    other.close()
    assert not one.post(9, header(), [torch.ones(2)])
    if kind == "shm":
        assert not one.post(2, header(), [torch.ones(2)])
        assert one.remove_peer(2) == []


@pytest.mark.parametrize("kind", MAILS)
def test_whoever_does_not_have_the_key_is_not_heard(make, kind, caplog):
    one, other = pair(make, kind)
    one.add_peer(Box(2, 0, other.address, "0" * 32))
    assert one.post(2, header(), [torch.ones(2)])
    until = time.monotonic() + 10
    while "does not have" not in caplog.text and time.monotonic() < until:
        assert other.collect(0.05) == []
    one.add_peer(box(2, other))
    assert one.post(2, header(weight=0.75), [torch.ones(2)])
    assert [delivered.header.weight for delivered in collected(other)] == [0.75]
    assert "does not have this node's key" in caplog.text


def test_a_message_that_names_a_slot_but_no_values_is_dropped(make, monkeypatch, caplog):
    one, other = pair(make, "shm")

    def without_sizes(message):
        return encode(msgspec.structs.replace(message, sizes=()) if message.kind == "model" else message)

    monkeypatch.setattr("paceline.transport.mail_shm.encode", without_sizes)
    assert one.post(2, header(), [torch.ones(2)])
    assert one.post(2, header(kind="asked"), [])
    assert [delivered.header.kind for delivered in collected(other)] == ["asked"]
    assert "a message of node 1 names slot 0, but no values" in caplog.text


def test_memory_that_could_shrink_is_refused(make, monkeypatch, caplog):
    one, other = pair(make, "shm")

    def unsealed(nbytes):
        descriptor = os.memfd_create("test")
        os.ftruncate(descriptor, nbytes)
        return descriptor

    monkeypatch.setattr("paceline.transport.mail_shm.anonymous_file", unsealed)
    assert one.post(2, header(), [torch.ones(2)])
    assert one.post(2, header(kind="asked"), [])
    assert [delivered.header.kind for delivered in collected(other)] == ["asked"]
    assert "not sealed" in caplog.text


def test_last_messages_of_a_peer_that_has_left_are_read(make):
    one, other = pair(make, "shm")
    for _ in range(2):
        assert one.post(2, header(), [torch.ones(3)])
        collected(other)
        other.release()
    assert one.post(2, header(weight=0.5), [torch.full((3,), 7.0)])
    other.remove_peer(1)
    (delivered,) = collected(other)
    assert float(delivered.values[0].view(torch.float32)[0]) == 7.0
    other.release()
    other.collect()
    other.release()
    assert not other._mapped


def test_a_name_that_is_too_long_for_a_socket_is_refused(tmp_path):
    folder = tmp_path / ("x" * 110)
    folder.mkdir()
    with pytest.raises(OptionError, match="at most 107 bytes, and .*/mail has .*: set TMPDIR to a shorter path"):
        ShmMail(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_is_not_heard_even_with_the_key(caplog):
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)  # as if the private folder were open
    other = ShmMail(folder)
    (folder / "mail").chmod(0o777)
    told = encode(msgspec.structs.replace(header(kind="asked"), key=other.key))
    for user in (23_001, 0):
        if os.fork() == 0:
            os.setuid(user)
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as theirs:
                theirs.sendto(told, other.address)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    assert [delivered.header.kind for delivered in other.collect()] == ["asked"]
    other.close()
    folder.rmdir()
    assert f"a message of {len(told)} bytes was dropped: it is of user 23001" in caplog.text


@pytest.mark.parametrize("kind", ["zeromq", "tcp"])
def test_messages_over_zeromq_are_seen_to_leave(make, kind):
    one, other = pair(make, kind)
    assert one.post(2, header(), [torch.ones(1000)])
    assert one.post(2, header(kind="asked"), [])
    collected(other, 2)
    until = time.monotonic() + 10
    while one.on_their_way:
        assert time.monotonic() < until
    assert [(departed.peer, departed.bytes) for departed in one.departed()] == [(2, 4000)]
    assert one.departed() == []


def test_what_was_taken_back_is_not_read_and_its_slot_is_somebody_elses(make):
    one, two, three = make("shm"), make("shm"), make("shm")
    one.add_peer(box(2, two))
    one.add_peer(box(3, three))
    assert one.post(2, header(), [torch.full((4,), 1.0)])
    assert len(one.remove_peer(2)) == 1
    assert one.post(3, header(), [torch.full((4,), 2.0)])
    assert two.collect() == []
    two.release()
    assert one.unread == 1
    assert one.post(3, header(), [torch.full((4,), 3.0)])
    assert [float(d.values[0].view(torch.float32)[0]) for d in collected(three, 2)] == [2.0, 3.0]
    three.release()
    assert one.unread == 0


def test_a_peer_that_was_parted_with_and_is_met_again_is_heard(make):
    one, other = pair(make, "shm")
    assert one.post(2, header(), [torch.ones(1)])
    assert len(collected(other)) == 1
    other.release()
    other.remove_peer(1)
    other.collect()
    other.release()  # lets go of what it had mapped
    one.remove_peer(2)
    other.add_peer(box(1, one))
    one.add_peer(box(2, other))
    for _ in range(5):
        assert one.post(2, header(), [torch.ones(1)])
        assert len(collected(other)) == 1
        other.release()


def test_the_next_life_of_a_peer_is_not_held_up_by_what_the_last_did_not_read(make):
    one, other = pair(make, "shm")
    while one.post(2, header(), [torch.ones(1)]):
        pass
    again = make("shm")
    one.add_peer(box(2, again, incarnation=1))
    assert one.post(2, header(), [torch.ones(1)])
    assert len(collected(again)) == 1
    assert other is not None


def test_a_message_that_names_too_many_tensors_is_refused_not_lost(make, caplog):
    one, other = pair(make, "shm")
    values = [torch.ones(3) for _ in range(2)]
    named = tuple(range(100_000))
    assert not one.post(2, header(tensors=named), values)
    assert "too long to be sent" in caplog.text
    assert one.unread == 0
    assert one.post(2, header(), values)
    assert len(collected(other)) == 1


def test_a_message_over_tcp_is_on_its_way_until_its_last_byte_whatever_its_last_tensor_is(make):
    one, other = make("zeromq"), make("zeromq")
    address = other.address
    other.close()  # nobody listens there
    one.add_peer(Box(2, 0, address, "k" * 32))
    assert one.post(2, header(), [torch.ones(1 << 20), torch.ones(2)])
    time.sleep(0.2)
    assert one.on_their_way == 1
    assert one.departed() == []
    assert len(one.remove_peer(2)) == 1


def test_many_small_messages_leave_room_for_large_ones(make):
    one = make("shm")
    one.reserve([400_000])
    others = {node: make("shm") for node in range(2, 35)}
    for node, mail in others.items():
        one.add_peer(box(node, mail))
    small, large = [torch.zeros(8)], [torch.arange(100_000, dtype=torch.float32)]
    for _ in range(UNREAD):
        for node in others:
            one.post(node, header(), small)
    assert not one.post(2, header(), large)  # nothing is free
    assert len(one._slots) == 64
    for mail in others.values():
        mail.collect()
        mail.release()
    for node, mail in others.items():
        assert one.post(node, header(), large)
        (delivered,) = collected(mail)
        assert torch.equal(delivered.values[0].view(torch.float32), large[0])
    assert one.unread == len(others)
