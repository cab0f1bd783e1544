"""How long a worker may be silent before a run goes on without it: a pure rule over its own past steps.

Rule: a worker that has a grant is overdue when it has sent nothing for

    min(max(floor, median + SPREADS * max(MAD, median)), ceiling) seconds

where median and MAD (the median distance from the median) are of its own last steps. The spread counts as at least the
median: steps that all take equally long say nothing about what a checkpoint, a collection of garbage or a page that was
swapped out costs, so a step 20 times as long as usual is no reason. Whatever the ceiling, twice the longest step that
the worker has ever made is allowed, since it has shown that it comes back from such steps. A grant larger than any
before gets time in proportion.

It is named before, when `NAMED` of that time has passed: later than its longest step so far, so that steps as usual are
not worth a line.

A worker without enough steps of its own is judged by the ceiling, and by the steps of the others as if they were its
own where those are longer; as long as nobody has made a step, nothing is known and nobody is overdue.
"""

import statistics
from collections import deque
from collections.abc import Iterable, Sequence

from paceline.core.quantities import Patience

SPREADS = 25.0  # above the median; with the spread at least the median, 26 times the usual step
ENOUGH = 1  # steps of its own by which a worker is judged; the first loads, compiles and fills caches, so it is long
WINDOW = 31  # steps: enough for a steady median, short enough to follow a change of speed
RETURNS = 2.0  # times the longest step from which a worker has come back
NAMED = 0.625  # of the time allowed, after which a worker is named; more than 1 / RETURNS, see above
NAMED_S = 3.0  # at least, but at most `NAMED_BY` of the time allowed: shorter silences are not worth a line
NAMED_BY = 0.75


class StepTimes:
    """One worker's past steps: the seconds of the last ones, the longest ever, and the largest grant."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.longest = 0.0
        self.most_samples = 0

    def add(self, seconds: float, samples: int) -> None:
        """Count a finished step."""
        self.recent.append(seconds)
        self.longest = max(self.longest, seconds)
        self.most_samples = max(self.most_samples, samples)

    def returned(self, seconds: float) -> None:
        """Count a silence that was taken for the end of the worker, and from which it came back."""
        self.longest = max(self.longest, seconds)


def likely_s(steps: Sequence[float]) -> float:
    """Return the longest silence that these steps make likely."""
    median = statistics.median(steps)
    deviation = statistics.median([abs(step - median) for step in steps])
    return median + SPREADS * max(deviation, median)


def allowed_s(own: StepTimes, others: Iterable[StepTimes], samples: int, patience: Patience) -> float | None:
    """Return how many seconds a worker may be silent over a grant of so many samples; None: for ever."""
    share = max(1.0, samples / own.most_samples) if own.most_samples else 1.0
    if len(own.recent) >= ENOUGH:
        usual = min(max(patience.floor, likely_s(own.recent)), patience.ceiling)
        return share * max(usual, RETURNS * own.longest)
    known = [*own.recent, *(step for other in others for step in other.recent)]
    if not known:
        return None
    return share * max(patience.ceiling, likely_s(known), RETURNS * own.longest)


def named_s(allowed: float) -> float:
    """Return after how many seconds of silence a worker is named, if it is taken out after `allowed`."""
    return min(max(NAMED * allowed, NAMED_S), NAMED_BY * allowed)
