"""Mailboxes over ZeroMQ: each node reads from one socket and has another for each peer that it writes to.

ZeroMQ's thread sends from a copy made by `post`, so a message is on its way until that thread has handed its last byte
to the kernel. Queues are short on both sides: posting to a peer that reads slowly soon fails.

Between hosts what one connection makes a node hold is bounded as at the server (`gatekeeper.py`): a few messages of its
model's size that were not read, or one that has no end.
"""

import contextlib
import logging
import secrets
import time
import warnings
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import zmq

from paceline.transport.gatekeeper import Gatekeeper
from paceline.transport.mail import UNREAD, Box, Delivered, Departed, PeerHeader, as_bytes, decode, encode, same_key
from paceline.transport.security import Security
from paceline.transport.zeromq import CHUNK, FRAME, bind_privately, end_context, remove_name, require_network, speak_ip6

LEAVING_MS = 5_000  # that `close` waits for messages still on their way
RECONNECT_MAX_MS = 5_000  # between attempts to reach a peer that is gone: it may come back until its departure is known
# Of links between hosts: a reader may compute for minutes and read nothing, so only the kernel can tell that its host
# is alive. Dead after 25 s of silence; the server tells of departures much earlier.
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_MISSED = 10, 5, 3
SPARE_BYTES = 4 * FRAME  # of one connection that are not read: headers, and what is around frames
STUCK_S = 2.0  # a message on its way for longer is not waited for: its reader does not read

logger = logging.getLogger("paceline")


def bound_mail(socket: "zmq.Socket[bytes]") -> None:
    """Set the bounds of mail between hosts; call it before `bind` or `connect`."""
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_EVERY_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_MISSED)


class _Posted(msgspec.Struct):
    """A posted message that may not have left yet."""

    peer: int
    header: PeerHeader
    values: list[torch.Tensor]
    tracker: Any
    at: float


class ZeromqMail:
    """A mailbox at a socket in a private folder, or at a TCP port. With `security`, only nodes of the run can connect,
    and it connects to such mailboxes alone."""

    tracks = True

    def __init__(self, bind: str, security: Security | None = None) -> None:
        if security is not None:
            require_network(bind)
        self.key = secrets.token_hex(16)
        self._security = security
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, UNREAD)
        self._gatekeeper: Gatekeeper | None = None
        if security is not None:
            self._gatekeeper = security.listen_as(self._context, self._socket, "node", admits=["node"])
            bound_mail(self._socket)
            self._gatekeeper.bound_unread(SPARE_BYTES)
        self.address = bind_privately(self._socket, bind)
        if self._gatekeeper is not None:
            self._gatekeeper.listens_at(self.address)
        self._largest = 0  # bytes of a message's values
        self._peers: dict[int, tuple[Box, zmq.Socket[bytes]]] = {}
        self._posted: list[_Posted] = []
        self._departed: list[Departed] = []

    unread = 0  # not known here

    def reserve(self, sizes: Sequence[int]) -> None:
        """Let peers send that much: no memory is reserved."""
        self._largest = max(self._largest, sum(sizes))
        if self._gatekeeper is not None:  # ZeroMQ stops reading at UNREAD messages, and has begun another by then
            self._gatekeeper.bound_unread((UNREAD + 1) * self._largest + SPARE_BYTES)

    def add_peer(self, peer: Box) -> None:
        self.remove_peer(peer.node)
        link = self._context.socket(zmq.PUSH)
        link.setsockopt(zmq.SNDHWM, UNREAD)
        if self._security is not None:
            self._security.connect_as(link, "node", to="node")
            bound_mail(link)
            link.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        link.copy_threshold = 0  # ZeroMQ would report a message whose last frame it copied as sent at once
        speak_ip6(link, peer.address)
        link.connect(peer.address)
        self._peers[peer.node] = (peer, link)

    def remove_peer(self, peer: int) -> list[Delivered]:
        self._look()
        _, link = self._peers.pop(peer, (None, None))
        if link is not None:
            link.close(linger=0)
        back = [posted for posted in self._posted if posted.peer == peer]
        self._posted = [posted for posted in self._posted if posted.peer != peer]
        return [Delivered(posted.header, posted.values) for posted in back]

    # -- out ---------------------------------------------------------------------------------------------------------

    def post(self, peer: int, header: PeerHeader, values: Sequence[torch.Tensor]) -> bool:
        if peer not in self._peers:
            return False
        box, link = self._peers[peer]
        copies = [as_bytes(value).clone() for value in values]
        header = msgspec.structs.replace(header, key=box.key, sizes=tuple(copy.nbytes for copy in copies))
        frames: list[Any] = [encode(header)]
        for copy in copies:
            frames += map(torch.Tensor.numpy, copy.split(list(self._cut(copy.nbytes))))
        try:
            tracker = link.send_multipart(frames, zmq.NOBLOCK, copy=False, track=True)
        except zmq.Again:  # the peer has not read earlier messages
            return False
        self._posted.append(_Posted(peer, header, copies, tracker, time.perf_counter()))
        return True

    def _cut(self, size: int) -> list[int]:
        """Return the lengths of the frames of a value: between hosts they are bounded, so that a listening socket can
        refuse longer ones from strangers."""
        if self._security is None:
            return [size] if size else []
        return [min(CHUNK, size - begin) for begin in range(0, size, CHUNK)]

    def _look(self) -> None:
        """Record which messages have left."""
        still, now = [], time.perf_counter()
        for posted in self._posted:
            if not posted.tracker.done:
                still.append(posted)
            elif posted.header.kind == "model":
                self._departed.append(Departed(posted.peer, sum(posted.header.sizes), now - posted.at))
        self._posted = still

    def departed(self) -> list[Departed]:
        self._look()
        found, self._departed = self._departed, []
        return found

    @property
    def on_their_way(self) -> int:
        self._look()
        lately = time.perf_counter() - STUCK_S
        return sum(posted.at > lately for posted in self._posted)

    # -- in ----------------------------------------------------------------------------------------------------------

    def collect(self, seconds: float = 0.0) -> list[Delivered]:
        found: list[Delivered] = []
        if seconds and not self._socket.poll(int(seconds * 1000)):
            return found
        while True:
            try:
                first, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return found
            self._count([first, *frames])
            header = decode(first.buffer)
            lengths = [len(frame.buffer) for frame in frames]
            if header is None or not same_key(header.key, self.key):
                logger.warning("a message of %d bytes was dropped: it does not have this node's key", len(first.buffer))
            elif min(header.sizes, default=0) < 0 or sum(header.sizes) != sum(lengths):
                self._drop(header)
            else:
                cuts = [self._cut(size) for size in header.sizes]
                if lengths != [length for cut in cuts for length in cut]:
                    self._drop(header)
                    continue
                waiting = iter(frames)
                found.append(Delivered(header, [_joined([next(waiting) for _ in cut]) for cut in cuts]))

    def _count(self, frames: Sequence[zmq.Frame]) -> None:
        """Take note of what was read from a connection."""
        if self._gatekeeper is not None:
            backlog = self._gatekeeper.backlog(frames[0], most_unread=0)
            for frame in frames:
                backlog.read(len(frame.buffer))

    def _drop(self, header: PeerHeader) -> None:
        logger.warning("a message of node %d was dropped: it is not as long as it says", header.sender)

    def release(self) -> None:
        """Do nothing: each collected message owns its frames."""

    def close(self) -> None:
        if self._context.closed:
            return
        if self._gatekeeper is not None:
            self._gatekeeper.close(0)
        else:
            self._socket.close(linger=0)
        remove_name(self.address)
        for _, link in self._peers.values():
            link.close(linger=LEAVING_MS)
        self._peers.clear()
        self._posted.clear()
        with contextlib.suppress(zmq.ZMQError):
            end_context(self._context)


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _joined(frames: Sequence[Any]) -> torch.Tensor:
    """Return a value as bytes: those of its frame, or a copy of those of several."""
    if not frames:
        return _NOTHING
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the buffer is read-only, and only read from
        parts = [torch.frombuffer(frame.buffer, dtype=torch.uint8) for frame in frames]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
