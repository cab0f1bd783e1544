"""Links over ZeroMQ, on a socket in a private folder or over TCP: a DEALER per worker, one ROUTER at the server.

Each side has its own region: tensors are sent directly from one and received directly into the other, and a message is
delivered only when its last byte has arrived. Tensors in a region are sent without a copy, so they must not change
before they are out. The order of a run ensures that: a worker writes to a slot again only when the server has granted
it, which follows the push; the server writes a worker's parameters again when its push has come, or when the grant they
went with is void.

The bytes of a message's tensors follow it in chunks, each a ZeroMQ message, so that receiving overlaps with sending.
Both sides cut by the same rule. A message that is longer than a chunk itself is announced by its length and cut too: no
frame is longer than FRAME, and ZeroMQ hangs up on whoever sends a longer one, before it makes room for it.

On a socket of the host a process of another user is turned away when it connects, by the credentials that the kernel
reports. Over a network `Security` gives both ends the run's keys, and nobody else gets as far as a message; without it
a port is open to everybody, which is for tests.

A worker's token is its routing id. The worker sends a handshake and waits for the answer, so it may connect before the
server expects it. ZeroMQ would silently reconnect to any server at the address; the socket's monitor tells a worker
that its server is gone.
"""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from socket import AF_INET, AF_INET6, getaddrinfo
from typing import Any

import numpy as np
import zmq
from zmq.utils.garbage import gc as zero_copy_frames
from zmq.utils.monitor import recv_monitor_message

from paceline.core.errors import InternalError, PacelineError, PeerError
from paceline.model.memory_budget import require_region
from paceline.model.regions import Region, private_region
from paceline.model.spec import ModelSpec
from paceline.model.store import ArrivingNorm, Gradient
from paceline.transport.base import Closed, Lost, ServerEnd
from paceline.transport.bell import Bell
from paceline.transport.codec import Codec, bytes_of
from paceline.transport.gatekeeper import Backlog, Gatekeeper, hang_up
from paceline.transport.join_token import Role
from paceline.transport.limits import Limits
from paceline.transport.messages import Bye, Hello, ToServer, ToWorker
from paceline.transport.refusals import RefusalLog
from paceline.transport.security import ANSWER_MS, Security

CHUNK = 1 << 20  # bytes; larger chunks overlap less, smaller ones cost more calls
GATHERED = 1 << 14  # bytes; smaller tensors share a chunk, which costs a copy but saves a message for each
HANDSHAKE = b"\x00"  # from a worker, and the server's answer; not the number of any message
PARTING = b"\xff"
LONG = b"\xfe"  # and eight bytes: so long is the message whose chunks follow
FRAME = CHUNK + GATHERED + 1024  # bytes of the longest frame, with what encryption adds
ShareMirror = Callable[[Region, ModelSpec], None]
TICK_S = 0.001  # resolution of ZeroMQ's poller
TURN = 256  # messages per pump, so that one worker's push does not block the server
STREAM_S = 0.005  # that a pump waits for the next chunk: a turn of the event loop for each costs more than the chunk
PATIENCE_S = 5.0  # after which the server refuses a worker whose token it does not know
LEAVING_MS = 5_000  # to send last messages
PARTED_S = 5.0  # for the server to read the last of very many
ENDING_S = 10.0  # for ZeroMQ to end, after that
LAST_WORDS_S = 5.0  # to receive the last messages of an ended process; they are in this machine's memory
WATCH_MS = 100  # between a waiting worker's checks that its server is alive
# A listener under a flood of strangers may hang up on a member that is slow to show its key, have no time for it, or
# not hear its address for a while (`address_filter.py`). So a connection that ends before the server has answered is
# made again, for KNOCKING_S, or what a worker's machine waits for a server. That a server does not know the keys looks
# the same, but is rare: `join` had them accepted before it started the worker. UNREACHED attempts that are turned down
# at once end it sooner: no server listens there any more.
KNOCKING_S = 60.0
UNREACHED = 3
AGAIN_S = 0.1  # between two attempts
_LENGTH_BYTES = 8
RECONNECT_MS = 3_600_000  # never, in effect; ZeroMQ's own "never" would drop unread messages
# Of links between hosts. A link is lost when nothing has come for HEARTBEAT_TIMEOUT_MS: long enough for a server that
# writes a checkpoint and does not read, or a network that is gone for some seconds; a process that ends is noticed at
# once. ZeroMQ's thread sends heartbeats, whatever the script does.
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 5_000, 30_000
# Of one worker that the server has not read; then ZeroMQ stops reading from it, and the worker's own memory fills. A
# worker that has sent more waits for the server's answer to its last word, so that none is lost when it hangs up.
UNREAD_FRAMES = 16
UNREAD_BYTES = (UNREAD_FRAMES + 4) * FRAME  # of one worker: only parts of one message without an end come to more
MOST_STRANGERS = 1_024  # members with unknown tokens that are remembered
_OF_HOST = "ipc://"
logger = logging.getLogger("paceline")
KEYS_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH  # ZeroMQ does not try again
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | KEYS_REFUSED
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | _REFUSED


def bind_privately(socket: "zmq.Socket[bytes]", address: str) -> str:
    """Bind the socket and return its address; on this host, accept processes of this user alone."""
    if address.startswith(_OF_HOST) and sys.platform == "linux":
        socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
    speak_ip6(socket, address)
    socket.bind(address)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def speak_ip6(socket: "zmq.Socket[bytes]", address: str) -> None:
    """Let the socket use IPv6 if the address does. ZeroMQ tries one kind of address: of a name, IPv4 if it has any."""
    if not address.startswith(_OF_HOST) and family_of(address.removeprefix("tcp://").rpartition(":")[0]) == AF_INET6:
        socket.setsockopt(zmq.IPV6, 1)


def family_of(host: str) -> int:
    """Return the kind of address that is used for a host: IPv6 in brackets, or by a name that has no other."""
    if host.startswith("["):
        return AF_INET6
    kinds: set[int] = set()
    with suppress(OSError, UnicodeError):  # whoever connects will say that nobody knows the name
        kinds = {kind for kind, *_ in getaddrinfo(host, None)}
    return AF_INET6 if kinds == {AF_INET6} else AF_INET


def require_network(address: str) -> None:
    """Refuse keys for a socket of the host, where the kernel tells who connects."""
    if address.startswith(_OF_HOST):
        raise InternalError(f"keys are for TCP, and {address} is a socket of this host")


def remove_name(address: str) -> None:
    """Remove the name of a closed socket of this host; ZeroMQ leaves it."""
    if address.startswith(_OF_HOST):
        Path(address.removeprefix(_OF_HOST)).unlink(missing_ok=True)


def _make(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket


def bound_link(socket: "zmq.Socket[bytes]") -> None:
    """Set the bounds of a link between hosts; call it before `bind` or `connect`."""
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)


def end_context(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    """End the context, and pyzmq's thread that waits until zero-copy frames are out.

    Now and then ZeroMQ's own end of a context never comes, though all its sockets are closed (seen where a connection
    ended at that moment): then its threads are left to the end of the process, which must not wait for them.
    """
    ending = threading.Thread(target=context.term, name="paceline-end", daemon=True)
    ending.start()
    ending.join(ENDING_S)
    if ending.is_alive():
        logger.debug("ZeroMQ did not end a context within %g s: it is left", ENDING_S)
        return
    until = time.monotonic() + 1.0
    while zero_copy_frames.refs and time.monotonic() < until:
        time.sleep(0.001)
    if not zero_copy_frames.refs:  # otherwise another context of this process still uses the thread
        zero_copy_frames.stop()


def chunks_of(views: list[memoryview]) -> list[list[memoryview]]:
    """Cut tensors into chunks; neighbouring small ones share a chunk."""
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
    """Assembles messages from the parts that arrive."""

    def __init__(self, codec: Codec, decode: Callable[[memoryview], tuple[Any, list[Any]]]) -> None:
        self.whole: deque[Any] = deque()
        self._codec, self._decode = codec, decode
        self._message: Any = None
        self._targets: deque[list[memoryview]] = deque()
        self._norm: ArrivingNorm | None = None  # of the push that arrives
        self.size = 0  # bytes of the part that was taken last
        self._long: bytearray | None = None  # the first chunks of a long message
        self._length = 0  # of it

    @property
    def unfinished(self) -> bool:
        """Whether the next part belongs to a message that has begun."""
        return bool(self._targets) or self._long is not None

    def take(self, socket: "zmq.Socket[bytes]", flags: int) -> bytes | None:
        """Receive the next part, or raise `zmq.Again` if none comes. Return a HANDSHAKE or PARTING to the caller."""
        if self._targets:
            self._take_chunk(socket, flags)
        else:
            data = socket.recv(flags)
            self.size = len(data)
            if self._long is not None:
                whole = self._joined(self._long, data)
                if whole is None:
                    return None
                data = whole
            elif data in (HANDSHAKE, PARTING):
                return data
            elif data.startswith(LONG):
                self._begin_long(data)
                return None
            self._message, loose = self._decode(memoryview(data))
            self._targets.extend(chunks_of([bytes_of(tensor) for tensor in loose]))
            self._norm = _to_be_measured(self._codec, len(self._targets))
            self._targets.extend(chunks_of([bytes_of(tensor) for tensor in _mirrored(self._codec)]))
        if not self._targets:
            if self._norm is not None:
                self._norm.finish()
                self._norm = None
            self.whole.append(self._message)
            self._message = None
        return None

    def drop_unfinished(self) -> None:
        """Forget a message that has begun."""
        self._message = self._long = self._norm = None
        self._targets.clear()

    def _begin_long(self, data: bytes) -> None:
        if len(data) != 1 + _LENGTH_BYTES:
            raise PeerError(f"a long message is announced by {1 + _LENGTH_BYTES} bytes, not by {len(data)}")
        self._length = int.from_bytes(data[1:], "little")
        if self._length <= CHUNK:
            raise PeerError(f"a message of {self._length} bytes is announced as a long one, of more than {CHUNK}")
        self._long = bytearray()

    def _joined(self, begun: bytearray, data: bytes) -> Any:
        """Add a chunk of a long message; return the message if that was the last."""
        expected = min(CHUNK, self._length - len(begun))
        if len(data) != expected:
            raise PeerError(f"a chunk of {len(data)} bytes arrived where {expected} were announced")
        if not begun:
            self._codec.require_length(data[0], self._length)
        begun += data
        if len(begun) < self._length:
            return None
        self._long = None
        return begun

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
        self.size = size
        if size != expected:
            raise PeerError(f"a chunk of {size} bytes arrived where {expected} were announced")
        self._targets.popleft()
        if self._norm is not None:
            self._norm.add()


def post(
    socket: "zmq.Socket[bytes] | _CountedSocket",
    codec: Codec,
    message: ToServer | ToWorker,
    address: bytes | None = None,
) -> None:
    """Send a message and the bytes of its tensors. The caller may reuse tensors outside a region afterwards."""
    data, loose = codec.encode(message)
    if len(data) <= CHUNK:
        send_part(socket, data, address)
    else:
        send_part(socket, LONG + len(data).to_bytes(_LENGTH_BYTES, "little"), address)
        for begin in range(0, len(data), CHUNK):
            send_part(socket, data[begin : begin + CHUNK], address)
    for chunk in chunks_of([bytes_of(tensor) for tensor in loose]):
        send_part(socket, chunk[0] if len(chunk) == 1 else b"".join(chunk), address)
    unwritten = [holder.unwritten for holder in codec.shared if holder.unwritten is not None]
    for chunk in chunks_of([bytes_of(tensor) for tensor in _mirrored(codec)]):
        for values in unwritten:  # ZeroMQ's thread sends the chunks before meanwhile
            values.write(before=_end_of(chunk[-1]))
        send_part(socket, chunk[0] if len(chunk) == 1 else b"".join(chunk), address, copy=False)
    codec.shared.clear()  # from here on ZeroMQ alone refers to what it sends


def _mirrored(codec: Codec) -> list[Any]:
    """Return the tensors of the last message that are in both sides' regions."""
    return [tensor for holder in codec.shared for tensor in holder.all()]


def _to_be_measured(codec: Codec, loose: int) -> ArrivingNorm | None:
    """Return the norm to be added up of a push whose worker left that to the server, if it has chunks of its own."""
    for holder in codec.shared:
        if not isinstance(holder, Gradient) or holder.norm is not None or holder.in_parts:
            continue
        if all(flat.nbytes >= GATHERED for flat in holder.flat):
            return ArrivingNorm(holder, CHUNK, after=loose)
    return None


def _end_of(view: memoryview) -> int:
    """Return the address after a view's last byte."""
    return int(np.frombuffer(view, np.uint8).ctypes.data) + len(view)


def send_part(
    socket: "zmq.Socket[bytes] | _CountedSocket", data: bytes | memoryview, address: bytes | None, copy: bool = True
) -> None:
    """Send one ZeroMQ message; `address` is the worker's, on a socket that serves several."""
    if address is not None:
        socket.send(address, zmq.SNDMORE)
    socket.send(data, 0, copy)


class _CountedSocket:
    """A socket that reports the bytes of each part that is sent over it."""

    def __init__(self, socket: "zmq.Socket[bytes]", report: Callable[[int], None]) -> None:
        self._socket, self._report = socket, report

    def send(self, data: Any, flags: int = 0, copy: bool = True) -> None:
        self._socket.send(data, flags, copy)
        if not flags & zmq.SNDMORE:
            self._report(len(data))


class _Attempts:
    """How often a worker may still connect to a server of its run that does not answer."""

    def __init__(self, seconds: float) -> None:
        self._last = time.monotonic()  # when the last attempt ended
        self._until = self._last + seconds
        self._unreached = UNREACHED

    def allow(self, event: int) -> bool:
        """Return whether to connect again after this event."""
        now = time.monotonic()
        took, self._last = now - self._last, now
        if event & zmq.EVENT_DISCONNECTED:
            return False  # it was connected, and the server may still take the worker for present
        if event & KEYS_REFUSED:
            return False
        if not event & _REFUSED and took < ANSWER_MS / 1000:
            self._unreached -= 1
            return self._unreached > 0
        return now < self._until


class ZeromqEndpoint:
    """A worker's end. `relink` waits for the address and token of the server that replaces a lost one; a server that
    does not answer is knocked at for `knocking_s`."""

    def __init__(
        self, address: str, token: str, relink: Callable[[], tuple[str, str]] | None = None,
        security: Security | None = None, knocking_s: float = KNOCKING_S, role: Role = "worker",
    ) -> None:  # fmt: skip
        self._relink = relink
        self._role = role
        self._knocking_s = knocking_s
        self._security = security
        self._codec = Codec()
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connect(address, token)

    def _connect(self, address: str, token: str) -> None:
        self._place = (address, token)
        self._attempts = _Attempts(self._knocking_s)
        self._open(address, token)

    def _open(self, address: str, token: str) -> None:
        self._intake = Intake(self._codec, self._codec.at_worker)
        self._let_in = False
        self._lost = False
        self._unreached = False  # it was given up before the server had answered
        self._refused = False
        self._parted = False  # the server has read this worker's last word
        self._unanswered = 0  # parts that were sent since the server sent something
        self._socket = _make(self._context, zmq.DEALER)
        if self._security is not None:
            self._security.connect_as(self._socket, self._role, to="server")
            bound_link(self._socket)
        self._socket.setsockopt(zmq.ROUTING_ID, token.encode())
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RCVTIMEO, WATCH_MS)
        self._monitor = self._socket.get_monitor_socket(_GONE)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        speak_ip6(self._socket, address)
        self._socket.connect(address)
        with suppress(zmq.Again):  # refused already
            self._socket.send(HANDSHAKE, zmq.NOBLOCK)

    def send(self, message: ToServer) -> None:
        if self._closed:
            raise Closed
        if not self.enter():
            return  # lost: the next `receive` raises
        if isinstance(message, Hello) and self._codec.region is not None:
            self._codec.region.take_in(message.values, message.buffers)
        post(
            self._socket if self._security is None else _CountedSocket(self._socket, self._count), self._codec, message
        )

    def enter(self) -> bool:
        """Wait for the server's answer to the handshake; return False if none will come. After it the socket stays."""
        while not self._let_in:
            if not self._advance(None):
                return False
        return True

    @property
    def descriptor(self) -> int:
        """Signals once, to whoever has read all there was, that the socket has something to read (see `Bell`)."""
        return int(self._socket.getsockopt(zmq.FD))

    @property
    def has_more(self) -> bool:
        """Whether something has arrived that was not received."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _count(self, _nbytes: int) -> None:
        self._unanswered += 1

    def receive(self) -> ToWorker:
        if self._closed:
            raise Closed
        while not self._intake.whole:
            if not self._advance(None) and self._lost:
                raise Lost
        message: ToWorker = self._intake.whole.popleft()
        if isinstance(message, Bye):
            self._closed = True
            raise Closed
        return message

    def poll(self, seconds: float = 0.0) -> bool:
        until = time.monotonic() + seconds
        while not (self._closed or self._intake.whole):
            remaining = until - time.monotonic()
            if not self._advance(remaining) and (self._lost or remaining <= 0):
                return self._lost
        return True

    def _advance(self, seconds: float | None) -> bool:
        """Receive one part, waiting up to `seconds`, or without limit if None. False: none came, or none will."""
        if seconds is None:
            return self._await_part()
        if not self._socket.poll(0):
            if 0 < seconds < TICK_S:
                time.sleep(seconds)
            elif seconds > 0:
                self._poller.poll(int(seconds * 1000))
                self._look()
            else:
                self._look()
        return self._take(zmq.NOBLOCK)

    def _await_part(self) -> bool:
        """Wait for a part inside ZeroMQ: faster than a poller, but the monitor needs a look of its own."""
        while not self._take(0):
            if self._lost:
                return False
            self._look()  # the loop first takes what came before the end
        return True

    def _look(self) -> None:
        """Notice that the connection has ended. One that the server has not answered yet is made again."""
        while not self._lost and self._monitor.poll(0):
            event = int(recv_monitor_message(self._monitor)["event"])
            self._refused |= bool(event & _REFUSED)
            if self._let_in or self._security is None or not self._attempts.allow(event):
                self._lost = True
                self._unreached = self._security is not None and not self._let_in
                return
            self._hang_up(0)
            time.sleep(AGAIN_S)
            self._open(*self._place)

    def _take(self, flags: int) -> bool:
        try:
            word = self._intake.take(self._socket, flags)
            self._let_in = self._let_in or word is not None
            self._parted = self._parted or word == PARTING
            self._unanswered = 0
        except zmq.Again:
            return False
        return True

    @property
    def refused(self) -> bool:
        """After `Lost`: whether the connection ended during ZeroMQ's handshake, as with keys of another run."""
        while self._monitor.poll(0):
            self._lost = True  # the events that say so are read here
            self._refused |= bool(recv_monitor_message(self._monitor)["event"] & _REFUSED)
        return self._refused

    def adopt(self, spec: ModelSpec) -> Region:
        """Return a region of this process, which the server mirrors."""
        require_region(spec)
        self._codec.region = private_region(spec)
        return self._codec.region

    @property
    def region(self) -> Region | None:
        """The memory that the server mirrors."""
        return self._codec.region

    def use_region(self, region: Region) -> None:
        """Let the other end mirror this region."""
        self._codec.region = region

    def reconnect(self) -> None:
        if self._closed or self._relink is None:
            self._closed = True
            raise Closed
        for address in self.unreached:
            logger.warning("%s does not answer: see that this machine can reach that port", address)
        self.move_to(*self._relink())

    @property
    def unreached(self) -> list[str]:
        """The address, if it was given up before anybody had answered there."""
        return [self._place[0]] if self._unreached else []

    def move_to(self, address: str, token: str) -> None:
        """Leave a lost server for the one at this address."""
        self._hang_up(0)
        self._connect(address, token)

    @property
    def lost(self) -> bool:
        """Whether the server is gone, as far as is known without a wait."""
        self._look()
        return self._lost

    def close(self) -> None:
        """Send what is left, then close. The region lives as long as its tensors."""
        if self._context.closed:
            return
        lost = self._lost or not self._let_in or self._monitor in dict(self._poller.poll(0))
        if not (self._closed or lost):
            self._socket.send(PARTING)
            if self._unanswered >= UNREAD_FRAMES:
                self._await_parting()
        self._hang_up(0 if lost else LEAVING_MS)
        self._closed = True
        self._codec.forget()
        end_context(self._context)

    def _await_parting(self) -> None:
        """Wait until the server has read everything: ZeroMQ may drop what it has not taken from a closed connection."""
        until = time.monotonic() + PARTED_S
        with suppress(PacelineError):
            while not (self._lost or self._parted) and time.monotonic() < until:
                self._advance(max(0.0, until - time.monotonic()))
                self._intake.whole.clear()

    def _hang_up(self, linger_ms: int) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)


class ZeromqServerEnd:
    """The server's end of one worker's link."""

    wants_write = False  # ZeroMQ's thread sends
    sends_region = True

    def __init__(self, hub: "ZeromqHub", address: bytes, limits: Limits | None = None) -> None:
        self._hub = hub
        self._address = address
        self._codec = Codec(self._mirror)
        self._codec.limits = limits
        self._share: ShareMirror | None = None
        self._intake = Intake(self._codec, self._codec.at_server)
        self._early: list[ToWorker] = []
        self.linked = False  # the worker's handshake has come
        self.parted = False  # the worker's PARTING has come
        self._gone = False
        self._fault: PacelineError | None = None
        self._faulty = False  # what comes after a fault is dropped
        self._backlog: Backlog | None = None  # of a worker of another host
        self._known_read = 0  # bytes that the worker had taken when that was last looked at

    @property
    def unfinished(self) -> bool:
        """Whether the next part belongs to a message that has begun."""
        return self._intake.unfinished

    @property
    def region(self) -> Region | None:
        """This side's mirror of the worker's memory, once its `Hello` has come."""
        return self._codec.region

    def use_region(self, region: Region) -> None:
        """Mirror the worker's memory in this region, which bounds what the worker may have and send."""
        self._codec.region = region
        if self._codec.limits is not None:
            self._codec.limits.announce(region.layout.parameters.nbytes)

    def allow(self, nbytes: int) -> None:
        """Let the worker send, and have sent to it, that many bytes more: of tables that it has announced elsewhere."""
        if self._codec.limits is not None:
            self._codec.limits.allow(nbytes)

    def leave_to_shards(self, share: ShareMirror) -> None:
        """Expect gradients and send versions without their tensors; `share` gets each mirror and its model."""
        self._share, self._codec.in_parts = share, True

    def _mirror(self, spec: ModelSpec) -> Region:
        require_region(spec)
        region = private_region(spec)
        if self._share is not None:
            self._share(region, spec)
        return region

    def deliver(self, message: ToWorker) -> None:
        if self._gone:
            return
        if not self.linked:
            self._early.append(message)
            return
        self._gone = not self._hub.post(self._address, self._codec, message, self._backlog)
        if self._backlog is not None and not self._gone:
            self._require_reader(self._backlog)

    def _require_reader(self, backlog: Backlog) -> None:
        """Part with a worker that asks for more and more and takes none of it; ZeroMQ keeps that until it hangs up."""
        most = 0 if self._codec.limits is None else self._codec.limits.most_waiting
        if not most or backlog.sent - self._known_read <= most:
            return
        waiting = backlog.unsent()
        self._known_read = backlog.sent - waiting
        if waiting > most:
            self._fail(PeerError(f"it does not take what it asks for: {waiting} bytes wait, the most are {most}"))
            self._hub.recall(self)

    def expel(self) -> None:
        """Have `close` end the connection, too: the worker is not to be spoken to any more."""
        self._fail(PeerError("this worker was taken out of the run"))

    def _fail(self, error: PacelineError) -> None:
        self._fault, self._faulty = error, True
        self._intake.drop_unfinished()

    def collect(self) -> ToServer | None:
        if self._intake.whole:
            message: ToServer = self._intake.whole.popleft()
            return message
        if self._fault is not None:
            fault, self._fault = self._fault, None
            self._gone = True
            raise fault
        if self._gone:
            raise Lost
        return None

    def close(self) -> None:
        """Send `Bye` to the worker and forget it."""
        self.deliver(Bye())
        self._gone = True
        self._hub.forget(self._address)
        self._codec.forget()
        if self._faulty and self._backlog is not None:
            hang_up(self._backlog.descriptor, self._backlog.name)

    def flush(self) -> None:
        """Do nothing: ZeroMQ's thread sends."""

    def begin(self, sender: zmq.Frame) -> None:
        """Keep account of the connection that this frame came over."""
        self._backlog = self._hub.backlog_of(sender)
        self._known_read = 0

    def greet(self) -> None:
        """Answer the worker's handshake and send the messages that waited for it."""
        self.linked = True
        early, self._early = self._early, []
        self._gone = not self._hub.post(self._address, None, HANDSHAKE)
        for message in early:
            self.deliver(message)

    @property
    def reachable(self) -> bool:
        """Whether the worker can still be sent to; sends a HANDSHAKE to find out.

        Not to a worker of another host: ZeroMQ may drop what it has not taken from a connection that it cannot write
        to. Its connection is open until all of it has been taken.
        """
        if self._backlog is not None:
            self._gone = self._gone or not self._backlog.is_open
            return not self._gone
        if not self._gone:
            self._gone = not self._hub.post(self._address, None, HANDSHAKE)
        return not self._gone

    def take(self, socket: "zmq.Socket[bytes]", sender: zmq.Frame) -> bool:
        """Receive a part that follows its sender's frame; return whether there is something to collect."""
        if self._faulty:
            socket.recv()
            return False
        try:
            word = self._intake.take(socket, zmq.NOBLOCK)
        except PacelineError as error:
            self._fail(error)
            return True
        if word == HANDSHAKE:
            self.begin(sender)
            self.greet()
        if self._backlog is not None:
            self._backlog.read(self._intake.size)
        if word == PARTING and self._backlog is not None:
            self._hub.post(self._address, None, PARTING)  # it may hang up: nothing of it is left unread
        if word == PARTING:
            self._gone = self.parted = True
        return word == PARTING or bool(self._intake.whole)


class ZeromqHub:
    """The server's socket and the workers it expects. With `security`, only members of the run can connect.

    What workers send is bounded by their model; shards send what the coordinator asks for.
    """

    def __init__(self, bind: str, security: Security | None = None, admits: Sequence[Role] = ("worker",)) -> None:
        if security is not None:
            require_network(bind)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = _make(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a worker that is gone raises
        self._gatekeeper: Gatekeeper | None = None
        if security is not None:
            self._gatekeeper = security.listen_as(self._context, self._socket, "server", admits)
            bound_link(self._socket)
            self._socket.setsockopt(zmq.RCVHWM, UNREAD_FRAMES)
            self._gatekeeper.bound_unread()
        self._limited = security is not None and "worker" in admits
        self._log = RefusalLog() if self._gatekeeper is None else self._gatekeeper.log
        self.address = bind_privately(self._socket, bind)
        if self._gatekeeper is not None:
            self._gatekeeper.listens_at(self.address)
        self._bell = Bell(int(self._socket.getsockopt(zmq.FD)))
        self._ends: dict[bytes, ZeromqServerEnd] = {}
        self._strangers: dict[bytes, tuple[float, zmq.Frame]] = {}  # time and sender of each unknown token's handshake
        self._left: dict[bytes, None] = {}  # tokens of links that were dropped, the last ones
        self._recalled: list[ServerEnd] = []  # ends with something to collect that no message brought

    def fileno(self) -> int:
        """Readable while `pump` has something to do."""
        return self._bell.fileno()

    def expect(self, token: str) -> ZeromqServerEnd:
        """Return the link of the worker with this token."""
        address = token.encode()
        end = self._ends[address] = ZeromqServerEnd(self, address, Limits() if self._limited else None)
        waiting = self._strangers.pop(address, None)
        if waiting is not None:
            end.begin(waiting[1])
            end.greet()
        return end

    def backlog_of(self, sender: zmq.Frame) -> Backlog | None:
        """Return the account of the connection that this frame came over; None: connections are not bounded."""
        return None if self._gatekeeper is None else self._gatekeeper.backlog(sender, UNREAD_BYTES)

    def recall(self, end: ServerEnd) -> None:
        """Have the next `pump` return this end."""
        self._recalled.append(end)
        self._bell.ring()

    def forget(self, address: bytes) -> None:
        """Drop the link; later messages from this address are ignored."""
        if self._ends.pop(address, None) is not None:
            self._left[address] = None
            if len(self._left) > MOST_STRANGERS:
                del self._left[next(iter(self._left))]

    def pump(self) -> list[ServerEnd]:
        """Receive what has arrived; return the ends that have something to collect."""
        self._bell.hush()
        ready: dict[int, ServerEnd] = {id(end): end for end in self._recalled}
        self._recalled.clear()
        streaming = False
        until = time.monotonic() + STREAM_S
        for _ in range(TURN):
            try:
                sender = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                if not streaming or ready or time.monotonic() > until or not self._socket.poll(1):
                    break
                continue
            end = self._ends.get(sender.bytes)
            if end is None:
                self._refuse(sender)
            elif end.take(self._socket, sender):
                ready[id(end)] = end
            streaming = end is not None and end.unfinished
            while self._socket.getsockopt(zmq.RCVMORE):
                self._socket.recv()
        else:
            self._bell.ring()
        return list(ready.values())

    def drain(self, end: ZeromqServerEnd) -> list[ServerEnd]:
        """Receive all that an ended worker process had sent; return the ends that have something to collect.

        A PARTING is the last message. Without one, everything has arrived once ZeroMQ cannot reach the worker any more.
        A worker whose handshake was not answered has sent nothing else.
        """
        ready: dict[int, ServerEnd] = {}
        until = time.monotonic() + LAST_WORDS_S
        while True:
            arrived_all = not (end.linked and end.reachable)
            ready |= {id(one): one for one in self.pump()}
            something = bool(self._socket.poll(0 if arrived_all else 1))
            if end.parted or (arrived_all and not something) or time.monotonic() > until:
                break
        if something:  # polling may have consumed the socket's signal
            self._bell.ring()
        return list(ready.values())

    @property
    def has_more(self) -> bool:
        """Whether something has arrived that `pump` has not received."""
        return bool(self._socket.poll(0))

    def post(self, address: bytes, codec: Codec | None, message: Any, backlog: Backlog | None = None) -> bool:
        """Send to one worker; False if it is gone. Without a codec, `message` is bytes."""
        try:
            if codec is None:
                send_part(self._socket, message, address)
            else:
                post(
                    self._socket if backlog is None else _CountedSocket(self._socket, backlog.send),
                    codec,
                    message,
                    address,
                )
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        finally:  # the attempt to send may have consumed the socket's signal that something arrived
            if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._bell.ring()
        return True

    def _refuse(self, sender: zmq.Frame) -> None:
        word, address = self._socket.recv(), sender.bytes
        now = time.monotonic()
        if word == HANDSHAKE:
            if len(self._strangers) < MOST_STRANGERS:
                self._strangers[address] = now, sender
        elif address not in self._left:
            self._log.warn(f"a message from {address!r} was dropped: no worker has this token")
        for stranger, (since, _) in list(self._strangers.items()):
            if now - since > PATIENCE_S:
                self._dismiss(stranger)

    def _dismiss(self, stranger: bytes) -> None:
        del self._strangers[stranger]
        self._log.warn(f"a connection from {stranger!r} was refused: no worker has this token")

    def close(self) -> None:
        """Close the socket; to workers that got no `Bye` the server is lost."""
        if self._context.closed:
            return
        for stranger in list(self._strangers):
            self._dismiss(stranger)
        self._bell.close()
        if self._gatekeeper is not None:
            self._gatekeeper.close(LEAVING_MS)
        else:
            self._socket.close(linger=LEAVING_MS)
            self._log.close()
        remove_name(self.address)
        self._ends.clear()
        end_context(self._context)
