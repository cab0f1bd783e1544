"""What a worker and its server say to each other about tables. Arrays are NumPy's; on a wire they travel as tensors."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from paceline.tables.spec import TableSpec

# -- to the server -----------------------------------------------------------------------------------------------------


class OpenTable(msgspec.Struct, frozen=True):
    """The script opens this table; the answer is Opened."""

    spec: TableSpec


class TableInit(msgspec.Struct, frozen=True):
    """The values that the table starts with, as Opened asked for them; all rows, or one that stands for all."""

    table: int
    values: Any


class Measures(msgspec.Struct, frozen=True):
    """The script can measure the tables: a function of this process. Of another process, `evaluate` is None."""

    evaluate: Callable[[dict[str, Any]], Mapping[str, float]] | None = None


class Fetch(msgspec.Struct, frozen=True):
    """Rows as they may be read at that clock; the answer is Rows."""

    table: int
    clock: int
    rows: Any  # None: all


class Forget(msgspec.Struct, frozen=True):
    """These rows of an eager table are no longer kept: they need not be sent."""

    table: int
    rows: Any


class TableLog(msgspec.Struct, frozen=True):
    """What one clock adds to one table; rows are distinct."""

    table: int
    rows: Any  # None: all
    sums: Any


class Tick(msgspec.Struct, frozen=True):
    """A clock is completed: its increments, what it cost, and how old the rows were that it read."""

    through: int  # clocks completed with this one
    work: int
    logs: list[TableLog]
    loss: float | None = None
    compute_s: float = 0.0  # by the worker's own clock
    reads: list[tuple[int, int, list[int]]] = []  # by table: an age in clocks, and how many rows were so old, or older
    era: int = 0  # barriers that the worker has passed

    @property
    def nbytes(self) -> int:
        return sum(log.sums.nbytes + (0 if log.rows is None else log.rows.nbytes) for log in self.logs)


class AtBarrier(msgspec.Struct, frozen=True):
    """The script waits for everybody, with so many clocks completed; the answer is Passed."""

    number: int
    clock: int


TableToServer = OpenTable | TableInit | Measures | Fetch | Forget | Tick | AtBarrier

# -- to a worker -------------------------------------------------------------------------------------------------------


class Opened(msgspec.Struct, frozen=True):
    """The table has this number. `wanted`: say what it starts with; otherwise it can be used."""

    table: int
    wanted: bool


class Roster(msgspec.Struct, frozen=True):
    """From that clock on, these workers share the work."""

    from_clock: int
    workers: list[int]


class Entered(msgspec.Struct, frozen=True):
    """The worker takes part from this clock on."""

    clock: int
    free_lead: float  # clocks by which it may lead the slowest without asking
    max_lead: float  # clocks by which nothing it reads can be older
    rosters: list[Roster]
    paced: bool  # each Tick is answered by a Clocked
    state: bytes | None = None  # of this worker, where the run goes on from a checkpoint


class Rows(msgspec.Struct, frozen=True):
    """Rows of a table as of some clock of the slowest worker."""

    table: int
    rows: Any  # None: all
    values: Any
    slowest: int
    included: int  # so many of the reader's own clocks are in the values
    clock: int | None  # of the Fetch that this answers; None: sent unasked, and all other rows kept are unchanged


class Clocked(msgspec.Struct, frozen=True):
    """The clock's time is over; or it will be, so many seconds after that moment of the host's monotonic clock."""

    seconds: float = 0.0
    since: float | None = None


class Included(msgspec.Struct, frozen=True):
    """So many of the worker's own clocks are in the tables."""

    clocks: int


class Passed(msgspec.Struct, frozen=True):
    """Everybody was at the barrier; all that was written before it is in the tables, and all go on from one clock."""

    number: int
    clock: int


class Save(msgspec.Struct, frozen=True):
    """Send your State under this number when you have completed the clock you are in."""

    number: int


class EvaluateTables(msgspec.Struct, frozen=True):
    """To the evaluator: measure these."""

    number: int
    names: list[str]
    values: list[Any]


TableToWorker = Opened | Roster | Entered | Rows | Clocked | Included | Passed | Save | EvaluateTables
