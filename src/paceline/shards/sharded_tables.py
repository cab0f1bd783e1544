"""The coordinator's side of tables split by rows: it decides as with one server, and shards hold the values.

Every change and every read is a command in the one stream that all shards follow, so the rows of an answer are of one
moment, whichever shards they come from. Increments and rows do not come through here, but for first values, evaluations
and results.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from paceline.core.errors import PeerError
from paceline.core.updates import Contents
from paceline.shards import commands as c
from paceline.shards.sharded_store import FileSums, ShardLinks
from paceline.shards.table_endpoint import without_sums
from paceline.shards.table_stripes import part_of, places_of
from paceline.tables import messages as t
from paceline.tables import positions
from paceline.tables.rowwise import Array, Rows, bytes_of_logs
from paceline.tables.server import TableExchange
from paceline.tables.table_spec import TableSpec
from paceline.tables.table_store import OF_SHARD, TableRecord, TableStore

if TYPE_CHECKING:
    from paceline.server.run import ServerRun


class ShardedTable(TableRecord):
    """A table whose rows are in shards."""

    def __init__(self, spec: TableSpec, number: int, links: ShardLinks) -> None:
        super().__init__(spec)
        self._number = number
        self._links = links
        links.send(c.MakeTable(spec))

    def fill(self, values: Array, *, saved: bool = False) -> None:
        columns = self.spec.columns if saved else self.spec.width
        if values.shape not in ((1, columns), (self.spec.rows, columns)):
            raise PeerError(
                f"table {self.spec.name!r} has {self.spec.rows} rows of {columns} numbers, and was sent values of "
                f"shape {values.shape}"
            )
        count = len(self._links)
        parts = [values if len(values) == 1 else values[shard::count] for shard in range(count)]
        commands = [c.FillTable(self._number, saved)] * count
        tensors = [{"values": torch.from_numpy(np.array(part))} for part in parts]
        self._links.ask_each(commands, c.CommandDone, tensors)
        self.filled = True


class ShardedTableStore(TableStore):
    """Tables in shards, and each worker's clock on them."""

    in_parts = True

    def __init__(self, run: "ServerRun", links: ShardLinks) -> None:
        super().__init__(run)
        self._links = links
        self._sent = 0  # messages with rows, so far
        self._kept = 0  # clocks of a checkpoint, likewise

    def _make(self, spec: TableSpec, number: int) -> TableRecord:
        return ShardedTable(spec, number, self._links)

    def write(self, tick: t.Tick) -> None:
        if tick.parts is not None:
            self._links.send(c.ApplyTick(tick.parts.owner, tick.parts.number))
        for log in tick.logs:
            self.tables[log.table].mark(log.rows)

    def rows(self, worker: int, table: int, rows: Rows | None, clock: int | None) -> t.Rows:
        """Let shards send a worker these rows; return the message that goes with them."""
        reader, spec, count = self.readers[worker], self.tables[table].spec, len(self._links)
        reader.told = reader.applied
        self._sent += 1
        engine: Any = self._run.engine
        token = engine.token(worker)
        commands: list[c.Command | None] = []
        for shard in range(count):
            own = None if rows is None else rows[places_of(rows, shard, count)] // count
            named = None if own is None else own.tobytes()
            commands.append(None if named == b"" else c.SendRows(token, self._sent, table, named))
        self._links.send_some(commands)
        nbytes = spec.row_bytes * (spec.rows if rows is None else len(rows))
        values = np.empty((0, spec.columns), spec.dtype)
        return t.Rows(table, rows, values, self.clocks.min, reader.applied, clock, (self._sent, nbytes))

    def snapshot(self) -> dict[str, Array]:
        specs = [table.spec for table in self.tables]
        whole = {spec.name: np.empty((spec.rows, spec.width), spec.dtype) for spec in specs}
        for shard, (_, parts) in enumerate(self._links.read_states(c.ReadTables())):
            for name, part in parts.items():
                whole[name][shard :: len(self._links)] = part.numpy()
        return whole

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def contents(self) -> Contents:
        """Return how shards write the tables: each its own file."""
        filled = [table.spec for table in self.tables if table.filled]
        return Contents({}, {"tables": msgspec.to_builtins(filled)}, self._save)

    def _save(self, folder: Path) -> tuple[FileSums, dict[str, Any]]:
        return self._links.save(folder, OF_SHARD, c.SaveTables)[0], {}

    def late_contents(self, cut: positions.Cut) -> Contents:
        return cut.contents([table.spec.name for table in self.tables], self._save_ticks)

    def _save_ticks(self, folder: Path, ticks: Mapping[str, t.TickParts]) -> FileSums:
        named = [(name, parts.owner, parts.number) for name, parts in ticks.items()]
        return self._links.save(folder, positions.OF_SHARD, lambda path: c.SaveTicks(path, named))[0]

    def keep(self, tick: t.Tick) -> t.Tick:
        """Let shards hold a clock of a checkpoint."""
        if not tick.logs:
            return tick
        self._kept += 1
        count = len(self._links)
        tensors: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
        for i, log in enumerate(tick.logs):
            rows = np.arange(self.tables[log.table].spec.rows) if log.rows is None else log.rows
            for shard, own in enumerate(tensors):
                part = part_of(t.TableLog(log.table, rows, log.sums), shard, count)
                positions.add_log(own, str(i), part.rows, part.sums)
        self._links.ask_each([c.HoldTick(self._kept, [log.table for log in tick.logs])] * count, c.CommandDone, tensors)
        logs = [without_sums(log, eager=self.tables[log.table].spec.eager) for log in tick.logs]
        parts = self._links.ticks.referred(t.TickParts(self._kept, bytes_of_logs(tick.logs)))
        return msgspec.structs.replace(tick, logs=logs, parts=parts)


class ShardedTableExchange(TableExchange):
    """The exchange of a run whose workers share tables in shards; its engine has them."""

    def _make_store(self, run: "ServerRun") -> TableStore:
        engine: Any = run.engine
        return ShardedTableStore(run, engine.shards)
