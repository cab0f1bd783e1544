"""Reading files that somebody else may have made: regular ones only, and no more of them than is allowed.

A pipe nobody writes to would make the reader wait for ever, and a device may have no end.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; anything else is an OSError that says what it is.

    Looks before opening, since opening a device can have effects, and again afterwards, since the name may have been
    given to something else meanwhile.
    """
    require_regular(os.stat(path), path)  # noqa: PTH116 - as os.fstat below
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        require_regular(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def require_regular(found: os.stat_result, path: Path) -> None:
    """Raise an OSError that says what it is, if it is not a regular file."""
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        code = errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.EINVAL
        raise OSError(code, f"it is {kind}, not a file", os.fspath(path))


def read_at_most(path: Path, most: int) -> bytes:
    """Return the bytes of a regular file; raise ValueError if there are more than `most`."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return data


def read_text(path: Path, most: int) -> str:
    """Return the text of a regular file; raise ValueError if it is not UTF-8, or too long."""
    try:
        return read_at_most(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (at byte {error.start})") from None
