"""Who attacks: machines that hold the run's token and misuse it, clients with wrong keys, strangers who send bytes."""

import random
import socket
import threading
import time
from contextlib import suppress

import msgspec
import zmq

from hostile_inputs import Frames
from paceline.engines.hosts import messages as m
from paceline.engines.hosts.serving import digest_of_file, versions_here
from paceline.engines.local import control
from paceline.shards.messages import BETWEEN
from paceline.transport.codec import FORMAT as WIRE_FORMAT
from paceline.transport.join_token import JoinToken, new_token
from paceline.transport.security import Security
from paceline.transport.zeromq import HANDSHAKE

PATIENCE_S = 20.0
NEVER_MS = 3_600_000


class Machine:
    """A machine that joins the run again and again, each time as a worker, and sends what it likes as that worker."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", port: int, token: JoinToken, script: str) -> None:
        self._context, self._port, self._security = context, port, Security(token)
        self._asked = m.JoinAsked(
            format=m.FORMAT, wire=WIRE_FORMAT, workload=script, host="hostile", kernel="", versions=versions_here()
        )
        self._launcher: zmq.Socket[bytes] | None = None
        self._worker: zmq.Socket[bytes] | None = None
        self._child = 0

    def ask(self) -> None:
        """Ask to join."""
        if self._launcher is None:
            self._launcher = self._connected(self._port)
        self._launcher.send(m.encode(self._asked))

    def enter(self, socket: int = 0) -> bool:
        """Wait for a place, and connect as its worker to the server, or to the shard of this number (from 1); return
        whether that was possible."""
        until = time.monotonic() + PATIENCE_S
        assert self._launcher is not None
        while self._launcher.poll(max(0, int(1000 * (until - time.monotonic())))):
            message = m.for_agent(self._launcher.recv())
            if isinstance(message, m.ToChild):
                role = control.for_child(message.data)
                if isinstance(role, control.Role):
                    self._child = message.child
                    self._worker = self._connected(port_of(role.address, socket), role.token.encode())
                    self._watch = self._worker.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                    self._worker.send(HANDSHAKE)
                    return self._hear() == "answered"
        return False

    def send(self, frames: Frames) -> None:
        """Send frames as a worker, and then ask whether the server still listens."""
        assert self._worker is not None
        for frame in [*frames, HANDSHAKE]:
            with suppress(zmq.Again):
                self._worker.send(frame, zmq.NOBLOCK)

    def outcome(self) -> str:
        """What became of the frames: the server `answered` what followed them, or it `hung up`, or neither came."""
        return self._hear()

    def _hear(self) -> str:
        assert self._worker is not None
        poller, until = zmq.Poller(), time.monotonic() + PATIENCE_S
        for one in (self._worker, self._watch):
            poller.register(one, zmq.POLLIN)
        while (left := until - time.monotonic()) > 0:
            ready = dict(poller.poll(int(1000 * left)))
            if self._worker in ready:
                if self._worker.recv() == HANDSHAKE:
                    return "answered"
            elif ready:
                return "hung up"
        return "neither"

    def say(self, data: bytes) -> None:
        """Send the launcher whatever this is."""
        if self._launcher is None:
            self._launcher = self._connected(self._port)
        self._launcher.send(data, zmq.NOBLOCK)

    def say_as_child(self, data: bytes) -> None:
        """Send the launcher a control message of the worker's process."""
        self.say(m.encode(m.FromChild(self._child, data)))

    def leave(self, *, hang_up: bool) -> None:
        """Say that the worker's process has exited; without `hang_up` its connection stays for a while."""
        if self._child:
            self.say(m.encode(m.ChildExited(self._child, -9)))
            self._child = 0
        if hang_up:
            self.forget_worker()

    def forget_worker(self) -> None:
        """Hang up, if `leave` did not."""
        if self._worker is not None:
            self._worker.disable_monitor()
            self._watch.close(linger=0)
            self._worker.close(linger=0)
            self._worker = None

    def reset(self) -> None:
        """Be another machine from now on."""
        self.forget_worker()
        if self._launcher is not None:
            self._launcher.close(linger=300)
            self._launcher = None
        self._child = 0

    def _connected(self, port: int, identity: bytes = b"") -> "zmq.Socket[bytes]":
        client = self._context.socket(zmq.DEALER)
        if identity:
            client.setsockopt(zmq.ROUTING_ID, identity)
        client.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
        self._security.connect_as(client, "worker", to="server")
        client.connect(f"tcp://127.0.0.1:{port}")
        return client


def port_of(addresses: str, socket: int) -> int:
    """The port of the server, or of a shard, among the addresses that a worker is told."""
    return int(addresses.split(BETWEEN)[socket].rpartition(":")[2])


def name_of_script(path: str) -> str:
    """What machines must say that they run."""
    from pathlib import Path

    return digest_of_file(Path(path))


class WrongKeys:
    """Clients with keys of another run, another role, or none."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", token: JoinToken, chance: random.Random) -> None:
        self._context, self._token, self._chance = context, token, chance
        self._other = Security(new_token())

    def attack(self, port: int, count: int, stay_s: float = 0.05) -> None:
        """Let so many clients try to get in."""
        clients = [self._connect(port) for _ in range(count)]
        time.sleep(stay_s)
        for client in clients:
            if client.poll(0):
                raise AssertionError("a client without a key got an answer")
            client.close(linger=0)

    def _connect(self, port: int) -> "zmq.Socket[bytes]":
        client = self._context.socket(zmq.DEALER)
        client.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
        pose = self._chance.choice(["none", "run", "role", "own", "password"])
        if pose == "run":
            self._other.connect_as(client, "worker", to="server")
        elif pose == "role":
            Security(self._token).connect_as(client, "node", to="server")
        elif pose == "own":
            client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
            client.curve_serverkey = self._token.keys("server").public
        elif pose == "password":
            Security(self._token, encrypted=False).connect_as(client, "worker", to="server")
        client.connect(f"tcp://{elsewhere(self._chance)}:0;127.0.0.1:{port}")
        with suppress(zmq.Again):
            client.send(HANDSHAKE, zmq.NOBLOCK)
        return client


def elsewhere(chance: random.Random) -> str:
    """Return another address of this machine: who knocks too often at one is not heard, and every input is to be."""
    return f"127.{chance.randrange(1, 255)}.{chance.randrange(255)}.{chance.randrange(1, 255)}"


def say(port: int, sayings: list[bytes], chance: random.Random) -> None:
    """Connect as strangers and send bytes."""
    open_ones = []
    for words in sayings:
        with suppress(OSError):
            stranger = socket.create_connection(("127.0.0.1", port), 5, (elsewhere(chance), 0))
            open_ones.append(stranger)
            stranger.settimeout(0.2)
            stranger.sendall(words)
    for stranger in open_ones:
        stranger.close()


def record(port: int, token: JoinToken) -> bytes:
    """Return the bytes that a member sends from its first to its first message, for others to replay."""
    listener = socket.create_server(("127.0.0.1", 0))
    seen = bytearray()

    def relay() -> None:
        one, _ = listener.accept()
        other = socket.create_connection(("127.0.0.1", port))
        back = threading.Thread(target=_copy, args=(other, one, None))
        back.start()
        _copy(one, other, seen)
        back.join()
        one.close()
        other.close()

    thread = threading.Thread(target=relay)
    thread.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = context.socket(zmq.DEALER)
    Security(token).connect_as(client, "worker", to="server")
    client.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
    client.send(m.encode(m.Beat()))
    client.poll(int(1000 * PATIENCE_S))  # the launcher does not know this machine, and says so
    context.destroy(linger=0)
    thread.join()
    listener.close()
    return bytes(seen)


def _copy(source: socket.socket, sink: socket.socket, seen: bytearray | None) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            if seen is not None:
                seen += data
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def machine_messages() -> list[msgspec.Struct]:
    """One message of every kind that a machine sends to the launcher, with a control message of every kind inside."""
    words: list[msgspec.Struct] = [
        control.Warned("a warning"), control.Debugging(True), control.LinkLost(1),
        control.Failure("script", "it failed", "a traceback"), control.Noticed("a notice"),
        control.Listening("tcp://1.2.3.4:5"), control.Began(1.0), control.StartWorker(1, 2), control.NoPlace("full"),
        control.Signal(0, 9), control.JournalLines(msgspec.msgpack.encode([])), control.Finished("done", b"{}"),
    ]  # fmt: skip
    asked = m.JoinAsked(
        format=m.FORMAT, wire=WIRE_FORMAT, workload="other.py (12)", host="x" * 300, kernel="k", versions={"torch": "1"}
    )
    plain: list[msgspec.Struct] = [m.Beat(), asked, m.Attached("p"), m.ChildExited(1, -9), m.LeaveAsked()]
    return [*plain, *(m.FromChild(1, control.encode(word)) for word in words)]  # type: ignore[arg-type]
