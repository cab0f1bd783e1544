"""Check before a run that its model fits: available memory of machine and control groups, and what a run needs.

The kernel grants more memory than it has and later kills a process that uses it, so a run checks before it allocates.
A limit may be set at any level above a process, in either version of control groups; the tightest one counts. Cached
files count as free: the kernel drops them first.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from paceline.core.errors import UserError
from paceline.model.flat import Layout
from paceline.model.regions import RegionLayout
from paceline.model.spec import ModelSpec, dtype_of

GIB = 1 << 30
MASTER_BYTES = 4  # per parameter at least: the server keeps half precision in single precision
STATES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "Rprop": 2, "ASGD": 1,
          "Adagrad": 1, "RMSprop": 1}  # tensors of a parameter's size per parameter; options add to these  # fmt: skip


class ShortOfMemoryError(UserError):
    """A model that does not fit into memory."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory still available; None if unknown. `root` replaces the file system's root in tests."""
    found = [*_of_machine(root / "proc/meminfo"), *_of_groups(root)]
    return min(found) if found else None


def require_region(spec: ModelSpec) -> None:
    """Raise if a worker's region does not fit into memory."""
    need = RegionLayout(spec).nbytes
    available = available_bytes()
    if available is not None and need > available:
        raise region_shortage(need, available)


def region_shortage(need: int, available: int | None) -> ShortOfMemoryError:
    """Return the error for a worker's region that does not fit into memory."""
    left = f"only {_gib(available)} are available" if available is not None else "the system refuses to give them"
    return ShortOfMemoryError(
        f"the model needs {_gib(need)} of shared memory per worker (parameters, two gradient slots), {left}: use fewer "
        "workers or a smaller model"
    )


def server_bytes(spec: ModelSpec, mirrors: int = 0) -> int:
    """Return the server's own need: weights, optimizer state, one scratch gradient and, where workers are reached
    over a network, a mirror of each worker's region."""
    master = _master_bytes(spec)
    buffers = sum(_entry_bytes(entry) for entry in spec.buffers)
    return master * (2 + _states(spec)) + buffers + mirrors * RegionLayout(spec).nbytes


def require_server(spec: ModelSpec, regions: int = 0, mirrors: int = 0) -> None:
    """Raise if the server's own need, its `mirrors` and the `regions` that workers have yet to allocate do not fit."""
    need = server_bytes(spec, mirrors) + regions * RegionLayout(spec).nbytes
    available = available_bytes()
    if available is not None and need > available:
        workers = max(regions, mirrors)
        raise ShortOfMemoryError(
            f"the model needs {_gib(need)} of memory (weights, optimizer state, a gradient, and parameters and two "
            f"gradient slots for each of {workers} workers), only {_gib(available)} are available: use fewer workers "
            "or a smaller model"
        )


def _gib(count: int) -> str:
    return f"{count / GIB:.3g} GiB"


def _entry_bytes(entry: tuple[str, tuple[int, ...], str]) -> int:
    return Layout([entry[1]], [dtype_of(entry[2])]).nbytes


def _master_bytes(spec: ModelSpec) -> int:
    layout = spec.layout
    return sum(place.size * max(layout.dtypes[place.buffer].itemsize, MASTER_BYTES) for place in layout.places)


def _states(spec: ModelSpec) -> int:
    """Return how many tensors of a parameter's size the optimizer keeps per parameter, in its largest group."""
    most = 0
    for optimizer in spec.optimizer.split():
        for group in optimizer.groups:
            states = STATES.get(optimizer.name, 0)
            states += sum(1 for option in ("momentum", "amsgrad", "centered") if group.get(option))
            most = max(most, states)
    return most


def _of_machine(meminfo: Path) -> Iterator[int]:
    for line in _lines(meminfo):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def _of_groups(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.strip().split(":", 2)
        if number == "0" and not controllers:
            for folder in _levels(root / "sys/fs/cgroup", path):
                yield from _left(folder, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            for folder in _levels(root / "sys/fs/cgroup/memory", path):
                yield from _left(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


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
