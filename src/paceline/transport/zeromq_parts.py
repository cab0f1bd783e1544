"""How messages and their tensors are cut into ZeroMQ messages, and put together again.

A message is followed by the bytes of its tensors in chunks, each a ZeroMQ message of its own, so that receiving
overlaps with sending. Both sides cut by the same rule. What lies in a region leaves from it without a copy and is
received into the other side's region.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from paceline.core.errors import PeerError
from paceline.transport.wire import Codec, Message, bytes_of, tensors_of

CHUNK = 1 << 20  # bytes; larger ones overlap less, smaller ones cost more calls
GATHERED = 1 << 14  # bytes; tensors below it share a chunk, which costs a copy but saves a message for each
GREETING = b"\x00"  # of a worker, and the server's answer; no kind of message
PARTING = b"\xff"


def chunks_of(views: list[memoryview]) -> list[list[memoryview]]:
    """How tensors are cut: large ones into chunks, neighbours among the small ones together."""
    chunks: list[list[memoryview]] = []
    small: list[memoryview] = []
    for view in views:
        if len(view) >= GATHERED or sum(map(len, small)) >= CHUNK:
            if small:
                chunks.append(small)
            small = []
        if len(view) >= GATHERED:
            chunks += [[view[begin : begin + CHUNK]] for begin in range(0, len(view), CHUNK)]
        elif len(view):
            small.append(view)
    return [*chunks, small] if small else chunks


class Intake:
    """Puts messages together as their parts come in."""

    def __init__(self, decode: Callable[[memoryview], tuple[Any, bool]]) -> None:
        self.whole: deque[Any] = deque()
        self._decode = decode
        self._message: Any = None
        self._targets: deque[list[memoryview]] = deque()

    @property
    def unfinished(self) -> bool:
        """Whether the next part belongs to a message that has begun."""
        return bool(self._targets)

    def take(self, socket: "zmq.Socket[bytes]", flags: int) -> bytes | None:
        """Take in the next part, or raise `zmq.Again` if it does not come; words at the door are the caller's."""
        if self._targets:
            self._take_chunk(socket, flags)
        else:
            data = socket.recv(flags)
            if data in (GREETING, PARTING):
                return data
            self._message, _ = self._decode(memoryview(data))
            self._targets.extend(chunks_of([bytes_of(tensor) for tensor in tensors_of(self._message)]))
        if not self._targets:
            self.whole.append(self._message)
            self._message = None
        return None

    def _take_chunk(self, socket: "zmq.Socket[bytes]", flags: int) -> None:
        target = self._targets[0]
        if len(target) == 1:
            expected = len(target[0])
            size = socket.recv_into(target[0], flags=flags)
        else:
            expected = sum(map(len, target))
            data = memoryview(socket.recv(flags))
            size = len(data)
            place = 0
            for part in target if size == expected else ():
                part[:] = data[place : place + len(part)]
                place += len(part)
        if size != expected:
            raise PeerError(f"a chunk of {size} bytes arrived where {expected} were announced")
        self._targets.popleft()


def post(socket: "zmq.Socket[bytes]", codec: Codec, message: Message, address: bytes | None = None) -> None:
    """A message and the bytes of its tensors."""
    data, loose = codec.encode(message)
    send_part(socket, data, address)
    for chunk in chunks_of([bytes_of(tensor) for tensor in tensors_of(message)]):
        # What lies in no region is its owner's again when this returns.
        send_part(socket, chunk[0] if len(chunk) == 1 else b"".join(chunk), address, copy=loose)


def send_part(socket: "zmq.Socket[bytes]", data: bytes | memoryview, address: bytes | None, copy: bool = True) -> None:
    """One message, to the worker at this address where the socket has several."""
    if address is not None:
        socket.send(address, zmq.SNDMORE)
    socket.send(data, 0, copy)
