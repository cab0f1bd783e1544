"""Rows of arrays, many at a time and without a loop over them: sums where rows are named more than once, and writes."""

import numpy as np
import numpy.typing as npt

from paceline.tables.table_spec import Array, Rows


def put_rows(target: Array, places: Array | slice, rows: Array) -> None:
    """`target[places] = rows` for distinct places: each row is moved as one thing, which NumPy's own does not."""
    if isinstance(places, slice):
        target[places] = rows
        return
    whole = np.dtype((np.void, target.shape[1] * target.itemsize))
    rows = np.ascontiguousarray(rows, dtype=target.dtype)
    np.put(target.view(whole).reshape(-1), places, rows.view(whole).reshape(-1))


def add_rows(target: Array, places: Array | slice, deltas: Array) -> None:
    """`target[places] += deltas` for distinct places."""
    if isinstance(places, slice):
        target[places] += deltas
        return
    sums = target.take(places, axis=0)
    sums += deltas
    put_rows(target, places, sums)


class RowDedup:
    """A scrap of paper as long as a table: tells in two strokes whether rows are distinct."""

    def __init__(self, rows: int) -> None:
        self._last = np.zeros(rows, dtype=np.int32)

    def last_of_each(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of these mentions is the last of its row."""
        order = np.arange(len(rows), dtype=np.int32)
        self._last[rows] = order
        return np.asarray(self._last[rows] == order)

    def distinct(self, rows: Rows) -> Rows:
        """Each of the rows once."""
        last = self.last_of_each(rows)
        return rows if last.all() else rows[last]

    def summed(self, rows: Rows, deltas: Array) -> tuple[Rows, Array]:
        """Each of the rows once, and the sum of what is said of it."""
        last = self.last_of_each(rows)
        if last.all():
            return rows, deltas
        distinct = rows[last]
        self._last[distinct] = np.arange(len(distinct), dtype=np.int32)
        places = self._last[rows]
        shape = (len(distinct), deltas.shape[1])
        if deltas.dtype.kind == "i":  # exact, which doubles are not
            sums = np.zeros(shape, dtype=deltas.dtype)
            np.add.at(sums, places, deltas)
            return distinct, sums
        cells = places.astype(np.int64)[:, None] * shape[1] + np.arange(shape[1])
        counted = np.bincount(cells.ravel(), weights=deltas.ravel(), minlength=shape[0] * shape[1])
        return distinct, counted.astype(deltas.dtype).reshape(shape)
