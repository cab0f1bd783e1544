"""Memory through which one end of a link hands arrays to the other: written once, read once, no byte over the socket.

A ring, made by the sender as an anonymous file when it is first needed and passed on with the message that needs it.
The receiver says in the ring's first page how far it has read, where the sender looks before it writes. What does not
fit at the moment goes over the socket, as it would without a ring.

A worker reads its rows where they lie, and their place is given back when it asks for the next message; whoever may
keep what it is given (a server holds increments) copies it first.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import msgspec
import numpy as np

from paceline.model.memory_budget import ShortOfMemoryError
from paceline.transport.codec import MakeArray, Shape

PAGE = mmap.PAGESIZE
LEAST_BYTES = 1 << 14  # below that a ring gains nothing over the socket
FIRST_BYTES = 1 << 22
ROOM = 4  # messages of the largest size so far that a ring is made for
MOST_BYTES = 1 << 26  # of a message; a ring takes four times as much, on either side
ALIGNED = 64


class Placed(msgspec.Struct, frozen=True):
    """Where a message's arrays lie; `descriptor`, if this is the ring's first message, is the sender's to close."""

    offset: int
    total: int
    end: int
    descriptor: int | None


class LaneOut:
    """The sender's end. `anonymous_file` gives the descriptor of so many bytes of memory."""

    def __init__(self, anonymous_file: Callable[[int], int]) -> None:
        self._anonymous_file = anonymous_file
        self._memory: mmap.mmap | None = None
        self._size = 0
        self._head = 0  # bytes ever placed, gaps counted in

    def place(self, arrays: Sequence[Any]) -> Placed | None:
        """Copy these into the ring; None if they are too few to be worth it, or there is no room."""
        total = sum(aligned(array.nbytes) for array in arrays)
        if not LEAST_BYTES <= total <= MOST_BYTES:
            return None
        descriptor = None
        if total * 2 > self._size:
            try:
                descriptor = self._make(total)
            except ShortOfMemoryError:
                return None
        begin = self._head
        offset = begin % self._size
        if offset + total > self._size:
            begin, offset = begin + self._size - offset, 0
        if begin + total - int(self._read[0]) > self._size:
            return None
        at = offset
        for array in arrays:
            _write(array, _view(self._memory, at, array.dtype, array.shape))
            at += aligned(array.nbytes)
        self._head = begin + total
        return Placed(offset, total, self._head, descriptor)

    def _make(self, total: int) -> int:
        size = FIRST_BYTES
        while size < ROOM * total:
            size *= 2
        descriptor = self._anonymous_file(PAGE + size)
        self._memory = mmap.mmap(descriptor, PAGE + size)
        self._read = np.frombuffer(self._memory, dtype=np.int64, count=1)
        self._size, self._head = size, 0
        return descriptor


class LaneIn:
    """The receiver's end."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self.unread: int | None = None  # up to where the ring is free once the arrays of the last message are not used

    def adopt(self, descriptor: int) -> None:
        """The sender has a ring from here on, or another one."""
        self.unread = None
        try:
            self._memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        self._read = np.frombuffer(self._memory, dtype=np.int64, count=1)

    def arrays(self, offset: int, total: int, end: int) -> MakeArray:
        """What hands out a message's arrays one after the other, as they lie. To be followed by `give_back`."""
        memory = self._memory
        if memory is None or offset % ALIGNED or PAGE + offset + total > len(memory):
            raise ValueError(f"{total} bytes at {offset} of a ring that has no such place")
        self.unread = end
        at = offset

        def next_array(dtype: "np.dtype[Any]", shape: Shape) -> Any:
            nonlocal at
            place, at = at, at + aligned(prod(shape) * dtype.itemsize)
            if at > offset + total:
                raise ValueError(f"an array of {dtype} {shape} does not fit into {total} bytes")
            return _view(memory, place, dtype, shape)

        return next_array

    def give_back(self) -> None:
        """The last message's arrays are not looked at any more."""
        if self.unread is not None:
            self._read[0], self.unread = self.unread, None


def _view(memory: Any, offset: int, dtype: Any, shape: Shape) -> Any:
    return np.frombuffer(memory, dtype=dtype, count=prod(shape), offset=PAGE + offset).reshape(shape)


def _write(array: Any, out: Any) -> None:
    """Rows that are not yet copied write themselves."""
    if isinstance(array, np.ndarray):
        out[...] = array
    else:
        array.write_to(out)


def aligned(nbytes: int) -> int:
    """So many bytes, or a few more, that what follows them begins at a cache line."""
    return -(-nbytes // ALIGNED) * ALIGNED
