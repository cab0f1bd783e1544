"""What `paceline join` and the launcher of `paceline serve` say to each other.

A machine that joins runs an agent, which starts the worker's process and supervises it. Launcher and process speak as
they do on one machine (`engines/local/control.py`): the agent only passes that on. Both sides send a `Beat` every
second, so that each knows that the other is there. Neither ever reads the other's clock.
"""

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from paceline.core.errors import PeerError

FORMAT = 3  # of these messages; the number of the wire format is compared, too
BEAT_S = 1.0  # between two beats
LOST_S = 30.0  # without a word; shorter cuts of the network pass unnoticed
LONGEST = 1 << 20  # bytes of a message
UNREAD = 16  # messages of one machine that the launcher has not read; then they wait where they come from

T = TypeVar("T")
Name = Annotated[str, Meta(max_length=400)]  # as long as a file's name, and a digest


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The sender is there."""


# -- from a machine that joins -----------------------------------------------------------------------------------------


class JoinAsked(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message: what this machine would run, and with what."""

    format: int
    wire: int  # the format of messages between worker and server
    workload: Name  # what is run: the digest of a script, or the name of a task
    host: Name  # the machine's name, for people
    kernel: Name  # which kernel and network namespace this is, for shared memory
    versions: Annotated[dict[Name, Name], Meta(max_length=16)]
    rank: int | None = None  # the number of a worker or shard that it would like to have
    shard: bool = False  # it would hold a part of the weights, and runs no workload
    strategy: str | None = None  # the digest of the run's strategy here, once asked for it; empty: it is not here


class Attached(msgspec.Struct, frozen=True, tag=True):
    """What was read through the descriptor that came over the local socket; empty: none came."""

    proof: str


class FromChild(msgspec.Struct, frozen=True, tag=True):
    """A control message of the worker's process."""

    child: int
    data: bytes


class ChildExited(msgspec.Struct, frozen=True, tag=True):
    """The worker's process has exited; a negative code is the signal that ended it."""

    child: int
    code: int


class LeaveAsked(msgspec.Struct, frozen=True, tag=True):
    """The user of this machine wants it out of the run."""


ToLauncher = Beat | JoinAsked | Attached | FromChild | ChildExited | LeaveAsked


# -- to a machine that joins -------------------------------------------------------------------------------------------


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """The machine may run workers. `attach`: a socket of this host to connect to; empty: the machines differ."""

    attach: str
    key: str
    remarks: list[str]


class StrategyAsked(msgspec.Struct, frozen=True, tag=True):
    """The run has a strategy from this file or module: the machine asks again, and says what it has there."""

    place: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The machine may not run workers."""

    reason: str


class StartChild(msgspec.Struct, frozen=True, tag=True):
    """Start a process for this worker, or shard; `child` numbers the processes of one agent."""

    child: int
    number: int


class ToChild(msgspec.Struct, frozen=True, tag=True):
    """A control message for the worker's process; the first is its role. May carry descriptors (shm)."""

    child: int
    data: bytes


class SignalChild(msgspec.Struct, frozen=True, tag=True):
    """Send this signal to the process group of the worker."""

    child: int
    number: int


class Dismissed(msgspec.Struct, frozen=True, tag=True):
    """The machine is not needed any more."""

    reason: str
    failed: bool = False


class Unknown(msgspec.Struct, frozen=True, tag=True):
    """The launcher does not know this machine, or has given it up: it may ask to join again."""


ToAgent = Beat | Admitted | StrategyAsked | Refused | StartChild | ToChild | SignalChild | Dismissed | Unknown

_encoder = msgspec.msgpack.Encoder()
_to_launcher: msgspec.msgpack.Decoder[ToLauncher] = msgspec.msgpack.Decoder(ToLauncher)
_to_agent: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)


def encode(message: ToLauncher | ToAgent) -> bytes:
    """Encode a message."""
    return _encoder.encode(message)


def for_launcher(data: bytes) -> ToLauncher:
    """Decode a message of an agent."""
    return _decode(_to_launcher, data, "a machine that joins")


def for_agent(data: bytes | bytearray) -> ToAgent:
    """Decode a message of the launcher."""
    return _decode(_to_agent, data, "the run's launcher")


def _decode(decoder: "msgspec.msgpack.Decoder[T]", data: bytes | bytearray, whose: str) -> T:
    if len(data) > LONGEST:
        raise PeerError(f"a message of {whose} has {len(data)} bytes, at most {LONGEST} are possible")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"a message of {whose} cannot be read: {error}") from error
