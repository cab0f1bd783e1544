"""What Linux does for a run's processes: adopt orphans, resume one whose parent has died, and show names in `ps`.

This module is loaded first of all in every process and imports nothing of weight.
"""

import contextlib
import ctypes
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

_SET_NAME = 15  # of <sys/prctl.h>
_LONGEST = 15  # bytes of a thread's name
_SET_PARENT_DEATH_SIGNAL, _SET_SUBREAPER, _GET_SUBREAPER = 1, 36, 37  # of <sys/prctl.h>


def resume_when_parent_dies() -> None:
    """Let the kernel resume this process, should it be stopped, when its parent dies.

    Once it runs it finds its socket closed, cleans up and ends. SIGKILL would leave its files behind, and would end it
    whenever the thread of the parent exits that the kernel ties the signal to. Call it in the process itself, once it
    has its last parent: a fork forgets it. A parent that is dead already has closed the socket.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGCONT), 0, 0, 0)


def interrupt_when_parent_dies() -> None:
    """Let the kernel interrupt this process, as Ctrl-C does, when the thread that has started it ends."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGINT), 0, 0, 0)


def begin_fresh() -> NoReturn:
    """Be the process that the command line names, as an interpreter of its own, and exit.

    It is tied to its parent before it loads torch.
    """
    resume_when_parent_dies()
    from paceline.engines.local import child

    child.main()


class Subreaper:
    """A context in which this process adopts orphans among its descendants."""

    def __init__(self) -> None:
        self._holders = 0
        self._before = 0
        self._lock = threading.Lock()

    def possible(self) -> bool:
        """Whether this system has such a thing."""
        try:
            return self._get() is not None
        except (AttributeError, OSError):
            return False

    def __enter__(self) -> None:
        with self._lock:
            if self._holders == 0:
                self._before = self._get() or 0
                self._set(1)
            self._holders += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                self._set(self._before)

    def _get(self) -> int | None:
        value = ctypes.c_int()
        failed = ctypes.CDLL(None).prctl(_GET_SUBREAPER, ctypes.byref(value), 0, 0, 0)
        return None if failed else value.value

    def _set(self, value: int) -> None:
        ctypes.CDLL(None).prctl(_SET_SUBREAPER, value, 0, 0, 0)


subreaper = Subreaper()


def show_as(name: str) -> None:
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
