"""Folders and files of a run that only their owner may read: models, journals, logs, checkpoints.

Modes hold for what is made; a folder or file that exists keeps its own.
"""

from pathlib import Path
from typing import IO

from paceline.model import descriptors

FOLDER_MODE = 0o700
FILE_MODE = 0o600


def make_folder(path: Path, *, exist_ok: bool = True) -> None:
    """Make a folder, and those above it that are missing."""
    if path.parent != path and not path.parent.exists():
        make_folder(path.parent)
    path.mkdir(mode=FOLDER_MODE, exist_ok=exist_ok)


def open_file(path: Path, mode: str) -> IO[bytes]:
    """Open a file for writing bytes, `wb` or `ab`, without a buffer in the latter case."""
    return open(path, mode, buffering=0 if mode == "ab" else -1, opener=_opener)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file."""
    with open_file(path, "wb") as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Write a file of UTF-8 text."""
    write_bytes(path, text.encode())


def _opener(path: str, flags: int) -> int:
    return descriptors.open_file(path, flags, FILE_MODE)
