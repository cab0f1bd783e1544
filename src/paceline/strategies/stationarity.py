"""Two tests for "this step size and batch make no more progress", from what the store reports of each version.

Pflug's: a counter goes up when consecutive applied gradients point against each other and down otherwise; near the
floor steps bounce about the minimum and the counter climbs. Trend: the mean loss of the last window is not below that
of the window before it by two standard errors.
"""

from math import isfinite, sqrt

import msgspec

from paceline.events import Applied


class Progress(msgspec.Struct):
    """What was seen since the last change."""

    iterations: int = 0
    counter: int = 0
    losses: list[float] = []  # of the last two windows

    def observe(self, event: Applied, window: int) -> None:
        """Take note of an applied version; a step without mass makes none."""
        if event.mass <= 0:
            return
        self.iterations += 1
        if event.inner_product is not None:
            self.counter += 1 if event.inner_product < 0 else -1
        if event.loss is not None and isfinite(event.loss):
            self.losses.append(event.loss)
            if len(self.losses) > 2 * window:
                del self.losses[0]

    def ended(self, test: str, threshold: int, window: int) -> str | None:
        """Why the test of that name, `pflug` or `trend`, sees no more progress; None while there is some."""
        return self.bounces(threshold) if test == "pflug" else self.stalls(window)

    def bounces(self, threshold: int) -> str | None:
        """Pflug's test: the sentence that says so, or None."""
        if self.counter <= threshold:
            return None
        return f"{self.counter} more negative than positive inner products in {self.iterations} iterations"

    def stalls(self, window: int) -> str | None:
        """The trend test: the sentence that says so, or None."""
        if len(self.losses) < 2 * window:
            return None
        (before, spread_before), (last, spread_last) = _mean(self.losses[:window]), _mean(self.losses[window:])
        error = sqrt((spread_before + spread_last) / window)
        if before - last > 2 * error:
            return None
        return f"mean loss {last:.4g} of {window} iterations after {before:.4g}, standard error {error:.2g}"


def _mean(values: list[float]) -> tuple[float, float]:
    """Mean and variance."""
    mean = sum(values) / len(values)
    return mean, sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1)
