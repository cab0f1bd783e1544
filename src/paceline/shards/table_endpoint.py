"""A worker's end where tables are split by rows over shards: it sends each shard its rows of a clock's increments at
once, and reads rows from the shards that have them.

Everything else goes to the coordinator, which decides. So does the clock itself, without increments: it counts when all
shards hold theirs. An answer with rows comes from the coordinator and names a number; the shards' parts come under it.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from paceline.core.errors import PeerError
from paceline.shards.messages import RowsPart, TickPart, VersionPart
from paceline.shards.table_stripes import part_of, places_of
from paceline.tables.messages import Opened, OpenTable, Rows, TableLog, Tick, TickParts
from paceline.tables.rowwise import bytes_of_logs
from paceline.tables.table_spec import TableSpec
from paceline.transport.messages import ToServer, ToWorker
from paceline.transport.shm import Channel, ShmEndpoint

P = TypeVar("P", VersionPart, RowsPart)
WRITE_S = 0.001  # between attempts to write to a full link, while the coordinator is waited for
NOTHING = np.empty((0, 0), np.float32)


class ShardEnd(Protocol):
    """A worker's end of its link to one shard."""

    def send(self, message: ToServer) -> None: ...

    def receive(self) -> ToWorker: ...


def next_part(shard: ShardEnd, number: int, kind: type[P]) -> P:
    """Read what a shard has sent under this number; skip what belongs to messages that never came."""
    while True:
        part = shard.receive()
        if not isinstance(part, kind) or part.number > number:
            raise PeerError(f"a shard sent {type(part).__name__} where {kind.__name__} {number} was due")
        if part.number == number:
            return part


def without_sums(log: TableLog, *, eager: bool) -> TableLog:
    """Return what the coordinator has to know of increments: their table and, to send them on unasked, the rows."""
    return TableLog(log.table, log.rows if eager else None, NOTHING)


class TableParts:
    """Splits the clocks that a worker sends, and joins the rows that it gets."""

    def __init__(self) -> None:
        self._ticks = 0  # sent so far
        self._opening: TableSpec | None = None
        self._eager: set[int] = set()  # tables

    def split(self, message: ToServer, shards: Sequence[ShardEnd]) -> ToServer:
        """Send each shard its part of a message; return the coordinator's."""
        if isinstance(message, OpenTable):
            self._opening = message.spec
        if not isinstance(message, Tick) or not message.logs:
            return message
        self._ticks += 1
        for number, shard in enumerate(shards):
            shard.send(TickPart(self._ticks, [part_of(log, number, len(shards)) for log in message.logs]))
        logs = [without_sums(log, eager=log.table in self._eager) for log in message.logs]
        return msgspec.structs.replace(message, logs=logs, parts=TickParts(self._ticks, bytes_of_logs(message.logs)))

    def join(self, message: ToWorker, shards: Sequence[ShardEnd]) -> ToWorker:
        """Return a message of the coordinator with the shards' parts of it."""
        if isinstance(message, Opened) and self._opening is not None and self._opening.eager:
            self._eager.add(message.table)
        if not isinstance(message, Rows) or message.parts is None:
            return message
        number, nbytes = message.parts
        columns, dtype = message.values.shape[1], message.values.dtype
        values = np.empty((nbytes // (columns * dtype.itemsize), columns), dtype)
        for shard, link in enumerate(shards):
            places = places_of(message.rows, shard, len(shards))
            if isinstance(places, slice) or len(places):
                values[places] = next_part(link, number, RowsPart).values
        return msgspec.structs.replace(message, values=values, parts=None)


class TableEndpoint(ShmEndpoint):
    """The end of a worker on the shards' host: a socket to the coordinator, and one to each shard.

    Gradients and versions need no link to a shard, which maps the worker's region.
    """

    def __init__(self, channels: list[Channel], relink: Callable[[], list[Channel]] | None = None) -> None:
        """The coordinator's channel comes first."""
        self._shards: list[ShmEndpoint] = []
        self._tables = TableParts()
        super().__init__(self._link(channels), None if relink is None else lambda: self._link(relink()))

    def _link(self, channels: list[Channel]) -> Channel:
        for shard in self._shards:
            shard.close()
        self._shards = [ShmEndpoint(channel) for channel in channels[1:]]
        return channels[0]

    def send(self, message: ToServer) -> None:
        super().send(self._tables.split(message, self._shards))

    def receive(self) -> ToWorker:
        while self._writes_wait() and not super().poll(WRITE_S):
            pass
        return self._tables.join(super().receive(), self._shards)

    def poll(self, seconds: float = 0.0) -> bool:
        self._writes_wait()
        return super().poll(seconds)

    def _writes_wait(self) -> bool:
        """Send shards what full links have not taken yet; return whether there is still something."""
        return bool([shard for shard in self._shards if not shard.flush()])

    def close(self) -> None:
        for shard in self._shards:
            shard.close()
        super().close()
