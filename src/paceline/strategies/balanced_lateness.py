"""From when on a worker of a balanced round counts as one that does not answer: arithmetic on times, without the round.

A round's span is what was predicted for it; where nothing could be, as in the first round, the time that the first
worker to be done has taken. Once half of the workers are done, the others have until they should have answered and a
margin; while more than half still compute, a longer one, because the many may be slow for one reason and the few would
take long for their samples. Times that the first ones, and half of them, took longer by count for everybody.
"""

from typing import Literal

import msgspec


class Lateness(msgspec.Struct):
    """The times of the round under way."""

    began: float = 0.0
    span: float = 0.0  # seconds; 0: there is no prediction, and nobody is done yet
    predicted: bool = False  # else the span is known only once somebody is done
    stretch: float = 0.0  # how many times the span the first took, and then half of the workers; 0 before
    settled: bool = False  # half of the workers are done, or others took over: the stretch stays as it is
    due: dict[int, float] = {}  # when each grant under way should be answered
    timer: Literal["", "most", "half"] = ""  # it is set, for a time when so many still computed or were done

    def begin(self, now: float, span: float) -> None:
        """Start a round of this span; 0 if it cannot be predicted."""
        self.began, self.span, self.predicted = now, span, span > 0
        self.stretch, self.settled, self.timer = 0.0, False, ""

    def forget(self, worker: int) -> None:
        """Drop what is due of a worker that is gone."""
        self.due.pop(worker, None)

    def some_are_done(self, now: float, half: bool) -> None:
        """Note that a worker, or half of them, gets nothing more to do."""
        if not self.span:
            self.span = now - self.began
            self.due = {worker: max(at, now) for worker, at in self.due.items()}
        if self.span and not self.settled and (half or not self.stretch):
            self.stretch = max(self.stretch, 1.0, (now - self.began) / self.span)
        self.settled = self.settled or half

    def late_at(self, worker: int, margin: float) -> float:
        """Return from when on the worker is late, for a margin in seconds after it should have answered."""
        due = self.due.get(worker, self.began + self.span)
        return self.began + (due - self.began + margin) * (self.stretch or 1.0)
