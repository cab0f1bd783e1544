"""What the server measures with: the run's clock, and its own effort."""

import time
from collections.abc import Sequence

from torch import Tensor

from paceline.store import Gradient, Merged, ModelSpec, Store


class Clock:
    """The run's seconds: they count from the moment its first phase begins."""

    def __init__(self) -> None:
        self.zero: float | None = None  # on the machine's monotonic clock

    def start(self, at: float = 0.0) -> None:
        """It is `at` seconds into the run."""
        self.zero = time.monotonic() - at

    def now(self) -> float:
        return 0.0 if self.zero is None else time.monotonic() - self.zero


class Effort:
    """Processor seconds that the server spent applying pushes and copying versions."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Count from here on: what it took to get ready is no part of the run."""
        self.apply_s = 0.0
        self.copy_s = 0.0
        self.since = time.process_time()


class TimedStore(Store):
    """A store that counts the time of its steps."""

    def __init__(
        self, spec: ModelSpec, values: Sequence[Tensor], buffers: Sequence[Tensor], statistics: bool, effort: Effort
    ) -> None:
        super().__init__(spec, values, buffers, statistics)
        self._effort = effort

    def apply(
        self, gradients: Sequence[Gradient], weights: Sequence[float], samples: Sequence[int], *, stock: bool
    ) -> Merged:
        began = time.process_time()
        merged = super().apply(gradients, weights, samples, stock=stock)
        self._effort.apply_s += time.process_time() - began
        return merged
