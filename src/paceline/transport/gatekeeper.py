"""Who may talk to a listening socket: members' credentials are admitted, everybody else is cut off and logged.

A thread of its own answers ZeroMQ's questions about credentials (ZAP, RFC 27), since the script of the process may
compute for minutes; the handshake itself is done by ZeroMQ's thread. A client that does not know the server's key never
gets as far as a question. The socket's monitor tells of it: which descriptor was accepted, that a handshake failed,
which descriptor was closed. One thread of ZeroMQ reports all three, so a failure belongs to the close that follows it.
Whose it was, `refusals.py` finds out.

Strangers may also connect and say nothing. ZeroMQ closes them after HANDSHAKE_MS, but it accepts without bound, and a
process without descriptors can open neither journal nor checkpoint. So the limit of descriptors is raised, some are
kept for files (`model/descriptors.py`), and of the connections that have not shown a key only a share stays: the oldest
of the others are hung up.

ZeroMQ bounds what it has received and nobody has read by the number of messages, and the parts of a message that has no
end not at all. So the kernel's count of a connection's bytes is compared with what was read from it (`Backlog`), as
soon as this process has grown: a connection with more unread than its reader allows it is hung up, and so is one that
has shown no key, or whose first message nobody has read, and has sent more than FIRST_BYTES. A reader that is only slow
loses nobody: ZeroMQ stops reading from a connection long before that.

An address from which too many connections come that show no key is not heard for a while (`address_filter.py`).

A forked process has no such thread and must not use the socket, as with every ZeroMQ socket.
"""

import fcntl
import os
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import zmq

from paceline.model import descriptors
from paceline.transport.address_filter import Knocks, set_filter
from paceline.transport.refusals import Name, RefusalLog, Refusals

FIRST_BYTES = 16 << 10  # before anything of a connection is read: a handshake and a first message have less
LOOK_S = 0.05  # between two looks at this process's memory: time for 20 MB at 400 MB/s, all that encryption allows
BEATS_BYTES = 40  # a second: two heartbeats of 50 bytes in 5 s, twice over
GROWN_BYTES = 8 << 20  # since the last look, which make connections be looked at
HANDSHAKE_MS = 5_000  # for a whole handshake: six messages, and one turn of a thread that a busy script may hold up
BACKLOG = 128  # connections that the kernel accepts ahead: more than workers that start together, few for a flood
DOMAIN = "paceline"
UNFINISHED_SHARE = 4  # a quarter of all descriptors, at most, is for connections that have shown no key
MOST_UNFINISHED = 1_024
CURVE_HELLO = 64 + 2 + 200  # bytes of greeting and first message; ZeroMQ hangs up on those that it cannot open
PLAIN_HELLO = 64 + 2 + 6 + 2 + 64  # greeting and first message with a password, and a role of no letters
_ZAP = "inproc://zeromq.zap.01"
_EVENT = struct.Struct("=HI")
_FAILED = {
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "it does not know this run's keys",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "it did not finish the handshake",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "",  # the question about its credentials was answered, and logged
}
_WATCHED = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_WATCHED |= zmq.EVENT_HANDSHAKE_SUCCEEDED | sum(_FAILED)
_UNREAD_EVENTS = 10_000  # the monitor blocks ZeroMQ's thread from there on
_BYTES = struct.Struct("=120xQQ")  # of Linux's `struct tcp_info`: acknowledged by the other end, and received from it
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Credentials:
    """What a listening socket admits: a mechanism of ZeroMQ's (CURVE or PLAIN), and what it asks of a client."""

    def __init__(self, mechanism: bytes, admitted: Iterable[tuple[bytes, ...]], hello_bytes: int) -> None:
        """`admitted` are public keys, or names with passwords; whoever ZeroMQ asks about has sent `hello_bytes`."""
        self.hello_bytes = hello_bytes
        self._mechanism = mechanism
        self._admitted = frozenset(admitted)

    @property
    def encrypts(self) -> bool:
        return self._mechanism == b"CURVE"

    def admits(self, mechanism: bytes, shown: Sequence[bytes]) -> bool:
        return mechanism == self._mechanism and tuple(shown) in self._admitted


class Backlog:
    """One connection's bytes that wait in this process: received and not read, or sent and not acknowledged."""

    def __init__(self, descriptor: int, most_unread: int, *, encrypted: bool) -> None:
        self.descriptor, self.name = descriptor, peer_of(descriptor)
        self._most_unread, self._since = most_unread, time.monotonic()
        self._read = self._sent = 0
        self._around = 33 if encrypted else 0  # bytes that encryption adds to a frame

    def read(self, nbytes: int) -> None:
        """Count a frame that was read."""
        self._read += nbytes + self._around + (9 if nbytes + self._around > 255 else 2)

    def send(self, nbytes: int) -> None:
        """Count a frame that was handed to ZeroMQ."""
        self._sent += nbytes + self._around + (9 if nbytes + self._around > 255 else 2)

    @property
    def is_open(self) -> bool:
        """Whether ZeroMQ has not closed the connection."""
        return self.name is not None and peer_of(self.descriptor) == self.name

    @property
    def sent(self) -> int:
        """Bytes that were handed to ZeroMQ since the connection began."""
        return self._sent

    @property
    def most_unread(self) -> int:
        """Bytes that may wait to be read; heartbeats, which nobody reads, come on top."""
        return self._most_unread + int(BEATS_BYTES * (time.monotonic() - self._since))

    def unread(self) -> int:
        """Return the bytes that this process has received and not read; those in the kernel's buffer are not its."""
        received = bytes_of_connection(self.descriptor, self.name)[1]
        return received - waiting_in(self.descriptor, self.name) - self._read if received else 0

    def unsent(self) -> int:
        """Return the bytes that the other end has not acknowledged; 0 if it is gone."""
        acknowledged, received = bytes_of_connection(self.descriptor, self.name)
        return self._sent - acknowledged if received else 0


class _Visitor:
    """An accepted connection that is not known to be a member's."""

    def __init__(self, name: Name | None) -> None:
        self.name = name
        self.hung_up = False


class Growth:
    """The memory of this process. Its file stays open: a process that strangers keep busy may not get another one."""

    def __init__(self) -> None:
        self._statm = descriptors.open_file("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._resident = self._read()

    def look(self) -> bool:
        """Return whether this process has grown by GROWN_BYTES since the last time that it had."""
        resident = self._read()
        grown = resident - self._resident >= GROWN_BYTES
        self._resident = resident if grown else min(self._resident, resident)
        return grown

    def close(self) -> None:
        os.close(self._statm)

    def _read(self) -> int:
        return int(os.pread(self._statm, 200, 0).split()[1]) * _PAGE


class Gatekeeper:
    """The thread beside one listening socket. Make it before `bind`; it closes the socket too."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", listening: "zmq.Socket[bytes]", credentials: Credentials
    ) -> None:
        self._refusals = Refusals()
        self._listening = listening
        self._credentials = credentials
        self._most_unfinished = min(descriptors.raise_limit() // UNFINISHED_SHARE, MOST_UNFINISHED)
        self._pid = os.getpid()
        self._visitors: dict[int, _Visitor] = {}
        self._admitted: dict[int, Name] = {}  # connections of finished handshakes
        self._backlogs: dict[int, Backlog] = {}  # of those from which something was read
        self._growth: Growth | None = None  # of this process; None: nobody looks
        self._of_member = FIRST_BYTES  # unread, in any case
        self._knocks = Knocks()
        self._listening_at: int | None = None  # the descriptor of the socket that accepts
        listening.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
        listening.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer nobody is admitted
        listening.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        listening.setsockopt(zmq.BACKLOG, BACKLOG)
        place = f"inproc://paceline-gatekeeper-{id(self)}"
        listening.monitor(f"{place}-events", _WATCHED)
        self._zap = context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._events = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.RCVHWM, _UNREAD_EVENTS)
        self._events.connect(f"{place}-events")
        self._stopped = context.socket(zmq.PAIR)
        self._stopped.bind(f"{place}-stop")
        self._stop = context.socket(zmq.PAIR)
        self._stop.connect(f"{place}-stop")
        self._thread = threading.Thread(target=self._run, name="paceline-gatekeeper", daemon=True)
        self._thread.start()

    @property
    def log(self) -> RefusalLog:
        """Where this socket's readers log what they refuse."""
        return self._refusals.log

    def listens_at(self, address: str) -> None:
        """Say where the socket is bound, for the kernel's reports."""
        self._refusals.ended.port = int(address.rpartition(":")[2])

    def bound_unread(self, of_member: int = FIRST_BYTES) -> None:
        """Hang up on connections with too many unread bytes; their reader keeps a `backlog` of each.

        `of_member` is what a member may have in any case, also before anything of its connection was read.
        """
        self._of_member = of_member
        self._growth = self._growth or Growth()

    def backlog(self, frame: zmq.Frame, most_unread: int) -> Backlog:
        """Return the account of the connection that this frame came over, for its reader to keep."""
        descriptor = int(frame.get("__fd"))
        known = self._backlogs.get(descriptor)
        if known is None or known.name != peer_of(descriptor):
            known = self._backlogs[descriptor] = Backlog(descriptor, most_unread, encrypted=self._credentials.encrypts)
        return known

    def close(self, linger_ms: int) -> None:
        """End the thread, then close the socket: ZeroMQ may never end a context whose connections and the socket that
        answers about credentials are closed at the same time."""
        if os.getpid() != self._pid or self._listening.closed:
            return
        self._listening.disable_monitor()  # ZeroMQ's thread would wait for somebody to read the last events
        self._end()
        self._listening.close(linger=linger_ms)

    def _end(self) -> None:
        self._stop.send(b"")
        self._thread.join()
        self._stop.close(linger=0)
        self.log.close()
        if self._growth is not None:
            self._growth.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        for one in (self._zap, self._events, self._stopped):
            poller.register(one, zmq.POLLIN)
        self._refusals.ended.register(poller)
        while True:
            ready = dict(poller.poll(int(1000 * LOOK_S)))
            if self._stopped in ready:
                break
            if self._zap in ready:
                self._answer()
            if self._events in ready:
                self._take_events()
            self._refusals.look()
            self._bound_unread()
            if self._knocks.look(time.monotonic()) and self._listening_at is not None:
                set_filter(self._listening_at, self._knocks.deaf_to)
        self._take_events()
        self._refusals.close()
        for one in (self._zap, self._events, self._stopped):
            one.close(linger=0)

    # -- credentials -------------------------------------------------------------------------------------------------

    def _answer(self) -> None:
        version, request, _domain, address, _identity, mechanism, *shown = self._zap.recv_multipart()
        admitted = self._credentials.admits(mechanism, shown)
        answer = (b"200", b"OK", b"member") if admitted else (b"400", b"refused", b"")
        self._zap.send_multipart([version, request, *answer, b""])
        if not admitted:
            self._refusals.refuse(
                (address.decode("ascii", "replace"), None), "it has no key of a role that is admitted here"
            )

    # -- connections -------------------------------------------------------------------------------------------------

    def _take_events(self) -> None:
        try:
            while True:
                head, *_ = self._events.recv_multipart(zmq.NOBLOCK)
                self._take_event(*_EVENT.unpack(head))
        except zmq.Again:
            self._bound_unfinished()

    def _take_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            visitor = self._visitors[value] = _Visitor(peer_of(value))
            if visitor.name is not None:
                self._knocks.knocked(visitor.name[0])
        elif event == zmq.EVENT_LISTENING:
            self._listening_at = value
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._claim()
        elif event == zmq.EVENT_DISCONNECTED:
            self._admitted.pop(value, None)
            self._backlogs.pop(value, None)
            gone = self._visitors.pop(value, None)
            self._refusals.close_one(None if gone is None else gone.name, unfinished=gone is not None)
        elif event in _FAILED:
            self._refusals.fail(_FAILED[event])

    def _claim(self) -> None:
        """Find the connection whose handshake has succeeded: the oldest that has sent as much as a member must."""
        for descriptor in self._visitors:
            name = peer_of(descriptor)
            if name is not None and received_by(descriptor, name) >= self._credentials.hello_bytes:
                del self._visitors[descriptor]
                self._admitted[descriptor] = name
                self._knocks.showed_key(name[0])
                self._refusals.admit(name)
                return
        self._refusals.admit(None)

    def _bound_unfinished(self) -> None:
        """Hang up on the surplus of connections: the oldest that have sent nothing, then the oldest without a key."""
        surplus = sum(not visitor.hung_up for visitor in self._visitors.values()) - self._most_unfinished
        for most_bytes in (1, self._credentials.hello_bytes):
            for descriptor, visitor in self._visitors.items():
                if surplus <= 0:
                    return
                if not visitor.hung_up and received_by(descriptor, visitor.name) < most_bytes:
                    visitor.hung_up = hang_up(descriptor, visitor.name)
                    surplus -= 1

    def _bound_unread(self) -> None:
        """If this process has grown, hang up on connections with more unread bytes than they may have."""
        if self._growth is None or not self._growth.look():
            return
        strangers = {descriptor: one.name for descriptor, one in self._visitors.items() if not one.hung_up}
        members_too = strangers | self._admitted
        sent = {each: received_by(each, name) - waiting_in(each, name) for each, name in members_too.items()}
        self._take_events()  # whose handshake had succeeded before it sent that much is no stranger
        for descriptor, name in (strangers | self._admitted).items():
            backlog = self._backlogs.get(descriptor)
            known = backlog is not None and backlog.name == name
            unread = backlog.unread() if backlog is not None and known else sent.get(descriptor, 0)
            most = self._of_member if self._admitted.get(descriptor) == name else FIRST_BYTES
            most = max(most, backlog.most_unread) if backlog is not None and known else most
            if unread > most and hang_up(descriptor, name):
                self._refusals.refuse(name, f"it has sent {unread} bytes that nobody has read, the most are {most}")


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Yield a socket that ZeroMQ's thread owns and may close meanwhile."""
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        yield found
    finally:
        found.detach()


def peer_of(descriptor: int) -> Name | None:
    """Return address and port of the other end; None if the connection is closed already."""
    try:
        with _borrowed(descriptor) as found:
            host, port, *_ = found.getpeername()
            return str(host), int(port)
    except (OSError, ValueError):
        return None


def received_by(descriptor: int, name: Name | None) -> int:
    """Return how many bytes have come from this other end; 0 if the descriptor is another connection's by now."""
    return bytes_of_connection(descriptor, name)[1]


def bytes_of_connection(descriptor: int, name: Name | None) -> tuple[int, int]:
    """Return how many bytes this other end has acknowledged and sent; 0 if the descriptor is another's by now."""
    if name is None or peer_of(descriptor) != name:
        return 0, 0
    try:
        with _borrowed(descriptor) as found:
            acknowledged, received = _BYTES.unpack(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES.size))
            return int(acknowledged), int(received)
    except (OSError, struct.error):
        return 0, 0


def waiting_in(descriptor: int, name: Name | None) -> int:
    """Return how many bytes of this other end are in the kernel's buffer."""
    if name is None or peer_of(descriptor) != name:
        return 0
    with suppress(OSError):
        return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)
    return 0


def hang_up(descriptor: int, name: Name | None) -> bool:
    """End the connection with this other end, so that ZeroMQ's thread closes it; False if it is closed already."""
    if name is None or peer_of(descriptor) != name:
        return False
    try:
        with _borrowed(descriptor) as found:
            found.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True
