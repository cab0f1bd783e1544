"""What this machine and its control groups let a process have: memory and processor time.

A limit may be set at any level above a process, in either version of control groups; the tightest one counts. Cached
files count as free memory: the kernel drops them first.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory still available; None if unknown. `root` replaces the file system's root in tests."""
    found = [*_of_machine(root / "proc/meminfo"), *_of_groups(root)]
    return min(found) if found else None


def granted_cores(root: Path = Path("/")) -> float | None:
    """Return the processor seconds per second that control groups grant; None without a limit. `root` as above."""
    found: list[float] = []
    for number, controllers, path in _groups(root):
        if number == "0" and not controllers:
            for folder in _levels(root / "sys/fs/cgroup", path):
                found += _quota(" ".join(_lines(folder / "cpu.max")))
        elif "cpu" in controllers.split(","):
            for folder in _levels(root / "sys/fs/cgroup/cpu", path):
                quota, period = _lines(folder / "cpu.cfs_quota_us"), _lines(folder / "cpu.cfs_period_us")
                found += _quota(" ".join([*quota[:1], *period[:1]]))
    return min(found) if found else None


def _quota(text: str) -> list[float]:
    """Return the limit in `QUOTA PERIOD`, both in microseconds; a quota of `max` or -1 is none."""
    words = text.split()
    return [int(words[0]) / int(words[1])] if len(words) == 2 and all(word.isdigit() for word in words) else []


def _of_machine(meminfo: Path) -> Iterator[int]:
    for line in _lines(meminfo):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def _of_groups(root: Path) -> Iterator[int]:
    for number, controllers, path in _groups(root):
        if number == "0" and not controllers:
            for folder in _levels(root / "sys/fs/cgroup", path):
                yield from _left(folder, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            for folder in _levels(root / "sys/fs/cgroup/memory", path):
                yield from _left(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _groups(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the number of each hierarchy, its controllers and this process's group in it."""
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.strip().split(":", 2)
        yield number, controllers, path


def _levels(mount: Path, path: str) -> Iterator[Path]:
    """Yield the group's folder and all above it; some are not visible inside a container."""
    relative = PurePosixPath(path.lstrip("/"))
    for part in (relative, *relative.parents):
        if ".." not in part.parts:
            yield mount / part


def _left(folder: Path, limit: str, usage: str, cached: str) -> Iterator[int]:
    bounds = _lines(folder / limit)
    used = _lines(folder / usage)
    if not bounds or not used or not bounds[0].strip().isdigit():  # "max" means no limit
        return
    droppable = 0
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == cached:
            droppable = int(value)
    yield max(0, int(bounds[0]) - int(used[0]) + droppable)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
