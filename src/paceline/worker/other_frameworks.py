"""What scripts bring along from other frameworks: unwrapped where paceline does its part, else refused in one line.

Wrappers are known by the package and name of their class, so that none of those packages is imported.
"""

import contextlib
import functools
import inspect
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from paceline.core.errors import OptionError, UserError

GROUP = "init_process_group"
LAUNCHED = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR")  # set by torchrun and launchers like it, beside RANK and WORLD_SIZE
REMOVE = "remove the call and what needs it (DistributedDataParallel, Accelerator, Fabric, destroy_process_group)"


class WrapperClass(NamedTuple):
    """A class of another framework, and the attribute that holds what it wraps."""

    package: str
    name: str
    attribute: str
    instead: str  # what the run does in its place


MERGES = "the run merges gradients itself"
WRAPPERS = (
    WrapperClass("torch", "DistributedDataParallel", "module", MERGES),
    WrapperClass("torch", "DataParallel", "module", MERGES),
    WrapperClass("accelerate", "AcceleratedOptimizer", "optimizer", "the run makes the steps"),
    WrapperClass("accelerate", "AcceleratedScheduler", "scheduler", "the scheduler follows the run's rounds"),
    WrapperClass("accelerate", "DataLoaderShard", "base_dataloader", "move batches to session.device in the loop"),
    WrapperClass("accelerate", "DataLoaderAdapter", "base_dataloader", "move batches to session.device in the loop"),
    WrapperClass("lightning", "_FabricModule", "module", MERGES),
    WrapperClass("lightning", "_FabricOptimizer", "optimizer", "the run makes the steps"),
    WrapperClass("lightning", "_FabricDataLoader", "_dataloader", "move batches to session.device in the loop"),
)
REFUSED = {  # modules whose parameters are not whole in one process
    ("torch", "FullyShardedDataParallel"): "give prepare() the module without it",
    ("torch", "FSDPModule"): "leave fully_shard() out",
    ("deepspeed", "DeepSpeedEngine"): "give prepare() the module and optimizer that deepspeed.initialize() was given",
}


def unwrapped(thing: Any) -> tuple[Any, list[str]]:
    """Return the object inside of other frameworks' wrappers, and a remark for each of them."""
    remarks: list[str] = []
    while (wrapper := _wrapper_of(thing)) is not None:
        if wrapper.name == "AcceleratedOptimizer" and getattr(thing, "scaler", None) is not None:
            raise OptionError(
                "the optimizer was prepared by an Accelerator with mixed_precision='fp16', whose scaler steps by "
                "itself: use 'bf16', or a GradScaler of your own"
            )
        inner = getattr(thing, wrapper.attribute, None)
        if inner is None or inner is thing:
            raise OptionError(
                f"this version's {wrapper.name} has no attribute {wrapper.attribute}: give paceline what it wraps"
            )
        remarks.append(f"{wrapper.name} ({wrapper.package}) is not used but for what it wraps: {wrapper.instead}")
        thing = inner
    for kind in type(thing).__mro__:
        advice = REFUSED.get((_package_of(kind), kind.__name__))
        if advice is not None:
            raise OptionError(f"a {kind.__name__} holds only a part of the model in each process: {advice}")
    return thing, remarks


def _wrapper_of(thing: Any) -> WrapperClass | None:
    kinds = {(_package_of(kind), kind.__name__) for kind in type(thing).__mro__}
    return next((wrapper for wrapper in WRAPPERS if (wrapper.package, wrapper.name) in kinds), None)


def _package_of(kind: type) -> str:
    root = kind.__module__.partition(".")[0]
    return "lightning" if root == "lightning_fabric" else root  # one code under two names


# -- processes that something else started or connected ----------------------------------------------------------------


def require_no_launcher(environ: Mapping[str, str], arguments: Sequence[str]) -> None:
    """Refuse a script that torchrun has started several times: each process would train a model of its own."""
    count = environ.get("WORLD_SIZE", "")
    if not count.isdecimal() or int(count) < 2 or "RANK" not in environ or not any(n in environ for n in LAUNCHED):
        return
    script = shlex.join(arguments) or "train.py"
    raise UserError(
        f"the script was started as process {environ['RANK']} of {count} (RANK, WORLD_SIZE), as by torchrun: each "
        f"would train a model of its own; start it once, with `paceline run --workers {count} {script}`"
    )


def require_no_process_group(what: str) -> None:
    """Refuse to go on in a process that torch.distributed has connected to others."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        size = torch.distributed.get_world_size()
        if size > 1:
            raise UserError(
                f"{what} was called in a process group of {size} (torch.distributed.{GROUP}): the run connects its "
                f"workers itself; {REMOVE}"
            )


@contextlib.contextmanager
def process_groups_refused(worker: Callable[[], int | None]) -> Iterator[None]:
    """Refuse `torch.distributed.init_process_group` in workers, where it would wait for others or connect them twice.

    `worker` returns the number of the calling thread's worker, None outside of a run. A group of one is let through.
    """
    if not torch.distributed.is_available():
        yield
        return
    real = torch.distributed.init_process_group

    @functools.wraps(real)
    def init_process_group(*given: Any, **named: Any) -> Any:
        number = worker()
        alone = _asked_size(real, given, named) == 1 and not torch.distributed.is_initialized()
        if number is not None and not alone:
            raise UserError(
                f"torch.distributed.{GROUP}() was called in worker {number}: the run connects its workers itself; "
                f"{REMOVE}"
            )
        return real(*given, **named)

    torch.distributed.init_process_group = init_process_group
    try:
        yield
    finally:
        torch.distributed.init_process_group = real


def advice_for(error: BaseException) -> str:
    """Return what to add to an error of a framework that takes a worker for one of its own processes; else nothing."""
    if "MASTER_ADDR" not in str(error):
        return ""
    return f" (RANK and WORLD_SIZE are the run's, which connects its workers itself; {REMOVE})"


def _asked_size(call: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> int | None:
    """Return how many members a call asks for; None if that cannot be told."""
    try:
        size = inspect.signature(call).bind(*given, **named).arguments.get("world_size", -1)
    except TypeError:
        return None
    found = str(size) if size != -1 else os.environ.get("WORLD_SIZE", "")
    return int(found) if found.isdecimal() else None
