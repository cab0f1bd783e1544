"""Tables split by rows: row r of every table is in shard r modulo the number of shards, with its rule's state.

Rules act on rows, so whoever applies a clock's increments to some rows comes to the bits that one server has there.
Stripes need no table's size, and spread rows that are used most: those are often the first.
"""

from collections.abc import Sequence
from typing import assert_never

import msgspec
import numpy as np
import torch

from paceline.core.errors import PeerError
from paceline.shards import commands as c
from paceline.tables.messages import TableLog
from paceline.tables.positions import add_log
from paceline.tables.rowwise import Rows
from paceline.tables.table_store import LazyRows, ServerTable


def places_of(rows: Rows | None, shard: int, shards: int) -> Rows | slice:
    """Return where among these rows those of a shard are."""
    return slice(shard, None, shards) if rows is None else np.flatnonzero(rows % shards == shard)


def part_of(log: TableLog, shard: int, shards: int) -> TableLog:
    """Return a shard's part of one clock's increments to a table, with rows as the shard counts them."""
    chosen = places_of(log.rows, shard, shards)
    rows = None if log.rows is None else log.rows[chosen] // shards
    return TableLog(log.table, rows, np.ascontiguousarray(log.sums[chosen]))


class TableStripes:
    """One shard's rows of all tables, and its parts of clocks until the coordinator drops them."""

    def __init__(self, shard: int, shards: int) -> None:
        self._shard, self._shards = shard, shards
        self._tables: list[ServerTable] = []
        self._ticks: dict[tuple[str, int], list[TableLog]] = {}

    @property
    def nbytes_of_last(self) -> int:
        """Bytes of the table that was made last."""
        spec = self._tables[-1].spec
        return spec.rows * spec.row_bytes

    def hold(self, owner: str, number: int, logs: Sequence[TableLog]) -> None:
        """Keep the shard's part of a clock."""
        for log in logs:
            self._require_fit(log)
        self._ticks[owner, number] = list(logs)

    def _require_fit(self, log: TableLog) -> None:
        if not 0 <= log.table < len(self._tables):
            raise PeerError(f"it adds to table {log.table}, and there are {len(self._tables)}")
        spec = self._tables[log.table].spec
        count = spec.rows if log.rows is None else len(log.rows)
        if log.sums.shape != (count, spec.width) or log.sums.dtype != spec.dtype:
            raise PeerError(
                f"it adds {log.sums.dtype} of shape {log.sums.shape} to {count} rows of table {spec.name!r}, which is "
                f"of {spec.dtype} and width {spec.width}"
            )
        if log.rows is not None and count and not 0 <= log.rows.min() <= log.rows.max() < spec.rows:
            raise PeerError(f"it adds to a row that is not one of the {spec.rows} here of table {spec.name!r}")

    def drop_after(self, owner: str, number: int) -> None:
        """Forget the clocks of a worker that come after this one."""
        for key in [key for key in self._ticks if key[0] == owner and key[1] > number]:
            del self._ticks[key]

    def rows(self, table: int, rows: bytes | None) -> LazyRows:
        """Return rows of a table to be sent."""
        return LazyRows(self._tables[table], None if rows is None else np.frombuffer(rows, np.int64))

    def carry_out(self, command: c.TableCommand, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """Carry out a command; return the tensors of its answer, None if it is not answered."""
        match command:
            case c.ApplyTick():
                for log in self._ticks[command.owner, command.number]:
                    self._tables[log.table].apply(log.rows, log.sums)
            case c.DropTicks():
                for key in command.ticks:
                    self._ticks.pop(key, None)
            case c.MakeTable():
                own = len(range(self._shard, command.spec.rows, self._shards))
                self._tables.append(ServerTable(msgspec.structs.replace(command.spec, rows=own, eager=False)))
            case c.FillTable():
                self._tables[command.table].fill(tensors["values"].numpy(), saved=command.saved)
                return {}
            case c.HoldTick():
                parts = [
                    (tensors[f"{i}.rows"].numpy(), tensors[f"{i}.sums"].numpy()) for i in range(len(command.tables))
                ]
                self.hold(
                    "", command.number, [TableLog(t, *part) for t, part in zip(command.tables, parts, strict=True)]
                )
                return {}
            case c.ReadTables():
                return {t.spec.name: torch.from_numpy(t.read(None)[:, : t.spec.width].copy()) for t in self._tables}
            case c.SaveTables():
                return {name: block for table in self._tables for name, block in table.saved().items()}
            case c.SaveTicks():
                return self._written(command.ticks)
            case _:
                assert_never(command)
        return None

    def _written(self, ticks: Sequence[tuple[str, str, int]]) -> dict[str, torch.Tensor]:
        """Return the increments of these clocks, with rows as the whole table counts them."""
        tensors: dict[str, torch.Tensor] = {}
        for name, owner, number in ticks:
            for i, log in enumerate(self._ticks[owner, number]):
                own = np.arange(self._tables[log.table].spec.rows) if log.rows is None else log.rows
                add_log(tensors, f"{name}.{i}", own * self._shards + self._shard, log.sums)
        return tensors
