"""Try out what the processes of a run need from this machine: private sockets, shared memory and the nursery.

Nothing here loads torch, so `paceline doctor` can ask where torch is broken. Each returns what goes wrong, None if
nothing does, and leaves nothing behind.
"""

import fcntl
import mmap
import os
import resource
import shutil
import socket
import tempfile

from paceline.core.errors import OptionError
from paceline.engines.local import nursery, scratch

# Measured by lowering the limit: two workers ran with 32 descriptors in each process and not with 28, four with 48 and
# not with 40, eight with 64 and not with 60. The server has most, as every worker brings it a control socket, a link
# and shared memory.
DESCRIPTORS, PER_WORKER = 20, 6
ENOUGH_DESCRIPTORS = 4_096
TRIED_BYTES = 1 << 20
PATIENCE_S = 5.0


def descriptors(workers: int) -> int:
    """Return how many descriptors a process of a run needs at most."""
    return DESCRIPTORS + PER_WORKER * workers


def more_descriptors(workers: int, soft: int, hard: int) -> str:
    """Return what raises a limit of open files that is too low."""
    enough = ENOUGH_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_DESCRIPTORS)
    lacking = f"raise the hard limit (docker run --ulimit nofile={ENOUGH_DESCRIPTORS})"
    return f"ulimit -n {enough}" if enough > max(soft, descriptors(workers)) else lacking


def require_descriptors(workers: int, *, raised: bool) -> None:
    """Refuse a run of more workers than the limit of open files allows; `raised`: it will have the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit, need = hard if raised else soft, descriptors(workers)
    if 0 <= limit < need:
        crowd = f"{workers} worker{'s' * (workers != 1)}"
        raise OptionError(
            f"this process may have {limit} files open (hard limit {shown_limit(hard)}), and a run of {crowd} needs "
            f">= {need}: {more_descriptors(workers, soft, hard)}"
        )


def shown_limit(count: int) -> str:
    """Return a limit of open files as text."""
    return "unlimited" if count == resource.RLIM_INFINITY else str(count)


def private_sockets() -> str | None:
    """Connect two sockets in a folder such as a run makes for its own."""
    try:
        folder = scratch.make()
    except OptionError as error:
        return str(error)
    try:
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
            listener.bind(str(folder / "s"))
            listener.listen(1)
            caller.settimeout(PATIENCE_S)
            caller.connect(str(folder / "s"))
    except OSError as error:
        return f"no socket in {folder.parent}: {error.strerror}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None


def has_anonymous_memory() -> bool:
    """Whether shared memory needs no name; otherwise it is a file of the temporary folder."""
    return hasattr(os, "memfd_create")


def shared_memory() -> str | None:
    """Share some memory between two mappings, as server and worker share a model."""
    try:
        if has_anonymous_memory():
            descriptor = os.memfd_create("paceline-trial", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        else:
            with tempfile.TemporaryFile(prefix="paceline-", buffering=0) as file:
                descriptor = os.dup(file.fileno())
    except OSError as error:
        return f"cannot be made: {error.strerror}"
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, TRIED_BYTES)
        else:
            os.ftruncate(descriptor, TRIED_BYTES)
        if has_anonymous_memory():
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with mmap.mmap(descriptor, TRIED_BYTES) as ours, mmap.mmap(descriptor, TRIED_BYTES) as theirs:
            ours[-5:] = b"there"
            return None if theirs[-5:] == b"there" else "what one process writes another does not see"
    except OSError as error:
        return f"{TRIED_BYTES >> 20} MiB cannot be taken: {error.strerror}"
    finally:
        os.close(descriptor)


def quick_start() -> str | None:
    """Start a nursery, which imports torch, and end it."""
    if not nursery.possible():
        return "this system has no process descriptors or does not let a process adopt orphans"
    started = nursery.Nursery()
    try:
        started.listen()
        return None if started.alive else started.complaint or "it has ended"
    finally:
        started.end()
