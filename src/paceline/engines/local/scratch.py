"""Temporary files and semaphores of a worker's child processes, under names that can be cleaned up after a kill.

The processes of a `DataLoader` make a temporary folder for the sockets over which they exchange tensors and, if they
are spawned, named semaphores. When the worker's process group is killed nobody removes them, since Python's resource
tracker belongs to the group too. So their names carry the worker's pid, and the process that reaps the worker removes
them.
"""

import contextlib
import multiprocessing.process
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

SHARED = Path("/dev/shm")  # where Linux keeps named memory and semaphores


def claim() -> None:
    """In a worker: use names with its pid, here and in all processes that it starts."""
    folder = _folder(os.getpid())
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError:  # a full disk: they use the names that Python gives them
        return
    inherited = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    inherited["semprefix"] = f"/{folder.name}"
    if folder.lstat().st_uid == os.getuid():  # another user's folder would give that user access
        inherited["tempdir"] = str(folder)


def own_folder() -> Path | None:
    """Return this process's folder; None if it is missing or another user's."""
    folder = _folder(os.getpid())
    return folder if folder.is_dir() and folder.lstat().st_uid == os.getuid() else None


def group_of(leader: int) -> list[int]:
    """Return the pids of a worker's process group, its own included; call it before reaping the worker. Linux only."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may have exited meanwhile
            fields = status.read_bytes().rpartition(b")")[2].split()  # the program's name may contain spaces and ")"
            if int(fields[2]) == leader:
                found.append(int(status.parent.name))
    return found


def clear(process: int, group: Sequence[int] = ()) -> None:
    """Remove what a worker and its group leave behind; they have exited or are about to."""
    for member in group:
        # Torch names a tensor's shared memory after the pid that made it, and unlinks the name a moment later.
        for block in SHARED.glob(f"torch_{member}_*"):
            with contextlib.suppress(OSError):
                block.unlink()
    for semaphore in SHARED.glob(f"sem.{_folder(process).name}-*"):
        with contextlib.suppress(OSError):  # already removed, or another user's
            semaphore.unlink()
    folder = _folder(process)
    if folder.is_dir() and not folder.is_symlink() and folder.lstat().st_uid == os.getuid():
        shutil.rmtree(folder, ignore_errors=True)


def _folder(process: int) -> Path:
    return Path(tempfile.gettempdir()) / f"pymp-paceline-{process}"
