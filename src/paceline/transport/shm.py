"""Links on one host: small messages over a private socket, tensors in memory that worker and server both map.

The worker makes its region as an anonymous file, so no name can be left behind. The file is sealed against shrinking,
which would kill any process that still maps it. The server gets the descriptor with the worker's `Hello` and maps the
same pages, so a push moves no byte. Tensors outside the region follow their message in the same frame.
"""

import errno
import fcntl
import mmap
import os
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor

from paceline.core.errors import InternalError, PeerError
from paceline.model.memory_budget import available_bytes, region_shortage, require_region
from paceline.model.regions import Region, RegionLayout, parameters_in
from paceline.model.spec import ModelSpec
from paceline.transport.base import Closed, Lost, ServerEnd
from paceline.transport.codec import Codec, MakeArray, bytes_of
from paceline.transport.frames import Channel, Frame
from paceline.transport.lanes import LaneIn, LaneOut
from paceline.transport.messages import Bye, Hello, ToServer, ToWorker, Welcome

_LOOSE = 128  # in place of a kind: the message's length, the message, then the bytes of its tensors
_LANE = 129  # likewise, but the arrays are in the sender's lane
_LENGTH = struct.Struct("<I")
_PLACE = struct.Struct("<QQQ")  # in a lane: offset, length, and the ring's head after it
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)
CLOSING_S = 1.0  # to send last messages to a slow reader; a longer wait would delay the end of the run
LEAVING_S = 5.0  # to send a worker's last messages: the server reads in turns, and may be applying


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

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
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

    def _map(self, spec: ModelSpec) -> Region:
        if self._shared is None:
            raise PeerError("a worker said Hello to a region without passing its descriptor")
        layout = RegionLayout(spec)
        size = os.fstat(self._shared).st_size
        if size != layout.nbytes:
            raise PeerError(f"a worker's region has {size} bytes, its model takes {layout.nbytes}")
        require_sealed(self._shared)
        return Region(layout, mmap.mmap(self._shared, size))


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
