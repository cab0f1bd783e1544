"""The processes of a run that an attack started, found in /proc, and the ways to end them."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen


def descendants(root: int) -> dict[int, str]:
    """All processes below this one, by their ids, with the titles that `ps` shows."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] != "Z":
                parents[int(stat.parent.name)] = int(fields[1])
    found: dict[int, str] = {}
    below = {root}
    while below:
        below = {child for child, parent in parents.items() if parent in below and child not in found}
        for child in below:
            with contextlib.suppress(OSError):
                title = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ")
                found[child] = title.decode(errors="replace").strip()
    return found


def named(root: int, name: str) -> list[int]:
    """The ids of the processes below `root` whose title is `paceline: <name>...`; the nursery has none of its own."""
    found = descendants(root).items()
    if name == "nursery":
        return sorted(pid for pid, title in found if "nursery" in title)
    return sorted(pid for pid, title in found if title.startswith(f"paceline: {name}"))


def kill_one(started: Popen[str], name: str, chance: random.Random) -> bool:
    """Kill one of the run's processes of this name; return whether there was one."""
    for pid in chance.sample(found := named(started.pid, name), len(found)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def kill_all(started: Popen[str]) -> None:
    """Kill the whole run at once: every process below it, then itself."""
    for pid in [*descendants(started.pid), started.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until(is_so: Callable[[], bool], started: Popen[str], seconds: float = 60.0) -> bool:
    """Wait until something is so; return False if the run ends before, or the time is over."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if is_so():
            return True
        if started.poll() is not None:
            return False
        time.sleep(0.005)
    return False
