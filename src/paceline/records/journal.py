"""The journal: one file of JSON lines per run, from which reports, metrics and replay are computed.

Kinds of line: a `header` at each start or restore, a `decision` (of a node: `peer_decision`) per event with its
actions, and an `observation` for anything else. Feeding the events after a header to a fresh strategy reproduces its
actions. A journal of the simulator holds nothing of the machine or the time of day, so equal runs give equal bytes.
"""

import contextlib
import gzip
import math
import os
import shutil
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from paceline.core.actions import Action, Apply, Grant, SetTimer, Track
from paceline.core.errors import JournalError
from paceline.core.events import Applied, Event, Pushed
from paceline.core.peer_actions import PeerAction
from paceline.core.peer_events import PeerEvent
from paceline.core.regular_files import open_regular
from paceline.core.values import shortened, shown
from paceline.records.journal_file import GZIP_HEAD, JournalWriteError, LockedFile, open_locked
from paceline.records.journal_tail import JournalTail

FORMAT = 1
FLUSH_SECONDS = 0.4  # readers are promised new lines at least twice a second
FLUSH_BYTES = 65536
MAX_LINE = 64 << 20  # bytes, as of a decision about half a million workers; a compressed file may hold endless lines


class Restored(msgspec.Struct, frozen=True):
    """State of the run at the checkpoint from which it resumes."""

    version: int
    at: float
    samples_used: int
    samples_lost: int
    pushes: int


class Header(msgspec.Struct, frozen=True, tag="header", tag_field="type", kw_only=True):
    """How the run was started: enough to build the same strategy again."""

    format: int = FORMAT
    engine: str
    strategy: str  # in the form `name:option=value`
    seed: int
    workers: int
    snapshot: dict[str, Any] | None = None  # the strategy's state, if it does not start afresh
    options: dict[str, Any] = {}
    scenario: dict[str, Any] | None = None
    versions: dict[str, str] = {}
    host: str | None = None  # real engines only, as is `started`
    started: str | None = None
    restored: Restored | None = None  # resumed from this checkpoint: what came after it is void
    defaults: int = 1  # which defaults the strategy's options had that are not given; 1: of journals that do not say


class Decision(msgspec.Struct, frozen=True, tag="decision", tag_field="type"):
    """One event and the strategy's actions."""

    event: Event
    actions: list[Action]


class PeerDecision(msgspec.Struct, frozen=True, tag="peer_decision", tag_field="type"):
    """One event of a node and its machine's actions; `life` is the node's incarnation."""

    node: int
    life: int
    event: PeerEvent
    actions: list[PeerAction]


class Observation(msgspec.Struct, frozen=True, tag="observation", tag_field="type", omit_defaults=True):
    """Anything that happened besides the decisions; `what` is its kind, `data` its details."""

    at: float
    what: str
    data: dict[str, Any] = {}
    worker: int | None = None


Line = Header | Decision | PeerDecision | Observation
_decode = msgspec.json.Decoder(Line, strict=False).decode


class Sink(Protocol):
    """A receiver of a run's lines: a file, a metrics fold, a test's list."""

    def write(self, line: Line) -> None: ...


class Lines(list[Line]):
    """A journal in memory, for tests and short experiments."""

    def write(self, line: Line) -> None:
        self.append(line)


class Tee:
    """Passes every line to each of `sinks`, and observations alone to `observations`, unless it is one of the sinks."""

    def __init__(self, *sinks: Sink | None, observations: Sink | None = None) -> None:
        self._sinks = [sink for sink in sinks if sink is not None]
        # By identity: two empty `Lines` are equal.
        known = any(sink is observations for sink in self._sinks)
        self._observations = None if known else observations

    def write(self, line: Line) -> None:
        for sink in self._sinks:
            sink.write(line)
        if self._observations is not None and isinstance(line, Observation):
            self._observations.write(line)


class Writer:
    """Streams lines to a file; compressed if its name ends in `.gz`.

    With `append` the lines follow the existing ones, except a last one that was cut short. A thread flushes at least
    twice a second, even if no further line comes. A flush leaves a mark in compressed bytes, so a compressed journal
    whose header has no `started` is flushed by size alone: the same run gives the same bytes.

    `tail` has the lines that are not flushed yet; with `append`, those of an earlier writer are added first.
    """

    def __init__(self, path: Path, append: bool = False, tail: JournalTail | None = None) -> None:
        self.path = path
        self._zipped = path.suffix == ".gz"
        self._tail = tail
        self._length = 0  # of all lines in the file, before compression
        try:
            if append and path.exists():
                self._raw, self._file, self._length = _reopened(path)
                if tail is not None:
                    self._length += self._file.write(tail.beyond(self._length))
                    self._file.flush()
            else:
                self._raw = open_locked(path)
                self._file = _lines_into(self._raw, path)
        except OSError as error:
            raise self._cannot_write(error) from error
        if tail is not None:
            tail.restart(self._length)
        self._encode = msgspec.json.Encoder().encode_into
        self._buffer = bytearray()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._flusher: threading.Thread | None = None
        self._failure: OSError | None = None
        self._raised = False  # the failure is known to the caller

    def write(self, line: Line) -> None:
        if type(line) is Header:
            self._begin(line)
        with self._lock:
            buffer = self._buffer
            begin = len(buffer)
            if _is_finite(line):
                self._encode(line, buffer, -1)
            else:
                self._encode(spelled_out(msgspec.to_builtins(line, str_keys=True)), buffer, -1)
            buffer += b"\n"
            kept = self._tail is None or self._tail.add(buffer[begin:])
            if len(buffer) > FLUSH_BYTES or not kept:
                self._flush()
        self._raise_failure()

    def flush(self) -> None:
        """Pass everything written so far to the operating system."""
        with self._lock:
            self._flush()
        self._raise_failure()

    def close(self) -> None:
        """Write the rest, stop the flushing thread and close the file."""
        if self._raw.closed:
            return
        self._closing.set()
        if self._flusher is not None:
            self._flusher.join()
        try:
            if self._failure is None:
                self.flush()
                self._file.close()  # of a compressed one, its end
            elif not self._raised:
                self._raise_failure()
        except OSError as error:
            raise self._cannot_write(error) from error
        finally:
            _leave(self._file)
            self._raw.close()
            if self._tail is not None:
                self._tail.close()

    def _begin(self, header: Header) -> None:
        by_time = not self._zipped or header.started is not None
        if by_time and self._flusher is None:
            self._flusher = threading.Thread(target=self._flush_by_time, name="paceline-journal", daemon=True)
            self._flusher.start()

    def _flush_by_time(self) -> None:
        while not self._closing.wait(FLUSH_SECONDS):
            with self._lock:
                self._flush()

    def _flush(self) -> None:
        if not self._buffer or self._failure is not None:
            return
        try:
            self._file.write(self._buffer)
            self._file.flush()
            self._length += len(self._buffer)
            self._buffer.clear()
            if self._tail is not None:
                self._tail.restart(self._length)
        except OSError as error:
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._raised = True
            raise self._cannot_write(self._failure)

    def _cannot_write(self, error: OSError) -> JournalError:
        return JournalWriteError(
            f"cannot write journal {self.path}: {error.strerror}; free some space or give --journal"
        )


def _lines_into(raw: LockedFile, named: Path) -> "IO[bytes] | LockedFile":
    """Return what to write lines to: the file itself, or a compressor if `named` ends in `.gz`."""
    if named.suffix != ".gz":
        return raw
    # mtime=0 and no name, so that equal runs give equal bytes.
    return gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0)  # type: ignore[return-value]


def _reopened(path: Path) -> "tuple[LockedFile, IO[bytes] | LockedFile, int]":
    """Open the file for writing after its last whole line; also return how long its lines are."""
    held = open_locked(path, keep=True)
    if path.suffix != ".gz":
        with path.open("rb") as written:
            length = _end_of_last_line(written)
        held.cut(length)
        return held, held, length
    length = 0
    # Lines after the point where a compressed stream was cut could not be read: copy the whole lines to a new one.
    beside = path.with_name(f".{path.name}.part")
    beside.unlink(missing_ok=True)  # of a run that was killed here
    with contextlib.closing(held):
        raw = open_locked(beside)
        file = _lines_into(raw, path)
        try:
            with path.open("rb") as old, gzip.GzipFile(fileobj=old, mode="rb") as lines:
                for text in _whole_lines(lines, path):
                    length += file.write(text)
            file.flush()
            shutil.copymode(path, beside)
            beside.replace(path)
        except BaseException:
            _leave(file)
            raw.close()
            beside.unlink()
            raise
    return raw, file, length


def _leave(file: "IO[bytes] | LockedFile") -> None:
    """Keep a compressor from writing its end to a file that was cut: there is something missing in between."""
    if isinstance(file, gzip.GzipFile):
        file.fileobj = None  # type: ignore[assignment]


def _end_of_last_line(file: IO[bytes]) -> int:
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - FLUSH_BYTES)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


def _is_finite(line: Line) -> bool:
    """Return whether a line can be encoded as it is: JSON has no infinities and NaN; only these fields can hold one.

    Checks sums instead of terms: if finite numbers overflow, the line is encoded the slow way, with the same result.
    """
    if not isinstance(line, Decision):
        return False
    event = line.event
    numbers = 0.0
    if isinstance(event, Pushed):
        if event.norm is not None or event.loss is not None:
            numbers = (event.norm or 0.0) + (event.loss or 0.0)
    elif isinstance(event, Applied):
        numbers = event.mass + (event.inner_product or 0.0) + (event.norm or 0.0) + (event.loss or 0.0)
    for action in line.actions:
        if isinstance(action, Grant):
            continue
        if isinstance(action, Apply):
            weights = action.weights
            numbers += weights[0] if len(weights) == 1 else sum(weights)
        elif isinstance(action, Track):
            numbers += action.value
        elif isinstance(action, SetTimer):
            numbers += action.at or 0.0
    return math.isfinite(numbers)


def spelled_out(data: Any) -> Any:
    """Return plain data with infinities and NaN as strings."""
    if isinstance(data, float):
        return data if math.isfinite(data) else str(data)
    if isinstance(data, dict):
        return {key: spelled_out(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [spelled_out(value) for value in data]
    return data


def read(path: Path) -> Iterator[Line]:
    """Yield the lines of a journal; a last line that was cut short is left out."""
    try:
        raw = open_regular(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise JournalError(f"cannot open journal {shown(str(path))}: {reason}") from error
    if path.suffix == ".gz" and os.fstat(raw.fileno()).st_size < GZIP_HEAD:  # cut before its first line
        raw.close()
        return
    with raw, gzip.GzipFile(fileobj=raw, mode="rb") if path.suffix == ".gz" else raw as file:
        for number, text in enumerate(_whole_lines(file, path), 1):
            yield parse(text, number, path)


def _whole_lines(file: IO[bytes] | gzip.GzipFile, path: Path) -> Iterator[bytes]:
    while True:
        try:
            text = file.readline(MAX_LINE)
        except EOFError:  # a compressed journal whose run was killed
            return
        except (OSError, zlib.error) as error:
            raise JournalError(f"{path} cannot be read as a journal: {error}") from error
        if len(text) == MAX_LINE:
            raise JournalError(f"{path} has a line of more than {MAX_LINE:,} bytes; is it a journal?")
        if not text.endswith(b"\n"):
            return
        yield text


def parse(text: bytes, number: int, path: Path) -> Line:
    """Return a line of a journal; its number and file are named in errors."""
    try:
        line: Line = _decode(text)
    except (ValueError, RecursionError) as error:  # includes msgspec's errors and invalid UTF-8
        _refuse_newer(text, path)
        raise JournalError(f"{path}, line {number} is not a line of a journal: {shortened(str(error))}") from error
    if isinstance(line, Header):
        _refuse_newer(text, path)
    return line


class _Format(msgspec.Struct):
    format: int = 0


def _refuse_newer(text: bytes, path: Path) -> None:
    """Raise if the line has a newer format; reads that field alone, as the rest may be unknown to this version."""
    try:
        found = msgspec.json.decode(text, type=_Format).format
    except (ValueError, RecursionError):
        return
    if found > FORMAT:
        raise JournalError(
            f"{path} has journal format {found}; this version reads up to {FORMAT}: install a newer paceline"
        )
