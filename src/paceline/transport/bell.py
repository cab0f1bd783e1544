"""One descriptor for event loops that want to know when a ZeroMQ socket has something to read."""

import os
import select
from contextlib import suppress


class Bell:
    """A descriptor for event loops, readable when the watched one is, or after `ring`.

    A ZeroMQ socket's own descriptor signals only changes, each once, and sending on the socket may consume the signal
    that something arrived. The hub rings the bell then; one epoll descriptor watches both.
    """

    def __init__(self, watched: int) -> None:
        self._rung, self._ringer = os.pipe()
        os.set_blocking(self._rung, False)
        os.set_blocking(self._ringer, False)
        if hasattr(select, "epoll"):
            self._both: select.epoll = select.epoll()
            self._both.register(watched, select.EPOLLIN)
            self._both.register(self._rung, select.EPOLLIN)
        else:
            raise OSError("the zeromq transport needs Linux's epoll: use --transport shm")
        self._ringing = False

    def fileno(self) -> int:
        return self._both.fileno()

    def ring(self) -> None:
        """Make the descriptor readable until `hush`."""
        if not self._ringing:
            self._ringing = True
            os.write(self._ringer, b"\x00")

    def hush(self) -> None:
        if self._ringing:
            self._ringing = False
            with suppress(BlockingIOError):
                os.read(self._rung, 1)

    def close(self) -> None:
        self._both.close()
        os.close(self._rung)
        os.close(self._ringer)
