"""Nodes' messages as bytes: what is said is what is heard, and what makes no sense is refused."""

import math

import msgspec
import numpy as np
import pytest

from paceline.core.errors import PeerError
from paceline.core.peer_actions import Mix, Send
from paceline.core.peer_events import PeerLeft, Received, Started, Stepped
from paceline.peers import messages as p
from paceline.transport.codec import Codec
from paceline.transport.messages import KINDS

BYTES = [np.arange(12, dtype=np.uint8), np.zeros(0, dtype=np.uint8), np.full(20_000, 7, dtype=np.uint8)]
BOX = p.Box(3, 1, "tcp://127.0.0.1:5", "k", 0.25)
TO_SERVER = [
    p.Mailbox("@x", "k"), p.NotFinite(12), p.Here(), p.Exchanged(3, 1, 1 << 40), p.Averaging(4, []),
    p.Averaging(4, BYTES),
    p.CentreExchange(0.3, None, BYTES), p.CentreExchange(0.3, (0, 5, 6), BYTES, 41), p.Leaving("done"),
    p.Snapshot(7, BYTES[:2], BYTES[2:]), p.Snapshot(0, BYTES, []),
    p.Decisions([
        p.Decided(Started(0.5, 2, (4, 0, 8)), []),
        p.Decided(Stepped(1.5, 3, math.inf, (0.5, math.inf), 4, 0.1, 0.2, None), [Send(1, 0.5, (0, 2), "why")]),
        p.Decided(Received(2.0, 1, 9, 0.5, None), [Mix(9, 0.25, "so")]),
        p.Decided(PeerLeft(2.5, 1, "leave"), []),
    ]),
]  # fmt: skip
TO_WORKER = [
    p.Peering([BOX], [(4, "crash")], True, 3, 12.5, 0.1, 1e-9), p.Group(3, 1, [0, 2, 5], 0.5), p.Collect(4, last=True),
    p.Pulled(BYTES), p.Pulled(BYTES, 41), p.AreYouThere(),
]  # fmt: skip


def plain(message):
    return msgspec.to_builtins(message, enc_hook=lambda array: array.tolist())


def passed_on(message, decode):
    data, loose = Codec().encode(message)
    got, targets = decode(bytearray(data))
    for target, array in zip(targets, loose, strict=True):
        target[...] = array
    return got


@pytest.mark.parametrize("message", TO_SERVER, ids=lambda m: type(m).__name__)
def test_what_nodes_say(message):
    assert plain(passed_on(message, Codec().at_server)) == plain(message)


@pytest.mark.parametrize("message", TO_WORKER, ids=lambda m: type(m).__name__)
def test_what_nodes_are_told(message):
    assert plain(passed_on(message, Codec().at_worker)) == plain(message)


def test_every_message_is_tried_here():
    assert {type(m) for m in TO_SERVER} == set(p.NodeToServer.__args__)
    assert {type(m) for m in TO_WORKER} == set(p.NodeToWorker.__args__)


@pytest.mark.parametrize(
    "arrays",
    [[("float32", (3,))], [("uint8", (3, 3))], [("uint8", (-1,))], [b"12345678"], [("uint8", (3,), b"12")]],
    ids=["dtype", "shape", "size", "indices", "bytes"],
)
def test_values_that_are_no_bytes_are_refused(arrays):
    data = bytes([KINDS[p.CentreExchange].number]) + msgspec.msgpack.encode([0.5, None, arrays])
    with pytest.raises(PeerError, match="malformed CentreExchange"):
        Codec().at_server(bytearray(data))
