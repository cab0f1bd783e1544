"""A learning-rate scheduler that stands at the run's position instead of counting one worker's calls."""

import math
from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import OptionError


class FollowingScheduler:
    """Takes the place of a scheduler's `step`: zero or more real steps, until it stands where the run does."""

    def __init__(self, scheduler: Any, position: Callable[[], float]) -> None:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise OptionError(
                "ReduceLROnPlateau decides by a metric, not by the run's position; choose a scheduler that counts "
                "steps, or call it without handing it to prepare()"
            )
        if not callable(getattr(scheduler, "step", None)):
            raise OptionError(f"scheduler must have a step(), and {type(scheduler).__name__} has none")
        self._advance = scheduler.step
        self._made = max(0, getattr(scheduler, "last_epoch", 0))
        self._position = position
        scheduler.step = self.step

    def step(self, *_: Any, **__: Any) -> None:
        """Catch up with the run."""
        self.advance_to(self._position())

    def advance_to(self, position: float) -> None:
        """Catch up with this position."""
        while self._made < math.floor(position + 1e-9):
            self._made += 1
            self._advance()
