"""A journal for the tools people have: a trace for Perfetto, a table of pushes (CSV or Parquet), TensorBoard's scalars.

A trace has a track for each worker with its spans of time, which add up to the report's seconds, and one for the server
with its versions; arrows lead from a push to the version that it became part of.
"""

import csv
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from paceline.core.actions import Action, Apply, Discard
from paceline.core.errors import OptionError
from paceline.core.events import Pushed
from paceline.records.history import History, Kind
from paceline.records.journal import Decision, Header, Line, Observation, read
from paceline.records.scalars import points

Format = Literal["perfetto", "tensorboard", "csv", "parquet"]
FORMATS: tuple[Format, ...] = get_args(Format)
ENDINGS: dict[Format, str] = {"perfetto": ".perfetto.json", "csv": ".csv", "parquet": ".parquet", "tensorboard": ".tb"}
SERVER, WORKERS = 1, 2  # processes of a trace
PART = 100_000  # rows of a Parquet file that are written at once


def export(journal: Path, form: Format, place: Path) -> None:
    """Write the journal in another format."""
    if not any(isinstance(line, Header) for line in read(journal)):  # its first line, so no more is read
        raise OptionError(f"{journal} holds no run yet: it has no header")
    {"perfetto": _perfetto, "csv": _csv, "parquet": _parquet, "tensorboard": _tensorboard}[form](journal, place)


# -- a trace -----------------------------------------------------------------------------------------------------------


class Trace(History):
    """Writes spans and versions as they come, in the JSON format of traces, which Perfetto reads."""

    def __init__(self, write: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(0.0, 0)
        self._write = write
        self._names: set[int] = set()

    def _span(self, worker: int, begin: float, seconds: float, kind: Kind, busy: Any, samples: int = 0) -> None:
        if seconds <= 0:
            return
        if worker not in self._names:
            self._names.add(worker)
            self._write(_named("thread_name", WORKERS, worker, f"worker {worker}"))
        told = {"reason": busy.reason, "clock": busy.clock, **({"samples": samples} if samples else {})}
        self._write({
            "ph": "X", "name": kind, "cat": kind, "pid": WORKERS, "tid": worker, "ts": 1e6 * begin,
            "dur": 1e6 * seconds, "args": told,
        })  # fmt: skip

    def _push(self, event: Pushed) -> None:
        super()._push(event)
        self._write({"ph": "s", "name": "push", "cat": "push", "id": event.push, "pid": WORKERS, "tid": event.worker,
                     "ts": 1e6 * event.at - 1e-3})  # fmt: skip

    def _apply(self, action: Apply) -> None:
        ts = 1e6 * self._at
        told = {"reason": action.reason, "pushes": list(action.pushes), "weights": list(action.weights)}
        super()._apply(action)
        self._write({"ph": "X", "name": f"version {self._versions}", "cat": "apply", "pid": SERVER, "tid": 0, "ts": ts,
                     "dur": 0, "args": told})  # fmt: skip
        for push in action.pushes:
            self._write({"ph": "f", "bp": "e", "name": "push", "cat": "push", "id": push, "pid": SERVER, "tid": 0,
                         "ts": ts})  # fmt: skip


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _perfetto(journal: Path, place: Path) -> None:
    with _opened(place) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(json.dumps(_named("process_name", SERVER, 0, "server")))

        def write(event: dict[str, Any]) -> None:
            if math.isfinite(event.get("ts", 0.0)) and math.isfinite(event.get("dur", 0.0)):  # JSON has no infinities
                file.write(",\n" + json.dumps(event, separators=(",", ":")))

        write(_named("process_name", WORKERS, 0, "workers"))
        trace = Trace(write)
        for line in read(journal):
            trace.write(line)
        file.write("\n]}\n")


def _opened(place: Path) -> Any:
    try:
        return place.open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise OptionError(f"--output: cannot write {place}: {error.strerror}") from error


# -- a table of pushes -------------------------------------------------------------------------------------------------


class PushRow(msgspec.Struct):
    """One push, and what became of it."""

    at: float
    worker: int
    push: int
    clock: int
    read_version: int
    samples: int
    compute_s: float
    transfer_s: float
    wait_s: float
    bytes_up: int
    bytes_down: int
    norm: float | None
    loss: float | None
    applied_at: float | None = None
    version: int | None = None  # that it became part of
    staleness: int | None = None
    weight: float | None = None


def pushes(lines: Iterator[Line]) -> Iterator[PushRow]:
    """Yield pushes once they are applied or discarded, and at the end those that are neither. Pieces are one push."""
    held: dict[int, PushRow] = {}
    version = 0
    for line in lines:
        if isinstance(line, Header) and line.restored is not None:
            yield from held.values()
            held, version = {}, line.restored.version
        elif isinstance(line, Observation) and line.what == "discarded" and line.data["push"] in held:
            yield held.pop(line.data["push"])
        elif isinstance(line, Decision):
            if isinstance(line.event, Pushed):
                _add(held, line.event)
            for action in line.actions:
                yield from _settled(action, held, version, line.event.at)
                version += isinstance(action, Apply) and sum(action.weights) > 0
    yield from held.values()


def _add(held: dict[int, PushRow], event: Pushed) -> None:
    row = PushRow(
        event.at, event.worker, event.push, event.clock, event.read_version, event.samples, event.compute_s,
        event.transfer_s, event.wait_s, event.bytes_up, event.bytes_down, event.norm, event.loss,
    )  # fmt: skip
    before = held.get(event.push)
    if before is not None:  # its samples are the total already
        for name in ("compute_s", "transfer_s", "wait_s", "bytes_up", "bytes_down"):
            setattr(row, name, getattr(row, name) + getattr(before, name))
    held[event.push] = row


def _settled(action: Action, held: dict[int, PushRow], version: int, at: float) -> Iterator[PushRow]:
    if isinstance(action, Discard) and action.push in held:
        yield held.pop(action.push)
    elif isinstance(action, Apply):
        for push, weight in zip(action.pushes, action.weights, strict=True):
            row = held.pop(push, None)
            if row is not None:
                row.applied_at, row.weight = at, weight
                if sum(action.weights) > 0:
                    row.version, row.staleness = version + 1, version - row.read_version
                yield row


def _csv(journal: Path, place: Path) -> None:
    with _opened(place) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(PushRow.__struct_fields__)
        for row in pushes(read(journal)):
            writer.writerow(["" if cell is None else cell for cell in msgspec.structs.astuple(row)])


def _parquet(journal: Path, place: Path) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise OptionError("--format parquet needs pyarrow: pip install 'paceline[export]'") from None
    kinds = {"float": pyarrow.float64(), "int": pyarrow.int64()}
    fields = [(f.name, kinds["float" if "float" in str(f.type) else "int"]) for f in msgspec.structs.fields(PushRow)]
    schema = pyarrow.schema(fields)
    _opened(place).close()
    with pyarrow.parquet.ParquetWriter(place, schema) as writer:
        part: list[dict[str, Any]] = []
        for row in pushes(read(journal)):
            part.append(msgspec.structs.asdict(row))
            if len(part) == PART:
                writer.write_table(pyarrow.Table.from_pylist(part, schema))
                part.clear()
        writer.write_table(pyarrow.Table.from_pylist(part, schema))


# -- scalars -----------------------------------------------------------------------------------------------------------


def _tensorboard(journal: Path, place: Path) -> None:
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise OptionError("--format tensorboard needs tensorboard: pip install 'paceline[export]'") from None
    try:
        place.mkdir(parents=True, exist_ok=True)
        writer = EventFileWriter(str(place))
    except OSError as error:
        raise OptionError(f"--output: cannot write {place}: {error.strerror}") from error
    for point in points(read(journal)):
        values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        writer.add_event(Event(wall_time=point.at, step=point.version, summary=Summary(value=values)))
    writer.close()
