"""Scalars of a run for the tools people have, while it goes on: TensorBoard, Weights & Biases, Trackio, a CSV file.

Each tool is imported only if a run asks for it. One that fails in the middle of a run is left out with a warning; the
run goes on.
"""

import contextlib
import csv
import importlib
import io
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline.core.errors import OptionError
from paceline.core.settings import LogTool
from paceline.records import private_files
from paceline.records.journal import Header, Line
from paceline.records.scalars import Moment, Scalars

PROJECT = "paceline"  # in tools that sort runs by project
FLUSH_S = 2
PAUSE_S = 0.2  # between two points with the same names, for tools that do not take thousands a second
INSTALL: dict[LogTool, tuple[str, str]] = {  # a module, and how to get it
    "tensorboard": ("tensorboard.summary.writer.event_file_writer", "pip install 'paceline[export]'"),
    "wandb": ("wandb", "pip install wandb"),
    "trackio": ("trackio", "pip install trackio"),
}
logger = logging.getLogger("paceline")


class ScalarWriter(Protocol):
    """One tool's own log of one run."""

    def add(self, point: Moment) -> None:
        """Write numbers."""

    def close(self) -> None:
        """Write what is left."""


class CsvWriter:
    """`scalars.csv`: one line for each number."""

    def __init__(self, folder: Path, header: Header) -> None:
        del header
        self._file = io.TextIOWrapper(private_files.open_file(folder / "scalars.csv", "wb"), "utf-8", newline="")
        self._rows = csv.writer(self._file, lineterminator="\n")
        self._rows.writerow(("seconds", "version", "name", "value"))
        self._flushed = time.monotonic()

    def add(self, point: Moment) -> None:
        """Write numbers; a reader sees them after `FLUSH_S` at the latest, if others follow."""
        for name, value in point.values.items():
            self._rows.writerow((point.at, point.version, name, value))
        if time.monotonic() - self._flushed > FLUSH_S:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorboardWriter:
    """A folder `tensorboard` with an event file; steps are versions."""

    def __init__(self, folder: Path, header: Header) -> None:
        del header
        event, summary, writer = (
            importlib.import_module(name)
            for name in ("tensorboard.compat.proto.event_pb2", "tensorboard.compat.proto.summary_pb2",
                         "tensorboard.summary.writer.event_file_writer")
        )  # fmt: skip
        self._event, self._summary = event.Event, summary.Summary
        private_files.make_folder(folder / "tensorboard")
        self._writer = writer.EventFileWriter(os.fspath(folder / "tensorboard"), flush_secs=FLUSH_S)
        self._began = time.time()

    def add(self, point: Moment) -> None:
        """Write numbers."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        self._writer.add_event(
            self._event(wall_time=self._began + point.at, step=point.version, summary=self._summary(value=values))
        )

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WandbWriter:
    """An offline run of Weights & Biases in the run's folder; `wandb sync` sends it."""

    def __init__(self, folder: Path, header: Header) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project=PROJECT, name=folder.name, dir=os.fspath(folder), mode="offline", config=_described(header),
            settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="version")

    def add(self, point: Moment) -> None:
        """Write numbers; versions are not its own steps, which may not go back as a restored run does."""
        self._run.log({**point.values, "version": point.version, "seconds": point.at})

    def close(self) -> None:
        """End the run."""
        self._run.finish()


class TrackioWriter:
    """A run of Trackio, in its own local store; `trackio show` plots it. What it prints goes to standard error."""

    def __init__(self, folder: Path, header: Header) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        with contextlib.redirect_stdout(sys.stderr):
            self._run = self._trackio.init(project=PROJECT, name=folder.name, config=_described(header))

    def add(self, point: Moment) -> None:
        """Write numbers."""
        self._run.log({**point.values, "version": point.version, "seconds": point.at})

    def close(self) -> None:
        """End the run; by the module's own function, or the module does it again as the process exits."""
        with contextlib.redirect_stdout(sys.stderr):
            self._trackio.finish()


def _described(header: Header) -> dict[str, Any]:
    """Return what a run is, for a tool that lists runs."""
    names = ("engine", "strategy", "seed", "workers")
    return {**{name: getattr(header, name) for name in names}, **header.options}


WRITERS: dict[LogTool, type[Any]] = {
    "csv": CsvWriter, "tensorboard": TensorboardWriter, "trackio": TrackioWriter, "wandb": WandbWriter
}  # fmt: skip
FREQUENT: tuple[LogTool, ...] = ("csv", "tensorboard")  # tools that get every point


class ScalarLog:
    """A journal sink that writes scalars to several tools."""

    def __init__(self, writers: dict[LogTool, ScalarWriter]) -> None:
        self._writers = writers
        self._scalars = Scalars()
        self._told: dict[tuple[LogTool, tuple[str, ...]], float] = {}  # when a tool last got these names

    def write(self, line: Line) -> None:
        """Write the numbers of a line."""
        point = self._scalars.of(line)
        if point is None:
            return
        for tool in list(self._writers):
            if tool in FREQUENT or self._due(tool, point):
                with self._left_out_if_broken(tool):
                    self._writers[tool].add(point)

    def close(self) -> None:
        """End all logs."""
        for tool in list(self._writers):
            with self._left_out_if_broken(tool):
                self._writers.pop(tool).close()

    def _due(self, tool: LogTool, point: Moment) -> bool:
        key, now = (tool, tuple(point.values)), time.monotonic()
        if now - self._told.get(key, -PAUSE_S) < PAUSE_S:
            return False
        self._told[key] = now
        return True

    @contextlib.contextmanager
    def _left_out_if_broken(self, tool: LogTool) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever a foreign tool raises
            self._writers.pop(tool, None)
            logger.warning("--log %s: %s: %s; it gets nothing more of this run", tool, type(error).__name__, error)


def require(tools: Sequence[LogTool]) -> None:
    """Refuse a tool that is not installed; nothing else of it is touched."""
    for tool in tools:
        if tool not in INSTALL:
            continue
        module, install = INSTALL[tool]
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise OptionError(f"--log {tool}: {tool} cannot be imported ({error}); {install}") from None


@contextlib.contextmanager
def opened(tools: Sequence[LogTool], folder: Path | None, header: Header) -> Iterator[ScalarLog | None]:
    """Yield the sink that writes to these tools; None if there are none."""
    if not tools:
        yield None
        return
    if folder is None:
        raise OptionError(f"--log {tools[0]} needs a folder to write to: give runs_dir, too")
    writers: dict[LogTool, ScalarWriter] = {}
    for tool in dict.fromkeys(tools):
        try:
            writers[tool] = WRITERS[tool](folder, header)
        except Exception as error:
            ScalarLog(writers).close()
            raise OptionError(f"--log {tool}: it cannot begin a log: {type(error).__name__}: {error}") from error
    log = ScalarLog(writers)
    try:
        yield log
    finally:
        log.close()
