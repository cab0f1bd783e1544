"""What a worker and a shard send each other: parts of clocks and of a table's rows; where they share no memory, also
parts of pushes and of versions. And what coordinator and shard send each other where they share none."""

from paceline.model.store import Gradient, Parameters
from paceline.tables.messages import TableLog
from paceline.transport.messages import STATE_BYTES, Array, RawBytes, ToServer, ToWorker, registered

BETWEEN = "\0"  # addresses of a server and of its shards; the name of a socket's file may hold any other character


@registered(57)
class PushPart(ToServer, frozen=True):
    """A shard's part of the push with this ticket; the push itself goes to the coordinator."""

    ticket: int
    gradient: Gradient


@registered(58)
class TickPart(ToServer, frozen=True):
    """A shard's rows of a clock's increments, which the coordinator's `Tick` refers to by this number. Rows are
    counted in the shard."""

    number: int
    logs: list[TableLog]


@registered(59, longest=STATE_BYTES)
class ShardAnswer(ToServer, frozen=True):
    """An answer of a shard to its coordinator (`commands.py`), and the bytes of the memory that goes with it."""

    data: bytes
    files: list[RawBytes]


@registered(122, longest=STATE_BYTES)
class ShardCommand(ToWorker, frozen=True):
    """A command of the coordinator to a shard, likewise."""

    data: bytes
    files: list[RawBytes]


@registered(120)
class VersionPart(ToWorker, frozen=True):
    """A shard's part of the version that a message of the coordinator refers to by this number."""

    number: int
    parameters: Parameters


@registered(121, in_place=True)
class RowsPart(ToWorker, frozen=True):
    """The rows that a shard has of those which a message of the coordinator refers to by this number."""

    number: int
    values: Array
