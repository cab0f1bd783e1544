"""Links on one host: small messages over a private socket, tensors in memory that worker and server both map.

The worker makes its region as an anonymous file, so no name can be left behind. The file is sealed against shrinking,
which would kill any process that still maps it. The server gets the descriptor with the worker's `Hello` and maps the
same pages, so a push moves no byte. Tensors outside the region follow their message in the same frame.

A frame is a length, a count of descriptors and its bytes. Descriptors are sent with the frame's first byte and the
kernel keeps them in order, so each frame takes as many as it counts from those that arrived, however reads split or
join frames. Sending never waits: what the socket does not accept at once is copied and sent by the next `send`,
`flush`, `receive` or `poll`, so neither side can block the other. Reading takes one system call per small message.
Launcher, server and workers talk over such a `Channel` too.
"""

import errno
import fcntl
import mmap
import os
import select
import socket
import struct
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor

from paceline.core.errors import InternalError, PeerError
from paceline.core.machine_limits import available_bytes
from paceline.model.memory_budget import region_shortage, require_region
from paceline.model.regions import Region, RegionLayout, parameters_in
from paceline.model.spec import ModelSpec
from paceline.transport.base import Closed, Lost, ServerEnd
from paceline.transport.codec import Codec, MakeArray, bytes_of
from paceline.transport.lanes import LaneIn, LaneOut
from paceline.transport.messages import Bye, Hello, ToServer, ToWorker, Welcome

Bytes = bytes | bytearray | memoryview
ShareRegion = Callable[[Region, ModelSpec, int], None]

_HEADER = struct.Struct("<QI")
LONGEST = 1 << 40  # bytes; a larger length cannot be a real frame's
MOST_DESCRIPTORS = 65  # per frame: a worker's links to its server and to 64 shards
_BUFFER = 1 << 16  # bytes; a longer frame is read directly into its own memory
_GATHERED = 512  # pieces per system call; Linux takes 1,024
_ANCILLARY = socket.CMSG_SPACE(MOST_DESCRIPTORS * struct.calcsize("i"))
# Plain ints: combining two of the socket module's enum flags costs as much as a system call.
_READ_FLAGS = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))  # macOS has none
_AT_ONCE = int(socket.MSG_DONTWAIT)
_TICK_S = 0.001  # resolution of `select.poll`; shorter waits would be rounded, and emulated times with them
_NONE: list[int] = []
_LOOSE = 128  # in place of a kind: the message's length, the message, then the bytes of its tensors
_LANE = 129  # likewise, but the arrays are in the sender's lane
_LENGTH = struct.Struct("<I")
_PLACE = struct.Struct("<QQQ")  # in a lane: offset, length, and the ring's head after it
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)
CLOSING_S = 1.0  # to send last messages to a slow reader; a longer wait would delay the end of the run
LEAVING_S = 5.0  # to send a worker's last messages: the server reads in turns, and may be applying


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


class ShmEndpoint:
    """A worker's end. `relink` waits for a new channel after the server went away."""

    def __init__(self, channel: Channel, relink: Callable[[], Channel] | None = None) -> None:
        self._channel = channel
        self._relink = relink
        self._codec = Codec()
        self._out, self._in = LaneOut(anonymous_file), LaneIn()
        self._descriptor: int | None = None
        self._spec: ModelSpec | None = None
        self._closed = False

    def send(self, message: ToServer) -> None:
        if self._closed:
            raise Closed
        descriptors: tuple[int, ...] = ()
        if isinstance(message, Hello) and self._descriptor is not None and self._codec.region is not None:
            descriptors = (self._descriptor,)
            self._codec.region.take_in(message.values, message.buffers)
        with suppress(Lost):
            _send(self._channel, self._codec, message, descriptors, self._out)

    def receive(self) -> ToWorker:
        if self._closed:
            raise Closed
        frame = self._channel.receive()
        if frame is None:
            raise InternalError("receive() without a timeout returned no frame")
        data, tensors, place = _split(frame)
        if self._in.unread is not None:
            self._in.give_back()
        make = None if place is None else _placed(place, self._in, frame)
        message: ToWorker
        message, loose = self._codec.at_worker(data, make)
        if place is None and (loose or tensors is not None):
            _fill(loose, tensors)
        if frame.descriptors:
            self._borrow(frame.descriptors)
        if isinstance(message, Bye):
            self._closed = True
            raise Closed
        return message

    def poll(self, seconds: float = 0.0) -> bool:
        return self._closed or self._channel.poll(seconds)

    def flush(self) -> bool:
        """Send what the socket accepts; return whether nothing is left."""
        try:
            return self._channel.flush()
        except Lost:  # the next `receive` raises it
            return True

    def adopt(self, spec: ModelSpec) -> Region:
        """Return a region in memory that the next `Hello` shares with the server."""
        require_region(spec)
        layout = RegionLayout(spec)
        self._spec = spec
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = anonymous_file(layout.nbytes)
        self._codec.region = Region(layout, mmap.mmap(self._descriptor, layout.nbytes))
        return self._codec.region

    def _borrow(self, descriptors: list[int]) -> None:
        """Map the server's own parameters."""
        try:
            if self._spec is not None:
                self._codec.lent = parameters_in(self._spec, mmap.mmap(descriptors[0], 0))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def reconnect(self) -> None:
        self._codec.lent = None  # the next server has other memory
        if self._closed or self._relink is None:
            self._closed = True
            raise Closed
        self._channel.close()
        self._channel = self._relink()
        self._out, self._in = LaneOut(anonymous_file), LaneIn()

    def close(self) -> None:
        """Send what is left, then close. The region lives as long as its tensors."""
        self._channel.finish(LEAVING_S)
        self._channel.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._codec.forget()
        self._closed = True


class ShmServerEnd:
    """The server's end of one worker's link."""

    sends_region = False

    def __init__(self, channel: Channel, share: ShareRegion | None = None) -> None:
        """`share` gets each region that the worker shares, its model and its descriptor, for other processes."""
        self._channel = channel
        self._share = share
        self._out, self._in = LaneOut(anonymous_file), LaneIn()
        self._codec = Codec(self._map)
        self._shared: int | None = None  # descriptor that came with the frame being decoded
        self._lent: int | None = None  # descriptor to send with the next `Welcome`; its lender closes it

    @property
    def region(self) -> Region | None:
        """The worker's memory, once its `Hello` has come."""
        return self._codec.region

    def fileno(self) -> int:
        return self._channel.fileno()

    def pump(self) -> list[ServerEnd]:
        """Return the ends that may have messages when this end's descriptor is readable."""
        return [self]

    @property
    def wants_write(self) -> bool:
        """Whether data is waiting to be sent: call `flush` when the descriptor is writable."""
        return self._channel.wants_write

    def flush(self) -> None:
        with suppress(Lost):
            self._channel.flush()

    def deliver(self, message: ToWorker) -> None:
        descriptors: tuple[int, ...] = ()
        if self._lent is not None and isinstance(message, Welcome):
            descriptors, self._lent = (self._lent,), None
        with suppress(Lost):  # reading will report that the worker is gone
            _send(self._channel, self._codec, message, descriptors, self._out)

    def lend(self, flat: list[Tensor], descriptor: int) -> None:
        """Let the worker read these parameters in place: messages after the next `Welcome` may refer to them."""
        self._codec.lent = flat
        self._lent = descriptor

    def collect(self) -> ToServer | None:
        frame = self._channel.collect()
        return None if frame is None else self._message(frame)

    def listen(self) -> None:
        """Read once, after the event loop reported the socket readable; then call `buffered` until it returns None."""
        self._channel.listen()

    def buffered(self) -> ToServer | None:
        """Return the next message already read."""
        frame = self._channel.buffered()
        return None if frame is None else self._message(frame)

    def _message(self, frame: Frame) -> ToServer:
        data, tensors, place = _split(frame)
        if frame.descriptors:
            self._shared = frame.descriptors[0]
        try:
            make = None if place is None else _placed(place, self._in, frame)
            message: ToServer
            message, loose = self._codec.at_server(data, make)
        finally:
            for descriptor in frame.descriptors:
                os.close(descriptor)
            self._shared = None
        if make is not None:
            self._in.give_back()
        elif loose or tensors is not None:
            _fill(loose, tensors)
        return message

    def close(self) -> None:
        """Send `Bye` and close. The worker's region lives as long as its tensors."""
        self.deliver(Bye())
        self._channel.finish(CLOSING_S)
        self._channel.close()

    def abandon(self) -> None:
        """Close without a `Bye`: to the worker, the server is lost."""
        self._channel.close()

    def _map(self, spec: ModelSpec) -> Region:
        if self._shared is None:
            raise PeerError("a worker said Hello to a region without passing its descriptor")
        layout = RegionLayout(spec)
        size = os.fstat(self._shared).st_size
        if size != layout.nbytes:
            raise PeerError(f"a worker's region has {size} bytes, its model takes {layout.nbytes}")
        require_sealed(self._shared)
        region = Region(layout, mmap.mmap(self._shared, size))
        if self._share is not None:
            self._share(region, spec, self._shared)
        return region


def _send(
    channel: Channel, codec: Codec, message: ToServer | ToWorker, descriptors: tuple[int, ...], lane: LaneOut
) -> None:
    data, loose = codec.encode(message)
    if not loose:
        channel.send(data, descriptors)
        return
    placed = None if any(isinstance(one, Tensor) for one in loose) else lane.place(loose)
    if placed is not None:
        where = _PLACE.pack(placed.offset, placed.total, placed.end)
        try:
            channel.send(
                [bytes([_LANE]), _LENGTH.pack(len(data)), data, where],
                () if placed.descriptor is None else (placed.descriptor,),
            )
        finally:
            if placed.descriptor is not None:
                os.close(placed.descriptor)
        return
    channel.send([bytes([_LOOSE]), _LENGTH.pack(len(data)), data, *map(bytes_of, loose)], descriptors)


def _split(frame: Frame) -> tuple[bytearray | memoryview, memoryview | None, memoryview | None]:
    """Split a frame into the message, the bytes of its tensors, and their place in the lane; absent ones are None."""
    data = frame.data
    if not data or data[0] not in (_LOOSE, _LANE):
        return data, None, None
    begin = 1 + _LENGTH.size
    if len(data) < begin:
        raise PeerError(f"a message ends after {len(data)} bytes, in the middle of its length")
    (length,) = _LENGTH.unpack_from(data, 1)
    view = memoryview(data)
    message, rest = view[begin : begin + length], view[begin + length :]
    return (message, None, rest) if data[0] == _LANE else (message, rest, None)


def _placed(place: memoryview, lane: LaneIn, frame: Frame) -> MakeArray:
    """Return the function that returns a message's arrays from the lane, in order."""
    if frame.descriptors:
        lane.adopt(frame.descriptors.pop(0))
    try:
        return lane.arrays(*_PLACE.unpack(place))
    except (ValueError, struct.error) as error:
        raise PeerError(f"a message points outside the ring buffer: {error}") from error


def _fill(loose: list[Any], data: memoryview | None) -> None:
    """Copy the bytes into the tensors that the message announced."""
    targets = [bytes_of(one) for one in loose]
    announced = sum(len(target) for target in targets)
    arrived = 0 if data is None else len(data)
    if data is None or announced != arrived:
        raise PeerError(f"a message announced {announced} bytes of tensors and brought {arrived}")
    place = 0
    for target in targets:
        target[:] = data[place : place + len(target)]
        place += len(target)


def require_sealed(descriptor: int) -> None:
    """Refuse memory that its maker could shrink while this process maps it."""
    if _SEALS and hasattr(os, "memfd_create") and fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise PeerError("a process shares memory that is not sealed: it could shrink under those who map it")


def anonymous_file(nbytes: int) -> int:
    """Return the descriptor of unnamed memory, all of it allocated."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile(prefix="paceline-", buffering=0) as file:
            descriptor = os.dup(file.fileno())
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, nbytes)
        else:
            os.ftruncate(descriptor, nbytes)
        if hasattr(os, "memfd_create"):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise region_shortage(nbytes, available_bytes()) from error
        raise
    return descriptor
