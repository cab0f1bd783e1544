"""A terminal that is closed in the middle of a run: what would be shown is shown nowhere, and the run ends in order.

Closing it sends SIGHUP, and from then on writing to it fails with EIO, perhaps before the signal is handled.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

STANDARD = (0, 1, 2)


def leave_terminal() -> None:
    """Send what is still printed, by this process and those that it starts, to nowhere; files and pipes stay."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    try:
        for descriptor in STANDARD:
            with contextlib.suppress(OSError):  # it is closed
                if stat.S_ISCHR(os.fstat(descriptor).st_mode):  # a closed terminal no longer says that it is one
                    os.dup2(nowhere, descriptor)
    finally:
        os.close(nowhere)


@contextlib.contextmanager
def closed_is_fine() -> Iterator[None]:
    """A context for printing: nobody misses what a closed terminal does not show."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
