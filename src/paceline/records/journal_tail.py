"""The last lines of a journal, kept where the death of the process that writes them does not reach.

A writer passes its lines to the system now and then, since doing so for each would cost more than the line. Until then
they are also in a small file that is mapped into memory: the system keeps what a killed process wrote there. Whoever
continues the journal adds them to its file first, so that a restarted server knows all that the one before it decided.

The file begins with two numbers: how long the journal was when it last took lines over, and how many bytes of lines
follow here. Lines come before the number that counts them, and the journal's file before both: wherever the writer is
killed, what is in neither place was never complete.
"""

import mmap
import os
import struct
from pathlib import Path

SIZE = 1 << 18  # bytes: several times what a writer lets wait
_HEAD = struct.Struct("<QQ")
_NUMBER = struct.Struct("<Q")


class JournalTail:
    """The lines that a journal's file may not have yet."""

    def __init__(self, path: Path) -> None:
        """Open the file of an earlier writer, or make one."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, SIZE)  # a full disk is an error here, and not a signal later
            self._memory = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        self._length = 0

    def beyond(self, length: int) -> bytes:
        """Return the lines that belong behind a journal's first `length` bytes."""
        since, kept = _HEAD.unpack_from(self._memory)
        if not since <= length <= since + kept or kept > SIZE - _HEAD.size:
            return b""
        return self._memory[_HEAD.size + length - since : _HEAD.size + kept]

    def restart(self, length: int) -> None:
        """Keep nothing: the journal's file has all, and is so long."""
        _NUMBER.pack_into(self._memory, _NUMBER.size, 0)
        _NUMBER.pack_into(self._memory, 0, length)
        self._length = 0

    def add(self, lines: bytes | bytearray) -> bool:
        """Keep these lines; return False if there is no room for them."""
        begin = _HEAD.size + self._length
        if begin + len(lines) > SIZE:
            return False
        self._memory[begin : begin + len(lines)] = lines
        self._length += len(lines)
        _NUMBER.pack_into(self._memory, _NUMBER.size, self._length)
        return True

    def close(self) -> None:
        """Unmap the file."""
        self._memory.close()
