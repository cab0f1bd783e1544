"""Nodes' messages as bytes: what is said is what is heard, and what makes no sense is refused."""

import math

import msgspec
import numpy as np
import pytest

from paceline.core.errors import PeerError
from paceline.core.peer_actions import Mix, Send
from paceline.core.peer_events import Left, Received, Started, Stepped
from paceline.peers import messages as p
from paceline.transport import peer_wire
from paceline.transport.wire import Codec, tensors_of
from paceline.transport.wire_forms import KINDS

BYTES = [np.arange(12, dtype=np.uint8), np.zeros(0, dtype=np.uint8), np.full(8, 7, dtype=np.uint8)]
BOX = p.Box(3, 1, "tcp://127.0.0.1:5", "k", 0.25)
TO_SERVER = [
    p.Mailbox("@x", "k"), p.Exchanged(3, 1, 1 << 40), p.Averaging(4, []), p.Averaging(4, BYTES),
    p.Elastic(0.3, None, BYTES), p.Elastic(0.3, (0, 5, 6), BYTES, 41), p.Leaving("done"),
    p.Snapshot(7, BYTES[:2], BYTES[2:]), p.Snapshot(0, BYTES, []),
    p.Decisions([
        p.Decided(Started(0.5, 2, (4, 0, 8)), []),
        p.Decided(Stepped(1.5, 3, math.inf, (0.5, math.inf), 4, 0.1, 0.2, None), [Send(1, 0.5, (0, 2), "why")]),
        p.Decided(Received(2.0, 1, 9, 0.5, None), [Mix(9, 0.25, "so")]),
        p.Decided(Left(2.5, 1, "leave"), []),
    ]),
]  # fmt: skip
TO_WORKER = [
    p.Peering([BOX], [(4, "crash")], True, 3, 12.5, 0.1, 1e-9), p.Group(3, 1, [0, 2, 5], 0.5), p.Collect(4, last=True),
    p.Pulled(BYTES), p.Pulled(BYTES, 41),
]  # fmt: skip


def plain(message):
    return msgspec.to_builtins(message, enc_hook=lambda array: array.tolist())


def passed_on(message, decode):
    data, loose = Codec().encode(message)
    got, expects = decode(bytearray(data))
    assert expects == loose
    for target, tensor in zip(tensors_of(got), tensors_of(message), strict=True):
        target.copy_(tensor)
    return got


@pytest.mark.parametrize("message", TO_SERVER, ids=lambda m: type(m).__name__)
def test_what_nodes_say(message):
    assert plain(passed_on(message, Codec().at_server)) == plain(message)


@pytest.mark.parametrize("message", TO_WORKER, ids=lambda m: type(m).__name__)
def test_what_nodes_are_told(message):
    assert plain(passed_on(message, Codec().at_worker)) == plain(message)


def test_every_message_is_tried_here():
    assert {type(m) for m in TO_SERVER} == set(peer_wire.TO_SERVER)
    assert {type(m) for m in TO_WORKER} == set(peer_wire.TO_WORKER)


@pytest.mark.parametrize(
    "arrays", [[("float32", (3,))], [("uint8", (3, 3))], [("uint8", (-1,))]], ids=["dtype", "shape", "size"]
)
def test_values_that_are_no_bytes_are_refused(arrays):
    wire = peer_wire.Values(0, 0.5, None, 0, arrays)
    data = bytes([KINDS[p.Elastic][0]]) + msgspec.msgpack.encode(wire)
    with pytest.raises(PeerError, match="malformed Elastic"):
        Codec().at_server(bytearray(data))
