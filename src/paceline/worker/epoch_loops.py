"""Epoch loops of a script's own: what `--epochs` leaves for each of their phases, and where a run stands in them."""

import math
import numbers
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from paceline.core.errors import OptionError
from paceline.core.ledger import whole_epochs
from paceline.transport.messages import EpochHeld, EpochMark, Ready

LITTLE = 1e-9  # of an epoch: sums of parts are not exact


class EpochLoops:
    """Counts the epochs of the phases inside loops, and the `session.epochs` loops, of one script."""

    def __init__(self, total: float | None) -> None:
        """`total` is what `--epochs` gave."""
        self._total = total
        self._spent = 0.0
        self._loops = 0
        self.mark: EpochMark | None = None  # of the `session.epochs` loop that the script is in

    @property
    def used_up(self) -> bool:
        return self._total is not None and self._spent >= self._total - LITTLE

    def share(self, ready: Ready) -> Ready | None:
        """Return the phase with what is left for it of `--epochs`; None if nothing is."""
        if self._total is None:
            return ready
        if self.used_up:
            return None
        epochs, spent = min(ready.epochs, self._total - self._spent), self._spent
        self._spent = spent + epochs
        if ready.sampling == "epoch":
            epochs = whole_epochs(ready.size, epochs, ready.least)
        return msgspec.structs.replace(ready, epochs=epochs, spent=spent)

    def epochs(
        self,
        count: Any,
        ask: Callable[[int], EpochHeld],
        begin_at: Callable[[EpochHeld], None],
        over: Callable[[], bool],
    ) -> Iterator[int]:
        """Yield the epochs from the one where the run stands; `begin_at` skips what is over."""
        if isinstance(count, bool) or not isinstance(count, numbers.Integral) or count < 1:
            raise OptionError(f"epochs(count) needs a whole number >= 1, not {count!r}")
        return self._run(int(count) if self._total is None else math.ceil(self._total - LITTLE), ask, begin_at, over)

    def _run(
        self,
        count: int,
        ask: Callable[[int], EpochHeld],
        begin_at: Callable[[EpochHeld], None],
        over: Callable[[], bool],
    ) -> Iterator[int]:
        loop, self._loops = self._loops, self._loops + 1
        first = 0
        if not over():
            held = ask(loop)
            if held.epoch is not None:
                first = held.epoch
                begin_at(held)
                self._spent = self._spent if held.spent is None else held.spent
        before = self.mark
        try:
            for epoch in range(first, count):
                if over() or self.used_up:
                    return
                self.mark = EpochMark(loop, epoch)
                yield epoch
        finally:
            self.mark = before
