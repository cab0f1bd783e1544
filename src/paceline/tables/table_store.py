"""The tables of a run at the server: their values, in flat arrays of some rows each, and whose clocks are in them.

The coordinator's decisions act here: it has completed clocks applied, and lets workers go through their next.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from paceline.core.errors import InternalError
from paceline.core.updates import UNMEASURED, Contents, Merged, PushRef
from paceline.server.workers import GrantOrder
from paceline.strategies.clocks import Clocks
from paceline.tables import messages as t
from paceline.tables.rowwise import Array, Rows, parse_rule
from paceline.tables.table_spec import TableSpec

if TYPE_CHECKING:
    from paceline.server.run import ServerRun

SHARD_BYTES = 1 << 28  # of a range: a checkpoint writes one at a time
TABLES = "tables.safetensors"  # a checkpoint's file
UNTOLD = 16  # own clocks applied before a worker that reads nothing is told so


class LazyRows:
    """Rows of a table that are yet to be copied, by whoever knows where they are to go."""

    def __init__(self, table: "ServerTable", rows: Rows | None) -> None:
        self._table, self._rows = table, rows
        home = table.shards[0]
        self.dtype = home.dtype
        self.shape = (table.spec.rows if rows is None else len(rows), home.shape[1])
        self.nbytes = self.shape[0] * self.shape[1] * home.itemsize

    def write_to(self, out: Array) -> None:
        """Copy them there."""
        self._table.read_into(self._rows, out)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        del dtype, copy
        return self._table.read(self._rows)


class ServerTable:
    """A table's values, with what its rule remembers beside them."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self._rule = parse_rule(spec.update)
        self._each = max(1, min(spec.rows, SHARD_BYTES // spec.row_bytes))  # rows of a shard
        self.shards: list[Array] = [
            np.zeros((min(self._each, spec.rows - begin), spec.columns), dtype=spec.dtype)
            for begin in range(0, spec.rows, self._each)
        ]
        self.filled = False  # with the values it starts with
        self.changes = 0  # applied so far
        self.changed = np.zeros(spec.rows, dtype=np.int64) if spec.eager else None  # after how many, for each row

    def fill(self, values: Array) -> None:
        """Start with these, or with one row for all."""
        for number, shard in enumerate(self.shards):
            begin = number * self._each
            shard[:, : self.spec.width] = values if len(values) == 1 else values[begin : begin + len(shard)]
        self.filled = True

    def apply(self, rows: Rows | None, sums: Array) -> None:
        """Let the rule act on what one worker adds in one clock; rows are distinct, None means all."""
        for shard, places, chosen in self._parts(rows):
            self._rule.apply(shard, places, sums[chosen])
        self.changes += 1
        if self.changed is not None:
            self.changed[slice(None) if rows is None else rows] = self.changes

    def read(self, rows: Rows | None) -> Array:
        """Copies of these rows."""
        if len(self.shards) == 1:
            return self.shards[0].copy() if rows is None else self.shards[0].take(rows, axis=0)
        count = self.spec.rows if rows is None else len(rows)
        values = np.empty((count, self.spec.columns), dtype=self.spec.dtype)
        self.read_into(rows, values)
        return values

    def read_into(self, rows: Rows | None, out: Array) -> None:
        """Copy these rows to where they are to go."""
        if len(self.shards) == 1 and rows is not None:
            self.shards[0].take(rows, axis=0, out=out, mode="clip")  # rows were checked; `raise` would copy twice
            return
        for shard, places, chosen in self._parts(rows):
            out[chosen] = shard[places]

    def _parts(self, rows: Rows | None) -> Iterator[tuple[Array, Rows | slice, Rows | slice]]:
        """For each shard concerned: which of its rows, and which of those named they are."""
        if rows is None:
            for number, shard in enumerate(self.shards):
                begin = number * self._each
                yield shard, slice(None), slice(begin, begin + len(shard))
        elif len(self.shards) == 1:
            yield self.shards[0], rows, slice(None)
        else:
            owner = rows // self._each
            for number in np.unique(owner):
                chosen = np.flatnonzero(owner == number)
                yield self.shards[number], rows[chosen] - number * self._each, chosen


class Reader:
    """One worker as its tables know it."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.first = 0  # the first clock that it completes
        self.order: GrantOrder | None = None  # the grant of the clock it is in
        self.granted = 0  # the clock that the grant goes through
        self.received = 0  # clocks that were delivered, those before its time counted in
        self.applied = 0  # and are in the tables
        self.told = 0
        self.offset = 0  # of its clocks to those that the strategy counts
        self.aside = False  # kept waiting by a table's own staleness, and away for the strategy
        self.returns = False  # from there
        self.entered = False
        self.era = 0  # barriers that it has passed: each may set its clock back
        self.overtaking: dict[int, tuple[t.Tick, PushRef]] = {}  # ticks that came before an earlier one
        self.early: deque[tuple[t.Tick, PushRef]] = deque()  # ticks that came before their grant
        self.parked: list[t.Fetch] = []
        self.parked_since: float | None = None  # by a table's own staleness, although its clock was granted
        self.barrier: t.AtBarrier | None = None
        self.rests_since = 0.0  # at the barrier
        self.passing: t.AtBarrier | None = None  # a barrier that is open
        self.kept: dict[int, tuple[Array, int]] = {}  # of eager tables: which rows it has, and as of which change

    def waits_for(self, read: t.Fetch) -> bool:
        """Whether the worker can be waiting for this: not for what it has asked for ahead of time."""
        return read.clock <= self.received


class TableStore:
    """All tables, and how far each worker has come on them."""

    def __init__(self, run: "ServerRun") -> None:
        self._run = run
        self.tables: list[ServerTable] = []
        self.clocks = Clocks()  # of whoever takes part, by what was applied
        self.readers: dict[int, Reader] = {}
        self.ticks: dict[int, t.Tick] = {}  # delivered clocks that are yet to be applied, by ticket
        self.due: set[int] = set()  # readers to be looked at
        self._numbers: dict[str, int] = {}

    def number_of(self, spec: TableSpec) -> int:
        """Of the table of that name, which is made if there is none."""
        number = self._numbers.setdefault(spec.name, len(self.tables))
        if number == len(self.tables):
            self.tables.append(ServerTable(spec))
        return number

    def write(self, logs: Sequence[t.TableLog]) -> None:
        """Let one clock's increments act on the tables."""
        for log in logs:
            self.tables[log.table].apply(log.rows, log.sums)

    def snapshot(self) -> dict[str, Array]:
        """Every table as it is, for whoever measures them."""
        return {table.spec.name: table.read(None)[:, : table.spec.width] for table in self.tables}

    # -- what the coordinator calls ----------------------------------------------------------------------------------

    def grant(self, order: GrantOrder) -> None:
        """The strategy lets a worker go through its next clock."""
        worker, run = order.worker, self._run
        through = run.workers.records[worker].through
        reader = self.readers.get(worker)
        if reader is None or reader.incarnation != order.incarnation:
            reader = self.readers[worker] = Reader(order.incarnation)
        if worker not in self.clocks.of:  # it joins, or comes back from a barrier
            self.clocks.join(worker)
            # Workers that stepped aside are ahead of what the strategy counts, and nobody's clock goes back.
            start = max(self.clocks.min, through - 1)
            reader.first, reader.offset = start + 1, start - (through - 1)
            reader.received = reader.applied = reader.told = start
            self.clocks.advance(worker, start)
        elif reader.returns:
            reader.offset, reader.returns = reader.received - (through - 1), False
        reader.order, reader.granted = order, through + reader.offset
        self.due.add(worker)
        number = run.checkpoints.number_for(worker) if run.checkpoints.every is not None else None
        if number is not None:
            run.engine.send(worker, t.Save(number))

    def cancel(self, worker: int, ticket: int) -> None:
        """A clock that was made is made."""

    def apply(self, pushes: Sequence[PushRef], weights: Sequence[float], *, stock: bool) -> Merged:
        """The strategy's Apply: these clocks' increments are in the tables from here on, as the script wrote them."""
        del weights, stock  # of gradients
        for push in pushes:
            tick, worker = self.ticks.pop(push.ticket), push.worker
            self.write(tick.logs)
            reader = self.readers.get(worker)
            if reader is not None and reader.incarnation == push.incarnation:
                reader.applied = tick.through
                if reader.applied - reader.told >= UNTOLD:
                    self.due.add(worker)
                if worker in self.clocks.of:  # not resting at a barrier
                    self.clocks.advance(worker, tick.through)
        return UNMEASURED

    def extend(self, held: PushRef, piece: PushRef) -> PushRef:
        """A clock comes whole."""
        raise InternalError(f"clock {held} of a table was extended by {piece}")

    def discard(self, push: PushRef) -> None:
        """Forget a clock's increments."""
        self.ticks.pop(push.ticket, None)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def contents(self) -> Contents:
        """Every table's values and what its rule remembers, as they lie."""
        filled = [table for table in self.tables if table.filled]
        shards = {
            f"{table.spec.name}.{number}": torch.from_numpy(shard)
            for table in filled
            for number, shard in enumerate(table.shards)
        }
        return Contents({TABLES: shards}, {"tables": msgspec.to_builtins([table.spec for table in filled])})

    def restore(self, contents: Contents) -> None:
        """Go on with these tables; they are opened again under the same names."""
        for spec in msgspec.convert(contents.head["tables"], list[TableSpec], strict=False):
            table = self.tables[self.number_of(spec)]
            for number, home in enumerate(table.shards):
                home[:] = contents.files[TABLES][f"{spec.name}.{number}"].numpy()
            table.filled = True
