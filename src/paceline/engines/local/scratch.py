"""A run's private temporary folder: sockets of its processes, and what their `DataLoader`s leave there.

The launcher makes one folder for each run, under a name that nobody can know beforehand and that no other user may
enter; each process makes a folder of its own inside. A process that is killed removes nothing, so the one that reaps it
does. When the launcher is killed every process removes its own part, and whoever comes last the whole.

The processes of a `DataLoader` make sockets in their worker's folder and, if they are spawned, named semaphores, whose
names begin with the folder's. Python's resource tracker would remove those, but it is killed with the worker's group.
"""

import contextlib
import multiprocessing.process
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from paceline.core.errors import OptionError

SHARED = Path("/dev/shm")  # where Linux keeps named memory and semaphores
PREFIX = "paceline-"
SHORT = Path("/tmp")
LONGEST_SOCKET = 107  # bytes of a socket's path on Linux
_NAME = 18  # bytes of "/" and a run's folder
_INSIDE = 26  # bytes of the longest name in it: "/", a process's number, "/", and a listener of `multiprocessing`
EXIT_S = 2.0  # for killed processes to be gone

_claimed: tuple[int, Path] | None = None  # this process, and its own folder


def make(inside: int = _INSIDE) -> Path:
    """Make a run's folder: in the usual place, or in another where its sockets' names are short enough.

    `inside`: bytes of the longest name of a socket in it.
    """
    complaints = []
    for place in dict.fromkeys((*_usual_place(), SHORT, SHARED)):
        complaint = _unfit(place, inside)
        if complaint is None:
            try:
                return Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
            except OSError as error:
                complaint = f"takes no folder ({error.strerror})"
        complaints.append(f"{place} {complaint}")
    raise OptionError(f"no place for a run's sockets: {', '.join(complaints)}; set TMPDIR to a short path of your own")


def _usual_place() -> list[Path]:
    try:
        return [Path(tempfile.gettempdir())]
    except OSError:  # Python finds none that can be written to, as on a full disk
        return []


def _unfit(place: Path, inside: int) -> str | None:
    longest = LONGEST_SOCKET - _NAME - inside
    if len(os.fsencode(place)) > longest:
        return f"is longer than {longest} bytes"
    try:
        status = place.stat()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        return "lets every user rename what is in it"
    if not os.access(place, os.W_OK | os.X_OK):
        return "cannot be written to"
    return None


def claim(run: Path) -> Path:
    """In a process of the run: make its own folder, for itself and all processes that it starts."""
    global _claimed
    require_private(run)
    folder = run / str(os.getpid())
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    require_private(folder)
    inherited = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    inherited["semprefix"] = f"/{_semaphores(run, os.getpid())}"
    inherited["tempdir"] = str(folder)
    _claimed = os.getpid(), folder
    return folder


def require_private(folder: Path) -> None:
    """Refuse a folder that another user owns or may enter."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OptionError(
            f"{folder} is not a folder of user {os.geteuid()} alone (owner {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):o}): somebody else has replaced it; set TMPDIR to a folder of your own"
        )


def group_of(leader: int) -> list[int]:
    """Return the pids of a worker's process group, its own included; call it before reaping the worker. Linux only."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may have exited meanwhile
            fields = status.read_bytes().rpartition(b")")[2].split()  # the program's name may contain spaces and ")"
            if int(fields[2]) == leader:
                found.append(int(status.parent.name))
    return found


def clear(run: Path | None, process: int, group: Sequence[int] = ()) -> None:
    """Remove what a process of the run and its group leave behind; they have exited or are about to."""
    _await_exits([member for member in group if member != os.getpid()])
    for member in group:
        # Torch names a tensor's shared memory after the pid that made it, and unlinks the name a moment later.
        for block in SHARED.glob(f"torch_{member}_*"):
            _unlink(block)
    if run is None:
        return
    for semaphore in SHARED.glob(f"sem.{_semaphores(run, process)}-*"):
        _unlink(semaphore)
    shutil.rmtree(run / str(process), ignore_errors=True)


def remove(run: Path) -> None:
    """Remove the whole folder of a run that has no process left, or whose processes have just been killed."""
    for semaphore in SHARED.glob(f"sem.{run.name}-*"):
        _unlink(semaphore)
    until = time.monotonic() + EXIT_S
    while True:
        shutil.rmtree(run, ignore_errors=True)
        if not run.exists() or time.monotonic() > until:
            return
        time.sleep(0.01)  # a process that is being killed has made one more file


def abandon(group: Collection[int]) -> None:
    """Remove this process's own part, and the run's folder if nobody else has a part in it; the launcher is gone.

    `group` are the processes that this one started; they have been killed.
    """
    if _claimed is None or _claimed[0] != os.getpid():  # it has no part, or is a fork of one that has
        return
    folder = _claimed[1]
    clear(folder.parent, os.getpid(), list(group))
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def _await_exits(processes: Sequence[int]) -> None:
    """Wait until killed processes run no more; a zombie does not, whoever has to reap it."""
    until = time.monotonic() + EXIT_S
    while any(map(_runs, processes)) and time.monotonic() < until:
        time.sleep(0.002)


def _runs(process: int) -> bool:
    return state_of(process) not in (None, "Z", "X")


def state_of(process: int) -> str | None:
    """Return the letter that Linux shows for a process's state, such as T for stopped; None if there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return None


def _semaphores(run: Path, process: int) -> str:
    return f"{run.name}-{process}"


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):  # already removed, or another user's
        path.unlink()
