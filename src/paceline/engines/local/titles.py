"""The names of processes in `ps`, `top` and `/proc`, where the system is Linux."""

import contextlib
import ctypes
import sys
from pathlib import Path

_SET_NAME = 15  # of <sys/prctl.h>
_LONGEST = 15  # bytes of a thread's name


def show(name: str) -> None:
    """Show this process as `paceline: worker 0`, and its main thread as `paceline:w0`."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError, ValueError, IndexError):  # a name is not worth a failure
        _show_command(f"paceline: {name}".encode())
        _show_thread(f"paceline:{name.replace('worker ', 'w')}".encode())


def _show_command(title: bytes) -> None:
    """Overwrite the command line, as `setproctitle` does."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    if len(title) + 2 <= end - begin:
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, title, len(title))
        ctypes.memset(end - 1, 1, 1)  # tells the kernel that the title ends at the first zero


def _show_thread(name: bytes) -> None:
    ctypes.CDLL(None).prctl(_SET_NAME, name[:_LONGEST], 0, 0, 0)
