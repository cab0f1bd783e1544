"""The folder that a worker's own child processes share sockets in, under a name that survivors know.

Processes of a `DataLoader` make a temporary folder for the sockets over which they hand tensors to each other. Killed
before they can remove it, they would leave it behind. So a worker gives them one that is named after the worker's
number, made when it is first asked for, and whoever buries the worker removes it.
"""

import contextlib
import multiprocessing.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def claim() -> None:
    """In a worker: use the folder of this process's number, here and in processes that it forks."""
    folder = _folder(os.getpid())
    usual: Callable[[], str] = multiprocessing.util.get_temp_dir

    def get_temp_dir() -> str:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        # Somebody else's of that name would let them in.
        return str(folder) if folder.lstat().st_uid == os.getuid() else usual()

    multiprocessing.util.get_temp_dir = get_temp_dir


def clear(process: int) -> None:
    """The worker of this number is gone, or about to go: so is its folder."""
    folder = _folder(process)
    if folder.is_dir() and not folder.is_symlink() and folder.lstat().st_uid == os.getuid():
        shutil.rmtree(folder, ignore_errors=True)


def _folder(process: int) -> Path:
    return Path(tempfile.gettempdir()) / f"pymp-paceline-{process}"
