"""What Linux does for families of processes, by `prctl`: adopt orphans, and resume a process whose parent has died.

This module is loaded first of all in every process and imports nothing of weight.
"""

import contextlib
import ctypes
import signal
import sys
import threading

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
