"""A worker's ties to the others: its control socket, heard in a thread of its own, and the link that it may bring anew.

The thread is there because a script computes for as long as it likes: the launcher's death must be noticed meanwhile.
"""

import os
import socket
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

from paceline.core.errors import InternalError
from paceline.engines.local.control import Failure, Relinked, Role, Unlinked, encode, for_child
from paceline.engines.local.processes import end_own_group
from paceline.transport.base import Closed
from paceline.transport.frames import Channel, Frame
from paceline.transport.shm import ShmEndpoint

if TYPE_CHECKING:
    from paceline.transport.zeromq import ZeromqEndpoint

LAST_WORDS_S = 5.0

Fresh = tuple[str, list[int]] | None  # where the server is, or the link to it; None: there will be none


class WorkerLinks:
    """Hears the launcher from the moment the role is known."""

    def __init__(self, control: Channel) -> None:
        self._control = control
        self._fresh: SimpleQueue[Fresh] = SimpleQueue()
        threading.Thread(target=self._watch, name="paceline-control", daemon=True).start()

    def endpoint(self, role: Role, descriptors: list[int]) -> "ShmEndpoint | ZeromqEndpoint":
        """The link to the server."""
        if role.transport == "shm":
            return ShmEndpoint(_channel(descriptors), lambda: _channel(self._await()[1]))
        from paceline.transport.zeromq import ZeromqEndpoint  # workers that share memory do without its thread

        return ZeromqEndpoint(role.address, role.token, lambda: (self._await()[0], role.token))

    def report(self, failure: Failure) -> None:
        """Tell the launcher, in case there is no server any more that would."""
        self._control.send(encode(failure))
        self._control.finish(LAST_WORDS_S)

    def _await(self) -> tuple[str, list[int]]:
        """The latest word about a server; servers that came and went meanwhile are passed over."""
        fresh = self._fresh.get()
        while not self._fresh.empty():
            for descriptor in fresh[1] if fresh is not None else ():
                os.close(descriptor)
            fresh = self._fresh.get()
        if fresh is None:
            self._fresh.put(None)
            raise Closed
        return fresh

    def _watch(self) -> None:
        try:
            while (frame := self._control.receive()) is not None:
                self._hear(frame)
        finally:
            end_own_group()  # whoever cannot hear the launcher must not go on without it

    def _hear(self, frame: Frame) -> None:
        match for_child(frame.data):
            case Relinked(address):
                self._fresh.put((address, frame.descriptors))
            case Unlinked():
                self._fresh.put(None)


def _channel(descriptors: list[int]) -> Channel:
    if not descriptors:
        raise InternalError("a link was announced and its descriptor did not come with it")
    return Channel(socket.socket(fileno=descriptors[0]))
