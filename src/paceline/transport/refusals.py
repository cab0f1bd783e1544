"""Connections that a listening socket refused: each is logged with its address, and a flood of them is counted.

The descriptor of a handshake that fails at once is closed, and perhaps another's, before anybody can ask whose it was.
So the addresses of refusals are the kernel's, which reports every TCP connection that ends (the monitoring group of its
socket diagnostics): those that were no member's, in order.
"""

import logging
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import zmq

LOG_BURST = 10  # refusals that are logged at once
LOG_EVERY_S = 10.0  # from there on, a count
MOST_LOGGED = 1_000  # letters of one refusal, which may quote what a member sent
_FOREIGN = "it does not speak this protocol"
_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG
_TCP_ENDED = 1 << 0 | 1 << 2  # SKNLGRP_INET_TCP_DESTROY and SKNLGRP_INET6_TCP_DESTROY
_REPORT = struct.Struct(">16xB3xHH16x16s")  # nlmsghdr, then of inet_diag_msg: family, both ports, the other address
_ADDRESS_BYTES = {int(socket.AF_INET): 4, int(socket.AF_INET6): 16}
_NAMELESS_S = 1.0  # that a refusal waits for the kernel's report
_MOST_NAMES = 1_000  # of connections that ended, kept for their refusals

Name = tuple[str, int]  # address and port of a connection's other end

logger = logging.getLogger("paceline")


def _printable(text: str) -> str:
    """Return the text's beginning with control characters escaped: it may hold what another machine sent."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text[:MOST_LOGGED])


class RefusalLog:
    """Logs the first refusals one by one, then their number every LOG_EVERY_S, so that a flood does not fill a disk.

    `noun` says what is counted, and `say` logs something other than warnings.
    """

    def __init__(self, noun: str = "refusals", say: Callable[[str], None] = logger.warning) -> None:
        self._noun, self._say = noun, say
        self._lock = threading.Lock()
        self._left = LOG_BURST
        self._since = time.monotonic()
        self._unlogged = 0
        self._last = ""

    def warn(self, text: str) -> None:
        """Log this refusal, or count it."""
        with self._lock:
            self._tell_count()
            if self._left:
                self._left -= 1
                self._say(_printable(text))
            else:
                self._unlogged, self._last = self._unlogged + 1, text

    def flush(self) -> None:
        """Log the number of refusals that were not logged, if it is time for that."""
        with self._lock:
            self._tell_count()

    def close(self) -> None:
        """Log what is left to be told."""
        with self._lock:
            self._since -= LOG_EVERY_S
            self._tell_count()

    def _tell_count(self) -> None:
        now = time.monotonic()
        if now - self._since < LOG_EVERY_S:
            return
        self._since = now
        if self._unlogged:
            self._say(f"{self._unlogged} more {self._noun}, the last: {_printable(self._last)}")
            self._unlogged = 0
        else:
            self._left = LOG_BURST


class EndedConnections:
    """The kernel's reports of TCP connections that ended at one local port. None come where it has no diagnostics."""

    def __init__(self) -> None:
        self.port: int | None = None
        try:
            self._socket: socket.socket | None = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG)
        except OSError:
            self._socket = None
            return
        try:
            self._socket.setblocking(False)
            self._socket.bind((0, _TCP_ENDED))
        except OSError:
            self.close()

    @property
    def reported(self) -> bool:
        """Whether the kernel reports."""
        return self._socket is not None

    def register(self, poller: zmq.Poller) -> None:
        if self._socket is not None:
            poller.register(self._socket, zmq.POLLIN)

    def take(self) -> list[Name]:
        """Return the other ends of the connections that have ended since the last call."""
        found: list[Name] = []
        with suppress(OSError):  # nothing is left, or there were more reports than the kernel keeps
            while self._socket is not None:
                report = self._socket.recv(1 << 16)
                if len(report) >= _REPORT.size:
                    family, local, port, address = _REPORT.unpack_from(report)
                    if local == self.port and family in _ADDRESS_BYTES:
                        found.append((socket.inet_ntop(family, address[: _ADDRESS_BYTES[family]]), port))
        return found

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Refusals:
    """The connections of one listening socket that came to nothing, and the log of them."""

    def __init__(self) -> None:
        self.log = RefusalLog()
        self.ended = EndedConnections()
        self._members: set[Name] = set()  # other ends of finished handshakes
        self._strangers: deque[Name] = deque(maxlen=_MOST_NAMES)  # other ends that are gone and were no members
        self._nameless: deque[tuple[str, Name | None, float]] = deque()  # refusals that wait for one, and since when
        self._failed: str | None = None  # why the next closed connection failed
        self._unclaimed = 0  # finished handshakes whose connections were closed meanwhile

    def refuse(self, name: tuple[str, int | None] | None, why: str) -> None:
        """Log a refusal; without a name, its connection was closed before anybody could look."""
        shown = "an address that is gone" if name is None else name[0] if name[1] is None else f"{name[0]}:{name[1]}"
        self.log.warn(f"a connection from {shown} was refused: {why}")

    def admit(self, name: Name | None) -> None:
        """Note that a handshake has succeeded: this end's, or that of a connection which is closed already."""
        if name is None:
            self._unclaimed += 1
        else:
            self._members.add(name)

    def fail(self, why: str) -> None:
        """Note why the handshake of the next connection that closes has failed; nothing: that was logged."""
        self._failed = why

    def close_one(self, name: Name | None, *, unfinished: bool) -> None:
        """Note that a connection was closed, and whether before its handshake was done: that one is logged."""
        why, self._failed = self._failed, None
        if not unfinished:
            return
        if why is None:  # for no reason that ZeroMQ knows
            why = "" if self._unclaimed else _FOREIGN
            self._unclaimed = max(0, self._unclaimed - 1)
        self._nameless.append((why, name, time.monotonic()))
        if self._strangers:
            self._settle(self._strangers.popleft())
        elif not self.ended.reported:
            self._settle(None)

    def look(self) -> None:
        """Learn the other ends of connections that ended, and log the refusals that waited for them."""
        for name in self.ended.take():
            if name in self._members:
                self._members.discard(name)
            elif self._nameless:
                self._settle(name)
            else:
                self._strangers.append(name)
        while self._nameless and time.monotonic() - self._nameless[0][2] > _NAMELESS_S:
            self._settle(None)
        self.log.flush()

    def close(self) -> None:
        """Log what is left, with the addresses that are known."""
        self.look()
        while self._nameless:
            self._settle(None)
        self.ended.close()

    def _settle(self, name: Name | None) -> None:
        """Log the oldest refusal that waits for its address; None: there is none but that of its descriptor."""
        why, guess, _ = self._nameless.popleft()
        if why != "":
            self.refuse(name or guess, why)
