"""WorkerLinks over TCP: a DEALER socket per worker, one ROUTER socket at the server.

Each side has a region of its own: tensors leave straight from the sender's and are received straight into the
receiver's, and nobody sees a message before its last byte is there. What lies in a region is sent without a copy, so it
must not change before it is out. That holds by the order of a run: a worker writes to a slot again only when the server
has granted it, which follows the push; a server writes a worker's parameters again when its push has come, or when the
grant they went with is void.

A message is followed by the bytes of its tensors in chunks, each a ZeroMQ message of its own, so that receiving
overlaps with sending. Both sides cut by the same rule.

A worker's token is its routing id. It greets and waits to be let in, so it may be there before the server expects it.
ZeroMQ would reconnect in silence to whoever is there; the socket's monitor tells a worker that its server is gone.
"""

import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils.garbage import gc as zero_copy_frames

from paceline.core.errors import PacelineError, PeerError
from paceline.model.memory_budget import require_region
from paceline.model.regions import Region, private_region
from paceline.model.spec import ModelSpec
from paceline.transport.base import Closed, Lost, ServerEnd
from paceline.transport.codec import Codec, bytes_of
from paceline.transport.messages import Bye, Hello, ToServer, ToWorker

CHUNK = 1 << 20  # bytes; larger ones overlap less, smaller ones cost more calls
GATHERED = 1 << 14  # bytes; tensors below it share a chunk, which costs a copy but saves a message for each
HANDSHAKE = b"\x00"  # of a worker, and the server's answer; no kind of message
PARTING = b"\xff"
TICK_S = 0.001  # the finest wait that ZeroMQ's poller knows
TURN = 256  # messages per pump, so that one worker's push does not keep the server from everything else
STREAM_S = 0.005  # in which a pump waits for the next chunk: going round the loop for each costs more than the chunk
PATIENCE_S = 5.0  # a token unknown for so long is not one that the server is about to hear of
LEAVING_MS = 5_000  # for last words
LAST_WORDS_S = 5.0  # of a process that is gone; they lie in this machine's memory
WATCH_MS = 100  # in which a waiting worker looks whether its server is still there
RECONNECT_MS = 3_600_000  # never, in effect; ZeroMQ's own "never" would throw away what is not yet read
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED

logger = logging.getLogger("paceline")


def _make(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket


def end_context(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    """Let go of the context and of pyzmq's thread that waits for zero-copy frames to be out."""
    context.term()
    until = time.monotonic() + 1.0
    while zero_copy_frames.refs and time.monotonic() < until:
        time.sleep(0.001)
    if not zero_copy_frames.refs:  # otherwise somebody else of this process sends without copies
        zero_copy_frames.stop()


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

    def __init__(self, codec: Codec, decode: Callable[[memoryview], tuple[Any, list[Any]]]) -> None:
        self.whole: deque[Any] = deque()
        self._codec, self._decode = codec, decode
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
            if data in (HANDSHAKE, PARTING):
                return data
            self._message, loose = self._decode(memoryview(data))
            for tensors in (loose, _mirrored(self._codec)):
                self._targets.extend(chunks_of([bytes_of(tensor) for tensor in tensors]))
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


def post(socket: "zmq.Socket[bytes]", codec: Codec, message: ToServer | ToWorker, address: bytes | None = None) -> None:
    """A message and the bytes of its tensors. What lies in no region is its owner's again when this returns."""
    data, loose = codec.encode(message)
    send_part(socket, data, address)
    for tensors, copy in ((loose, True), (_mirrored(codec), False)):
        for chunk in chunks_of([bytes_of(tensor) for tensor in tensors]):
            send_part(socket, chunk[0] if len(chunk) == 1 else b"".join(chunk), address, copy)


def _mirrored(codec: Codec) -> list[Any]:
    """Tensors of the last message that lie in the region, and in the other side's."""
    return [tensor for holder in codec.shared for tensor in holder.all()]


def send_part(socket: "zmq.Socket[bytes]", data: bytes | memoryview, address: bytes | None, copy: bool = True) -> None:
    """One message, to the worker at this address where the socket has several."""
    if address is not None:
        socket.send(address, zmq.SNDMORE)
    socket.send(data, 0, copy)


class ZeromqEndpoint:
    """A worker's end. `relink` waits for the address and token of a server that took the place of a lost one."""

    def __init__(self, address: str, token: str, relink: Callable[[], tuple[str, str]] | None = None) -> None:
        self._relink = relink
        self._codec = Codec()
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connect(address, token)

    def _connect(self, address: str, token: str) -> None:
        self._intake = Intake(self._codec, self._codec.at_worker)
        self._let_in = False
        self._lost = False
        self._socket = _make(self._context, zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, token.encode())
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RCVTIMEO, WATCH_MS)
        self._monitor = self._socket.get_monitor_socket(_GONE)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(address)
        self._socket.send(HANDSHAKE)

    def send(self, message: ToServer) -> None:
        if self._closed:
            raise Closed
        while not self._let_in:
            if not self._advance(None):
                return  # lost; the next `receive` will say so
        if isinstance(message, Hello) and self._codec.region is not None:
            self._codec.region.take_in(message.values, message.buffers)
        post(self._socket, self._codec, message)

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
        """Take in one part; waits so long for it. False: none came, or none will."""
        if seconds is None:
            return self._await_part()
        if not self._socket.poll(0):
            if 0 < seconds < TICK_S:
                time.sleep(seconds)
            elif seconds > 0:
                self._lost = self._monitor in dict(self._poller.poll(int(seconds * 1000)))
            else:
                self._lost = bool(self._monitor.poll(0))
        return self._take(zmq.NOBLOCK)

    def _await_part(self) -> bool:
        """Waiting inside ZeroMQ is faster than a poller, but does not see the monitor."""
        while not self._take(0):
            if self._lost:
                return False
            self._lost = bool(self._monitor.poll(0))  # what came before the end is taken first
        return True

    def _take(self, flags: int) -> bool:
        try:
            if self._intake.take(self._socket, flags) is not None:
                self._let_in = True
        except zmq.Again:
            return False
        return True

    def adopt(self, spec: ModelSpec) -> Region:
        """A region of this process, which the server mirrors."""
        require_region(spec)
        self._codec.region = private_region(spec)
        return self._codec.region

    def reconnect(self) -> None:
        if self._closed or self._relink is None:
            self._closed = True
            raise Closed
        self._hang_up(0)
        self._connect(*self._relink())

    def close(self) -> None:
        """Say what is still to be said, then let go. The region lives as long as its tensors."""
        if self._context.closed:
            return
        lost = self._lost or not self._let_in or self._monitor in dict(self._poller.poll(0))
        if not (self._closed or lost):
            self._socket.send(PARTING)
        self._hang_up(0 if lost else LEAVING_MS)
        self._closed = True
        self._codec.forget()
        end_context(self._context)

    def _hang_up(self, linger_ms: int) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)


class ZeromqServerEnd:
    """The server's end of one worker's link."""

    wants_write = False  # ZeroMQ's own thread sends

    def __init__(self, hub: "ZeromqHub", address: bytes) -> None:
        self._hub = hub
        self._address = address
        self._codec = Codec(_mirror)
        self._intake = Intake(self._codec, self._codec.at_server)
        self._early: list[ToWorker] = []
        self.linked = False  # the worker has greeted
        self.parted = False  # it has said its last word
        self._gone = False
        self._fault: PacelineError | None = None

    @property
    def unfinished(self) -> bool:
        """Whether the next part belongs to a message that has begun."""
        return self._intake.unfinished

    @property
    def region(self) -> Region | None:
        """This side's mirror of the worker's memory, once it has said Hello."""
        return self._codec.region

    def deliver(self, message: ToWorker) -> None:
        if self._gone:
            return
        if not self.linked:
            self._early.append(message)
            return
        self._gone = not self._hub.post(self._address, self._codec, message)

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
        """Tell the worker that nothing more will come."""
        self.deliver(Bye())
        self._gone = True
        self._hub.forget(self._address)

    def flush(self) -> None:
        """ZeroMQ's own thread sends."""

    def greet(self) -> None:
        """The worker is there: let it in and say what there is to say."""
        self.linked = True
        early, self._early = self._early, []
        self._gone = not self._hub.post(self._address, None, HANDSHAKE)
        for message in early:
            self.deliver(message)

    @property
    def reachable(self) -> bool:
        """Whether something sent to the worker would set out."""
        if not self._gone:
            self._gone = not self._hub.post(self._address, None, HANDSHAKE)
        return not self._gone

    def take(self, socket: "zmq.Socket[bytes]") -> bool:
        """Take a part in; whether there is something to collect."""
        try:
            word = self._intake.take(socket, zmq.NOBLOCK)
        except PacelineError as error:
            self._fault = error
            return True
        if word == HANDSHAKE:
            self.greet()
        elif word == PARTING:
            self._gone = self.parted = True
        return word == PARTING or bool(self._intake.whole)


def _mirror(spec: ModelSpec) -> Region:
    require_region(spec)
    return private_region(spec)


class Bell:
    """A descriptor for event loops, readable when the watched one is, or after `ring`.

    A ZeroMQ socket's own descriptor signals changes only, and only once, and whoever sends on the socket may swallow
    the signal that something arrived meanwhile. The bell is rung then, and both are watched as one.
    """

    def __init__(self, watched: int) -> None:
        self._rung, self._ringer = os.pipe()
        os.set_blocking(self._rung, False)
        os.set_blocking(self._ringer, False)
        if hasattr(select, "epoll"):
            self._both: select.epoll = select.epoll()
            self._both.register(watched, select.EPOLLIN)
            self._both.register(self._rung, select.EPOLLIN)
        else:
            raise OSError("the zeromq transport needs Linux's epoll: use --transport shm")
        self._ringing = False

    def fileno(self) -> int:
        return self._both.fileno()

    def ring(self) -> None:
        """Make the descriptor readable until `hush`."""
        if not self._ringing:
            self._ringing = True
            os.write(self._ringer, b"\x00")

    def hush(self) -> None:
        if self._ringing:
            self._ringing = False
            with suppress(BlockingIOError):
                os.read(self._rung, 1)

    def close(self) -> None:
        self._both.close()
        os.close(self._rung)
        os.close(self._ringer)


class ZeromqHub:
    """The server's socket, and whom it expects there. Bound to this host unless told otherwise."""

    def __init__(self, bind: str = "tcp://127.0.0.1:*") -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = _make(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a worker that is gone is an error, not silence
        self._socket.bind(bind)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._bell = Bell(int(self._socket.getsockopt(zmq.FD)))
        self._ends: dict[bytes, ZeromqServerEnd] = {}
        self._strangers: dict[bytes, float] = {}  # greeted at
        self._left: set[bytes] = set()

    def fileno(self) -> int:
        """Readable while `pump` has something to do."""
        return self._bell.fileno()

    def expect(self, token: str) -> ZeromqServerEnd:
        """The link of the worker that has this token."""
        address = token.encode()
        end = self._ends[address] = ZeromqServerEnd(self, address)
        if self._strangers.pop(address, None) is not None:
            end.greet()
        return end

    def forget(self, address: bytes) -> None:
        """Whatever still comes from there is nobody's."""
        if self._ends.pop(address, None) is not None:
            self._left.add(address)

    def pump(self) -> list[ServerEnd]:
        """Take in what has arrived; who has something to collect."""
        self._bell.hush()
        ready: dict[int, ServerEnd] = {}
        streaming = False
        until = time.monotonic() + STREAM_S
        for _ in range(TURN):
            try:
                address = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                if not streaming or ready or time.monotonic() > until or not self._socket.poll(1):
                    break
                continue
            end = self._ends.get(address)
            if end is None:
                self._refuse(address)
            elif end.take(self._socket):
                ready[id(end)] = end
            streaming = end is not None and end.unfinished
            while self._socket.getsockopt(zmq.RCVMORE):
                self._socket.recv()
        else:
            self._bell.ring()
        return list(ready.values())

    def drain(self, end: ZeromqServerEnd) -> list[ServerEnd]:
        """The worker's process is gone: take in all that it had sent; who has something to collect.

        Its last word is the last. Without one, ZeroMQ has all that came from a worker once it cannot reach it any more.
        A worker that was never let in has said nothing.
        """
        ready: dict[int, ServerEnd] = {}
        until = time.monotonic() + LAST_WORDS_S
        while True:
            arrived_all = not (end.linked and end.reachable)
            ready |= {id(one): one for one in self.pump()}
            something = bool(self._socket.poll(0 if arrived_all else 1))
            if end.parted or (arrived_all and not something) or time.monotonic() > until:
                break
        if something:  # looking may have swallowed the socket's own signal
            self._bell.ring()
        return list(ready.values())

    def post(self, address: bytes, codec: Codec | None, message: Any) -> bool:
        """Send to one worker; False if it is gone. Bytes go as they are, without a codec."""
        try:
            if codec is None:
                send_part(self._socket, message, address)
            else:
                post(self._socket, codec, message, address)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        # Sending may have swallowed the socket's own signal that something is there to be read.
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._bell.ring()
        return True

    def _refuse(self, address: bytes) -> None:
        word = self._socket.recv()
        now = time.monotonic()
        if word == HANDSHAKE:
            self._strangers[address] = now
        elif address not in self._left:
            logger.warning("a message from %r was dropped: no worker has this token", address)
        for stranger, since in list(self._strangers.items()):
            if now - since > PATIENCE_S:
                self._dismiss(stranger)

    def _dismiss(self, stranger: bytes) -> None:
        del self._strangers[stranger]
        logger.warning("a connection from %r was refused: no worker has this token", stranger)

    def close(self) -> None:
        """Hang up on all; whoever was not told before takes the server for lost."""
        if self._context.closed:
            return
        for stranger in list(self._strangers):
            self._dismiss(stranger)
        self._bell.close()
        self._socket.close(linger=LEAVING_MS)
        self._ends.clear()
        end_context(self._context)
