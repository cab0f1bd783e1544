"""Check before a run that its model fits into the memory that is left.

The kernel grants more memory than it has and later kills a process that uses it, so a run checks before it allocates.
"""

from paceline.core.errors import UserError
from paceline.core.machine_limits import available_bytes
from paceline.model.flat import Layout
from paceline.model.regions import RegionLayout
from paceline.model.spec import ModelSpec, dtype_of

GIB = 1 << 30
MASTER_BYTES = 4  # per parameter at least: the server keeps half precision in single precision
STATES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "Rprop": 2, "ASGD": 1,
          "Adagrad": 1, "RMSprop": 1}  # tensors of a parameter's size per parameter; options add to these  # fmt: skip


class ShortOfMemoryError(UserError):
    """A model that does not fit into memory."""


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
