"""What bench_unevenness.py consists of: named parts, each a list of tasks, a side in a cell.

A task asks for the runs it needs one after the other. All that were made before are found, so a part that is asked for
again, or for the result, only looks up what it had.
"""

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from contenders.uneven_cells import CELLS, JUDGED, REPORTED, RESAMPLED, Outcome, resampled
from contenders.uneven_tuning import RIVALS, SIDES, Choice, Make, Search, fresh, rounded

BATCHES = (16, 32, 64)
FREE = ("equal", "w8_4x", "w8_4x_line03", "interference")  # cells in which the batch is free as well
SPREAD = ("w8_4x", "w16_8x")
SPREAD_SIDES = ("asp", "dasp")
SPREAD_SEEDS = tuple(range(40))  # the standard error of a ratio of spreads is 11 %; of ten seeds it is 24 %
SPREAD_LONGER = 1.5  # times asp's tuned time: then both stop

# The first form of `adaptive_sync` missed its bar on the resampled mixes, and the present one was made after that, on
# mixes of other seeds. These are new to it: they were drawn when its rule was done.
AGAIN_SEED = 20261120
AGAIN = tuple(
    msgspec.structs.replace(cell, name=f"again{number}")
    for number, cell in enumerate(resampled(AGAIN_SEED))
    if not cell.trace
)
AGAIN_SIDES = ("bsp", "asp", "adaptive_sync")
CELLS.update((cell.name, cell) for cell in AGAIN)

How = Literal["tuned", "fresh", "free", "once", "spread"]


class Found(msgspec.Struct, frozen=True):
    """What a task has: the chosen trial, and its runs on fresh seeds."""

    choice: Choice | None
    outcomes: list[Outcome]


class Task(msgspec.Struct, frozen=True):
    """A side in a cell, and how it is measured there."""

    how: How
    cell: str
    side: str

    @property
    def told(self) -> str:
        """Its name."""
        return f"{self.how} {self.cell} {self.side}"

    def carry_out(self, make: Make) -> Found:
        """Make all runs it needs."""
        match self.how:
            case "tuned":
                return Found(self._tune(make), [])
            case "fresh":
                return self._timed(make, self._tune(make))
            case "free":
                choices = [self._tune(make, batch) for batch in reversed(BATCHES)]
                there = [choice for choice in choices if choice is not None]
                return self._timed(make, min(there, key=lambda choice: choice.score, default=None))
            case "once":
                return Found(self._tune(make, seconds=False), [])
            case "spread":
                return self._spread(make)

    def _tune(self, make: Make, batch: int | None = None, seconds: bool = True) -> Choice | None:
        search = Search(self.cell, self.side, batch or CELLS[self.cell].size.batch, make)
        search.run(SIDES[self.side])
        return search.choose() if seconds else search.first_choice()

    def _timed(self, make: Make, choice: Choice | None) -> Found:
        return Found(choice, fresh(choice, make) if choice is not None else [])

    def _spread(self, make: Make) -> Found:
        """Runs of equal virtual length: until some time after asp, as tuned, is at the target."""
        length = Task("tuned", self.cell, "asp").carry_out(make).choice
        choice = self._tune(make)
        if length is None or choice is None:
            return Found(None, [])
        limit = rounded(SPREAD_LONGER * length.score)
        trials = [
            msgspec.structs.replace(choice.trial, seed=seed, limit_s=limit, to_the_end=True) for seed in SPREAD_SEEDS
        ]
        return Found(choice, [make(trial) for trial in trials])


def everywhere(how: How, cells: Iterable[str], sides: Iterable[str]) -> list[Task]:
    """All sides in all cells."""
    return [Task(how, cell, side) for cell in cells for side in sides]


RACING = (*RIVALS, "dasp", "dasp_states", "adaptive_sync")  # whose times bars ask for
WITH_BALANCED = (*RACING, "balanced")
JUDGED_NAMES = tuple(cell.name for cell in JUDGED)
ONCE = tuple(cell.name for cell in REPORTED if cell.name != "equal")

PARTS: dict[str, Callable[[], list[Task]]] = {
    "tuning": lambda: everywhere("tuned", [*JUDGED_NAMES, "equal"], WITH_BALANCED),
    "fresh": lambda: everywhere("fresh", [*JUDGED_NAMES, "equal"], WITH_BALANCED),
    "batches": lambda: everywhere("free", FREE, WITH_BALANCED),
    "reported": lambda: everywhere("once", ONCE, WITH_BALANCED),
    "spread": lambda: everywhere("spread", SPREAD, SPREAD_SIDES),
    "resampled": lambda: everywhere("fresh", [cell.name for cell in RESAMPLED], RACING),
    "again": lambda: everywhere("fresh", [cell.name for cell in AGAIN], AGAIN_SIDES),
}
