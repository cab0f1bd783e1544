"""Frames keep their borders and their descriptors, however the socket splits and joins them."""

import os
import random
import socket
import threading
from itertools import cycle

import leaks
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import PeerError
from paceline.transport.base import Lost
from paceline.transport.shm import LONGEST, MOST_DESCRIPTORS, Channel

PATIENCE_S = 30.0


@pytest.fixture
def channels():
    watch = leaks.Watch()
    pair = Channel.pair()
    yield pair
    for channel in pair:
        channel.close()
    watch.require_nothing_left()


def collected(one, other):
    """All frames on their way from one to the other."""
    frames = []
    while one.wants_write or other.poll():
        one.flush()
        if (frame := other.collect()) is not None:
            frames.append(frame)
    return frames


def number_in(descriptor):
    """What `numbered` wrote."""
    with os.fdopen(descriptor, "rb") as file:
        return int(file.read())


def numbered(number):
    """A descriptor that can be told from others."""
    read, write = os.pipe()
    os.write(write, str(number).encode())
    os.close(write)
    return read


def test_frames_of_all_sizes_come_whole_and_in_order(channels):
    one, other = channels
    chance = random.Random(1)
    sent = [chance.randbytes(size) for size in (0, 1, 3, 65_523, 65_524, 65_525, 65_536, 10, 700_000, 0, 4_000_000, 5)]
    thread = threading.Thread(target=lambda: ([one.send(data) for data in sent], one.finish(PATIENCE_S)))
    thread.start()
    assert [bytes(other.receive().data) for _ in sent] == sent
    thread.join()
    assert other.collect() is None


def test_a_frame_may_be_given_in_many_pieces(channels):
    one, other = channels
    pieces = [bytes([number % 256]) * (number % 300) for number in range(3000)]
    one.send([memoryview(piece) for piece in pieces])
    assert [frame.data for frame in collected(one, other)] == [b"".join(pieces)]


def test_descriptors_stay_with_their_frames(channels):
    one, other = channels
    for number in range(40):
        carried = [numbered(number * 10 + place) for place in range(number % 4)]
        one.send(b"x" * (number * 997), carried)
        for descriptor in carried:
            os.close(descriptor)
    frames = collected(one, other)
    assert len(frames) == 40
    for number, frame in enumerate(frames):
        assert len(frame.data) == number * 997
        assert [number_in(d) for d in frame.descriptors] == [number * 10 + place for place in range(number % 4)]


def test_what_waits_to_be_sent_keeps_its_own_copy_of_data_and_descriptors(channels):
    one, other = channels
    filler = bytearray(1_000_000)
    one.send(filler)
    assert one.wants_write
    carried = numbered(7)
    data = bytearray(b"before")
    one.send(data, [carried])
    os.close(carried)
    data[:] = b"after!"
    filler[:] = b"\x01" * len(filler)
    first, second = collected(one, other)
    assert first.data == bytes(1_000_000)
    assert second.data == b"before"
    assert number_in(second.descriptors[0]) == 7


def test_descriptors_that_nobody_took_are_closed(channels):
    one, other = channels
    for _ in range(3):
        carried = numbered(1)
        one.send(b"unread", [carried])
        os.close(carried)
    assert other.poll()


def test_receive_waits_so_long_and_no_longer(channels):
    one, other = channels
    assert other.receive(0.0) is None
    assert other.receive(0.002) is None
    assert not other.poll(0.0005)
    one.send(b"x")
    assert other.poll()
    assert other.receive(0.0).data == b"x"
    timer = threading.Timer(0.01, lambda: one.send(b"y"))
    timer.start()
    assert other.receive(PATIENCE_S).data == b"y"
    timer.join()


def test_a_peer_that_hung_up_is_lost_after_its_last_word(channels):
    one, other = channels
    other.send(b"never read")
    one.send(b"last")
    one.close()
    assert other.poll()
    assert other.receive().data == b"last"
    assert other.poll()
    for wait in (other.receive, other.collect):
        with pytest.raises(Lost):
            wait()
    with pytest.raises(Lost):
        other.send(b"x")


def test_half_a_frame_is_none(channels):
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.send(b"\x05\x00")
    assert channel.collect() is None
    theirs.send(b"\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00ab")
    assert channel.collect() is None
    theirs.close()
    with pytest.raises(Lost):
        channel.receive()
    channel.close()


def test_a_closed_channel_is_lost(channels):
    one, _ = channels
    one.close()
    with pytest.raises(Lost):
        one.send(b"x")
    with pytest.raises(Lost):
        one.receive()


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        ((LONGEST + 1).to_bytes(8, "little") + bytes(4), "the other end announced"),
        (bytes(8) + (MOST_DESCRIPTORS + 1).to_bytes(4, "little"), "the other end announced"),
        (bytes(8) + (1).to_bytes(4, "little"), "1 descriptors were sent and 0 arrived"),
    ],
)
def test_noise_is_named(header, fault):
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.send(header)
    with pytest.raises(PeerError, match=fault):
        channel.collect()
    channel.close()
    theirs.close()


def test_too_many_descriptors_are_refused(channels):
    one, _ = channels
    with pytest.raises(ValueError, match=f"at most {MOST_DESCRIPTORS} descriptors, not {MOST_DESCRIPTORS + 1}"):
        one.send(b"", [0] * (MOST_DESCRIPTORS + 1))


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=300), max_size=12), st.lists(st.integers(1, 500), min_size=1, max_size=9))
def test_splits_do_not_matter(bodies, cuts):
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    stream = b"".join(len(body).to_bytes(8, "little") + bytes(4) + body for body in bodies)
    got = []
    for cut in cycle(cuts):
        if not stream:
            break
        theirs.send(stream[:cut])
        stream = stream[cut:]
        while (frame := channel.collect()) is not None:
            got.append(bytes(frame.data))
    theirs.close()
    channel.close()
    assert got == bodies


@settings(max_examples=60)
@given(st.binary(max_size=200))
def test_random_bytes_are_a_frame_or_the_peers_fault(noise):
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.send(noise)
    theirs.close()
    try:
        while channel.collect() is not None:
            pass
    except (PeerError, Lost):
        pass
    finally:
        channel.close()
