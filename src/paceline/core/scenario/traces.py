"""Recorded traces that replace synthetic times: workers' measured batch times, or a table of measured throughputs.

Both are read whole when a scenario is loaded, so that a broken file is refused before anything runs. Batch times are
divided by the file's median: a trace gives the shape of the noise, the scenario its scale.

A scenario may come from somebody else and name any file of this machine. So a refusal repeats nothing that stands in a
trace, each file is read once however often it is named, and all files of a scenario together have a largest size.
"""

import csv
import io
import math
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline.core.errors import ScenarioError
from paceline.core.regular_files import read_text
from paceline.core.values import shown

TIME_COLUMNS = ("batch_time_norm", "seconds")
MAX_BYTES = 4 << 20  # of all traces of a scenario: hundreds of thousands of batch times, read in a second

Cell = tuple[str, str]  # the names of a row and a column
Factors = tuple[tuple[float, ...], ...]


class Traces:
    """The traces of one scenario, found relative to the folder of its file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._left = MAX_BYTES
        self._factors: dict[str, Factors] = {}

    def batch_factors(self, file: str) -> Factors:
        """Return each worker's batch times over the file's median: workers by id, times in the order of `time`."""
        if file not in self._factors:
            self._factors[file] = self._read_factors(file)
        return self._factors[file]

    def _read_factors(self, file: str) -> Factors:
        header, rows = self._rows(file)
        value_column = next((name for name in TIME_COLUMNS if name in header), None)
        missing = [name for name in ("worker", "time") if name not in header]
        missing += [] if value_column else [" or ".join(TIME_COLUMNS)]
        if value_column is None or missing:
            raise ScenarioError(
                f"trace {shown(file)} has no column {', '.join(missing)}; a trace of batch times needs worker, time "
                f"and {' or '.join(TIME_COLUMNS)} in its first line"
            )
        times: dict[float, list[tuple[float, float]]] = {}
        for number, row in rows:
            seconds = _number(file, number, value_column, row, header)
            if seconds <= 0:
                raise ScenarioError(
                    f"trace {shown(file)}, line {number}: {value_column} must be > 0; leave the line out"
                )
            worker = _number(file, number, "worker", row, header)
            times.setdefault(worker, []).append((_number(file, number, "time", row, header), seconds))
        if not times:
            raise _no_rows(file)
        median = statistics.median(seconds for rows in times.values() for _, seconds in rows)
        # The sort key is the time alone: rows of equal time keep the order of the file.
        return tuple(
            tuple(seconds / median for _, seconds in sorted(times[worker], key=lambda row: row[0]))
            for worker in sorted(times)
        )

    def cells(self, file: str, wanted: Iterable[Cell]) -> dict[Cell, float]:
        """Return positive numbers of a table whose first column names its rows; the first row of a name counts."""
        header, rows = self._rows(file)
        missing: dict[str, list[str]] = {}
        for name, column in wanted:
            if column not in list(header)[1:]:
                raise ScenarioError(f"trace {shown(file)} has no column {shown(column)}; its first line names them")
            missing.setdefault(name, []).append(column)
        found: dict[Cell, float] = {}
        empty = True
        for number, row in rows:
            empty = False
            for column in missing.pop(row[0], ()):
                cell = found[row[0], column] = _number(file, number, column, row, header)
                if cell <= 0:
                    raise ScenarioError(
                        f"trace {shown(file)}, line {number}: {column} must be > 0 to be a speed; take another cell"
                    )
        if empty:
            raise _no_rows(file)
        if missing:
            name = next(iter(missing))
            raise ScenarioError(f"trace {shown(file)} has no row {shown(name)}; its first column names them")
        return found

    def _rows(self, file: str) -> tuple[dict[str, int], Iterator[tuple[int, list[str]]]]:
        """Return the places of the columns by their names, and the rows with their line numbers."""
        try:
            text = read_text(self._folder / file, self._left)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            most = f" (all traces of a scenario together may have {MAX_BYTES:,})" if self._left < MAX_BYTES else ""
            raise ScenarioError(
                f"cannot read trace {shown(file)}: {reason}{most}; paths are relative to the scenario file"
            ) from error
        self._left -= len(text.encode())
        rows = _counted(text, file)
        _, names = next(rows, (0, []))
        header = {name: place for place, name in enumerate(names) if name}
        if not header:
            raise _no_rows(file)
        return header, rows


def _counted(text: str, file: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows that are not empty, with their line numbers."""
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise ScenarioError(
            f"cannot read trace {shown(file)}: line {reader.line_num} is not CSV; correct it, or take another file"
        ) from error


def _no_rows(file: str) -> ScenarioError:
    return ScenarioError(f"trace {shown(file)} has no rows; it must be a CSV file with a header line and data below it")


def _number(file: str, line: int, column: str, row: list[str], header: dict[str, int]) -> float:
    place = header[column]
    try:
        value = float(row[place]) if place < len(row) else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ScenarioError(f"trace {shown(file)}, line {line}: {column} must be a finite number; correct it")
    return value
