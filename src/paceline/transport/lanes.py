"""Ring buffers in shared memory that carry arrays from one end of a link to the other, bypassing the socket.

The sender makes the ring as an anonymous file when it is first needed and passes it with that message. The receiver
writes to the ring's first page how far it has read; the sender checks that before it writes. Arrays that do not fit at
the moment go over the socket.

A worker reads its rows in place and frees them when it asks for the next message; a receiver that keeps arrays (a
server holds increments) copies them first.
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
LEAST_BYTES = 1 << 14  # smaller messages gain nothing over the socket
FIRST_BYTES = 1 << 22
ROOM = 4  # a ring holds this many messages of the size that it was made for
MOST_BYTES = 1 << 26  # per message; a ring is ROOM times as large, and there is one each way
ALIGNED = 64


class Placed(msgspec.Struct, frozen=True):
    """Where a message's arrays are. `descriptor` is set for a ring's first message; the sender closes it."""

    offset: int
    total: int
    end: int
    descriptor: int | None


class LaneOut:
    """The sender's end. `anonymous_file` allocates that many bytes and returns their descriptor."""

    def __init__(self, anonymous_file: Callable[[int], int]) -> None:
        self._anonymous_file = anonymous_file
        self._memory: mmap.mmap | None = None
        self._size = 0
        self._head = 0  # bytes placed so far, gaps included

    def place(self, arrays: Sequence[Any]) -> Placed | None:
        """Copy the arrays into the ring; None if they are too small or too large for it, or it is full."""
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
        self.unread: int | None = None  # how far the ring is free after `give_back`

    def adopt(self, descriptor: int) -> None:
        """Map the sender's ring, in place of an earlier one."""
        self.unread = None
        try:
            self._memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        self._read = np.frombuffer(self._memory, dtype=np.int64, count=1)

    def arrays(self, offset: int, total: int, end: int) -> MakeArray:
        """Return a function that returns a message's arrays in order, as views of the ring until `give_back`."""
        memory = self._memory
        if memory is None or offset % ALIGNED or PAGE + offset + total > len(memory):
            raise ValueError(f"{total} bytes at offset {offset} are not a valid range of the ring")
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
        """Let the sender overwrite the last message's arrays."""
        if self.unread is not None:
            self._read[0], self.unread = self.unread, None


def _view(memory: Any, offset: int, dtype: Any, shape: Shape) -> Any:
    return np.frombuffer(memory, dtype=dtype, count=prod(shape), offset=PAGE + offset).reshape(shape)


def _write(array: Any, out: Any) -> None:
    """Copy an array to `out`; lazy rows have a `write_to` of their own."""
    if isinstance(array, np.ndarray):
        out[...] = array
    else:
        array.write_to(out)


def aligned(nbytes: int) -> int:
    """Round up so that what follows starts at a cache line."""
    return -(-nbytes // ALIGNED) * ALIGNED
