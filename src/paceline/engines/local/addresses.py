"""Where the sockets of a run's processes are: in the run's private folder, which no other user may enter.

Measurements and tests of the network path ask for ports of the loopback instead, to which every user of the host can
connect.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

LOOPBACK = "tcp://127.0.0.1:*"

over_tcp = False  # of the runs that this process launches


@contextlib.contextmanager
def loopback() -> Iterator[None]:
    """Let runs that are launched in this context listen at ports of the loopback (zeromq)."""
    global over_tcp
    before, over_tcp = over_tcp, True
    try:
        yield
    finally:
        over_tcp = before


def connectable(address: str) -> str:
    """Return where processes of this machine connect to, instead of the wildcards that sockets are bound to."""
    return address.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:").replace("tcp://[::]:", "tcp://[::1]:")


def of_socket(folder: Path, name: str, *, over_tcp: bool) -> str:
    """Return the address for a ZeroMQ socket of a process whose private folder this is."""
    return LOOPBACK if over_tcp else f"ipc://{folder / name}"
