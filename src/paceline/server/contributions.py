"""Names workers that compute and bring nothing, under strategies that may leave out whoever is slow.

Fastest k cancels a lastingly slow worker in every round. Nothing in the report's totals says so, and with data of its
own (`sampling="shard"`, streams) its rows are never used, which shows as an error that does not fall any further.

Rule: a worker is named once `ROUNDS` updates in a row had no push of it, and by then `MISSED` pushes would have been
its share. The second part is there since chance leaves out honest workers, too: of 50 equally fast workers, one of
which makes each update, a worker misses 50 updates in a row with probability 0.98^50 = 0.36. With k of n workers an
update both hold after `max(ROUNDS, MISSED n / k)` updates.
"""

from collections import OrderedDict
from collections.abc import Iterable

from paceline.core.ledger import Ledger
from paceline.strategies.base import Strategy

ROUNDS = 50  # updates without a push of it
MISSED = 12.0  # pushes that would have been its share: chance alone misses so many once in 160,000 pushes


class Contributions:
    """When each present worker's push was last applied, the longest ago first."""

    def __init__(self) -> None:
        self._last: OrderedDict[int, tuple[int, float]] = OrderedDict()  # by worker: updates and shares by then
        self._paused: dict[int, tuple[int, float]] = {}  # missed by those who wait for data or for the next loop
        self._updates = 0
        self._shares = 0.0  # pushes that were each worker's share of all updates
        self._named: set[int] = set()

    def joined(self, worker: int) -> None:
        """Begin to watch a worker, or go on with what it had missed; one that is watched stays as it is."""
        if worker in self._last:
            return
        updates, shares = self._paused.pop(worker, (0, 0.0))
        first = next(iter(self._last.values()), (self._updates, 0.0))
        self._last[worker] = since = self._updates - updates, self._shares - shares
        if since < first:
            self._last.move_to_end(worker, last=False)

    def pause(self, worker: int) -> None:
        """Stop counting for a worker that waits for data or for the next loop; what it has missed is kept."""
        known = self._last.pop(worker, None)
        if known is not None:
            self._paused[worker] = self._updates - known[0], self._shares - known[1]

    def left(self, worker: int) -> None:
        """Forget a worker that is gone."""
        self._last.pop(worker, None)
        self._paused.pop(worker, None)

    def applied(self, workers: Iterable[int]) -> int | None:
        """Count an update of these workers' pushes; return a worker that is to be named, each at most once.

        Costs no more than the pushes do: only the worker that has brought nothing for longest is looked at.
        """
        self._updates += 1
        count = 0
        for worker in workers:
            count += 1
            if worker in self._last:
                self._last[worker] = self._updates, self._shares
                self._last.move_to_end(worker)
        if not self._last:
            return None
        self._shares += count / len(self._last)
        longest, (updates, shares) = next(iter(self._last.items()))
        if self._updates - updates < ROUNDS or self._shares - shares < MISSED:
            return None
        self._last[longest] = self._updates, self._shares
        self._last.move_to_end(longest)
        if longest in self._named:
            return None
        self._named.add(longest)
        return longest


def warning(worker: int, strategy: Strategy, ledger: Ledger | None) -> str:
    """Say which worker brings nothing, what that means for its data, and what to do."""
    can_cover = "cover" in getattr(strategy.options, "__struct_fields__", ())
    cover = f"`cover=true` to {strategy.name}, which keeps its late pushes" if can_cover else ""
    head = f"worker {worker} is present, but no push of it was used in {ROUNDS} updates and more: "
    own = "" if ledger is None else ledger.own_data
    if own == "rows":
        fix = f'give `sampling="epoch"` to `session.batches`{", or " if cover else ""}{cover}'
        return f"{head}its rows are not learned from; {fix}"
    what = "what it reads is not learned from" if own else "others compute its samples, and its own work is lost"
    return f"{head}{what}; give {cover or 'a smaller k'}, or leave the machine out"
