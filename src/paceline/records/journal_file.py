"""The file of a journal: taken only if nothing else is in it, locked against other runs, and cut where a disk is full.

The lock is the kernel's (`flock`), so it goes with the process that holds it, however that ends. Where a write fails,
nothing is written any more: what is in the file is the beginning of the journal, up to a cut.
"""

import contextlib
import errno
import fcntl
import os
import time
import zlib
from pathlib import Path

from paceline.core.errors import JournalError, StorageError
from paceline.core.regular_files import require_regular
from paceline.core.values import shown
from paceline.model import descriptors
from paceline.records import private_files
from paceline.records.private_files import FILE_MODE

BEGINNING = b'{"type":"header"'
CUT = 6  # letters of it that are enough in a file with nothing more: a run was killed there
GZIP_MAGIC = b"\x1f\x8b"
GZIP_HEAD = 10  # bytes
GZIP_EMPTY = 32  # bytes; a compressed file of no more, from which nothing can be read, is nobody's loss
PEEKED = 4096  # bytes that are enough to see how a file begins
LOOKS, LOOK_S = 5, 0.01  # at a lock that may be a watcher's, who holds it for as long as asking for it takes
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # some network file systems have none


class JournalWriteError(JournalError, StorageError):
    """A journal that cannot be written any more."""


class LockedFile:
    """A journal's file, open for writing and locked. `keep` leaves the contents; otherwise it is emptied."""

    def __init__(self, path: Path, *, keep: bool = False) -> None:
        self.path = path
        self._descriptor = _locked(path)
        self._broken = False
        try:
            _require_journal(self._descriptor, path)
            if not keep:
                os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def closed(self) -> bool:
        return self._descriptor < 0

    def cut(self, length: int) -> None:
        """Drop what is behind this many bytes, and go on writing there."""
        os.ftruncate(self._descriptor, length)
        os.lseek(self._descriptor, length, os.SEEK_SET)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of it; after a failure nothing is ever written."""
        left = memoryview(bytes(data))  # a copy: an error holds it, and the caller's buffer must be free to grow
        length = len(left)
        while left and not self._broken:
            try:
                left = left[os.write(self._descriptor, left) :]
            except OSError:
                self._broken = True
                raise
        return length

    def flush(self) -> None:
        """Do nothing: there is no buffer."""

    def close(self) -> None:
        if not self.closed:
            with contextlib.suppress(OSError):  # a forked process may still have the descriptor
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


def require_usable(path: Path) -> None:
    """Refuse, before a run begins, a path that it could not write its journal to; leave everything as it was."""
    known = os.path.lexists(path)
    with contextlib.closing(open_locked(path, keep=True)):
        if not known:
            path.unlink()


def open_locked(path: Path, *, keep: bool = False) -> LockedFile:
    """Open the file and lock it; refuse one that is no journal, or that another run writes."""
    try:
        private_files.make_folder(path.parent)
        return LockedFile(path, keep=keep)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise JournalError(f"cannot write journal {path}: {reason}; choose another --journal") from error


def _locked(path: Path) -> int:
    while True:
        with contextlib.suppress(FileNotFoundError):
            require_regular(os.stat(path), path)  # noqa: PTH116 - before opening, which can have effects
        flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = descriptors.open_file(path, flags, FILE_MODE)
        try:
            require_regular(os.fstat(descriptor), path)
            _lock(descriptor, path)
            if _is_still_at(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # another run has put a new file in its place


def _lock(descriptor: int, path: Path) -> None:
    for _ in range(LOOKS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOOK_S)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return
        else:
            return
    raise JournalError(
        f"another run writes the journal {shown(str(path))}: wait for its end, or choose another --journal"
    )


def is_being_written(descriptor: int) -> bool | None:
    """Whether a run holds the lock of a journal that was opened for reading; None where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def _is_still_at(path: Path, descriptor: int) -> bool:
    mine = os.fstat(descriptor)
    try:
        there = os.stat(path)  # noqa: PTH116
    except FileNotFoundError:
        return False
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def _require_journal(descriptor: int, path: Path) -> None:
    """Refuse a file that is not a journal: a mistyped path must not destroy a script."""
    begin = os.pread(descriptor, PEEKED, 0)
    if begin.startswith(GZIP_MAGIC):
        try:
            found = zlib.decompressobj(wbits=31).decompress(begin, len(BEGINNING))
        except zlib.error:
            found = b"damaged"
        begin = found if found or len(begin) <= GZIP_EMPTY else b"empty"
    begin = begin[: len(BEGINNING)]
    if begin and begin != BEGINNING and not (len(begin) >= CUT and BEGINNING.startswith(begin)):
        raise JournalError(f"{path} exists and is no journal: it is not overwritten; choose another --journal")
