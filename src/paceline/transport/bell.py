"""A descriptor for event loops over a ZeroMQ socket, whose own one signals changes only, and only once.

Whoever sends on the socket may swallow the signal that something arrived meanwhile. The bell is rung then, and both
descriptors are watched as one, which an ordinary selector may wait for.
"""

import os
import select
from contextlib import suppress


class Bell:
    """Readable when the watched descriptor is, or after `ring`."""

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
