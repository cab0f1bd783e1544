"""What a test of links must not leave behind: descriptors, threads and mappings."""

import gc
import threading
import time
from pathlib import Path

PATIENCE_S = 10.0  # for threads of ZeroMQ, which end after their context


def descriptors():
    """What this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def regions():
    """Mappings of worker memory."""
    return Path("/proc/self/maps").read_text().count("memfd:paceline")


class Census:
    """Counts before and after."""

    def __init__(self):
        self.before = self.count()

    @staticmethod
    def count():
        return descriptors(), threading.active_count(), regions()

    def require_nothing_left(self):
        until = time.monotonic() + PATIENCE_S
        while self.left() and time.monotonic() < until:
            gc.collect()
            time.sleep(0.01)
        assert not self.left(), f"left behind (more of): {self.left()}"

    def left(self):
        """What there is more of than before; less of it is what an earlier test left to the garbage collector."""
        names = ("descriptors", "threads", "mappings")
        counts = zip(names, self.before, self.count(), strict=True)
        return [name for name, before, after in counts if after > before]
