"""The link between the coordinator and a shard that shares no memory with it, as on another machine.

Both ends have the methods of a `Channel`, so commands and answers do not depend on where a shard is. A descriptor
cannot cross a network: the bytes of the unnamed memory behind it are sent, and the other end gets a descriptor of
memory with the same bytes. The shard connects, as a worker does: its token is its routing id, and with `Security` both
ends prove keys of the run, the shard those of a role that nobody else shows.
"""

import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from paceline.core.errors import PeerError
from paceline.shards.messages import ShardAnswer, ShardCommand
from paceline.transport.base import Closed, Lost
from paceline.transport.bell import Bell
from paceline.transport.security import Security
from paceline.transport.shm import Frame, anonymous_file
from paceline.transport.zeromq import KNOCKING_S, ZeromqEndpoint, ZeromqHub, ZeromqServerEnd

LOOK_S = 1.0  # between two looks whether the other end is still there, while it is waited for


class CommandLink(Protocol):
    """One end of a link between the coordinator and a shard: a `Channel`, or what this module has."""

    @property
    def wants_write(self) -> bool: ...

    def fileno(self) -> int: ...

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None: ...

    def receive(self, seconds: float | None = None) -> Frame | None: ...

    def collect(self) -> Frame | None: ...

    def listen(self) -> None: ...

    def buffered(self) -> Frame | None: ...

    def flush(self) -> bool: ...

    def close(self) -> None: ...


class ShardPort:
    """Where shards connect to the coordinator. `on_wait` is called now and then while one is waited for."""

    def __init__(self, bind: str, security: Security | None, on_wait: Callable[[], None] = lambda: None) -> None:
        self._hub = ZeromqHub(bind, security, admits=("shard",))
        self._poller = select.poll()
        self._poller.register(self._hub, select.POLLIN)
        self._on_wait = on_wait

    @property
    def address(self) -> str:
        return self._hub.address

    def fileno(self) -> int:
        """Readable while a shard has sent something."""
        return self._hub.fileno()

    def expect(self, token: str) -> "RemoteLink":
        """Return the link to the shard with this token."""
        return RemoteLink(self, self._hub.expect(token))

    def pump(self) -> None:
        """Receive what has arrived, over all links."""
        self._hub.pump()

    def wait(self, seconds: float) -> None:
        """Wait until something arrives."""
        self._poller.poll(int(1000 * seconds))
        self._on_wait()

    def close(self) -> None:
        self._hub.close()


class RemoteLink:
    """The coordinator's end."""

    wants_write = False  # ZeroMQ's thread sends

    def __init__(self, port: ShardPort, end: ZeromqServerEnd) -> None:
        self.port = port
        self._end = end

    def fileno(self) -> int:
        return self.port.fileno()

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a command; that the shard is gone shows when its answer is waited for."""
        self._end.deliver(ShardCommand(bytes(data), [_contents(each) for each in descriptors]))

    def receive(self, seconds: float | None = None) -> Frame | None:
        """Wait for the next answer; None if none came within `seconds`."""
        until = None if seconds is None else time.monotonic() + seconds
        while (frame := self.collect()) is None:
            if self.lost:
                self.port.pump()  # what it sent before it went
                frame = self.buffered()
                if frame is None:
                    raise Lost
                return frame
            left = LOOK_S if until is None else min(LOOK_S, until - time.monotonic())
            if left <= 0:
                return None
            self.port.wait(left)
        return frame

    @property
    def lost(self) -> bool:
        """Whether the shard was there and is gone."""
        return self._end.linked and not self._end.reachable

    def collect(self) -> Frame | None:
        """Return the next answer, None if none has arrived."""
        self.port.pump()
        return self.buffered()

    def listen(self) -> None:
        """Receive what has arrived."""
        self.port.pump()

    def buffered(self) -> Frame | None:
        """Return the next answer that was received."""
        message = self._end.collect()
        if message is None:
            return None
        if not isinstance(message, ShardAnswer):
            raise PeerError(f"a shard sent a {type(message).__name__}, which only workers do")
        return Frame(bytearray(message.data), [_described(each) for each in message.files])

    def flush(self) -> bool:
        return True

    def close(self) -> None:
        self._end.close()


class RemoteShardEnd:
    """The shard's end. Waits until the coordinator has let it in; raises `Lost` if it does not."""

    wants_write = False  # ZeroMQ's thread sends

    def __init__(
        self, address: str, token: str, security: Security | None = None, knocking_s: float = KNOCKING_S
    ) -> None:
        self._endpoint = ZeromqEndpoint(address, token, None, security, knocking_s, role="shard")
        if not self._endpoint.enter():
            self._endpoint.close()
            raise Lost
        self._bell = Bell(self._endpoint.descriptor)

    def fileno(self) -> int:
        return self._bell.fileno()

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send an answer."""
        self._endpoint.send(ShardAnswer(bytes(data), [_contents(each) for each in descriptors]))
        if self._endpoint.has_more:
            self._bell.ring()  # sending may have consumed the socket's signal that something arrived

    def receive(self, seconds: float | None = None) -> Frame | None:
        """Wait for the next command; None if none came within `seconds`."""
        if seconds is not None and not self._endpoint.poll(seconds):
            return None
        return self._next()

    def collect(self) -> Frame | None:
        """Return the next command, None if none has arrived."""
        return self.receive(0.0)

    def listen(self) -> None:
        """Take note that the loop has seen the signal; `buffered` reads."""
        self._bell.hush()

    def buffered(self) -> Frame | None:
        """Return the next command that has arrived."""
        return self.receive(0.0)

    def _next(self) -> Frame:
        try:
            message: Any = self._endpoint.receive()
        except Closed:
            raise Lost from None  # the coordinator has closed the link
        if not isinstance(message, ShardCommand):
            raise PeerError(f"the coordinator sent a {type(message).__name__}, which shards do not get")
        return Frame(bytearray(message.data), [_described(each) for each in message.files])

    def flush(self) -> bool:
        return True

    def close(self) -> None:
        self._bell.close()
        self._endpoint.close()


def _contents(descriptor: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Return the bytes of the memory behind a descriptor."""
    data = np.empty(os.fstat(descriptor).st_size, np.uint8)
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        file.readinto(data)  # type: ignore[arg-type]
    return data


def _described(data: "np.ndarray[Any, np.dtype[np.uint8]]") -> int:
    """Return a descriptor of memory with these bytes."""
    descriptor = anonymous_file(max(1, data.nbytes))
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data.data)
    return descriptor
