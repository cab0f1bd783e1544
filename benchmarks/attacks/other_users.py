"""Another user of the host against a run: can that user change it, end it, or read along?

The stranger is a process of another user id that starts before the run and goes on while it lasts. It makes every
folder in the temporary folder whose name can be guessed, and tries to enter those of the run; it takes keys from the
names of abstract sockets and forges messages of nodes with them, with weights of a million; it sends garbage and
plausible handshakes to every Unix socket and every port of the loopback that it finds; it opens more than a thousand
connections and leaves them idle, against a run that may have 1,024 descriptors; and it reads what it can of the run's
folder, of its journal, of shared memory and of `/proc`.

A run is judged by its model. Under `bsp` and `local_sgd`, whose bits do not depend on timing, it must be the model of
an undisturbed run with the same seed, bit for bit; under `gossip`, where they do, all weights must be as small as ever
and none of the stranger's messages may have been accepted. For reading, nothing that the run has written or maps may be
open to the stranger. Each attempt has a network namespace of its own, so that no other run of the host is touched.
"""

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import mmap
import multiprocessing
import os
import re
import resource
import select
import socket
import struct
import time
from array import array
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import safetensors.torch
import torch

from attacks.harness import Attack, Ended, Target, Trial, scratch, stranger

BEFORE = "3b17ec6"

NEW_NETWORK = 0x40000000  # of <sched.h>
INTERFACE_FLAGS, SET_INTERFACE_FLAGS, UP = 0x8913, 0x8914, 1
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
AHEAD = 3000  # process numbers for which the stranger makes folders beforehand
DESCRIPTORS = 1024  # that a flooded run may have
IDLE = 1200  # connections of the stranger
AT_ONCE = 50  # connections
HUGE = 1e6  # a weight that the stranger would like to see
LARGEST = 10.0  # that a weight of an undisturbed run is by far
FORGED = [("model", (4, 1), 0), *(("mean", (part,), number) for part in (2, 3) for number in range(99))]
SETTINGS = ("local_sgd:period=4", "shm"), ("bsp", "zeromq"), ("bsp", "shm"), ("local_sgd:period=4", "zeromq")

SCRIPT = """
import time, torch, paceline
session = paceline.init()
torch.manual_seed(1)
x = torch.randn(1, 4).repeat(96, 1)  # alike, since who computes which sample depends on timing without a server
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
session.prepare(model, optimizer)
for x, y in session.batches(data, batch_size=4, epochs=25):
    optimizer.zero_grad()
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
    time.sleep(0.002)
"""


class Loot(msgspec.Struct):
    """What the stranger has come to."""

    rounds: int = 0
    squatted: int = 0  # process numbers below have their folder
    forged: int = 0  # messages that a mailbox took
    connected: int = 0
    read: list[str] = []


# -- the victim --------------------------------------------------------------------------------------------------------


def victim(target: Target, strategy: str, transport: str, before: Callable[[], None] | None = None) -> Ended:
    """Train, with a temporary folder that all users share."""
    (target.folder / "train.py").write_text(SCRIPT)
    shared = shared_folder(target)
    return target.run(
        "run", "--workers", "2", "--threads", "1", "--seed", "3", "--evaluate-every", "off", "--quiet",
        "--strategy", strategy, "--transport", transport, "--journal", "journals/run.jsonl", "train.py",
        environment={"TMPDIR": str(shared)}, before=before,
    )  # fmt: skip


def shared_folder(target: Target) -> Path:
    """A temporary folder for all users, as /tmp is."""
    shared = target.folder / "tmp"
    shared.mkdir(exist_ok=True)
    shared.chmod(0o1777)
    return shared


def models(folder: Path) -> dict[str, bytes]:
    """The models in the runs of a folder: of the server, or of the nodes."""
    found = sorted([*folder.glob("runs/*/model.safetensors"), *folder.glob("runs/*/nodes/*.safetensors")])
    return {path.name: path.read_bytes() for path in found}


def largest_weight(folder: Path) -> float:
    """The largest weight of any node, infinite if one is not a number."""
    weights = [value for data in models(folder).values() for value in safetensors.torch.load(data).values()]
    flat = torch.cat([weight.reshape(-1).double() for weight in weights]) if weights else torch.tensor([torch.inf])
    return float(flat.abs().nan_to_num(torch.inf, torch.inf).max())


@functools.cache
def undisturbed(source: Path, strategy: str, transport: str) -> str:
    """The digest of the models that a run makes when nobody attacks it."""
    with scratch("undisturbed") as folder:
        ended = victim(Target(source, folder), strategy, transport)
        if ended.code != 0:
            raise RuntimeError(f"an undisturbed run failed: {ended.said}")
        return digest(folder)


def digest(folder: Path) -> str:
    """A digest of all models in the runs of a folder."""
    return hashlib.sha256(b"".join(name.encode() + data for name, data in models(folder).items())).hexdigest()


# -- the stranger ------------------------------------------------------------------------------------------------------


def keep_at(deed: Callable[[Loot], None], there: Connection) -> None:
    """Do it again and again, and report what came of it."""
    loot = Loot()
    while True:
        loot.rounds += 1
        deed(loot)
        there.send(loot)
        time.sleep(0.05)


def meddle(folder: Path, known: frozenset[int], loot: Loot) -> None:
    """Do everything but flooding."""
    squat(folder / "tmp", loot)
    forge(loot)
    knock(folder, known, loot)
    read_along(folder, loot)


def flood(known: frozenset[int], held: list[socket.socket], loot: Loot) -> None:
    """Hold as many idle connections to the run's ports as possible."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * IDLE, 2 * IDLE))
    for port in ports() - known:
        while len(held) < IDLE:
            idle = socket.socket()
            idle.setblocking(False)
            if idle.connect_ex(("127.0.0.1", port)) not in (0, errno.EINPROGRESS):
                idle.close()
                break
            held.append(idle)
            if len(held) % AT_ONCE == 0:
                time.sleep(0.01)  # as many as a listener's queue holds
    loot.connected = sum(map(_connected, held))


def _connected(idle: socket.socket) -> bool:
    try:
        idle.getpeername()
    except OSError:
        return False
    return True


def squat(shared: Path, loot: Loot) -> None:
    """Make the folders that processes of the near future might want, and enter those that exist."""
    last = int(Path("/proc/loadavg").read_text().split()[4])
    for number in range(max(loot.squatted, last), last + AHEAD):
        with contextlib.suppress(OSError):
            os.mkdir(shared / f"pymp-paceline-{number}")  # noqa: PTH102 - thousands of them
    loot.squatted = last + AHEAD
    with contextlib.suppress(OSError):
        for name in os.listdir(shared):  # noqa: PTH208
            if name.startswith("paceline"):
                with contextlib.suppress(OSError):
                    os.rename(shared / name, shared / f"{name}-stolen")  # noqa: PTH104
                    loot.read.append(f"renamed {name}")
                with contextlib.suppress(OSError):
                    (shared / name / "mail").touch()
                    loot.read.append(f"wrote to {name}")


def forge(loot: Loot) -> None:
    """Send nodes messages of other nodes, with keys from the names of abstract sockets."""
    for name in set(re.findall(r"@paceline-([0-9a-f]{32})", Path("/proc/net/unix").read_text())):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as theirs:
            for sender in (0, 1):
                for kind, sizes, round_ in FORGED:
                    data, descriptor = forged(name, sender, kind, sizes, round_)
                    with contextlib.suppress(OSError):
                        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))]
                        theirs.sendmsg([data], rights, socket.MSG_DONTWAIT, f"\0paceline-{name}")
                        loot.forged += 1
                    os.close(descriptor)


def forged(key: str, sender: int, kind: str, sizes: tuple[int, ...], round_: int) -> tuple[bytes, int]:
    """A message whose values are huge, and the memory that they are in."""
    values = [array("f", [HUGE] * size).tobytes() for size in sizes]
    body = struct.pack("q", 1).ljust(mmap.PAGESIZE, b"\0") + b"".join(value.ljust(64, b"\0") for value in values)
    descriptor = os.memfd_create("forged", os.MFD_ALLOW_SEALING)
    os.write(descriptor, body.ljust(2 * mmap.PAGESIZE, b"\0"))
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    lengths = [len(value) for value in values]
    header = [key, sender, 0, kind, 1.0, None, 99, round_, 0, 0, 0.0, lengths, 7, 1]
    return msgspec.msgpack.encode(header), descriptor


GARBAGE = [
    b"\0" * 64, b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL".ljust(64, b"\0"), b"\4\x26\5READY\7Identity\0\0\0\x20" + b"0" * 32,
    os.urandom(300), msgspec.msgpack.encode(["0" * 32, 0, 0, "model"]),
]  # fmt: skip


def knock(folder: Path, known: frozenset[int], loot: Loot) -> None:
    """Connect to everything, and say what a node or a worker might say."""
    names = [line.split()[7] for line in Path("/proc/net/unix").read_text().splitlines()[1:] if len(line.split()) > 7]
    guesses = [name for name in names if "paceline" in name or str(folder) in name]
    for name in guesses:
        address = name.replace("@", "\0", 1) if name.startswith("@") else name
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
            with socket.socket(socket.AF_UNIX, kind) as knocking, contextlib.suppress(OSError):
                knocking.settimeout(0.1)
                knocking.connect(address)
                loot.connected += 1
                for words in GARBAGE:
                    knocking.send(words)
    for port in ports() - known:
        for words in GARBAGE:
            with socket.socket() as knocking, contextlib.suppress(OSError):
                knocking.settimeout(0.1)
                knocking.connect(("127.0.0.1", port))
                loot.connected += 1
                knocking.send(words)
                if select.select([knocking], [], [], 0.01)[0]:
                    knocking.send(knocking.recv(4096))  # back to its sender


def ports() -> set[int]:
    """The ports of this network at which somebody listens."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}


def read_along(folder: Path, loot: Loot) -> None:
    """Read the run's folder, its journal, its temporary folder, shared memory, and what `/proc` says of it."""
    for top in ("runs", "journals"):
        for place, _, names in os.walk(folder / top):
            for name in names:
                _try_to_read(Path(place) / name, loot)
    shared = folder / "tmp"
    for place in shared.glob("paceline-*"):
        with contextlib.suppress(OSError):
            loot.read += [f"listed {place.name}" for _ in os.scandir(place)]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"paceline" in (process / "cmdline").read_bytes():
                read_process(process, loot)
    for block in Path("/dev/shm").glob("*"):
        if block.name.startswith(("torch_", "sem.paceline", "sem.pymp-paceline", "paceline")):
            _try_to_read(block, loot)


def read_process(process: Path, loot: Loot) -> None:
    """Read what `/proc` says of somebody else's process. One that becomes the stranger's own meanwhile does not count:
    then it is the stranger of another attack on this host."""
    found = Loot()
    if process.stat().st_uid == os.getuid():
        return
    for name in ("environ", "mem", "maps"):
        _try_to_read(process / name, found)
    with contextlib.suppress(OSError):
        found.read += [f"listed {process}/fd" for _ in os.scandir(process / "fd")]
    if process.stat().st_uid != os.getuid():
        loot.read += found.read


def _try_to_read(path: Path, loot: Loot) -> None:
    with contextlib.suppress(OSError), path.open("rb") as file:
        # Of a process that has ended and is not yet waited for, everybody may open `maps`, and nothing is in it.
        found = file.read(1) or not path.is_relative_to("/proc")
        if found and str(path) not in loot.read:
            loot.read.append(str(path))


def some(read: list[str]) -> str:
    """The first of what was read, for people."""
    return ", ".join("/".join(Path(name).parts[-2:]) for name in sorted(set(read))[:4]) or "nothing"


# -- attempts ----------------------------------------------------------------------------------------------------------


def in_own_network(attempt: Callable[[Target, int], Trial], target: Target, seed: int) -> Trial:
    """Make the attempt in a network namespace of its own."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    process = fork.Process(target=_isolated, args=(attempt, target, seed, there))
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        return Trial(False, "the attempt itself failed")
    finally:
        process.join()
        here.close()


def _isolated(attempt: Callable[[Target, int], Trial], target: Target, seed: int, there: Connection) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK) == 0:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = array("b", struct.pack("16sh", b"lo", 0) + bytes(24))
            fcntl.ioctl(any_socket, INTERFACE_FLAGS, request)
            flags = struct.unpack("16sh", request[:18])[1]
            fcntl.ioctl(any_socket, SET_INTERFACE_FLAGS, struct.pack("16sh", b"lo", flags | UP) + bytes(24))
    there.send(attempt(target, seed))


def acting(deed: Callable[..., None], *given: object) -> Callable[[Connection], None]:
    """A stranger who does this again and again."""
    return functools.partial(keep_at, functools.partial(deed, *given))


def last_of(here: Connection) -> Loot:
    """What the stranger has come to by now."""
    loot = Loot()
    while here.poll():
        loot = here.recv()
    return loot


def _prepared(target: Target) -> frozenset[int]:
    """Make the shared folder before the stranger comes, and return the ports that have nothing to do with the run."""
    shared_folder(target)
    return frozenset(ports())


def gossiping(target: Target, seed: int) -> Trial:
    return in_own_network(_gossiping, target, seed)


def _gossiping(target: Target, seed: int) -> Trial:
    known = _prepared(target)
    with stranger(acting(meddle, target.folder, known)) as here:
        time.sleep(0.3)  # some folders are made before the run
        ended = victim(target, "gossip", "shm" if seed % 4 != 3 else "zeromq")
        loot = last_of(here)
    largest = largest_weight(target.folder)
    held = ended.code == 0 and largest < LARGEST and loot.forged == 0 and loot.rounds > 0
    return Trial(held, f"exit {ended.code}, largest weight {largest:.3g}, {loot.forged} forged messages accepted")


def disturbing(target: Target, seed: int) -> Trial:
    strategy, transport = SETTINGS[seed % len(SETTINGS)]
    wanted = undisturbed(target.source, strategy, transport)
    return in_own_network(functools.partial(_disturbing, strategy, transport, wanted), target, seed)


def _disturbing(strategy: str, transport: str, wanted: str, target: Target, seed: int) -> Trial:
    known = _prepared(target)
    with stranger(acting(meddle, target.folder, known)) as here:
        time.sleep(0.3)
        ended = victim(target, strategy, transport)
        loot = last_of(here)
    same = digest(target.folder) == wanted
    said = "the bits of an undisturbed run" if same else "other bits"
    return Trial(
        ended.code == 0 and same and loot.connected == loot.forged == 0 and loot.rounds > 0 and not loot.read,
        f"{strategy} over {transport}: exit {ended.code}, {said}, {loot.connected} connections, {loot.forged} forged, "
        f"read or changed: {some(loot.read)}",
    )


def flooding(target: Target, seed: int) -> Trial:
    strategy, transport = SETTINGS[1 if seed % 2 == 0 else 3]
    wanted = undisturbed(target.source, strategy, transport)
    return in_own_network(functools.partial(_flooding, strategy, wanted), target, seed)


def _flooding(strategy: str, wanted: str, target: Target, seed: int) -> Trial:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))

    with stranger(acting(flood, _prepared(target), [])) as here:
        ended = victim(target, strategy, "zeromq", limited)
        loot = last_of(here)
    same = digest(target.folder) == wanted
    held = ended.code == 0 and same and loot.rounds > 0
    said = "the bits of an undisturbed run" if same else "no such model"
    return Trial(held, f"{strategy}: exit {ended.code} with {loot.connected} idle connections, {said}")


def reading(target: Target, seed: int) -> Trial:
    return in_own_network(_reading, target, seed)


def _reading(target: Target, seed: int) -> Trial:
    strategy, transport = SETTINGS[seed % len(SETTINGS)]
    _prepared(target)
    with stranger(acting(read_along, target.folder)) as here:
        ended = victim(target, strategy, transport)
        before = last_of(here).rounds
        while (loot := last_of(here)).rounds < before + 2:  # and once more when the run is over
            time.sleep(0.01)
    return Trial(ended.code == 0 and not loot.read, f"{strategy}: exit {ended.code}, read: {some(loot.read)}")


ATTACKS = [
    Attack("squatted gossip", "squats the temporary folder and forges messages of nodes", gossiping, 8, root=True),
    Attack("strangers", "squats, forges, connects to and reads all that there is", disturbing, 20, 4, root=True),
    Attack("idle connections", "opens a thousand connections and leaves them idle", flooding, 4, 4, root=True),
    Attack("reading along", "reads the run's files, memory and processes", reading, 4, 1, root=True),
]
