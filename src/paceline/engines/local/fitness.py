"""Try out what the processes of a run need from this machine: private sockets, shared memory and the nursery.

Nothing here loads torch, so `paceline doctor` can ask where torch is broken. Each returns what goes wrong, None if
nothing does, and leaves nothing behind.
"""

import fcntl
import mmap
import os
import shutil
import socket
import tempfile

from paceline.core.errors import OptionError
from paceline.engines.local import nursery, scratch

# Measured by lowering the limit: two workers ran with 32 descriptors in each process and not with 24, four with 48 and
# not with 32. The server has most, as every worker brings it a control socket, a link and shared memory.
DESCRIPTORS, PER_WORKER = 16, 8
TRIED_BYTES = 1 << 20
PATIENCE_S = 5.0


def descriptors(workers: int) -> int:
    """Return how many descriptors a process of a run needs at most."""
    return DESCRIPTORS + PER_WORKER * workers


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
