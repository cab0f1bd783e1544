"""Checkpoints: folders that appear whole or not at all, in formats that any tool can read.

`checkpoints/v000000100/` holds `checkpoint.json` (where the run stood, and the length and checksum of every other
file), `model.safetensors` (the plain module's `state_dict`), `optimizer.safetensors`, `server.safetensors` where there
is something beside these (single-precision masters of half-precision parameters, buffers outside the `state_dict`, the
gradient applied last), and `worker-<i>.safetensors`, each worker's own state as it sent it.

A folder is written under a name that readers ignore, flushed to disk, and renamed. An older one of the same version is
removed only after that, so the newer one has a serial number after a dot in its name. The next writer removes what a
killed one left. The store is written when a checkpoint begins, without a copy of it in memory; the workers' states
follow as they arrive.
"""

import json
import logging
import os
import platform
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline._version import __version__
from paceline.core.errors import CheckpointError, StorageError
from paceline.core.updates import Contents
from paceline.core.values import shortened
from paceline.model import descriptors, tensor_files
from paceline.records import private_files
from paceline.records.journal import spelled_out
from paceline.server.checkpoint.run_snapshot import RunSnapshot

FORMAT = 1
FOLDER = "checkpoints"
HEAD = "checkpoint.json"
NAME = re.compile(r"v(\d{9,})(?:\.(\d+))?")
UNFINISHED, DISCARDED = ".writing-", ".removing-"  # prefixes of names that readers ignore
READ_BYTES = 1 << 20

logger = logging.getLogger("paceline")


class CheckpointWriteError(CheckpointError, StorageError):
    """A checkpoint that cannot be written."""


class FileSum(msgspec.Struct, frozen=True):
    """The length and checksum of a whole file."""

    nbytes: int
    crc32: int


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of `checkpoint.json`."""

    format: int = FORMAT
    written: str  # when, in UTC
    versions: dict[str, str]
    run: RunSnapshot
    spec: Any = None  # only the code that holds the weights reads these three
    tables: Any = None
    optimizer: Any = None
    engine: dict[str, Any]  # added by the run: the phase, evaluations, options in force
    files: dict[str, FileSum]


class Checkpointer:
    """Writes a run's checkpoints, one at a time, and keeps the newest ones."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder  # `checkpoints` of the run's folder
        self.keep = keep
        self.number: int | None = None  # the version of the checkpoint under way
        self.waiting: set[int] = set()  # workers whose states it still lacks
        self._place = folder
        self._head: dict[str, Any] = {}
        self._files: dict[str, FileSum] = {}

    def begin(self, run: RunSnapshot, contents: Contents, engine: Mapping[str, Any], workers: Iterable[int]) -> None:
        """Write the weights as they are now; the states of these workers follow."""
        self.abandon()
        self.number, self.waiting = run.version, set(workers)
        self._place = self.folder / f"{UNFINISHED}{_named(run.version)}"
        try:
            private_files.make_folder(self.folder)
            self._clean()
            private_files.make_folder(self._place, exist_ok=False)
            more = self._write(contents)
            self._head = {**contents.head, **more, "run": msgspec.to_builtins(run), "engine": engine}
        except OSError as error:
            raise self._cannot_write(error) from error

    def add(self, contents: Contents) -> None:
        """Write what was not known when the checkpoint began; its plain data goes to the head's `engine`."""
        try:
            more = self._write(contents)
        except OSError as error:
            raise self._cannot_write(error) from error
        self._head["engine"] = {**self._head["engine"], **contents.head, **more}

    def state(self, number: int, worker: int, data: bytes) -> bool:
        """Write a worker's state; return True if the checkpoint under way waits for no other."""
        if number != self.number or worker not in self.waiting:
            return False
        name = _of_worker(worker)
        try:
            private_files.write_bytes(self._place / name, data)
        except OSError as error:
            raise self._cannot_write(error) from error
        self._files[name] = FileSum(len(data), zlib.crc32(data))
        return self.gone(worker)

    def gone(self, worker: int) -> bool:
        """Stop waiting for a worker's state; return True if the checkpoint under way waits for no other."""
        if self.number is None or worker not in self.waiting:
            return False
        self.waiting.discard(worker)
        return not self.waiting

    def complete(self) -> Path:
        """Let the checkpoint appear, remove the oldest beyond those to keep, and return its folder."""
        if self.number is None:
            raise CheckpointError("there is no checkpoint under way to complete")
        same = [path for path in _all_in(self.folder) if _order(path)[0] == self.number]
        place = self.folder / _named(self.number, _order(same[-1])[1] + 1 if same else 0)
        try:
            self._write_head()
            for name in [*self._files, HEAD]:
                _bring_to_disk(self._place / name)
            _bring_to_disk(self._place)
            self._place.rename(place)
            _bring_to_disk(self.folder)
            for old in same:
                self._remove(old)
            for old in _all_in(self.folder)[: -self.keep]:
                self._remove(old)
        except OSError as error:
            raise self._cannot_write(error) from error
        self.number, self.waiting, self._files = None, set(), {}
        return place

    def abandon(self) -> None:
        """Give up the checkpoint under way."""
        if self.number is not None:
            shutil.rmtree(self._place, ignore_errors=True)
        self.number, self.waiting, self._files = None, set(), {}

    def _write(self, contents: Contents) -> dict[str, Any]:
        """Write all files of these contents; return what else belongs into the head."""
        for name, tensors in contents.files.items():
            self._write_tensors(name, tensors)
        sums, more = ({}, {}) if contents.save is None else contents.save(self._place)
        self._files |= {name: FileSum(*found) for name, found in sums.items()}
        return more

    def _write_tensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        with private_files.open_file(self._place / name, "wb") as file:
            checksum = tensor_files.write(file, tensors)
            self._files[name] = FileSum(file.tell(), checksum)

    def _write_head(self) -> None:
        versions = {"paceline": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
        head = {
            "format": FORMAT, "written": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions,
            **self._head, "files": msgspec.to_builtins(self._files),
        }  # fmt: skip
        plain = json.loads(json.dumps(spelled_out(head), allow_nan=False))  # as it is read: its keys are strings
        text = json.dumps({"checksum": _checksum(plain), **plain}, indent=1)
        private_files.write_text(self._place / HEAD, text + "\n")

    def _clean(self) -> None:
        for path in self.folder.iterdir():
            if path.name.startswith((UNFINISHED, DISCARDED)):
                shutil.rmtree(path)

    def _remove(self, path: Path) -> None:
        """Rename it first, so that no reader ever finds half of it."""
        shutil.rmtree(path.rename(path.with_name(f"{DISCARDED}{path.name}")))

    def _cannot_write(self, error: OSError) -> CheckpointError:
        text = (
            f"cannot write a checkpoint to {self.folder}: {error.strerror}; free some space or drop --checkpoint-every"
        )
        self.abandon()
        return CheckpointWriteError(text)


class Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint whose files were found whole."""

    path: Path
    head: Head

    @property
    def run(self) -> RunSnapshot:
        return self.head.run

    @property
    def workers(self) -> list[int]:
        """The workers whose states it holds."""
        return sorted(int(name.split("-")[1].split(".")[0]) for name in self.head.files if name.startswith("worker-"))

    def state(self, worker: int) -> bytes | None:
        """Return the worker's state; None if the checkpoint has none."""
        name = _of_worker(worker)
        return (self.path / name).read_bytes() if name in self.head.files else None

    def contents(self) -> Contents:
        """Return the weights."""
        head = self.head
        files = {
            name: tensor_files.read(self.path / name) for name in head.files if not name.startswith("worker-")
        }  # fmt: skip
        parts = {"spec": head.spec, "tables": head.tables, "optimizer": head.optimizer}
        return Contents(files, {name: part for name, part in parts.items() if part is not None})


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint in a run's folder or in its `checkpoints`; a checkpoint's own folder as it is."""
    if (folder / HEAD).is_file() and not folder.name.startswith("."):
        return folder
    found = _all_in(folder / FOLDER if (folder / FOLDER).is_dir() else folder)
    return found[-1] if found else None


def read(folder: Path) -> Checkpoint:
    """Read the newest checkpoint there that is whole; each that is damaged is named in a warning.

    A checkpoint's own folder means that one and no other.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: give a run's folder or one of its checkpoints")
    if NAME.fullmatch(folder.name) or ((folder / HEAD).is_file() and not folder.name.startswith(".")):
        return _read_whole(folder)
    found = _named_in(folder / FOLDER if (folder / FOLDER).is_dir() else folder)
    if not found:
        raise CheckpointError(
            f"{folder} holds no checkpoint: give a run's folder or one of its checkpoints, written with "
            "--checkpoint-every"
        )
    damaged: list[CheckpointError] = []
    for path in reversed(found):
        try:
            whole = _read_whole(path)
        except CheckpointError as error:
            damaged.append(error)
            continue
        for each in damaged:
            logger.warning("%s; going on from an older one, %s", each, path)
        return whole
    raise CheckpointError(f"all {len(found)} checkpoints of {folder} are damaged; of the newest: {damaged[0]}")


def newest_whole(folder: Path) -> Path | None:
    """Return the newest checkpoint of a run that is not damaged; None if there is none."""
    try:
        return read(folder).path
    except CheckpointError:
        return None


def _read_whole(path: Path) -> Checkpoint:
    head = _read_head(path / HEAD)
    for name, expected in head.files.items():
        _check(path / name, expected)
    return Checkpoint(path, head)


def _read_head(path: Path) -> Head:
    try:
        data = json.loads(path.read_bytes())
        found = data["format"]
        if found > FORMAT:
            raise CheckpointError(
                f"{path} has checkpoint format {found}; this version reads up to {FORMAT}: install a newer paceline"
            )
        checksum = data.pop("checksum", None)  # not in older checkpoints
        if checksum is not None and checksum != _checksum(data):
            raise ValueError("its contents do not have its checksum")
        head = msgspec.convert(data, Head, strict=False)
    except OSError as error:
        raise CheckpointError(f"cannot open {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {shortened(str(error))}") from error
    return head


def _check(path: Path, expected: FileSum) -> None:
    nbytes = checksum = 0
    try:
        with path.open("rb") as file:
            while part := file.read(READ_BYTES):
                nbytes += len(part)
                checksum = zlib.crc32(part, checksum)
    except OSError as error:
        raise CheckpointError(f"cannot open {path}: {error.strerror}") from error
    if FileSum(nbytes, checksum) != expected:
        raise CheckpointError(
            f"{path} is damaged: {nbytes} bytes with checksum {checksum} instead of {expected.nbytes} with "
            f"{expected.crc32}"
        )


def _checksum(head: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(head, sort_keys=True, separators=(",", ":")).encode())


def _named(version: int, serial: int = 0) -> str:
    return f"v{version:09d}.{serial}" if serial else f"v{version:09d}"


def _of_worker(worker: int) -> str:
    return f"worker-{worker}.safetensors"


def _order(path: Path) -> tuple[int, int]:
    """Return a checkpoint's version, and its serial number among those of that version."""
    match = NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


def _all_in(folder: Path) -> list[Path]:
    """Return the whole checkpoints, oldest first."""
    return [path for path in _named_in(folder) if (path / HEAD).is_file()]


def _named_in(folder: Path) -> list[Path]:
    """Return all that have the name of a checkpoint, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()), key=_order)


def _bring_to_disk(path: Path) -> None:
    """Flush to disk: a rename must not get there before what it names."""
    descriptor = descriptors.open_file(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
