"""The control messages between the launcher and its children, over their private sockets.

The launcher starts and signals processes and knows how each ended; the server decides. So the launcher reports starts
and exits, and the server requests both. A link's descriptor travels with the message that announces it.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from paceline.core.errors import PeerError
from paceline.core.settings import Transport
from paceline.records.journal import Line
from paceline.server.plan import Cause, Plan
from paceline.server.progress import Progress

if TYPE_CHECKING:
    from paceline.transport.security import Security

T = TypeVar("T")
SHARD = "shard "  # begins the names of shards' processes
Blame = Literal["storage", "user", "script", "peer", "internal"]


# -- launcher to server ------------------------------------------------------------------------------------------------


class Secret(msgspec.Struct, frozen=True):
    """A join token on its way between processes of one machine; empty: there is none. It is never shown."""

    value: str = ""
    encrypts: bool = True

    def __repr__(self) -> str:
        return "Secret()" if not self.value else "Secret(...)"

    @property
    def security(self) -> "Security | None":
        """The keys for sockets between machines."""
        from paceline.transport.join_token import read_token  # it loads zmq, which processes of one machine need not
        from paceline.transport.security import Security

        return Security(read_token(self.value), encrypted=self.encrypts) if self.value else None


class Setup(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message: what to run."""

    plan: Plan
    began: float | None = None  # the run's zero by time.monotonic, which all processes share; None: not yet
    relay: bool  # send every line of the journal, not only what a log shows
    progress: bool = False  # send how far the run has come
    restore: str | None = None  # the folder of the checkpoint to go on from
    append: bool = False  # continue the journal of the server before this one
    folder: str  # the run's temporary folder
    over_tcp: bool = False  # workers connect to a port of the loopback (zeromq)
    listen: str = ""  # where workers of other machines connect to; empty: none do
    secret: Secret = Secret()  # the join token of such a run
    shards_listen: str = ""  # where shards of other machines connect to; empty: there are none


class Linked(msgspec.Struct, frozen=True, tag=True):
    """A process has started, or lives on under a restarted server. Carries its link's descriptor (shm)."""

    worker: int
    incarnation: int
    evaluator: bool
    pid: int  # also the id of its process group; 0: it is not a child of the launcher
    token: str
    loads: bool = False  # it lives on, but its script has not told an earlier server what it works on


class ShardLinked(msgspec.Struct, frozen=True, tag=True):
    """A shard of the weights has started: all of them are announced right after the setup. Carries its descriptor; one
    of another machine connects, and proves itself by this token."""

    shard: int
    token: str = ""


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A process has exited; a negative code is the signal that ended it.

    Its last messages may still be unread. A restarted server also gets this for workers that it was never linked to.
    """

    worker: int
    incarnation: int
    evaluator: bool
    code: int


class Interrupt(msgspec.Struct, frozen=True, tag=True):
    """The user asks for the run to end cleanly, with its report."""


class Debugged(msgspec.Struct, frozen=True, tag=True):
    """A worker's debugger waits for a command, so its silence means nothing; or it does so no longer."""

    worker: int
    waits: bool


class Newcomer(msgspec.Struct, frozen=True, tag=True):
    """Somebody wants to be a worker beside those that the run began with."""


class Leaves(msgspec.Struct, frozen=True, tag=True):
    """The user of a worker's machine takes it out of the run."""

    worker: int
    incarnation: int


class NeverStarted(msgspec.Struct, frozen=True, tag=True):
    """No process could be started for this worker: nobody is there to run it."""

    worker: int
    incarnation: int


ToServer = Setup | ShardLinked | Linked | Exited | Interrupt | Debugged | Newcomer | Leaves | NeverStarted


# -- server to launcher ------------------------------------------------------------------------------------------------


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The address at which workers find the server (zeromq), and those of its shards after spaces; none of the workers
    begins without it."""

    address: str


class Serving(msgspec.Struct, frozen=True, tag=True):
    """The server has taken up its checkpoint, if it was given one, and attends to workers."""


class ShardsExpected(msgspec.Struct, frozen=True, tag=True):
    """The address at which shards of other machines find the server."""

    address: str


class ShardLost(msgspec.Struct, frozen=True, tag=True):
    """The link to this shard has ended; the server waits for its own end."""

    shard: int


class Began(msgspec.Struct, frozen=True, tag=True):
    """The zero of the run's clock, by time.monotonic; the launcher keeps it for a restarted server."""

    zero: float


class StartWorker(msgspec.Struct, frozen=True, tag=True):
    """Start a process for a worker that joins, rejoins or is respawned."""

    worker: int
    incarnation: int


class NoPlace(msgspec.Struct, frozen=True, tag=True):
    """A newcomer is not wanted any more."""

    reason: str


class Came(msgspec.Struct, frozen=True, tag=True):
    """A worker's script has told what it works on, so that a restarted server has to wait for it."""

    worker: int
    incarnation: int


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Send this signal to the worker's process group."""

    worker: int
    number: int


class Progressed(msgspec.Struct, frozen=True, tag=True):
    """How far the run has come."""

    progress: Progress


class JournalLines(msgspec.Struct, frozen=True, tag=True):
    """Lines of the journal."""

    data: bytes  # a list of `Line`, as msgpack

    def lines(self) -> list[Line]:
        return msgspec.msgpack.decode(self.data, type=list[Line])


class Failure(msgspec.Struct, frozen=True, tag=True):
    """What went wrong, and who is to blame. A worker sends it too when its script fails, in case no server is left."""

    blame: Blame
    text: str
    traceback: str = ""


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The last message. Carries a descriptor of the model's state as safetensors bytes, if there is a model."""

    cause: Cause
    report: bytes  # as JSON; empty if there is none
    error: Failure | None = None
    keys: list[str] = []  # of the model's state, in its own order
    tables: bool = False  # the state is that of tables, not of a model


class Noticed(msgspec.Struct, frozen=True, tag=True):
    """Something to tell the user that is not about training, such as whom the run waits for."""

    text: str


class Warned(msgspec.Struct, frozen=True, tag=True):
    """A warning of Python or of a logger in a worker's process; the launcher shows the same text once."""

    text: str


class Debugging(msgspec.Struct, frozen=True, tag=True):
    """A worker's debugger waits for a command, or does so no longer; one that needs no terminal may at any time."""

    waits: bool
    on_terminal: bool = True


class LinkLost(msgspec.Struct, frozen=True, tag=True):
    """A worker's link to the server is gone; it waits for another."""

    links: int  # that it was given so far, this one included


ToLauncher = (
    Listening | Serving | ShardsExpected | ShardLost | Began | StartWorker | NoPlace | Came | Signal | Progressed
    | JournalLines | Failure | Finished | Noticed | Warned | Debugging | LinkLost
)  # fmt: skip


# -- launcher to workers and evaluator ---------------------------------------------------------------------------------


class Role(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message: who the process is and what it runs. Carries the link's descriptor (shm)."""

    worker: int  # the evaluator's is the number of workers
    incarnation: int
    workers: int
    evaluator: bool
    seed: int
    options: dict[str, str]
    batch_size: int | None
    epochs: float | int | None
    data_dir: str | None
    threads: int
    script: str | None  # a file, run as `__main__` with these arguments,
    arguments: list[str]
    function: bytes | None  # or a pickled function; only ever from the launcher to its own children
    sys_path: list[str]
    transport: Transport
    address: str
    token: str
    folder: str | None = None  # the run's temporary folder
    over_tcp: bool = False  # other nodes connect to a port of the loopback (zeromq)
    mail_host: str = ""  # the address of this machine at which other nodes reach this one; empty: none of this machine
    secret: Secret = Secret()  # the join token, of a worker that reaches its server over the network
    knocking_s: float = 0.0  # for such a worker to get in, as long as its machine waits for a server
    log_level: int = 0  # of the logger `paceline`; 0: not set
    peer: str | None = None  # the strategy of a run without a server
    yields: bool = False  # the core to the server, if both want the same
    terminal: str | None = None  # for a debugger


class ShardRole(msgspec.Struct, frozen=True, tag=True):
    """The first message to a shard. Carries the descriptor of its link to the server, if both are on one machine."""

    shard: int
    shards: int
    threads: int
    folder: str  # the run's temporary folder
    listens: bool = False  # there may be workers that share no memory
    over_tcp: bool = False  # they connect to a port of the loopback
    listen: str = ""  # where workers of other machines connect to; empty: none do
    secret: Secret = Secret()
    server: str = ""  # the address of a server on another machine,
    token: str = ""  # what the shard shows there,
    knocking_s: float = 0.0  # and how long it tries


class Relinked(msgspec.Struct, frozen=True, tag=True):
    """The server was restarted. Carries the fresh link's descriptor (shm)."""

    address: str


class Unlinked(msgspec.Struct, frozen=True, tag=True):
    """There will be no further server."""


ToChild = Role | ShardRole | Relinked | Unlinked

_encoder = msgspec.msgpack.Encoder(enc_hook=str)  # paths


def _from_text(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"{kind} has no plain form")


_to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer, dec_hook=_from_text)
_to_launcher: msgspec.msgpack.Decoder[ToLauncher] = msgspec.msgpack.Decoder(ToLauncher, dec_hook=_from_text)
_to_child: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild, dec_hook=_from_text)


def encode(message: ToServer | ToLauncher | ToChild) -> bytes:
    """Encode a message."""
    return _encoder.encode(message)


def for_server(data: bytes | bytearray) -> ToServer:
    """Decode a message from the launcher to the server."""
    return _decode(_to_server, data, "server")


def for_launcher(data: bytes | bytearray) -> ToLauncher:
    """Decode a message from a child to the launcher."""
    return _decode(_to_launcher, data, "launcher")


def for_child(data: bytes | bytearray) -> ToChild:
    """Decode a message from the launcher to a worker or the evaluator."""
    return _decode(_to_child, data, "worker")


def _decode(decoder: "msgspec.msgpack.Decoder[T]", data: bytes | bytearray, whose: str) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:  # text that is none, lists in lists
        raise PeerError(f"a control message for the {whose} cannot be read: {error}") from error
