"""What a loop works on: the script's arguments, those of its `DataLoader`, and the settings that override both."""

import math
import numbers
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from paceline.core.errors import OptionError
from paceline.worker.context import WorkerContext
from paceline.worker.fetching import parts_of


class LoopPlan(NamedTuple):
    """A data set, how much of it a loop uses, and in which portions."""

    dataset: Any
    batch_size: int
    epochs: float  # the script's own
    loader_options: dict[str, Any]
    remark: str | None  # what the run does otherwise than the script's loader


def plan_loop(
    given: WorkerContext, dataset: Any, batch_size: int | None, epochs: float, loader_options: dict[str, Any]
) -> LoopPlan:
    """Settle on a loop's data and sizes; `--batch-size` comes first."""
    remark = None
    if isinstance(dataset, DataLoader):
        loader = parts_of(dataset)
        dataset, remark, loader_options = loader.dataset, loader.remark, {**loader.options, **loader_options}
        if batch_size is None and given.batch_size is None and loader.batch_size is None:
            raise OptionError("the DataLoader has no batch size: give one, batches(loader, batch_size=...)")
        batch_size = loader.batch_size if batch_size is None else batch_size
    batch_size = 1 if batch_size is None else batch_size
    batch_size = whole_size(given.batch_size if given.batch_size is not None else batch_size)
    if not (isinstance(epochs, int | float) and epochs > 0 and math.isfinite(epochs)):
        raise OptionError(f"epochs must be > 0 and finite, not {epochs!r}")
    return LoopPlan(dataset, batch_size, epochs, loader_options, remark)


def rounds_of(size: int, batch_size: int, epochs: float, workers: int) -> int:
    """Return how many rounds a loop has: `batch_size` samples of every worker are one."""
    return math.ceil(max(1, round(epochs * size)) / (batch_size * workers))


def whole_size(batch_size: Any) -> int:
    """Return the batch size as an int; refuse what is none."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, numbers.Integral) or batch_size < 1:
        raise OptionError(f"batch_size must be a whole number >= 1, not {batch_size!r}")
    return int(batch_size)
