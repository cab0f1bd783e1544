"""What a test may leave behind, and how to see it: processes, descriptors, threads, shared memory, temporary files.

Children inherit the environment, so a tag in it names every process that a test started, however far removed and
whoever adopted it. Processes from a nursery that outlives the test show the nursery's environment, with the tag of the
whole session. Zombies show none, but those that count are children of this process.
"""

import contextlib
import gc
import os
import re
import threading
import time
import uuid
from pathlib import Path

from paceline.engines.local import nursery

TAG = "PYTEST_LEAK_TAG"
SESSION = uuid.uuid4().hex  # the tag of what outlives single tests
SHARED_MEMORY = Path("/dev/shm")
OWNED = re.compile(r"(torch_|paceline-chaos-|sem\.paceline-\w+-)(?P<owner>\d+)[_-].*")  # what names a process


def tagged_processes(tag):
    """Every living process (zombies of other parents excluded) whose environment has the tag, this one not included."""
    return processes_with(TAG, tag)


def processes_with(variable, value):
    """The same, of any variable."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if f"{variable}={value}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def zombies():
    """Children of this process that nobody has waited for."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_bytes().rpartition(b")")[2].split()[:2]
            if (state, int(parent)) == (b"Z", os.getpid()):
                found.add(int(stat.parent.name))
    return found


def descriptors():
    """What this process has open."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(entry.readlink()))
    return sorted(_without_number(name) for name in found)


def _without_number(name):
    return name.split(":")[0] if name.startswith(("socket:", "pipe:")) else name


def stale_blocks():
    """Named shared memory of torch or paceline whose process is gone."""
    if not SHARED_MEMORY.is_dir():
        return []
    left = []
    for block in SHARED_MEMORY.iterdir():
        named = OWNED.fullmatch(block.name)
        orphaned = named is not None and not Path(f"/proc/{named['owner']}").exists()
        if orphaned or (named is None and "paceline" in block.name):
            left.append(block.name)
    return left


def all_blocks():
    """Named shared memory, whoever's: the number of a process that had left some may be another's for a while."""
    return {block.name for block in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def mappings():
    """How often this process has mapped memory of paceline's."""
    return Path("/proc/self/maps").read_text().count("memfd:paceline")


def kept_nursery():
    """The process from which later tests start theirs; it may have been replaced meanwhile."""
    kept = nursery._keep.nursery
    return set() if kept is None else {kept.pid}


class Watch:
    """From here to `require_nothing_left`: whatever appears must be gone again.

    Without a temporary folder it watches this process alone, for tests that start none.
    """

    def __init__(self, temporary=None):
        self.tag = uuid.uuid4().hex
        self.temporary = temporary
        self.processes = set() if temporary is None else tagged_processes(SESSION).keys() | zombies()
        self.blocks = set() if temporary is None else all_blocks()
        self.threads = set(threading.enumerate())
        self.descriptors = descriptors()
        self.mappings = mappings()

    def require_nothing_left(self):
        left = self.left()
        assert not left, f"left behind: {left}"

    def left(self, patience_s=10.0):
        """All that is left, in words; ending takes a moment, so nothing is complained about before that."""
        deadline = time.monotonic() + patience_s
        while True:
            complaints = self._complaints()
            if not complaints or time.monotonic() > deadline:
                return complaints
            gc.collect()
            time.sleep(0.02)

    def _complaints(self):
        complaints = self._in_this_process()
        if self.temporary is not None:
            alive = tagged_processes(self.tag) | tagged_processes(SESSION)
            known = {*self.processes, *kept_nursery()}
            complaints += [f"process {pid}: {command}" for pid, command in alive.items() if pid not in known]
            complaints += [f"zombie {pid}" for pid in zombies() - self.processes]
            complaints += [f"shared memory {name}" for name in set(stale_blocks()) - self.blocks]
            complaints += [f"temporary {path.name}" for path in self.temporary.iterdir()]
        return complaints

    def _in_this_process(self):
        alive = [t.name for t in threading.enumerate() if t not in self.threads and t.is_alive()]
        complaints = [f"thread {name}" for name in alive]
        mine = descriptors()
        for name in sorted(set(mine)):
            extra = mine.count(name) - self.descriptors.count(name)
            if extra > 0:
                complaints.append(f"{extra} open {name}")
        extra = mappings() - self.mappings  # fewer is what an earlier test left to the garbage collector
        return complaints + ([f"{extra} mappings of shared memory"] if extra > 0 else [])
