"""`paceline join`: run a worker, or a shard, of somebody else's run on this machine.

The agent asks the launcher of the run for a place, starts the process, and passes on what launcher and process say to
each other. It gives the process what is of this machine: the script's path, the data, the threads, the address under
which this machine reaches the server and, of a shard, where workers reach this machine. Nothing that comes over the
network is unpickled: a worker runs what was given here, and a shard runs nothing but this package.

If the launcher is silent for too long the agent ends its process and asks to join again.
"""

import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from paceline.core.errors import OptionError, PeerError
from paceline.core.settings import Start
from paceline.engines.hosts import messages as m
from paceline.engines.hosts.join_listener import kernel_and_namespace
from paceline.engines.hosts.serving import name_of, versions_here
from paceline.engines.hosts.strategy_source import digest_of_file, file_here
from paceline.engines.local import control, scratch
from paceline.engines.local import nursery as nurseries
from paceline.engines.local.loop import Loop, interrupts
from paceline.engines.local.output import Console, Transcript
from paceline.engines.local.processes import Process
from paceline.engines.local.workload import Workload, packed
from paceline.records.logs import notice
from paceline.shards.messages import BETWEEN
from paceline.transport.base import Lost
from paceline.transport.bell import Bell
from paceline.transport.codec import FORMAT as WIRE_FORMAT
from paceline.transport.join_token import JoinToken
from paceline.transport.security import WRONG_KEYS
from paceline.transport.shm import Channel
from paceline.transport.zeromq import KEYS_REFUSED, end_context, family_of, speak_ip6

LEAVE_S = 10.0  # for a worker to leave cleanly after Ctrl-C
ATTACH_S = 5.0  # for a launcher of this host to pass a descriptor
RECONNECT_MS = (200, 2_000)
TOLD_AFTER = 3  # connections that the other end has closed during the handshake: within a second
LINGER_MS = 2_000
INTERRUPTED = 130

logger = logging.getLogger("paceline")


class JoinSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine that joins decides itself."""

    address: str  # HOST:PORT of `paceline serve`
    data_dir: Path | None = None
    threads: int | None = None  # None: as the run says
    wait_s: float = 60.0  # for the server, before the first answer and after losing it
    start: Start = "nursery"
    trusted_network: bool = False
    rank: int | None = None
    strategy: Path | None = None  # looked for here first, then at the run's path and beside the script
    shard: bool = False  # hold a part of the weights instead of running a worker
    listen: str = ""  # HOST:PORT where workers reach the shard; empty: any port of the address towards the server


def join(train: Callable[[], None], task: str | None, token: JoinToken, settings: JoinSettings) -> int:
    """Run one worker until the run is over; return the exit code."""
    workload = packed(train)
    agent = Agent(workload, name_of(workload, task), token, settings)
    with interrupts() as descriptor, contextlib.closing(agent):
        return agent.run(descriptor)


def hold(token: JoinToken, settings: JoinSettings) -> int:
    """Run one shard until the run is over; return the exit code."""
    agent = Agent(Workload(), "", token, msgspec.structs.replace(settings, shard=True))
    with interrupts() as descriptor, contextlib.closing(agent):
        return agent.run(descriptor)


class Agent:
    """One machine's part in a run: its connection to the launcher, and one process at a time."""

    def __init__(self, workload: Workload, name: str, token: JoinToken, settings: JoinSettings) -> None:
        self._workload = workload
        self._name = name
        self._settings = settings
        self._secret = control.Secret(token.reveal(), not settings.trusted_network)
        self._loop = Loop()
        self._console = Console()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._link: LauncherLink | None = None
        self._local: Channel | None = None  # to a launcher of this host
        self._nursery: nurseries.Nursery | None = None
        self._folder: Path | None = None
        self._process: Process | None = None
        self._child = 0
        self._strategy: Path | None = None  # the file of the run's strategy, if it is here
        self._admitted = False
        self._was_in = False
        self._told = False  # that connections are closed
        self._leaving_until: float | None = None
        self._code: int | None = None

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self, interrupts: int) -> int:
        """Take part until the launcher has no more use for this machine."""
        self._loop.watch_descriptor(interrupts, lambda: self._on_interrupt(interrupts))
        if self._settings.start == "nursery" and nurseries.possible():
            self._nursery = nurseries.take()
        self._folder = scratch.make()
        self._connect()
        while self._code is None:
            self._loop.turn(m.BEAT_S / 2)
            self._look(time.monotonic())
        return self._code

    def _connect(self) -> None:
        """Ask to join, over a new connection."""
        if self._link is not None:
            self._loop.unwatch_descriptor(self._link.fileno())
            self._link.close()
        self._drop_local()
        self._admitted = False
        self._link = LauncherLink(self._context, self._settings.address, self._secret)
        self._loop.watch_descriptor(self._link.fileno(), self._pump)
        self._ask()

    def _ask(self, strategy: str | None = None) -> None:
        self._send(
            m.JoinAsked(
                format=m.FORMAT,
                wire=WIRE_FORMAT,
                workload=self._name,
                host=socket.gethostname(),
                kernel=kernel_and_namespace(),
                versions=versions_here(),
                rank=self._settings.rank,
                shard=self._settings.shard,
                strategy=strategy,
            )
        )

    def _look(self, now: float) -> None:
        """Do what is due: a beat, the end of patience."""
        link = self._link
        if link is None:
            return
        if self._leaving_until is not None and now > self._leaving_until:
            self._end_process()
            self._code = INTERRUPTED
        elif self._admitted and now - link.heard > m.LOST_S:
            logger.warning("%s has sent nothing for %g s: asking to join again", self._settings.address, m.LOST_S)
            self._begin_again()
        elif not self._admitted:
            self._look_outside(link, now)
        elif self._admitted and now - link.beat > m.BEAT_S:
            link.beat = now
            self._send(m.Beat())

    def _look_outside(self, link: "LauncherLink", now: float) -> None:
        """Say why nobody lets this machine in, and end when that is certain or has lasted for too long."""
        address, wait_s = self._settings.address, self._settings.wait_s
        error = PeerError if self._was_in else OptionError
        if link.look():
            raise error(f"{address} does not let this machine in: {WRONG_KEYS}")
        if now - link.began > wait_s:
            raise error(
                f"nobody let this machine in at {address} within {wait_s:g} s: "
                + (
                    f"{link.hung_up} connections were closed during the handshake; {WRONG_KEYS}, or strangers flood it"
                    if link.hung_up >= TOLD_AFTER
                    else "see that `paceline serve` runs there, that its two ports can be reached, and that the token "
                    "is that run's"
                )
            )
        if link.hung_up >= TOLD_AFTER and not self._told:
            self._told = True
            logger.warning(
                "%s closes each connection during the handshake: %s, or strangers flood it; trying until %g s have "
                "passed (--wait)", address, WRONG_KEYS, wait_s,
            )  # fmt: skip

    def _begin_again(self) -> None:
        self._end_process()
        self._connect()

    def _send(self, message: m.ToLauncher) -> None:
        if self._link is not None:
            self._link.send(message)

    # -- what the launcher says --------------------------------------------------------------------------------------

    def _pump(self) -> None:
        link = self._link
        while link is not None and link is self._link and (message := link.receive()) is not None:
            self._handle(message, [])

    def _pump_local(self) -> None:
        try:
            while self._local is not None and (frame := self._local.collect()) is not None:
                self._handle(m.for_agent(frame.data), frame.descriptors)
        except Lost:
            self._drop_local()  # the launcher is gone, or has sent its last word: its silence will tell

    def _handle(self, message: m.ToAgent, descriptors: list[int]) -> None:
        try:
            match message:
                case m.Admitted():
                    self._on_admitted(message)
                case m.StrategyAsked() if not self._admitted:
                    brought = self._settings.strategy
                    there = brought is not None and brought.is_file()
                    self._strategy = brought if there else file_here(message.place, self._script)
                    self._ask("" if self._strategy is None else digest_of_file(self._strategy))
                case m.Refused():
                    raise OptionError(f"{self._settings.address} does not let this machine in: {message.reason}")
                case m.StartChild():
                    self._start(message)
                case m.ToChild() if self._process is not None and message.child == self._child:
                    self._process.send(self._made_local(message.data), tuple(descriptors))
                case m.SignalChild() if self._process is not None and message.child == self._child:
                    self._process.signal(message.number)
                case m.Dismissed():
                    self._on_dismissed(message)
                case m.Unknown() if self._admitted:
                    self._on_unknown()
                case _:
                    pass  # a beat, or about a process that is gone
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _on_admitted(self, message: m.Admitted) -> None:
        self._admitted = self._was_in = True
        for remark in message.remarks:
            logger.warning("%s", remark)
        if message.attach:
            self._attach(message.attach, message.key)
        notice(f"joined {self._settings.address}" + (", on this machine" if self._local is not None else ""))

    @property
    def _script(self) -> Path | None:
        return None if self._workload.script is None else Path(self._workload.script)

    def _attach(self, path: str, key: str) -> None:
        """Connect to a launcher of this host, and say whether a descriptor can be passed."""
        proof, channel = "", None
        with contextlib.suppress(OSError, Lost, PeerError):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(ATTACH_S)
            channel = Channel(_connected(sock, path))
            channel.send(key.encode())
            frame = channel.receive(ATTACH_S)
            if frame is not None and frame.descriptors:
                with os.fdopen(frame.descriptors[0], "rb") as pipe:
                    proof = pipe.read(64).decode(errors="replace")
        if proof and channel is not None:
            self._local = channel
            self._loop.watch_descriptor(channel.fileno(), self._pump_local)
        elif channel is not None:
            channel.close()
        self._send(m.Attached(proof))

    def _drop_local(self) -> None:
        if self._local is not None:
            self._loop.unwatch_descriptor(self._local.fileno())
            self._local.close()
            self._local = None

    def _on_unknown(self) -> None:
        self._pump_local()  # a dismissal takes the local socket, where an answer to a beat may overtake it
        if self._code is None:
            logger.warning("%s has given this machine up: asking to join again", self._settings.address)
            self._begin_again()

    def _on_dismissed(self, message: m.Dismissed) -> None:
        self._end_process()
        if self._leaving_until is not None:
            self._code = INTERRUPTED
        else:
            notice(f"not needed any more: {message.reason}")
            self._code = 1 if message.failed else 0

    # -- the process -------------------------------------------------------------------------------------------------

    def _start(self, message: m.StartChild) -> None:
        self._end_process()
        self._await_nursery()
        name = f"{control.SHARD if self._settings.shard else 'worker '}{message.number}"
        process = Process(name, self._console, Transcript(None, name), self._nursery, self._folder)
        self._process, self._child = process, message.child
        child = message.child
        self._loop.watch(process, lambda frame: self._send(m.FromChild(child, bytes(frame.data))), self._on_exit)
        notice(f"running {name}")

    def _await_nursery(self) -> None:
        nursery = self._nursery
        if nursery is None or not nursery.starting:
            return
        with contextlib.closing(Loop()) as waiting:
            waiting.watch_descriptor(nursery.fileno(), nursery.listen)
            while nursery.starting:
                waiting.turn(m.BEAT_S)
                self._send(m.Beat())

    def _on_exit(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._send(m.ChildExited(self._child, process.reap()))

    def _end_process(self) -> None:
        if self._process is not None:
            self._loop.forget(self._process)
            process, self._process = self._process, None
            process.reap()

    def _made_local(self, data: bytes) -> bytes:
        """Replace in a message for the process what is another machine's by what is this one's."""
        message = control.for_child(data)
        if isinstance(message, control.Relinked) and message.address:
            return control.encode(control.Relinked(self._as_seen_here(message.address)))
        if isinstance(message, control.ShardRole):
            return control.encode(self._shard_role(message))
        if not isinstance(message, control.Role):
            return data
        own, settings = self._workload, self._settings
        strategy = message.peer
        if strategy is not None and self._strategy is not None and ".py:" in strategy:
            strategy = f"{self._strategy}{strategy[strategy.index('.py:') + 3 :]}"
        return control.encode(
            msgspec.structs.replace(
                message,
                script=own.script,
                arguments=own.arguments or message.arguments,
                function=own.function,
                sys_path=nurseries.import_path(),
                data_dir=None if settings.data_dir is None else os.fspath(settings.data_dir),
                threads=settings.threads or message.threads,
                folder=None if self._folder is None else os.fspath(self._folder),
                address=self._as_seen_here(message.address),
                mail_host=_address_towards(self._settings.address) if message.peer is not None else "",
                peer=strategy,
                secret=self._secret,
                knocking_s=self._settings.wait_s,
                log_level=logger.level,
                terminal=None,
            )
        )

    def _shard_role(self, role: control.ShardRole) -> control.ShardRole:
        settings = self._settings
        return msgspec.structs.replace(
            role,
            threads=settings.threads or role.threads,
            folder="" if self._folder is None else os.fspath(self._folder),
            listen=f"tcp://{settings.listen or f'{_address_towards(settings.address)}:*'}",
            server=self._as_seen_here(role.server),
            secret=self._secret,
            knocking_s=settings.wait_s,
        )

    def _as_seen_here(self, address: str) -> str:
        """Return the server's address, and those of its shards, with the host under which this machine knows it.

        Shards on machines of their own listen at another host than the server, and that one is left alone.
        """
        host = self._settings.address.rpartition(":")[0]
        servers = address.partition(BETWEEN)[0].rpartition(":")[0]
        return BETWEEN.join(
            f"tcp://{host}:{each.rpartition(':')[2]}"
            if each.startswith("tcp://") and each.rpartition(":")[0] == servers
            else each
            for each in address.split(BETWEEN)
        )

    # -- the end -----------------------------------------------------------------------------------------------------

    def _on_interrupt(self, descriptor: int) -> None:
        os.read(descriptor, 64)
        if self._leaving_until is not None or self._process is None:
            raise KeyboardInterrupt
        notice("interrupted: leaving the run; once more ends its process at once")
        self._leaving_until = time.monotonic() + LEAVE_S
        self._process.signal(signal.SIGCONT)
        self._send(m.LeaveAsked())

    def close(self) -> None:
        """Leave no process, file or descriptor behind."""
        with contextlib.ExitStack() as last_steps:  # runs all of them, whichever fails
            if self._folder is not None:
                last_steps.callback(scratch.remove, self._folder)
            last_steps.callback(end_context, self._context)
            if self._link is not None:
                last_steps.callback(self._link.close)
            last_steps.callback(self._loop.close)
            last_steps.callback(self._drop_local)
            if self._nursery is not None:
                last_steps.callback(nurseries.give_back, self._nursery)
            last_steps.callback(self._end_process)


class LauncherLink:
    """A connection to a launcher. ZeroMQ connects again by itself; the launcher knows the machine by its identity."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, secret: control.Secret) -> None:
        self._socket = context.socket(zmq.DEALER)
        if secret.security is not None:
            secret.security.connect_as(self._socket, "worker", to="server")
        self._socket.setsockopt(zmq.ROUTING_ID, secrets.token_hex(16).encode())
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS[0])
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1])
        self._socket.setsockopt(zmq.MAXMSGSIZE, m.LONGEST)
        self._refusals = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | KEYS_REFUSED)
        self.hung_up = 0  # connections that the other end has closed during the handshake
        speak_ip6(self._socket, address)
        self._socket.connect(f"tcp://{address}")
        self._bell = Bell(int(self._socket.getsockopt(zmq.FD)))
        self.began = self.heard = self.beat = time.monotonic()

    def fileno(self) -> int:
        return self._bell.fileno()

    def look(self) -> bool:
        """Count the connections that were closed during the handshake; return whether that was because of the keys.

        It is not known of a server that cannot read what was encrypted for another run's: one under a flood does that,
        too.
        """
        while self._refusals.poll(0):
            if recv_monitor_message(self._refusals)["event"] & KEYS_REFUSED:
                return True
            self.hung_up += 1
        return False

    def send(self, message: m.ToLauncher) -> None:
        """Send a message; while nobody is there it waits, and is dropped if too many do."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(m.encode(message), zmq.NOBLOCK)
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._bell.ring()  # sending may have consumed the socket's signal that something arrived

    def receive(self) -> m.ToAgent | None:
        """Return the next message; None if none has arrived."""
        self._bell.hush()
        try:
            data = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        self.heard = time.monotonic()
        return m.for_agent(data)

    def close(self) -> None:
        """Send last words and close."""
        self._bell.close()
        self._socket.disable_monitor()
        self._refusals.close(linger=0)
        self._socket.close(linger=LINGER_MS)


def _connected(sock: socket.socket, path: str) -> socket.socket:
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock


def _address_towards(server: str) -> str:
    """Return the address of this machine that packets to the server carry."""
    host = server.rpartition(":")[0]
    family = family_of(host)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host.strip("[]"), 9))  # sends nothing: it only makes the system choose an address
        found: str = probe.getsockname()[0]
    return f"[{found}]" if family == socket.AF_INET6 else found
