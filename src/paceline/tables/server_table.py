"""One table's home at the server: flat arrays, each of a range of rows."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from paceline.tables.rowwise import add_rows, put_rows
from paceline.tables.table_spec import Array, Rows, TableSpec, parse_rule

SHARD_BYTES = 1 << 28  # of a range: a checkpoint writes one at a time


class LazyRows:
    """Rows of a shelf that are yet to be copied, by whoever knows where they are to go."""

    def __init__(self, shelf: "ServerTable", rows: Rows | None) -> None:
        self._shelf, self._rows = shelf, rows
        self.dtype = np.dtype(shelf.spec.dtype)
        self.shape = (shelf.spec.rows if rows is None else len(rows), shelf.spec.columns)
        self.nbytes = self.shape[0] * shelf.spec.row_bytes

    def write_to(self, out: Array) -> None:
        """Copy them there."""
        self._shelf.read_into(self._rows, out)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        del dtype, copy
        return self._shelf.read(self._rows)


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
        self.changes = 0  # applied so far
        self.changed = np.zeros(spec.rows, dtype=np.int64) if spec.eager else None  # after how many, for each row

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    def fill(self, values: Array) -> None:
        """Start with these, or with one row for all."""
        for number, shard in enumerate(self.shards):
            begin = number * self._each
            shard[:, : self.spec.width] = values if len(values) == 1 else values[begin : begin + len(shard)]

    def apply(self, rows: Rows | None, sums: Array) -> None:
        """Let the rule act on what one worker adds in one clock; rows are distinct, None means all."""
        width = self.spec.width
        for shard, places, chosen in self._parts(rows):
            deltas = sums[chosen]
            if not self._rule.remembers:
                add_rows(shard, places, self._rule.change(deltas, None))
                continue
            part = shard[places]
            part[:, :width] += self._rule.change(deltas, part[:, width:])
            put_rows(shard, places, part)
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
