"""The server's links to workers, evaluator and launcher, behind one selector."""

import contextlib
import os
import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol

import zmq

from paceline.core.errors import (
    CheckpointError,
    InternalError,
    JournalError,
    OptionError,
    PacelineError,
    PeerError,
    StorageError,
    UserError,
)
from paceline.engines.local import addresses, scratch
from paceline.engines.local.control import Came, Exited, Linked, encode
from paceline.model.regions import Region
from paceline.server.engine import EVALUATOR
from paceline.server.run import ServerRun
from paceline.shards.sharded_store import ShardLinks
from paceline.tables.messages import Tick
from paceline.transport.base import Lost, ServerEnd
from paceline.transport.messages import Hello, Push, ToServer
from paceline.transport.security import Security
from paceline.transport.shm import Channel, ShmServerEnd
from paceline.transport.zeromq import ZeromqHub, ZeromqServerEnd

WRITE_S = 0.001  # between attempts to write to a full link

# What a message can raise that its own values are to blame for, and what can only be this process's fault.
_MISFITS = (UserError, PeerError, LookupError, ValueError, TypeError, ArithmeticError, RuntimeError)
_OURS = (JournalError, CheckpointError, StorageError)

Place = tuple[int, int, bool]  # worker, incarnation, whether it is the evaluator


class Link(ServerEnd, Protocol):
    """The server's end of the link to one process. Sending never blocks on a full socket."""

    @property
    def sends_region(self) -> bool:
        """Whether the region's tensors are sent, not shared."""

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
        self.came = False  # the launcher knows that its script has said what it works on
        self.token = ""  # where there are shards
        self.waiting: deque[ToServer] = deque()  # messages from a push or clock on that some shards do not hold yet

    @property
    def name(self) -> str:
        return "the evaluator" if self.number == EVALUATOR else f"worker {self.number}"


class ServerLinks:
    """All linked processes; hands their messages to the run."""

    run: ServerRun  # receives the messages

    def __init__(
        self, channel: Channel, now: Callable[[], float], folder: Path, on_control: Callable[[], None],
        on_hello: Callable[[Hello], None], *, exact: bool, shards: ShardLinks | None = None,
    ) -> None:  # fmt: skip
        """`folder` is this process's own, in that of the run.

        `exact`: waits end on time, but `select` limits the number of workers; else up to 1 ms late, no limit. `shards`
        hold the weights, if there are some.
        """
        self._channel = channel
        self._folder = folder
        self._now = now
        self._on_hello = on_hello
        self._shards = shards
        self._by_token: dict[str, Member] = {}  # workers that send parts to shards
        self._held_back: set[Member] = set()  # those of them with messages that wait for shards
        self._selector = selectors.SelectSelector() if exact else selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ, on_control)
        if shards is not None:
            for shard in shards.channels:
                self._selector.register(shard, selectors.EVENT_READ, shards.listen)
        self._processes: dict[Place, Member] = {}
        self._by_link: dict[int, Member] = {}
        self._hub: ZeromqHub | None = None

    def listen(self, address: str, security: Security | None, *, over_tcp: bool = False) -> str:
        """Accept workers over ZeroMQ, at this address or, if it is empty, on this host alone; return the address."""
        place = address or addresses.of_socket(self._folder, "hub", over_tcp=over_tcp)
        try:
            hub = self._hub = ZeromqHub(place, security)
        except zmq.ZMQError as error:
            raise OptionError(f"--listen: cannot listen at {place}, for tensors: {error.strerror}") from error
        self._selector.register(hub, selectors.EVENT_READ, self._pump)
        return hub.address

    def link(self, message: Linked, descriptors: list[int]) -> Member:
        """Register the link of a process that the launcher announced."""
        if descriptors:
            share = None if self._shards is None else self._shards.share
            link: Any = ShmServerEnd(Channel(socket.socket(fileno=descriptors[0])), share)
        elif self._hub is not None:
            link = self._hub.expect(message.token)
        else:
            raise InternalError(f"worker {message.worker} was announced without a descriptor of its link")
        member = Member(message.worker, message.incarnation, message.pid, link, evaluator=message.evaluator)
        self._processes[message.worker, message.incarnation, message.evaluator] = member
        self._by_link[id(link)] = member
        if descriptors:
            self._selector.register(link, selectors.EVENT_READ, lambda: self._listen(member, link))
        if self._shards is not None:
            if descriptors:
                self._shards.connect(message.token, descriptors[1:])
            else:
                self._shards.expect(message.token, link)
            self._by_token[message.token] = member
            member.token = message.token
        return member

    def may_still_speak(self, message: Exited) -> bool:
        """Return whether last messages of a process of another machine may be on their way, whose exit another
        connection has told. Do not wait for them: whoever is hostile says so and keeps its link open."""
        member = self._processes.get((message.worker, message.incarnation, message.evaluator))
        if member is None or member.pid or member.hung_up or self._hub is None:
            return False
        link = member.link
        if not isinstance(link, ZeromqServerEnd) or not link.linked:
            return False
        # What waits for shards is waited for, too: they may have less than the server.
        return (not link.parted and (link.reachable or self._hub.has_more)) or bool(member.waiting)

    def unlink(self, message: Exited) -> Member | None:
        """Read the last messages of a process that has exited and remove it; return None if it was never linked."""
        place = (message.worker, message.incarnation, message.evaluator)
        member = self._processes.get(place)
        if member is None:
            return None
        if self._hub is not None and isinstance(member.link, ZeromqServerEnd) and not member.hung_up:
            for link in self._hub.drain(member.link) if member.pid else self._hub.pump():
                if id(link) in self._by_link:
                    self._drain(self._by_link[id(link)])
        self._drain(member)
        far = isinstance(member.link, ZeromqServerEnd) and not member.pid  # `may_still_speak` has waited for it
        if member.waiting and self._shards is not None and not far:
            self._shards.drain(member.token)
        self._release(member, last=True)
        self.hang_up(member)
        del self._processes[place], self._by_link[id(member.link)]
        return member

    def drain(self, member: Member) -> None:
        """Handle all messages that a process has sent so far."""
        if self._hub is not None:
            self._pump()
        self._drain(member)

    def hang_up(self, member: Member) -> None:
        """Close the link to a process."""
        if not member.hung_up:
            self._unregister(member)  # before another link can reuse the descriptor's number
            member.hung_up = True
            member.link.close()
            self._held_back.discard(member)
            if self._shards is not None and self._by_token.pop(member.token, None) is not None:
                self._shards.forget(member.token, member.link.region)

    def wait(self, seconds: float) -> bool:
        """Handle what arrives within this time; return whether anything did."""
        shards = self._shards
        if shards is not None and shards.news:  # it came while a shard's answer was waited for
            seconds = 0.0
        events = self._selector.select(min(seconds, WRITE_S) if self._writes_wait() else seconds)
        for key, _ in events:
            key.data()
        if shards is not None and shards.news:
            self._look_at_shards(shards)
            return True
        return bool(events)

    def _look_at_shards(self, shards: ShardLinks) -> None:
        """Handle what all shards hold by now, and go on without workers that have sent shards nonsense."""
        shards.news = False
        while shards.broken:
            broken = shards.broken.pop()
            member = self._by_token.get(broken.token)
            if member is not None and not member.hung_up:
                self._part_with(member, broken.text)
        for member in list(self._held_back):
            self._release(member)

    def _release(self, member: Member, *, last: bool = False) -> None:
        """Handle the messages of a worker up to a push or clock that some shards do not hold; of an ended process, all
        others.

        Handling one may make shards report more, which the next wait looks at.
        """
        while member.waiting and not member.hung_up:
            whole = self._held_by_all(member, member.waiting[0])
            if whole is None and not last:
                self._held_back.add(member)
                return
            member.waiting.popleft()
            if whole is not None:
                self._handle(member, whole)
        self._held_back.discard(member)

    def _held_by_all(self, member: Member, message: ToServer) -> ToServer | None:
        """Return a message if all shards hold what they get of it."""
        region, shards = member.link.region, self._shards
        if isinstance(message, Tick) and shards is not None:
            return shards.ticks.take(member.token, message)
        if not isinstance(message, Push) or message.gradient is None or not message.gradient.in_parts:
            return message
        if region is None or shards is None:
            return message
        norm = shards.take(region, message.ticket)
        if norm is not None and message.gradient.norm is None:
            message.gradient.norm = norm
        return None if norm is None else message

    def orphaned(self) -> NoReturn:
        """Kill all process groups, stopped ones included, and exit: the launcher is gone and nobody else would."""
        local = [member.pid for member in self._processes.values() if member.pid]
        groups = {leader: scratch.group_of(leader) for leader in local}
        for leader in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(leader, signal.SIGKILL)
        for leader, group in groups.items():
            scratch.clear(self._folder.parent, leader, group)
        scratch.remove(self._folder.parent)
        os._exit(1)

    def close(self) -> None:
        """Close all links."""
        for member in self._processes.values():
            self.hang_up(member)
        if self._hub is not None:
            self._hub.close()
        self._selector.close()

    def _writes_wait(self) -> bool:
        """Flush links that were full, as after a grant of very many samples; return whether any still had to wait."""
        waiting = [m.link for m in self._processes.values() if not m.hung_up and m.link.wants_write]
        for link in waiting:
            link.flush()
        if self._channel.wants_write:
            with contextlib.suppress(Lost):
                self._channel.flush()
        full = self._shards is not None and self._shards.flush()
        return bool(waiting) or full or self._channel.wants_write

    def _pump(self) -> None:
        if self._hub is not None:
            for link in self._hub.pump():
                if id(link) in self._by_link:
                    self._drain(self._by_link[id(link)])

    def _take(self, member: Member, message: ToServer) -> None:
        if self._shards is not None:
            member.waiting.append(message)
            self._release(member)
        else:
            self._handle(member, message)

    def _handle(self, member: Member, message: ToServer) -> None:
        """Hand a message to the run; go on without a worker of another machine whose message does not fit the run."""
        try:
            if isinstance(message, Hello):
                self._on_hello(message)
                self._note_coming(member, says=True)  # before it is handled: a server may die of that
            self.run.on_message(member.number, member.incarnation, message, self._now())
            self._note_coming(member)
        except _MISFITS as error:
            if member.pid or isinstance(error, _OURS) or not self.run.departures.can_spare(member.number):
                raise
            self._part_with(member, f"its {type(message).__name__} does not fit this run: {error}")

    def _note_coming(self, member: Member, *, says: bool = False) -> None:
        """Tell the launcher of a script that has begun, or says so, for the case that this server dies."""
        record = None if member.came else self.run.workers.get(member.number, member.incarnation)
        if record is not None and (says or record.script.came):
            member.came = True
            with contextlib.suppress(Lost):
                self._channel.send(encode(Came(member.number, member.incarnation)))

    def _listen(self, member: Member, link: ShmServerEnd) -> None:
        """Handle what one read of a ready link yields; if more has arrived since, the next wait reports it."""
        try:
            link.listen()
            while not member.hung_up and (message := link.buffered()) is not None:
                self._take(member, message)
        except Lost:
            self._unregister(member)

    def _drain(self, member: Member) -> None:
        """Handle all messages that have arrived over a link."""
        if member.hung_up:
            return
        try:
            while (message := self._collected(member)) is not None:
                self._take(member, message)
        except Lost:
            self._unregister(member)  # the launcher will report the exit of the process

    def _collected(self, member: Member) -> ToServer | None:
        """Return the next message of a link; go on without a worker of another machine that sends what is none."""
        try:
            return member.link.collect()
        except PacelineError as error:
            if member.pid:
                raise  # a process of this machine: the fault is ours
            self._part_with(member, str(error))
            return None

    def _part_with(self, member: Member, why: str) -> None:
        self.run.departures.on_nonsense(member.number, member.incarnation, why, self._now())
        if isinstance(member.link, ZeromqServerEnd):
            member.link.expel()
        self.hang_up(member)

    def _unregister(self, member: Member) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(member.link)  # type: ignore[arg-type]
