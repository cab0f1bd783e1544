"""The server's line in a balanced round: models go down one after the other, and gradients come up likewise.

The k-th model leaves the line after k times `each` seconds, and the gradient that is j-th from the end must begin j
times that long before the round ends; a worker computes in what is between. The round's samples are most if the fastest
is first down and last up, so each worker has one place for both ways, and its share is what fits between them.

How long a model takes is known from how long the others waited for it. Where nobody was ever seen to wait, nothing here
has an effect.
"""

from collections.abc import Iterable, Mapping
from math import log2

import msgspec

from paceline.core.events import Pushed
from paceline.strategies.balanced_pace import Pace
from paceline.strategies.monitor import SMOOTHING

CLASSES = 4  # of speed, where it doubles: by the last digit, who was lucky of late would get the work of the fastest
CUSHION = 2.5  # mean deviations by which the last to push is planned to be done before its turn; measured


class Line(msgspec.Struct):
    """How long a model occupies the line, and whose turn is when."""

    each: float = 0.0  # seconds, either way; 0: nobody waits for others
    place: dict[int, int] = {}  # a worker's model goes down after so many others, and its push comes up before them
    sharing: int = 0  # workers with places that take part in the round, by its prediction
    ahead: dict[int, int] = {}  # models sent at the same moment before the one under way to this worker
    sent: int = 0  # models sent at the moment `sent_at`
    sent_at: float | None = None

    def note_model(self, worker: int, at: float) -> None:
        """Note that a model is sent to the worker, after those of the same moment."""
        if at != self.sent_at:
            self.sent_at, self.sent = at, 0
        self.ahead[worker] = self.sent
        self.sent += 1

    def measure(self, event: Pushed) -> None:
        """Take from a push how long its model waited for those ahead."""
        ahead = self.ahead.pop(event.worker, 0)
        if ahead:
            each = (event.queued_down_s or 0.0) / ahead
            self.each = self.each + SMOOTHING * (each - self.each) if self.each else each

    def forget(self, worker: int) -> None:
        """Drop the note of a model whose push will not come."""
        self.ahead.pop(worker, None)

    def line_up(self, paces: Mapping[int, Pace], before: int = 0) -> None:
        """Give these workers places after `before` others: the fastest first, by classes of speed."""
        order = list(paces)
        if self.each:
            order.sort(key=lambda worker: round(CLASSES * log2(paces[worker].per_sample)))
        self.place.update({worker: before + place for place, worker in enumerate(order)})

    def in_turn(self, workers: Iterable[int]) -> list[int]:
        """Return the workers in the order of their models; those without a place are to be measured, and come first."""
        order = sorted(workers)
        if self.each:
            order.sort(key=lambda worker: self.place.get(worker, -1))
        return order

    def delayed(self, worker: int, pace: Pace, spread: float, *, goes_on: bool) -> Pace:
        """Return the worker's pace with its waiting; a piece that goes on with a held push has no model to wait for.

        Those who push last are the ones for whom the round waits if they are late, so they get less work, and those
        who push early more.
        """
        place = self.place.get(worker)
        if not self.each or place is None:
            return pace
        risk = max(0.0, 1 - place / self.sharing) ** 2 if self.sharing else 0.0
        waiting = (1 if goes_on else 2) * self.each * place
        return Pace(pace.start + waiting, pace.per_sample * (1 + CUSHION * spread * risk))

    def cost(self, workers: int, span: float) -> float:
        """Return the seconds that one more push of each of these workers costs a round of this span.

        The fuller the line is anyway, the more a further push delays those of others.
        """
        all_pushes = workers * self.each
        return all_pushes * min(1.0, all_pushes / span) if span > 0 else all_pushes
