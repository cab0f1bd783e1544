"""Recorded traces that replace synthetic times: workers' measured batch times, or a table of measured throughputs.

Both are read whole when a scenario is loaded, so that a broken file is refused before anything runs. Batch times are
divided by the file's median: a trace gives the shape of the noise, the scenario its scale.
"""

import csv
import io
import math
import statistics
from pathlib import Path

from paceline.core.errors import ScenarioError
from paceline.core.values import nearest, shown

TIME_COLUMNS = ("batch_time_norm", "seconds")
MAX_BYTES = 256 << 20  # most bytes of a scenario or trace: no real one comes near, and a device file has no end


def batch_factors(path: Path) -> tuple[tuple[float, ...], ...]:
    """Return each worker's batch times over the file's median: workers by id, times in the order of `time`."""
    lines = _lines(path)
    value_column = next((name for name in TIME_COLUMNS if name in lines[0][1]), None)
    missing = [name for name in ("worker", "time") if name not in lines[0][1]]
    missing += [] if value_column else [" or ".join(TIME_COLUMNS)]
    if value_column is None or missing:
        raise ScenarioError(
            f"trace {path} has no column {', '.join(missing)}, only {', '.join(lines[0][1])}; "
            f"a trace of batch times needs worker, time and {' or '.join(TIME_COLUMNS)}"
        )
    times: dict[float, list[tuple[float, float]]] = {}
    for number, line in lines:
        seconds = _number(path, number, value_column, line[value_column])
        if seconds <= 0:
            raise ScenarioError(
                f"trace {path}, line {number}: {value_column} must be > 0, not {seconds:g}; leave the line out"
            )
        worker = _number(path, number, "worker", line["worker"])
        times.setdefault(worker, []).append((_number(path, number, "time", line["time"]), seconds))
    median = statistics.median(seconds for rows in times.values() for _, seconds in rows)
    # The sort key is the time alone: rows of equal time keep the order of the file.
    return tuple(
        tuple(seconds / median for _, seconds in sorted(times[worker], key=lambda row: row[0]))
        for worker in sorted(times)
    )


def table_cell(path: Path, row: str, column: str) -> float:
    """Return a positive number of a table whose first column names its rows; the first row of that name counts."""
    lines = _lines(path)
    name_column, *columns = lines[0][1]
    if column not in columns:
        raise ScenarioError(f"trace {path} has no column {shown(column)}; {nearest(column, columns)}")
    for number, line in lines:
        if line[name_column] == row:
            cell = _number(path, number, column, line[column])
            if cell <= 0:
                raise ScenarioError(
                    f"trace {path}, line {number}: {column} must be > 0 to be a speed, not {cell:g}; take another cell"
                )
            return cell
    raise ScenarioError(
        f"trace {path} has no row {shown(row)}; {nearest(row, dict.fromkeys(line[name_column] for _, line in lines))}"
    )


def read_text(path: Path) -> str:
    """Read a scenario or trace as text; raise ValueError if it is not UTF-8 or too large."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text ({error})") from None


def _lines(path: Path) -> list[tuple[int, dict[str, str]]]:
    """Read the rows of a CSV file by column name, each with its line number; raise if there is none."""
    try:
        reader = csv.DictReader(io.StringIO(read_text(path), newline=""), restkey="", restval="")
        lines = [(reader.line_num, {name: cell for name, cell in row.items() if name}) for row in reader]
    except (OSError, ValueError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ScenarioError(
            f"cannot read trace {shown(str(path))}: {reason}; paths are relative to the scenario file"
        ) from error
    if not lines or not lines[0][1]:
        raise ScenarioError(f"trace {path} has no rows; it must be a CSV file with a header line and data below it")
    return lines


def _number(path: Path, line: int, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ScenarioError(
            f"trace {path}, line {line}: {column} must be a finite number, not {shown(text)}; correct it"
        )
    return value
