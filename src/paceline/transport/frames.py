"""Whole frames, with descriptors, over a stream socket between two processes of one host.

A frame is a length, a count of descriptors and its bytes. Descriptors are sent with the frame's first byte and the
kernel keeps them in order, so each frame takes as many as it counts from those that arrived, however reads split or
join frames. Sending never waits: what the socket does not accept at once is copied and sent by the next `send`,
`flush`, `receive` or `poll`, so neither side can block the other. Reading takes one system call per small message.
"""

import os
import select
import socket
import struct
import time
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from paceline.core.errors import PeerError
from paceline.transport.base import Lost

Bytes = bytes | bytearray | memoryview

_HEADER = struct.Struct("<QI")
LONGEST = 1 << 40  # bytes; a larger length cannot be a real frame's
MOST_DESCRIPTORS = 8  # per frame
_BUFFER = 1 << 16  # bytes; a longer frame is read directly into its own memory
_GATHERED = 512  # pieces per system call; Linux takes 1,024
_ANCILLARY = socket.CMSG_SPACE(MOST_DESCRIPTORS * struct.calcsize("i"))
# Plain ints: combining two of the socket module's enum flags costs as much as a system call.
_READ_FLAGS = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))  # macOS has none
_AT_ONCE = int(socket.MSG_DONTWAIT)
_TICK_S = 0.001  # resolution of `select.poll`; shorter waits would be rounded, and emulated times with them
_NONE: list[int] = []


class Frame(NamedTuple):
    """One message; the receiver must close its descriptors."""

    data: bytearray
    descriptors: list[int]


class _Leftover:
    """The part of a frame that the socket did not accept; its descriptors go with its first byte."""

    def __init__(self, data: memoryview, descriptors: list[int]) -> None:
        self.data = data
        self.descriptors = descriptors


class Channel:
    """One end of a connected AF_UNIX stream socket, which it owns."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)  # a wait is then one system call; calls that must not wait pass a flag
        self._sock = sock
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._start = 0  # of the bytes read and not yet returned as frames
        self._end = 0
        self._body: bytearray | None = None  # of a frame that is too long for the buffer
        self._filled = 0
        self._counted = 0  # descriptors of that frame
        self._arrived: deque[int] = deque()
        self._ended = False
        self._seen: Frame | None = None  # read ahead by `poll`
        self._leftovers: deque[_Leftover] = deque()

    @staticmethod
    def pair() -> "tuple[Channel, Channel]":
        """Return two connected channels."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Channel(one), Channel(other)

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        """Close the socket and every descriptor that was not delivered."""
        for descriptor in (*self._arrived, *(d for left in self._leftovers for d in left.descriptors)):
            os.close(descriptor)
        if self._seen is not None:
            for descriptor in self._seen.descriptors:
                os.close(descriptor)
        self._arrived.clear()
        self._leftovers.clear()
        self._seen = None
        self._ended = True
        self._sock.close()

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, data: Bytes | Sequence[Bytes], descriptors: Sequence[int] = ()) -> None:
        """Send a frame without waiting; the caller may reuse data and close descriptors afterwards. Raises `Lost` if
        the other end is gone."""
        if type(data) is bytes and not descriptors and len(data) < _BUFFER:
            self._post([memoryview(_HEADER.pack(len(data), 0) + data)], ())
            return
        pieces = [data] if isinstance(data, bytes | bytearray | memoryview) else data
        length = sum([_size(piece) for piece in pieces])
        if len(descriptors) > MOST_DESCRIPTORS:
            raise ValueError(f"a frame takes at most {MOST_DESCRIPTORS} descriptors, not {len(descriptors)}")
        header = _HEADER.pack(length, len(descriptors))
        # For a short frame one copy is cheaper than a list of pieces.
        pieces = [b"".join([header, *pieces])] if length < _BUFFER else [header, *pieces]
        self._post([memoryview(piece).cast("B") for piece in pieces], descriptors)

    def _post(self, pieces: list[memoryview], descriptors: Sequence[int]) -> None:
        place = 0
        while place < len(pieces) and not self._leftovers:
            sent = self._transmit(pieces[place : place + _GATHERED], descriptors)
            if sent is None:
                break
            descriptors = ()
            while place < len(pieces) and sent >= len(pieces[place]):
                sent -= len(pieces[place])
                place += 1
            if sent:
                pieces[place] = pieces[place][sent:]
        if place < len(pieces):
            rest = memoryview(b"".join(pieces[place:]))
            self._leftovers.append(_Leftover(rest, [os.dup(descriptor) for descriptor in descriptors]))
            self.flush()

    def _transmit(self, pieces: list[memoryview], descriptors: Sequence[int]) -> int | None:
        """Return how many bytes the socket accepted; None if it is full."""
        try:
            if len(pieces) == 1 and not descriptors:
                return self._sock.send(pieces[0], _AT_ONCE)
            # Not `socket.send_fds`, which ignores its flags and would wait.
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
            return self._sock.sendmsg(pieces, rights, _AT_ONCE)
        except BlockingIOError:
            return None
        except OSError as error:  # either end has closed
            raise Lost from error

    @property
    def wants_write(self) -> bool:
        """Whether data is waiting to be sent."""
        return bool(self._leftovers)

    def flush(self) -> bool:
        """Send what the socket accepts; return whether nothing is left."""
        while self._leftovers:
            left = self._leftovers[0]
            sent = self._transmit([left.data], left.descriptors)
            if sent is None:
                return False
            for descriptor in left.descriptors:
                os.close(descriptor)
            left.descriptors = []
            left.data = left.data[sent:]
            if not left.data:
                self._leftovers.popleft()
        return True

    def finish(self, seconds: float) -> bool:
        """Wait up to `seconds` for everything to be sent; return whether it was. False if the other end is gone."""
        until = time.monotonic() + seconds
        try:
            while not self.flush():
                remaining = until - time.monotonic()
                if remaining <= 0:
                    return False
                self._await(select.POLLOUT, remaining)
        except Lost:
            return False
        return True

    # -- receiving ---------------------------------------------------------------------------------------------------

    def receive(self, seconds: float | None = None) -> Frame | None:
        """Wait for the next frame; None if none came within `seconds`. Raises `Lost` if none will."""
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            found = self._known()
            if found is not None:
                return found
            if until is None and not self._leftovers:
                self._read(0)
            elif not self._read_what_waits():
                remaining = None if until is None else until - time.monotonic()
                if remaining is not None and remaining <= 0:
                    return None
                self._await(select.POLLIN | (select.POLLOUT if self._leftovers else 0), remaining)
                with suppress(Lost):  # what the other end sent before it went can still be read
                    self.flush()

    def collect(self) -> Frame | None:
        """Return the next frame, None if none has arrived. Raises `Lost` if none will."""
        while True:
            found = self._known()
            if found is not None:
                return found
            if not self._read_what_waits():
                return None

    def listen(self) -> None:
        """Read once, after the event loop reported the socket readable; then call `buffered` until it returns None."""
        self._read(_AT_ONCE)

    def buffered(self) -> Frame | None:
        """Return the next frame already read. Raises `Lost` if none will come."""
        return self._known()

    def poll(self, seconds: float = 0.0) -> bool:
        """Return whether `receive` would return a frame or raise at once, waiting up to `seconds` for that."""
        if self._leftovers:
            with suppress(Lost):
                self.flush()
        if self._seen is None:
            try:
                self._seen = self.receive(seconds) if seconds > 0 else self.collect()
            except Lost:
                return True
        return self._seen is not None

    def _await(self, events: int, seconds: float | None) -> None:
        if seconds is not None and seconds < _TICK_S:
            time.sleep(seconds)
            return
        poller = select.poll()
        poller.register(self._sock, events)
        poller.poll(None if seconds is None else int(seconds * 1000))

    def _known(self) -> Frame | None:
        """Return the next frame already read, including by `poll`. Raises `Lost` if no more can come."""
        if self._seen is not None:
            frame, self._seen = self._seen, None
            return frame
        found = self._take()
        if found is None and self._ended:
            raise Lost
        return found

    def _take(self) -> Frame | None:
        """Return the next frame if all of it was read."""
        if self._body is not None:
            if self._filled < len(self._body):
                return None
            body, self._body = self._body, None
            return Frame(body, self._claim(self._counted))
        available = self._end - self._start - _HEADER.size
        if available < 0:
            self._make_room(_HEADER.size)
            return None
        length, count = _HEADER.unpack_from(self._buffer, self._start)
        if available < length:
            self._expect(length, count, available)
            return None
        if count > MOST_DESCRIPTORS:
            raise _implausible(length, count)
        begin = self._start + _HEADER.size
        end = begin + length
        data = self._buffer[begin:end]
        self._start, self._end = (0, 0) if end == self._end else (end, self._end)
        return Frame(data, self._claim(count) if count else _NONE)

    def _expect(self, length: int, count: int, available: int) -> None:
        """Make room for the rest of a partly read frame."""
        if length > LONGEST or count > MOST_DESCRIPTORS:
            raise _implausible(length, count)
        if length <= _BUFFER - _HEADER.size:
            self._make_room(_HEADER.size + length)
            return
        try:
            self._body = bytearray(length)
        except MemoryError as error:
            raise PeerError(f"a message of {length} bytes does not fit into memory") from error
        begin = self._start + _HEADER.size
        self._body[:available] = self._view[begin : self._end]
        self._filled = available
        self._counted = count
        self._start = self._end = 0

    def _make_room(self, needed: int) -> None:
        """Move unread bytes to the front of the buffer if `needed` bytes would not fit from `_start` on."""
        if self._start + needed > _BUFFER:
            kept = self._end - self._start
            self._buffer[:kept] = self._buffer[self._start : self._end]
            self._start, self._end = 0, kept

    def _claim(self, count: int) -> list[int]:
        if count > len(self._arrived):
            raise PeerError(f"{count} descriptors were sent and {len(self._arrived)} arrived: raise `ulimit -n`")
        return [self._arrived.popleft() for _ in range(count)]

    def _read_what_waits(self) -> bool:
        """Read what has arrived; False if nothing has."""
        return bool(self._readable.poll(0)) and self._read(_AT_ONCE)  # catching BlockingIOError is ten times slower

    def _read(self, flags: int) -> bool:
        """Read once; False if nothing had arrived and the flags forbid waiting."""
        target = self._view[self._end :] if self._body is None else memoryview(self._body)[self._filled :]
        try:
            size, ancillary, _, _ = self._sock.recvmsg_into([target], _ANCILLARY, flags | _READ_FLAGS)
        except BlockingIOError:
            return False
        except OSError:  # closed here, or there with our data unread
            self._ended = True
            return True
        for level, kind, packed in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._arrived.extend(number for (number,) in struct.iter_unpack("i", packed[: len(packed) // 4 * 4]))
        if not size:
            self._ended = True
        elif self._body is not None:
            self._filled += size
        else:
            self._end += size
        return True


def _size(piece: Bytes) -> int:
    return piece.nbytes if isinstance(piece, memoryview) else len(piece)


def _implausible(length: int, count: int) -> PeerError:
    return PeerError(
        f"the other end announced a message of {length} bytes with {count} descriptors, at most {LONGEST} and "
        f"{MOST_DESCRIPTORS} are possible: it does not use paceline's protocol"
    )
