"""Mailboxes on one host: headers over a datagram socket, values in memory that the reader maps.

A slot is an anonymous file that its sender makes and fills; the reader gets its descriptor with the first message in
it, mixes from there, and marks it as read in its first page. So a model is copied once and read once. There are as many
slots as messages unread at one time, at most UNREAD for each peer and MOST_SLOTS in all.

The socket has a name in the worker's own temporary folder, which no other user may enter and the process that reaps the
worker removes. With every message the kernel tells whose process sent it; those of other users are dropped unread, and
so are those without the mailbox's key.
"""

import logging
import mmap
import os
import secrets
import select
import socket
import struct
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from paceline.core.errors import OptionError, PeerError
from paceline.model.memory_budget import ShortOfMemoryError
from paceline.transport.lanes import aligned
from paceline.transport.mail import UNREAD, Box, Delivered, Departed, PeerHeader, decode, encode, same_key
from paceline.transport.shm import anonymous_file, require_sealed

PAGE = mmap.PAGESIZE
MOST_SLOTS = 64
LONGEST_NAME = 107  # bytes of a socket's name on Linux
LONGEST_HEADER = 1 << 18  # bytes of a header, which may list thousands of tensors; the kernel accepts no more
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_ANCILLARY = socket.CMSG_SPACE(array("i", [0]).itemsize) + socket.CMSG_SPACE(_CREDENTIALS.size)
_TELLS_SENDERS = hasattr(socket, "SO_PASSCRED")  # Linux

logger = logging.getLogger("paceline")


class _Memory:
    """A slot's memory, as mapped by either side."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = mmap.mmap(descriptor, PAGE + nbytes)
        self.state = torch.frombuffer(self.memory, dtype=torch.int64, count=1)  # the unread message's number, or 0

    def views(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return a message's values as bytes."""
        found, at = [], PAGE
        for size in sizes:
            found.append(
                torch.frombuffer(self.memory, dtype=torch.uint8, count=size, offset=at)
                if size
                else torch.empty(0, dtype=torch.uint8)
            )
            at += aligned(size)
        return found


class _Slot:
    """The sender's side of a slot."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.descriptor = anonymous_file(PAGE + nbytes)
        self.memory = _Memory(self.descriptor, nbytes)
        self.reader: int | None = None
        self.header: PeerHeader | None = None
        self.known: set[tuple[int, int]] = set()  # peers, with their incarnations, that have the descriptor

    @property
    def unread(self) -> bool:
        return self.reader is not None and bool(self.memory.state)

    def close(self) -> None:
        os.close(self.descriptor)


class ShmMail:
    """A mailbox in shared memory."""

    tracks = False

    def __init__(self, folder: Path) -> None:
        """`folder` belongs to this process and is removed with it."""
        self.key = secrets.token_hex(16)
        self.address = os.fspath(folder / "mail")
        length = len(os.fsencode(self.address))
        if length > LONGEST_NAME:
            raise OptionError(
                f"a mailbox's name has at most {LONGEST_NAME} bytes, and {self.address} has {length}: set TMPDIR to a "
                "shorter path"
            )
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        if _TELLS_SENDERS:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(self.address)
        self._out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._boxes: dict[int, Box] = {}
        self._slots: list[_Slot] = []
        self._largest = 0  # message, in bytes
        self._mapped: dict[tuple[int, int, int], _Memory] = {}
        self._looked_at: list[tuple[_Memory, int]] = []  # collected since `release`, with the message's number
        self._posted = 0
        self._removed: set[int] = set()  # peers whose last messages may still be unread here
        self._forgotten: set[int] = set()
        self.on_their_way = 0  # a posted message is at once in memory that its reader maps

    def reserve(self, sizes: Sequence[int]) -> None:
        self._largest = sum(map(aligned, sizes))

    def add_peer(self, peer: Box) -> None:
        known = self._boxes.get(peer.node)
        if known is not None and known.incarnation != peer.incarnation:
            self.remove_peer(peer.node)
        self._removed.discard(peer.node)
        for slot in self._slots:  # the peer may have unmapped the slot: send its descriptor again
            slot.known.discard((peer.node, peer.incarnation))
        self._boxes[peer.node] = peer

    def remove_peer(self, peer: int) -> list[Delivered]:
        self._boxes.pop(peer, None)
        back = []
        for slot in self._slots:
            if slot.reader == peer:
                if slot.unread and slot.header is not None:
                    values = [view.clone() for view in slot.memory.views(slot.header.sizes)]
                    back.append(Delivered(slot.header, values))
                slot.memory.state.fill_(0)  # void the message, should the peer still find it
                slot.reader = None
        self._removed.add(peer)
        return back

    # -- out ---------------------------------------------------------------------------------------------------------

    def post(self, peer: int, header: PeerHeader, values: Sequence[torch.Tensor]) -> bool:
        box = self._boxes.get(peer)
        if box is None:
            return False
        sizes = tuple(value.nbytes for value in values)
        slot = self._slot_for(peer, sum(map(aligned, sizes))) if sizes else None
        if sizes and slot is None:
            return False
        if slot is not None:
            for view, value in zip(slot.memory.views(sizes), values, strict=True):
                if view.numel():
                    view.view(value.dtype).view(value.shape).copy_(value.detach())
            self._posted += 1
            slot.memory.state.fill_(self._posted)
            slot.reader = peer
        place = -1 if slot is None else slot.number
        header = msgspec.structs.replace(header, key=box.key, sizes=sizes, slot=place, number=self._posted)
        if self._send(box, header, slot):
            if slot is not None:
                slot.header = header
            return True
        if slot is not None:
            slot.reader = None
        return False

    def _send(self, box: Box, header: PeerHeader, slot: _Slot | None) -> bool:
        place = (box.node, box.incarnation)
        news = slot is not None and place not in slot.known
        rights = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [slot.descriptor]))] if slot is not None and news else []
        )
        data = encode(header)
        if len(data) > LONGEST_HEADER:
            logger.warning("a message that names %d tensors is too long to be sent", len(header.sizes))
            return False
        try:
            self._out.sendmsg([data], rights, socket.MSG_DONTWAIT, box.address)
        except OSError as error:  # the peer is gone, or its queue is full
            logger.debug("a message to node %d was not taken: %s", box.node, error)
            return False
        if slot is not None:
            slot.known.add(place)
        return True

    def _slot_for(self, peer: int, nbytes: int) -> _Slot | None:
        unread = [slot for slot in self._slots if slot.unread]
        if len([slot for slot in unread if slot.reader == peer]) >= UNREAD:
            return None
        free = [slot for slot in self._slots if slot not in unread and slot.memory.nbytes >= nbytes]
        if free:
            return min(free, key=lambda slot: slot.memory.nbytes)
        too_small = [slot for slot in self._slots if slot not in unread]
        place = len(self._slots)
        if place >= MOST_SLOTS:
            if not too_small:
                return None
            place = min(too_small, key=lambda slot: slot.memory.nbytes).number
        try:
            slot = _Slot(place, self._capacity(nbytes))
        except ShortOfMemoryError:
            if not self._slots:  # without any slot nothing could ever be sent
                raise
            return None
        if place < len(self._slots):  # readers get the descriptor of the larger one with their next message in it
            self._slots[place].close()
            self._slots[place] = slot
        else:
            self._slots.append(slot)
        return slot

    def _capacity(self, nbytes: int) -> int:
        """Return a size that allows reuse: twice the bytes of a few tensors, but no more than a model's."""
        return max(nbytes, min(2 * nbytes, self._largest), PAGE)

    @property
    def unread(self) -> int:
        return sum(slot.unread and slot.header is not None and slot.header.kind == "model" for slot in self._slots)

    def departed(self) -> list[Departed]:
        return []

    # -- in ----------------------------------------------------------------------------------------------------------

    def collect(self, seconds: float = 0.0) -> list[Delivered]:
        found: list[Delivered] = []
        if seconds and not self._readable.poll(seconds * 1000):
            return found
        while True:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(LONGEST_HEADER, _ANCILLARY, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._forgotten |= self._removed  # everything that they sent has been read
                self._removed.clear()
                return found
            descriptors, user = _unpacked(ancillary)
            try:
                delivered = self._read(data, descriptors, user)
            except PeerError as error:
                logger.warning("a message was dropped: %s", error)
                delivered = None
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            if delivered is not None:
                found.append(delivered)

    def _read(self, data: bytes, descriptors: Sequence[int], user: int | None) -> Delivered | None:
        if user != os.geteuid() and _TELLS_SENDERS:
            logger.warning("a message of %d bytes was dropped: it is of user %s", len(data), user)
            return None
        header = decode(data)
        if header is None or not same_key(header.key, self.key):
            logger.warning("a message of %d bytes was dropped: it does not have this node's key", len(data))
            return None
        if header.slot < 0:
            return Delivered(header, [])
        if not header.sizes:
            raise PeerError(f"a message of node {header.sender} names slot {header.slot}, but no values")
        place = (header.sender, header.incarnation, header.slot)
        if descriptors:
            require_sealed(descriptors[0])
            self._mapped[place] = _Memory(descriptors[0], os.fstat(descriptors[0]).st_size - PAGE)
        memory = self._mapped.get(place)
        if memory is None or min(header.sizes) < 0 or sum(map(aligned, header.sizes)) > memory.nbytes:
            raise PeerError(f"a message of node {header.sender} names {sum(header.sizes)} bytes that are not there")
        if int(memory.state) != header.number:
            return None  # the sender has voided the message
        self._looked_at.append((memory, header.number))
        return Delivered(header, memory.views(header.sizes))

    def release(self) -> None:
        for memory, number in self._looked_at:
            if int(memory.state) == number:
                memory.state.fill_(0)
        self._looked_at.clear()
        for place in [place for place in self._mapped if place[0] in self._forgotten and place[0] not in self._boxes]:
            del self._mapped[place]
        self._forgotten.clear()

    def close(self) -> None:
        for slot in self._slots:
            slot.close()
        self._slots.clear()
        self._mapped.clear()
        self._looked_at.clear()
        self._out.close()
        self._socket.close()
        with suppress(FileNotFoundError):
            Path(self.address).unlink()


def _unpacked(ancillary: Sequence[tuple[int, int, bytes]]) -> tuple["array[int]", int | None]:
    """Return the descriptors that came with a message, and the user whose process sent it, if the kernel says so."""
    descriptors, user = array("i"), None
    for level, kind, packed in ancillary:
        if level != socket.SOL_SOCKET:
            continue
        if kind == socket.SCM_RIGHTS:
            descriptors.frombytes(packed[: len(packed) // descriptors.itemsize * descriptors.itemsize])
        elif _TELLS_SENDERS and kind == socket.SCM_CREDENTIALS and len(packed) >= _CREDENTIALS.size:
            user = _CREDENTIALS.unpack_from(packed)[1]
    return descriptors, user
