"""What else goes on on this worker's host: its load, time stolen by a hypervisor, and a limit of the CPU that was hit.

A push carries the latest sample, so that a strategy can tell a node that is disturbed from one that became slow. A
sample costs three small files, and is taken at most every `EVERY_S`, so a push costs a look at the clock. What a system
does not tell counts as zero; one that does not know its load, as Windows, has no samples at all.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from paceline.core.events import HostLoad

EVERY_S = 0.5  # the load average itself is updated every 5 s
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
LOAD: Callable[[], tuple[float, float, float]] | None = getattr(os, "getloadavg", None)
USER, STOLEN, GUEST = 1, 8, 9  # columns of /proc/stat; guests' time is part of user time already
NANOSECONDS, MICROSECONDS = 1e-9, 1e-6


class HostWatch:
    """Samples of one process's host."""

    def __init__(
        self, proc: Path = PROC, cgroups: Path = CGROUPS, clock: Callable[[], float] = perf_counter,
        load: Callable[[], tuple[float, float, float]] | None = LOAD,
    ) -> None:  # fmt: skip
        self._proc = proc
        self._clock = clock
        self._load = load
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._limits = _limits_file(proc, cgroups)
        self._latest: HostLoad | None = None
        self._next = -1.0
        self._before: tuple[float, float, float, float] | None = None  # time; CPU ticks, stolen; seconds throttled

    def sample(self) -> HostLoad | None:
        """Return what was found at most `EVERY_S` ago; None where the system does not tell."""
        now = self._clock()
        if now >= self._next and self._load is not None:
            self._next = now + EVERY_S
            self._latest = self._look(now, self._load)
        return self._latest

    def _look(self, now: float, load: Callable[[], tuple[float, float, float]]) -> HostLoad | None:
        try:
            average = load()[0]
        except OSError:
            return None
        total, stolen = self._ticks()
        found = now, total, stolen, self._throttled_s()
        steal = throttled = 0.0
        if self._before is not None:
            passed, ticks, taken, held = (new - old for new, old in zip(found, self._before, strict=True))
            steal = taken / ticks if ticks > 0 else 0.0
            throttled = held / passed if passed > 0 else 0.0
        self._before = found
        # Few digits: they go into every push's line of the journal.
        return HostLoad(round(average / self._cores, 2), _share(steal), _share(throttled))

    def _ticks(self) -> tuple[float, float]:
        """Return the time of all CPUs since the host started, and how much of it was stolen."""
        columns = _read(self._proc / "stat").partition("\n")[0].split()
        if len(columns) <= STOLEN or columns[0] != "cpu":
            return 0.0, 0.0
        return float(sum(map(int, columns[USER:GUEST]))), float(columns[STOLEN])

    def _throttled_s(self) -> float:
        """Return for how long this process's group was held back at its limit of the CPU."""
        if self._limits is None:
            return 0.0
        found = dict(line.split(maxsplit=1) for line in _read(self._limits).splitlines() if " " in line)
        if "throttled_usec" in found:
            return int(found["throttled_usec"]) * MICROSECONDS
        return int(found.get("throttled_time", 0)) * NANOSECONDS


@functools.cache
def host_watch() -> HostWatch:
    """Return the one watch of this process."""
    return HostWatch()


def _share(value: float) -> float:
    return round(min(1.0, max(0.0, value)), 3)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _limits_file(proc: Path, cgroups: Path) -> Path | None:
    """Return the `cpu.stat` of this process's group, of either version; one inside a container is at the root."""
    places: list[Path] = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            places += [cgroups / group.lstrip("/"), cgroups]
        elif "cpu" in controllers.split(","):
            roots = [cgroups / controllers, cgroups / "cpu"]
            places += [root / inner for root in roots for inner in (group.lstrip("/"), "")]
    for place in places:
        if "throttled" in _read(place / "cpu.stat"):
            return place / "cpu.stat"
    return None
