"""The clocks that a worker has sent: until the server has applied them, and until a checkpoint holds them.

Rows from the server may lack the first; the second are sent again to a server that was started again.
"""

from msgspec import structs

from paceline.core.errors import PeerError
from paceline.tables import messages as t
from paceline.tables.rowwise import Array

SPARSE = 2  # a log that fills less than this part of its memory is copied before it is kept


class SentClocks:
    """One worker's clocks and barriers, in their order."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self.lacking: list[t.Tick] = []  # with increments that rows from the server may lack
        self._kept: list[t.Tick | t.AtBarrier] = []  # that no checkpoint is known to hold
        self._keeps = False
        self._sent = False  # anything, since it entered
        self.since: t.ClockStanding | None = None  # what precedes those that are kept; None before it has entered

    def begin(self, clock: int, *, keeps: bool) -> None:
        """Start at this clock; `keeps`: a server that dies may be started again."""
        self.since, self._keeps = t.ClockStanding(0, clock), keeps

    def add(self, tick: t.Tick) -> None:
        """Note a clock that is sent."""
        if tick.logs:
            self.lacking.append(tick)
        if self._keeps:
            self._kept.append(_compact(tick) if any(_is_sparse(log.sums) for log in tick.logs) else tick)
        self._sent = True

    def included(self, clocks: int) -> None:
        """Note that rows from the server hold this many clocks."""
        self.lacking = [tick for tick in self.lacking if tick.through > clocks]

    def passed(self, barrier: t.AtBarrier, clock: int) -> None:
        """Note a barrier that was passed: what was sent before is in the tables, and all go on from `clock`."""
        self.lacking = []
        if self._keeps:
            self._kept.append(t.AtBarrier(barrier.number, barrier.clock, clock))
        self._sent = True

    def stored(self, era: int, clock: int) -> None:
        """Drop what a checkpoint holds."""
        self._kept = self._after(era, clock)
        self.since = t.ClockStanding(era, clock)

    def again(self, era: int, clock: int) -> list[t.Tick | t.AtBarrier]:
        """Return what a server that was started again at this clock has to be sent again."""
        if not self._keeps and self._sent:
            raise PeerError(
                f"the server was started again, and worker {self._worker} cannot send again what it sent before: only "
                "a run with --checkpoint-every keeps that; start it again with --resume"
            )
        found = [
            structs.replace(item, again=True, compute_s=0.0, reads=[]) if isinstance(item, t.Tick) else item
            for item in self._after(era, clock)
        ]
        self.lacking = [item for item in found if isinstance(item, t.Tick) and item.logs]
        return found

    def _after(self, era: int, clock: int) -> list[t.Tick | t.AtBarrier]:
        return [
            item
            for item in self._kept
            if ((item.era, item.through) > (era, clock) if isinstance(item, t.Tick) else item.number > era)
        ]


def _is_sparse(sums: Array) -> bool:
    return sums.base is not None and SPARSE * sums.nbytes < sums.base.nbytes


def _compact(tick: t.Tick) -> t.Tick:
    """Return the clock without memory that it does not fill."""
    logs = [t.TableLog(log.table, None if log.rows is None else log.rows.copy(), log.sums.copy()) for log in tick.logs]
    return t.Tick(tick.through, tick.work, logs, tick.loss, tick.compute_s, tick.reads, tick.era, host=tick.host)
