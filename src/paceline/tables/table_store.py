"""The server's tables: their values, in blocks of some rows each, and how many of each worker's clocks are in them.

The coordinator's actions are carried out here: Apply adds a completed clock's increments, Grant permits the next clock.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
import torch

from paceline.core.errors import CheckpointError, InternalError
from paceline.core.updates import UNMEASURED, Contents, Merged, PushRef
from paceline.server.workers import GrantOrder
from paceline.strategies.clocks import Clocks
from paceline.tables import messages as t
from paceline.tables.positions import Cut, Position, RestoredPositions
from paceline.tables.rowwise import Array, Rows, parse_rule
from paceline.tables.table_spec import TableSpec

if TYPE_CHECKING:
    from paceline.server.run import ServerRun

BLOCK_BYTES = 1 << 28  # at most, since a checkpoint writes one block at a time
TABLES = "tables.safetensors"  # in a checkpoint
OF_SHARD = "tables-{}.safetensors"  # likewise, where several servers hold the tables
UNTOLD = 16  # applied clocks after which a worker that reads nothing gets a confirmation


class LazyRows:
    """Rows of a table that are copied only when the transport knows where to, which saves one copy."""

    def __init__(self, table: "ServerTable", rows: Rows | None) -> None:
        self._table, self._rows = table, rows
        home = table.blocks[0]
        self.dtype = home.dtype
        self.shape = (table.spec.rows if rows is None else len(rows), home.shape[1])
        self.nbytes = self.shape[0] * self.shape[1] * home.itemsize

    def write_to(self, out: Array) -> None:
        """Copy the rows into `out`."""
        self._table.read_into(self._rows, out)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        del dtype, copy
        return self._table.read(self._rows)


class TableRecord:
    """What the host knows of a table, wherever its values are."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.filled = False  # whether it has its first values
        self.changes = 0  # logs applied so far
        self.changed = np.zeros(spec.rows, dtype=np.int64) if spec.eager else None  # the last change of each row

    def fill(self, values: Array, *, saved: bool = False) -> None:
        """Set the first values; a single row is used for all. `saved`: with the rule's state, from a checkpoint."""
        raise NotImplementedError

    def mark(self, rows: Rows | None) -> None:
        """Note that these rows have changed."""
        self.changes += 1
        if self.changed is not None:
            self.changed[slice(None) if rows is None else rows] = self.changes


class ServerTable(TableRecord):
    """A table's values, with its rule's state beside them."""

    def __init__(self, spec: TableSpec) -> None:
        super().__init__(spec)
        self._rule = parse_rule(spec.update)
        self._each = max(1, min(spec.rows, BLOCK_BYTES // spec.row_bytes))  # rows of a block
        self.blocks: list[Array] = [
            np.zeros((min(self._each, spec.rows - begin), spec.columns), dtype=spec.dtype)
            for begin in range(0, max(1, spec.rows), self._each)
        ]

    def fill(self, values: Array, *, saved: bool = False) -> None:
        columns = self.spec.columns if saved else self.spec.width
        for number, block in enumerate(self.blocks):
            begin = number * self._each
            block[:, :columns] = values if len(values) == 1 else values[begin : begin + len(block)]
        self.filled = True

    def apply(self, rows: Rows | None, sums: Array) -> None:
        """Apply what one worker adds in one clock, by the table's rule; rows are distinct, None means all."""
        for block, places, chosen in self._parts(rows):
            self._rule.apply(block, places, sums[chosen])
        self.mark(rows)

    def read(self, rows: Rows | None) -> Array:
        """Return a copy of these rows."""
        if len(self.blocks) == 1:
            return self.blocks[0].copy() if rows is None else self.blocks[0].take(rows, axis=0)
        count = self.spec.rows if rows is None else len(rows)
        values = np.empty((count, self.spec.columns), dtype=self.spec.dtype)
        self.read_into(rows, values)
        return values

    def read_into(self, rows: Rows | None, out: Array) -> None:
        """Copy these rows into `out`."""
        if len(self.blocks) == 1 and rows is not None:
            self.blocks[0].take(rows, axis=0, out=out, mode="clip")  # mode "raise" copies twice; rows are checked
            return
        for block, places, chosen in self._parts(rows):
            out[chosen] = block[places]

    def _parts(self, rows: Rows | None) -> Iterator[tuple[Array, Rows | slice, Rows | slice]]:
        """Yield each block that has some of these rows, with their places in the block and in `rows`."""
        if rows is None:
            for number, block in enumerate(self.blocks):
                begin = number * self._each
                yield block, slice(None), slice(begin, begin + len(block))
        elif len(self.blocks) == 1:
            yield self.blocks[0], rows, slice(None)
        else:
            owner = rows // self._each
            for number in np.unique(owner):
                chosen = np.flatnonzero(owner == number)
                yield self.blocks[number], rows[chosen] - number * self._each, chosen

    def saved(self) -> dict[str, torch.Tensor]:
        """Return all that a checkpoint needs, without a copy."""
        return {f"{self.spec.name}.{number}": torch.from_numpy(block) for number, block in enumerate(self.blocks)}


def saved_rows(spec: TableSpec, files: Mapping[str, Mapping[str, torch.Tensor]]) -> Array:
    """Return a table's rows, with the rule's state, from a checkpoint of any number of servers."""
    names = [TABLES, *(OF_SHARD.format(shard) for shard in range(len(files)))]
    held = [list(_blocks(spec.name, files[name])) for name in names if name in files]
    found = [sum(map(len, blocks)) for blocks in held]
    if found != [len(range(shard, spec.rows, len(held))) for shard in range(len(held))]:
        raise CheckpointError(f"the rows of table {spec.name!r} that it holds are not all {spec.rows}: {found}")
    if found == [len(held[0][0])]:
        return held[0][0]
    values = np.empty((spec.rows, spec.columns), dtype=spec.dtype)
    for shard, blocks in enumerate(held):
        values[shard :: len(held)] = np.concatenate(blocks)
    return values


def _blocks(name: str, tensors: Mapping[str, torch.Tensor]) -> Iterator[Array]:
    for number in itertools.count():
        if f"{name}.{number}" not in tensors:
            return
        yield tensors[f"{name}.{number}"].numpy()


class Reader:
    """What the tables know of one worker."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.first = 0  # the first clock that it completes
        self.order: GrantOrder | None = None  # the grant of the clock it is in
        self.granted = 0  # the clock that its grant completes
        self.received = 0  # clocks delivered, including those before it joined
        self.applied = 0  # of these, the clocks that are in the tables
        self.told = 0  # of these, the clocks confirmed to the worker
        self.offset = 0  # its clock less the strategy's count of it
        self.aside = False  # parked by a table's own staleness, and absent for the strategy
        self.returns = False  # has joined again after that, and waits for its grant
        self.entered = False
        self.era = 0  # barriers passed: each may set its clock back
        self.overtaking: dict[int, tuple[t.Tick, PushRef]] = {}  # ticks that arrived before an earlier one
        self.early: deque[tuple[t.Tick, PushRef]] = deque()  # ticks that arrived before their grant
        self.parked: list[t.Fetch] = []
        self.parked_since: float | None = None  # since when a table's own staleness parks it in a granted clock
        self.barrier: t.AtBarrier | None = None
        self.rests_since = 0.0  # when its wait at the barrier began
        self.passing: t.AtBarrier | None = None  # the barrier that has opened for it
        self.kept: dict[int, tuple[Array, int]] = {}  # per eager table: the rows it caches, and the last change sent

    @property
    def passed_on(self) -> int:
        """Clocks that the strategy knows."""
        return self.received - len(self.early)

    def waits_for(self, read: t.Fetch) -> bool:
        """Whether the worker can be waiting for this read; a prefetch is not waited for."""
        return read.clock <= self.received


class TableStore:
    """All tables of a run, and each worker's clock on them."""

    of_clocks: ClassVar[bool] = True
    in_parts: ClassVar[bool] = False  # clocks come without their increments, which several servers hold

    def __init__(self, run: "ServerRun") -> None:
        self._run = run
        self._own: list[ServerTable] = []
        self.tables: list[TableRecord] = []
        self.clocks = Clocks()  # applied clocks of the workers present
        self.counts = False  # whether there was a worker present
        self.readers: dict[int, Reader] = {}
        self.ticks: dict[int, t.Tick] = {}  # clocks passed to the strategy and not yet applied, by ticket
        self.due: set[int] = set()  # workers that `Host.settle` has to look at
        self.restored = RestoredPositions()
        self.standing: dict[int, t.ClockStanding] = {}  # of processes that outlived an earlier server
        self.starts: dict[int, int] = {}  # clocks from which workers go on, where that is not the slowest's
        self.leading: set[int] = set()  # workers that went on from such a clock since the last `Host.settle`
        self.numbers: dict[str, int] = {}  # of tables, by name

    def number_of(self, spec: TableSpec) -> int:
        """Return the number of the table of that name; make the table if there is none."""
        number = self.numbers.setdefault(spec.name, len(self.tables))
        if number == len(self.tables):
            self.tables.append(self._make(spec, number))
        return number

    # -- values: those of several servers override this ---------------------------------------------------------------

    def _make(self, spec: TableSpec, number: int) -> TableRecord:
        """Make the table of this number."""
        del number
        self._own.append(ServerTable(spec))
        return self._own[-1]

    def write(self, tick: t.Tick) -> None:
        """Apply one clock's increments to the tables."""
        for log in tick.logs:
            self._own[log.table].apply(log.rows, log.sums)

    def rows(self, worker: int, table: int, rows: Rows | None, clock: int | None) -> t.Rows:
        """Return the message that brings a worker these rows, for a read at `clock` or unasked."""
        reader = self.readers[worker]
        reader.told = reader.applied
        return t.Rows(table, rows, LazyRows(self._own[table], rows), self.clocks.min, reader.applied, clock)

    def snapshot(self) -> dict[str, Array]:
        """Return a copy of every table, by name."""
        return {table.spec.name: table.read(None)[:, : table.spec.width] for table in self._own}

    def contents(self) -> Contents:
        """Return every table's values and its rule's state, without a copy."""
        filled = [table for table in self._own if table.filled]
        blocks = {name: block for table in filled for name, block in table.saved().items()}
        return Contents({TABLES: blocks}, {"tables": msgspec.to_builtins([table.spec for table in filled])})

    def keep(self, tick: t.Tick) -> t.Tick:
        """Take in a clock of a checkpoint, with its increments, until it is written."""
        return tick

    def late_contents(self, cut: Cut) -> Contents:
        """Return what a checkpoint holds of the clocks that are not in its tables."""
        return cut.contents([table.spec.name for table in self.tables])

    @property
    def may_restart(self) -> bool:
        """Whether a server that dies is started again, and workers have to keep what it may lose."""
        return self._run.checkpoints.every is not None

    def open_barrier(self, resting: Sequence[tuple[int, Reader]]) -> None:
        """Set the clocks from which workers go on after a barrier, where that is not the slowest's.

        Those that passed it under an earlier server go on from the same clock again. Scripts that were resumed call
        barriers again that they had passed; their clocks stay, or some iterations would be made twice or never.
        """
        barriers = [reader.barrier for _, reader in resting if reader.barrier is not None]
        agreed = next((barrier.passed for barrier in barriers if barrier.passed is not None), None)
        # The states that have come are from before the barrier. Workers that send again what they did have none.
        self._run.checkpoints.begin_again(vain=agreed is None)
        if agreed is not None:
            self.starts.update((worker, agreed) for worker, _ in resting)
        elif any(barrier.number <= self.restored.repeats for barrier in barriers):
            self.starts.update((worker, reader.applied) for worker, reader in resting)

    # -- called by the coordinator -----------------------------------------------------------------------------------

    def grant(self, order: GrantOrder) -> None:
        """Grant a worker its next clock."""
        worker, run = order.worker, self._run
        through = run.workers.records[worker].through
        reader = self.readers.get(worker)
        if reader is None or reader.incarnation != order.incarnation:
            reader = self.readers[worker] = Reader(order.incarnation)
            self._place(worker, reader)
        if worker not in self.clocks.of:  # it joins, or returns from a barrier
            # The strategy may count otherwise: workers that step aside, or go on at clocks of their own, join it at
            # its slowest's clock. Only before anybody has a clock here is its count all that is known.
            start = self.clocks.min if self.counts else through - 1
            if worker in self.starts:
                start = self.starts.pop(worker)
                self.leading.add(worker)
            self.clocks.enter(worker, start)
            self.counts = True
            reader.first, reader.offset = start + 1, start - (through - 1)
            reader.received, reader.applied, reader.told = start + len(reader.early), start, start
        elif reader.returns:
            reader.offset, reader.returns = reader.passed_on - (through - 1), False
        reader.order, reader.granted = order, through + reader.offset
        self.due.add(worker)
        number = run.checkpoints.number_for(worker) if run.checkpoints.possible else None
        if number is not None:
            run.engine.send(worker, t.Save(number))

    def _place(self, worker: int, reader: Reader) -> None:
        """Let a worker go on where it stood in the checkpoint, with the clocks that it had sent after the tables'."""
        position = self.restored.place(worker, reader.incarnation, self.standing.get(worker))
        if position is not None:
            self.starts[worker], reader.era = position.applied, position.era
            reader.early += [(tick, PushRef(worker, reader.incarnation, 0, 0)) for tick in position.ticks]
        self.write_loose()

    def write_loose(self) -> int:
        """Apply the clocks of a checkpoint whose workers do not come back; return how many."""
        loose = self.restored.take_loose()
        for tick in loose:
            self.write(tick)
        return len(loose)

    def cancel(self, worker: int, ticket: int) -> None:
        """Do nothing: a clock cannot be taken back."""

    def apply(self, pushes: Sequence[PushRef], weights: Sequence[float], *, stock: bool) -> Merged:
        """Apply the increments of these clocks, as the script wrote them."""
        del weights, stock  # meant for gradients
        for push in pushes:
            tick, worker = self.ticks.pop(push.ticket), push.worker
            self.write(tick)
            reader = self.readers.get(worker)
            if reader is not None and reader.incarnation == push.incarnation:
                reader.applied = tick.through
                if reader.applied - reader.told >= UNTOLD:
                    self.due.add(worker)
                if worker in self.clocks.of:  # not resting at a barrier
                    self.clocks.advance(worker, tick.through)
        return UNMEASURED

    def extend(self, held: PushRef, piece: PushRef) -> PushRef:
        """Raise: a clock arrives in one piece."""
        raise InternalError(f"clock {held} of a table was extended by {piece}")

    def discard(self, push: PushRef) -> None:
        """Drop a clock's increments."""
        self.ticks.pop(push.ticket, None)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def positions(self) -> tuple[dict[int, Position], list[t.Tick]]:
        """Return where the workers stand, and clocks that are held of processes that are gone."""
        held: dict[int, list[t.Tick]] = {}
        loose: list[t.Tick] = []
        for _, push in sorted(self._run.coordinator.held.items()):
            reader, tick = self.readers.get(push.worker), self.ticks.get(push.ticket)
            if tick is None:
                continue
            if reader is not None and reader.incarnation == push.incarnation:
                held.setdefault(push.worker, []).append(tick)
            else:
                loose.append(tick)
        positions = self.restored.absent
        for worker, reader in self.readers.items():
            early = [tick for tick, _ in reader.early] + [tick for tick, _ in reader.overtaking.values()]
            ticks = [*held.get(worker, ()), *early]
            positions[worker] = Position(reader.incarnation, reader.era, reader.applied, ticks)
        return positions, loose

    def restore(self, contents: Contents) -> None:
        """Load the tables of a checkpoint; scripts open them again under the same names."""
        for spec in msgspec.convert(contents.head["tables"], list[TableSpec], strict=False):
            self.tables[self.number_of(spec)].fill(saved_rows(spec, contents.files), saved=True)
