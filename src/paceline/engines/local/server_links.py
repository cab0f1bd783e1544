"""The server's links to the processes that run the script, and to the launcher, behind one wait."""

import contextlib
import os
import selectors
import signal
import socket
from collections.abc import Callable
from typing import Any, Protocol

from paceline.engines.local import scratch
from paceline.engines.local.control import Exited, Linked
from paceline.engines.local.timekeeping import Clock
from paceline.model.regions import Region
from paceline.server.engine import EVALUATOR
from paceline.server.run import ServerRun
from paceline.transport.base import Lost, ServerEnd
from paceline.transport.frames import Channel
from paceline.transport.messages import Hello, ToServer
from paceline.transport.shm import ShmServerEnd
from paceline.transport.zeromq import ZeromqHub

WRITE_S = 0.001  # between two attempts to write to a link that was full

Place = tuple[int, int, bool]  # worker, incarnation, whether it is the evaluator


class Link(ServerEnd, Protocol):
    """The server's end of one process's link, which never waits for a full socket."""

    @property
    def region(self) -> Region | None: ...

    @property
    def wants_write(self) -> bool: ...

    def flush(self) -> None: ...


class Member:
    """One process that runs the script: a worker, or the evaluator."""

    def __init__(self, worker: int, incarnation: int, pid: int, link: Link, *, evaluator: bool) -> None:
        self.number = EVALUATOR if evaluator else worker
        self.incarnation = incarnation
        self.pid = pid
        self.link = link
        self.hung_up = False  # its link is closed

    @property
    def name(self) -> str:
        return "the evaluator" if self.number == EVALUATOR else f"worker {self.number}"


class ServerLinks:
    """Who is linked, and what has come from whom."""

    run: ServerRun  # that messages are for

    def __init__(
        self, channel: Channel, clock: Clock, on_control: Callable[[], None], on_hello: Callable[[Hello], None], *,
        exact: bool,
    ) -> None:  # fmt: skip
        """`exact`: waits end in time; others may take a millisecond longer, and are for any number of workers."""
        self._channel = channel
        self._clock = clock
        self._on_hello = on_hello
        self._selector = selectors.SelectSelector() if exact else selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ, on_control)
        self._processes: dict[Place, Member] = {}
        self._by_link: dict[int, Member] = {}
        self._hub: ZeromqHub | None = None

    def listen(self) -> str:
        """Be there for workers that come over TCP; the address."""
        hub = self._hub = ZeromqHub()
        self._selector.register(hub, selectors.EVENT_READ, self._pump)
        return hub.address

    def link(self, message: Linked, descriptors: list[int]) -> Member:
        """A process has a link from here on."""
        if self._hub is not None:
            link: Any = self._hub.expect(message.token)
        else:
            link = ShmServerEnd(Channel(socket.socket(fileno=descriptors[0])))
        member = Member(message.worker, message.incarnation, message.pid, link, evaluator=message.evaluator)
        self._processes[message.worker, message.incarnation, message.evaluator] = member
        self._by_link[id(link)] = member
        if self._hub is None:
            self._selector.register(link, selectors.EVENT_READ, lambda: self._listen(member, link))
        return member

    def unlink(self, message: Exited) -> Member | None:
        """A process is no more: hear what it had said, and forget it. None if it was never linked."""
        place = (message.worker, message.incarnation, message.evaluator)
        member = self._processes.get(place)
        if member is None:
            return None
        if self._hub is not None and not member.hung_up:
            for link in self._hub.drain(member.link):  # type: ignore[arg-type]  # over TCP all links are its own
                if id(link) in self._by_link:
                    self._drain(self._by_link[id(link)])
        self._drain(member)
        self.hang_up(member)
        del self._processes[place], self._by_link[id(member.link)]
        return member

    def drain(self, member: Member) -> None:
        """Take in what a process has said so far."""
        if self._hub is not None:
            self._pump()
        self._drain(member)

    def hang_up(self, member: Member) -> None:
        """Tell a process that nothing more will come."""
        if not member.hung_up:
            self._unregister(member)  # before the descriptor's number belongs to another link
            member.hung_up = True
            member.link.close()

    def wait(self, seconds: float) -> bool:
        """Hear whatever comes within so long; whether anything did."""
        events = self._selector.select(min(seconds, WRITE_S) if self._writes_wait() else seconds)
        for key, _ in events:
            key.data()
        return bool(events)

    def orphaned(self) -> None:
        """The launcher is gone: nobody else ends these processes, stopped ones included."""
        for member in self._processes.values():
            group = scratch.group_of(member.pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(member.pid, signal.SIGKILL)
            scratch.clear(member.pid, group)
        os._exit(1)

    def close(self) -> None:
        """Hang up on all."""
        for member in self._processes.values():
            self.hang_up(member)
        if self._hub is not None:
            self._hub.close()
        self._selector.close()

    def _writes_wait(self) -> bool:
        """Send on what a link could not take at once: a grant that names very many samples."""
        waiting = [m.link for m in self._processes.values() if not m.hung_up and m.link.wants_write]
        for link in waiting:
            link.flush()
        if self._channel.wants_write:
            with contextlib.suppress(Lost):
                self._channel.flush()
        return bool(waiting) or self._channel.wants_write

    def _pump(self) -> None:
        if self._hub is not None:
            for link in self._hub.pump():
                if id(link) in self._by_link:
                    self._drain(self._by_link[id(link)])

    def _take(self, member: Member, message: ToServer) -> None:
        if isinstance(message, Hello):
            self._on_hello(message)
        self.run.on_message(member.number, member.incarnation, message, self._clock.now())

    def _listen(self, member: Member, link: ShmServerEnd) -> None:
        """Hear what a wait has announced; if more has come meanwhile, the next wait tells."""
        try:
            link.listen()
            while not member.hung_up and (message := link.buffered()) is not None:
                self._take(member, message)
        except Lost:
            self._unregister(member)

    def _drain(self, member: Member) -> None:
        """Hear everything that has come over a link."""
        if member.hung_up:
            return
        try:
            while (message := member.link.collect()) is not None:
                self._take(member, message)
        except Lost:
            self._unregister(member)  # its process's end is the launcher's to report

    def _unregister(self, member: Member) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(member.link)  # type: ignore[arg-type]
