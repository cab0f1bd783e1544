"""Descriptors of this process: more of them for one that listens, and some kept for the run's own files.

Whoever can reach a port can make a process accept connections faster than it hangs up, until it has no descriptor left.
So the soft limit is raised to the hard one less KEPT: accepting fails there, the run's own files are opened above it.
"""

import errno
import os
import resource
import threading
import time
from pathlib import Path

MOST = 65_536  # that the limit is raised to; each descriptor costs the kernel memory
KEPT = 64  # or an eighth of all, if that is less: a checkpoint has few files open at a time
PATIENCE_S = 10.0  # for connections to be closed that have got hold of the kept ones meanwhile
_RETRY_S = 0.005

_lock = threading.Lock()
_full: tuple[int, int] | None = None  # the limits with the kept descriptors, in a process that keeps some


def raise_limit() -> int:
    """Raise the soft limit of this process, keep descriptors for `open_file`, and return the limit for all others."""
    global _full
    with _lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if _full is None:
            most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
            _full = (max(most, soft) if soft != resource.RLIM_INFINITY else MOST, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (_shared(_full[0]), hard))
        return _shared(_full[0])


def open_file(path: str | Path, flags: int, mode: int = 0o777) -> int:
    """Open a file of the run as `os.open` does, with a kept descriptor if there is no other."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return os.open(path, flags, mode)
        except OSError as error:
            if error.errno != errno.EMFILE or _full is None or time.monotonic() > until:
                raise
        with _lock:
            resource.setrlimit(resource.RLIMIT_NOFILE, _full)
            try:
                return os.open(path, flags, mode)
            except OSError as error:
                if error.errno != errno.EMFILE:
                    raise
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (_shared(_full[0]), _full[1]))
        time.sleep(_RETRY_S)


def _shared(limit: int) -> int:
    return limit - min(KEPT, limit // 8)
