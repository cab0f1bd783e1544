"""Whether there is memory for a model: what this machine and its control groups have left, and what a run takes.

The kernel grants more than it has and later kills whoever uses it, so the question is asked before memory is taken.
A limit may stand at any level above a process, and under either version of control groups; the tightest one counts.
Files that are merely cached count as free: the kernel drops them first.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from paceline.core.errors import UserError
from paceline.model.flat import Layout
from paceline.model.regions import RegionLayout
from paceline.model.spec import ModelSpec, dtype_of

GIB = 1 << 30
MASTER_BYTES = 4  # the server keeps half-precision parameters in single precision
STATES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "Rprop": 2, "ASGD": 1,
          "Adagrad": 1, "RMSprop": 1}  # tensors of a parameter's size; options add to these  # fmt: skip


class ShortOfMemoryError(UserError):
    """The model does not fit."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """How much memory may still be taken; None where nobody can say. `root` stands for the file system's."""
    found = [*_of_machine(root / "proc/meminfo"), *_of_groups(root)]
    return min(found) if found else None


def require_region(spec: ModelSpec) -> None:
    """Raise if a worker's share of memory does not fit."""
    need = RegionLayout(spec).nbytes
    available = available_bytes()
    if available is not None and need > available:
        raise region_shortage(need, available)


def region_shortage(need: int, available: int | None) -> ShortOfMemoryError:
    """The error of a worker whose share of memory does not fit."""
    left = f"only {_gib(available)} are available" if available is not None else "the system refuses to give them"
    return ShortOfMemoryError(
        f"the model needs {_gib(need)} of shared memory per worker (parameters, two gradient slots), {left}: use fewer "
        "workers or a smaller model"
    )


def server_bytes(spec: ModelSpec, mirrors: int = 0) -> int:
    """What the server takes for itself: weights, optimizer state, one gradient of scratch and, where workers are
    reached over a network, a mirror of each one's region."""
    master = _master_bytes(spec)
    buffers = sum(_entry_bytes(entry) for entry in spec.buffers)
    return master * (2 + _states(spec)) + buffers + mirrors * RegionLayout(spec).nbytes


def require_server(spec: ModelSpec, regions: int = 0, mirrors: int = 0) -> None:
    """Raise if the server's own need, `mirrors` and `regions` that workers are still to take do not fit."""
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
    layout = Layout([shape for _, shape, _ in spec.parameters], [dtype_of(name) for _, _, name in spec.parameters])
    return sum(place.size * max(layout.dtypes[place.buffer].itemsize, MASTER_BYTES) for place in layout.places)


def _states(spec: ModelSpec) -> int:
    """Tensors of a parameter's size that the optimizer keeps for each, by the greediest group."""
    most = 0
    for group in spec.optimizer.groups:
        states = STATES.get(spec.optimizer.name, 0)
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
    """The group's folder and all above it; inside a container some of them do not show."""
    relative = PurePosixPath(path.lstrip("/"))
    for part in (relative, *relative.parents):
        if ".." not in part.parts:
            yield mount / part


def _left(folder: Path, limit: str, usage: str, cached: str) -> Iterator[int]:
    bounds = _lines(folder / limit)
    used = _lines(folder / usage)
    if not bounds or not used or not bounds[0].strip().isdigit():  # no limit is spelled `max`
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
