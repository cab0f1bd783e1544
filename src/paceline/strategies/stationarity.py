"""Two tests for "this step size and batch make no more progress", from what the store reports of each version.

Pflug's: a counter goes up when consecutive applied gradients point against each other and down otherwise; near the
floor steps bounce about the minimum and the counter climbs. Trend: the losses of the last window are not below those
of the window before it by two standard errors. They are compared by rank (Mann and Whitney): a few huge losses at the
start would raise the standard error of a mean so far that the fastest progress of the run passes for none (measured on
the publication's regression: k grew after 80 s instead of 1060 s, and the target took 45 % longer).
"""

from bisect import bisect_left, bisect_right
from math import isfinite, sqrt

import msgspec

from paceline.core.events import Applied


class SinceChange(msgspec.Struct):
    """Iterations, counter and losses since the last change."""

    iterations: int = 0
    counter: int = 0
    losses: list[float] = []  # of the last two windows

    def observe(self, event: Applied, window: int) -> None:
        """Record an applied version; a step without mass makes none."""
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
        """Return why the test of that name, `pflug` or `trend`, sees no more progress; None while it sees some."""
        return self.bounces(threshold) if test == "pflug" else self.stalls(window)

    def bounces(self, threshold: int) -> str | None:
        """Pflug's test: return the reason if it fires, else None."""
        if self.counter <= threshold:
            return None
        return f"{self.counter} more negative than positive inner products in {self.iterations} iterations"

    def stalls(self, window: int) -> str | None:
        """The trend test: return the reason if it fires, else None."""
        if len(self.losses) < 2 * window:
            return None
        lead = standard_errors_below(self.losses[window:], self.losses[:window])
        if lead > 2:
            return None
        return f"losses of the last {window} iterations are only {lead:.2f} standard errors below those before"


def standard_errors_below(last: list[float], before: list[float]) -> float:
    """Return how far `last` ranks below `before`, in standard errors of the rank sum; equal values share their rank."""
    ordered = sorted(last + before)
    sizes = len(last) * len(before)
    rank_sum = sum((bisect_left(ordered, value) + bisect_right(ordered, value) + 1) / 2 for value in last)
    below = sizes / 2 - (rank_sum - len(last) * (len(last) + 1) / 2)
    return below / sqrt(sizes * (len(ordered) + 1) / 12)
