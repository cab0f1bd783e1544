"""What a worker's own child processes share by name, under names that survivors know.

Processes of a `DataLoader` make a temporary folder for the sockets over which they hand tensors to each other, and, if
they are spawned, named semaphores. Killed before they can remove them, they would leave them behind; and so would the
process that Python has for the purpose, since it belongs to the worker's group and is killed with it. So both carry the
worker's process number, and whoever buries the worker removes them.
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
    """In a worker: use names with this process's number, here and in processes that it starts, however it does."""
    folder = _folder(os.getpid())
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    inherited = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    inherited["semprefix"] = f"/{folder.name}"
    if folder.lstat().st_uid == os.getuid():  # somebody else's of that name would let them in
        inherited["tempdir"] = str(folder)


def own_folder() -> Path | None:
    """This process's folder, if it is really its own."""
    folder = _folder(os.getpid())
    return folder if folder.is_dir() and folder.lstat().st_uid == os.getuid() else None


def group_of(leader: int) -> list[int]:
    """The processes of a worker's group, itself included; to be asked while it is there. Linux only."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may be gone by now
            fields = status.read_bytes().rpartition(b")")[2].split()  # a program's name may hold anything
            if int(fields[2]) == leader:
                found.append(int(status.parent.name))
    return found


def clear(process: int, group: Sequence[int] = ()) -> None:
    """The worker of this number is gone, or about to go, and its group: so is what they shared."""
    for member in group:
        # Torch names a tensor's memory after whoever made it, for the moment until the name is taken back.
        for block in SHARED.glob(f"torch_{member}_*"):
            with contextlib.suppress(OSError):
                block.unlink()
    for semaphore in SHARED.glob(f"sem.{_folder(process).name}-*"):
        with contextlib.suppress(OSError):  # its own cleaner may have been quicker, and others' are not ours
            semaphore.unlink()
    folder = _folder(process)
    if folder.is_dir() and not folder.is_symlink() and folder.lstat().st_uid == os.getuid():
        shutil.rmtree(folder, ignore_errors=True)


def _folder(process: int) -> Path:
    return Path(tempfile.gettempdir()) / f"pymp-paceline-{process}"
