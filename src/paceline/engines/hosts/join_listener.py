"""Where machines join: the launcher's listening socket, and the hosts that have come over it.

A machine is one `JoinedHost` from its first message to its last. It is compared with what the run requires; then the
launcher gives it the place of a worker or a shard, and it has a `JoinedProcess`, which the launcher treats as its own
children: it sends it control messages and signals, and is told of its exit. A host that is silent for `LOST_S`, or
whose connection is closed, is lost, and so is its process.

Host and launcher share memory if they run on the same kernel in the same network namespace, and a descriptor that
the launcher passes over a socket of its private folder arrives. Then all links of the worker are those of one machine.
"""

import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from paceline.core.errors import OptionError, PeerError
from paceline.engines.hosts import messages as m
from paceline.engines.hosts.strategy_source import StrategySource
from paceline.engines.local.control import SHARD
from paceline.engines.local.output import Voice
from paceline.transport.base import Lost
from paceline.transport.bell import Bell
from paceline.transport.security import Security
from paceline.transport.shm import Channel
from paceline.transport.zeromq import end_context, speak_ip6

ATTACH_S = 2.0  # for a process of this host to say who it is
TURN = 256  # messages per pump
UNREAD_BYTES = (m.UNREAD + 4) * m.LONGEST  # of one machine: only parts of one message without an end come to more
DYING_S = 5.0  # for a killed process to be reported; after that its machine is taken for lost
LINGER_MS = 2_000  # to send last words
NAMESPACE = Path("/proc/self/ns/net")
KERNEL = Path("/proc/sys/kernel/random/boot_id")
_KILLED = -int(signal.SIGKILL)


def kernel_and_namespace() -> str:
    """Name this machine's running kernel and network namespace; empty where that is unknown."""
    try:
        return f"{KERNEL.read_text().strip()}/{NAMESPACE.stat().st_ino}/{os.geteuid()}"
    except OSError:
        return ""


class Requirements(msgspec.Struct, frozen=True):
    """What a machine must have to join."""

    wire: int
    workload: str
    versions: dict[str, str]
    strategy: StrategySource | None = None
    shards: bool = False  # some are on other machines

    def refusal(self, asked: m.JoinAsked) -> str | None:
        """Return why a machine may not join; None if it may."""
        if (asked.format, asked.wire) != (m.FORMAT, self.wire):
            theirs, ours = f"{asked.format}.{asked.wire}", f"{m.FORMAT}.{self.wire}"
            return f"it speaks format {theirs}, this run {ours}: install the same version of paceline on both"
        if asked.shard:
            return None if self.shards else "all shards of this run are on its own machine: see --remote-shards"
        if asked.workload != self.workload:
            return f"it would run {asked.workload}, this run {self.workload}: give both the same script"
        if self.strategy is not None and asked.strategy is not None:
            return self.strategy.refusal(asked.strategy)
        return None

    def remarks(self, asked: m.JoinAsked) -> list[str]:
        """Return what differs and may matter."""
        return [
            f"{asked.host} has {name} {asked.versions.get(name, 'of an unknown version')}, the server {version}: "
            "results may differ"
            for name, version in self.versions.items()
            if asked.versions.get(name) != version
        ]


class JoinedHost:
    """A machine that has joined."""

    def __init__(self, identity: bytes, asked: m.JoinAsked, now: float) -> None:
        self.identity = identity
        self.hostname = asked.host
        self.rank = asked.rank
        self.shard = asked.shard  # it holds a part of the weights, and runs no worker
        self.heard = now
        self.key = secrets.token_hex(16)
        self.proof = secrets.token_hex(16)
        self.channel: Channel | None = None  # a socket of this host, which carries descriptors
        self.ready = False  # it is known whether memory is shared
        self.process: JoinedProcess | None = None
        self.last = asked.rank if asked.shard else None  # the worker or shard that it ran, or the shard it asked for
        self.children = 0


class JoinedProcess:
    """The process of a worker or a shard on a machine that has joined."""

    pid = 0
    voices: Sequence[Voice] = ()

    def __init__(self, listener: "JoinListener", host: JoinedHost, number: int) -> None:
        self.name = f"{SHARD if host.shard else 'worker '}{number}"
        self.host = host
        self.number = number
        self.shares_memory = host.channel is not None
        self.code: int | None = None
        self.killed_at: float | None = None
        host.children += 1
        self.child = host.children
        self._listener = listener

    @property
    def alive(self) -> bool:
        return self.code is None

    def send(self, data: bytes, descriptors: tuple[int, ...] = ()) -> None:
        self._listener.send(self.host, m.ToChild(self.child, bytes(data)), descriptors)

    def warn(self, text: str, *, show: bool) -> None:
        """Show a warning of this process, if asked to; its own machine logs it."""
        if show:
            self._listener.log.warn(f"{self.name} on {self.host.hostname}: {text}")

    def signal(self, number: int) -> None:
        if self.alive:
            if number == signal.SIGKILL and self.killed_at is None:
                self.killed_at = time.monotonic()
            self._listener.send(self.host, m.SignalChild(self.child, int(number)))

    def reap(self) -> int:
        """Kill it if it still runs, without waiting for that, and return its exit code."""
        if self.code is None:
            self.signal(signal.SIGKILL)
            self.code = _KILLED
        if self.host.process is self:
            self.host.process = None
        return self.code


class JoinEvents(Protocol):
    """What the listener tells the launcher."""

    def on_host(self, host: JoinedHost) -> None:
        """A machine is ready to run a worker or a shard."""

    def on_word(self, process: JoinedProcess, data: bytes) -> None:
        """A process has sent a control message."""

    def on_end(self, process: JoinedProcess) -> None:
        """A process has exited, or its machine is lost."""

    def on_idle_gone(self, host: JoinedHost) -> None:
        """A machine that ran nothing is gone."""

    def on_leaving(self, process: JoinedProcess) -> None:
        """The user of a machine wants it out of the run."""


class JoinListener:
    """The listening socket, and all hosts that have joined over it."""

    def __init__(self, address: str, security: Security, required: Requirements, events: JoinEvents) -> None:
        self._events = events
        self._required = required
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a machine that is gone raises
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a machine that connects again is the same one
        self._socket.setsockopt(zmq.MAXMSGSIZE, m.LONGEST)
        self._socket.setsockopt(zmq.RCVHWM, m.UNREAD)
        self._gatekeeper = security.listen_as(self._context, self._socket, "server", admits=["worker"])
        self._gatekeeper.bound_unread()
        speak_ip6(self._socket, address)
        try:
            self._socket.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            self._gatekeeper.close(linger_ms=0)
            end_context(self._context)
            raise OptionError(f"--listen: cannot listen at {address}: {error.strerror}") from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")  # with its port
        self._gatekeeper.listens_at(self.address)
        self.log = self._gatekeeper.log
        self._bell = Bell(int(self._socket.getsockopt(zmq.FD)))
        self._local: socket.socket | None = None
        self._attach = ""
        self.hosts: dict[bytes, JoinedHost] = {}
        self._next_beat = time.monotonic()

    def fileno(self) -> int:
        """Readable while `pump` has something to do."""
        return self._bell.fileno()

    @property
    def is_open_locally(self) -> bool:
        """Whether processes of this host can attach."""
        return self._local is not None

    def open_locally(self, folder: Path) -> int:
        """Accept processes of this host at a socket in this private folder; return its descriptor."""
        self._local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._attach = os.fspath(folder / "attach")
        self._local.bind(self._attach)
        self._local.listen()
        self._local.setblocking(False)
        return self._local.fileno()

    # -- hosts ------------------------------------------------------------------------------------------------------

    def free(self, *, shard: bool = False) -> list[JoinedHost]:
        """Return the machines that could run a worker, or a shard."""
        return [host for host in self.hosts.values() if host.ready and host.process is None and host.shard == shard]

    def idle(self, number: int | None = None, *, shard: bool = False) -> JoinedHost | None:
        """Return a machine that could run a worker, or shard, preferably the one that ran this one before."""
        free = self.free(shard=shard)
        return next((host for host in free if host.last == number), free[0] if free else None)

    def start(self, host: JoinedHost, number: int) -> JoinedProcess:
        """Let a machine start a process for this worker or shard."""
        process = host.process = JoinedProcess(self, host, number)
        host.last = number
        self.send(host, m.StartChild(process.child, number))
        return process

    def dismiss(self, host: JoinedHost, reason: str, failed: bool = False) -> None:
        """Send a machine away."""
        self.send(host, m.Dismissed(reason, failed))
        self._forget(host)

    def send(self, host: JoinedHost, message: m.ToAgent, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message; a machine that is gone will be noticed by its silence or at the next beat."""
        if host.channel is not None and not isinstance(message, m.Beat):
            with contextlib.suppress(Lost):
                host.channel.send(m.encode(message), descriptors)
            return
        self._post(host.identity, message)

    def _post(self, identity: bytes, message: m.ToAgent) -> bool:
        try:
            self._socket.send_multipart([identity, m.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return error.errno == zmq.EAGAIN
        finally:
            if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._bell.ring()  # sending may have consumed the socket's signal that something arrived
        return True

    def _forget(self, host: JoinedHost) -> None:
        self.hosts.pop(host.identity, None)
        if host.channel is not None:
            host.channel.finish(ATTACH_S)
            host.channel.close()
            host.channel = None

    # -- what comes in -----------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Handle what has arrived, a share of it at a time: other descriptors must have their turn, too."""
        self._bell.hush()
        for _ in range(TURN):
            try:
                sender, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity, parts = sender.bytes, [frame.bytes for frame in frames]
            backlog = self._gatekeeper.backlog(sender, UNREAD_BYTES)
            for part in parts:
                backlog.read(len(part))
            try:
                if len(parts) != 1:
                    raise PeerError(f"a message of a machine that joins has {len(parts)} parts instead of 1")
                self._handle(identity, m.for_launcher(parts[0]))
            except PeerError as error:
                self.log.warn(str(error))
                self._post(identity, m.Refused(str(error)))
        self._bell.ring()

    def _handle(self, identity: bytes, message: m.ToLauncher) -> None:
        host = self.hosts.get(identity)
        if isinstance(message, m.JoinAsked):
            self._admit(identity, message, host)
            return
        if host is None:
            self._post(identity, m.Unknown())
            return
        host.heard = time.monotonic()
        process = host.process
        match message:
            case m.Attached():
                self._attached(host, message.proof)
            case m.FromChild() if process is not None and message.child == process.child:
                self._events.on_word(process, message.data)
            case m.ChildExited() if process is not None and message.child == process.child:
                process.code, host.process = message.code, None
                self._events.on_end(process)
            case m.LeaveAsked() if process is not None:
                self._events.on_leaving(process)
            case m.LeaveAsked():
                self.dismiss(host, "as its user asks")
                self._events.on_idle_gone(host)
            case _:
                pass  # a beat, or about a process that is gone

    def _admit(self, identity: bytes, asked: m.JoinAsked, before: JoinedHost | None) -> None:
        if before is not None:  # it lost its patience and begins again
            self._lose(before, "has started anew")
        refusal = self._required.refusal(asked)
        if refusal is not None:
            self.log.warn(f"{asked.host} may not join: {refusal}")
            self._post(identity, m.Refused(refusal))
            return
        if self._required.strategy is not None and asked.strategy is None and not asked.shard:
            self._post(identity, m.StrategyAsked(self._required.strategy.place))
            return
        host = self.hosts[identity] = JoinedHost(identity, asked, time.monotonic())
        remarks = self._required.remarks(asked)
        for remark in remarks:
            self.log.warn(remark)
        near = bool(asked.kernel) and asked.kernel == kernel_and_namespace()
        self._post(identity, m.Admitted(self._attach if near else "", host.key, remarks))
        if not (near and self._attach):
            host.ready = True
            self._events.on_host(host)

    def accept(self) -> None:
        """Let a process of this host attach, and pass it a descriptor to prove that this is possible."""
        if self._local is None:
            return
        try:
            connected, _ = self._local.accept()
        except OSError:  # it is gone again
            return
        channel = Channel(connected)
        try:
            frame = channel.receive(ATTACH_S)
        except (Lost, PeerError):
            frame = None
        key = b"" if frame is None else bytes(frame.data)
        host = next((each for each in self.hosts.values() if secrets.compare_digest(each.key.encode(), key)), None)
        if host is None or host.channel is not None:
            channel.close()
            return
        reader, writer = os.pipe()
        with contextlib.suppress(Lost), os.fdopen(writer, "wb") as pipe:
            pipe.write(host.proof.encode())
            channel.send(b"proof", (reader,))
        os.close(reader)
        host.channel = channel

    def _attached(self, host: JoinedHost, proof: str) -> None:
        if host.ready:
            return
        if not secrets.compare_digest(proof.encode(), host.proof.encode()) and host.channel is not None:
            host.channel.close()
            host.channel = None
        host.ready = True
        self._events.on_host(host)

    # -- time --------------------------------------------------------------------------------------------------------

    def seconds_left(self) -> float:
        """Return the seconds until `tick` is due."""
        return max(0.0, self._next_beat - time.monotonic())

    def tick(self) -> None:
        """Send a beat to everybody, and notice who is gone."""
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + m.BEAT_S
        for host in list(self.hosts.values()):
            process = host.process
            if not self._post(host.identity, m.Beat()):
                self._lose(host, "has closed its connection")
            elif now - host.heard > m.LOST_S:
                self._lose(host, f"has sent nothing for {m.LOST_S:g} s")
            elif process is not None and process.killed_at is not None and now - process.killed_at > DYING_S:
                self._lose(host, "does not end its process")

    def _lose(self, host: JoinedHost, how: str) -> None:
        process, host.process = host.process, None
        self._post(host.identity, m.Unknown())
        self._forget(host)
        if process is not None and process.alive:
            self.log.warn(f"{host.hostname}, which ran {process.name}, {how}")
            process.code = _KILLED
            self._events.on_end(process)
        elif process is None:
            self._events.on_idle_gone(host)

    def close(self, reason: str, *, failed: bool) -> None:
        """Send everybody away and close."""
        for host in list(self.hosts.values()):
            self.dismiss(host, reason, failed)
        if self._local is not None:
            self._local.close()
        self._bell.close()
        self._gatekeeper.close(LINGER_MS)
        end_context(self._context)
