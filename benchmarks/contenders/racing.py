"""What every contender of a race does alike: sleep the difference, and watch for the target."""

import time


def sleep_until(at: float) -> bool:
    """Wait for a moment on the monotonic clock; False if it is past: the step took longer than modelled."""
    left = at - time.monotonic()
    if left > 0:
        time.sleep(left)
    return left > 0


class Watch:
    """A loss is met by the mean of three evaluations in a row, at the middle one's time."""

    def __init__(self, target: float) -> None:
        self._target = target
        self._seen: list[tuple[float, float]] = []
        self.reached_s: float | None = None

    def look(self, at: float, value: float) -> bool:
        """Take an evaluation in; whether the target has been met."""
        self._seen = [*self._seen[-2:], (at, value)]
        mean = sum(value for _, value in self._seen) / 3
        if self.reached_s is None and len(self._seen) == 3 and mean <= self._target:
            self.reached_s = self._seen[1][0]
        return self.reached_s is not None
