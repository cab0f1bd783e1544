"""Messages between a worker and the server about tables. Rows are distinct; None means all rows."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from paceline.core.events import HostLoad
from paceline.core.ledger import Indices
from paceline.tables.table_spec import TableSpec
from paceline.transport.messages import Array, ToServer, ToWorker, registered

# -- to the server -----------------------------------------------------------------------------------------------------


@registered(14)
class OpenTable(ToServer, frozen=True):
    """Open this table; the answer is Opened."""

    spec: TableSpec

    def announced_bytes(self) -> int:
        return max(0, self.spec.rows) * max(0, self.spec.row_bytes)


@registered(15)
class TableInit(ToServer, frozen=True):
    """The table's first values, sent when Opened asks for them: all rows, or one row that is used for all."""

    table: int
    values: Array


@registered(16, local=("evaluate",))
class Measures(ToServer, frozen=True):
    """The script can evaluate the tables. `evaluate` is the function if it is in this process, else None."""

    evaluate: Callable[[dict[str, Any]], Mapping[str, float]] | None = None


@registered(17)
class Fetch(ToServer, frozen=True):
    """Request rows that are fresh enough to be read at that clock; the answer is Rows."""

    table: int
    clock: int
    rows: Indices | None


@registered(18)
class Forget(ToServer, frozen=True):
    """These rows of an eager table are no longer cached: stop sending them."""

    table: int
    rows: Indices


class TableLog(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The increments of one clock to one table; rows are distinct."""

    table: int
    rows: Indices | None
    sums: Array


class TickParts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, weakref=True):
    """Where a clock's increments are that several servers hold: their logs come without sums, and of eager tables alone
    with rows."""

    number: int  # counted by the worker
    nbytes: int
    owner: str = ""  # set by the coordinator


@registered(19)
class Tick(ToServer, frozen=True):
    """A completed clock: its increments, its cost, and the age of the rows it read."""

    through: int  # clocks completed with this one
    work: int
    logs: list[TableLog]
    loss: float | None = None
    compute_s: float = 0.0  # by the worker's own clock
    # Per table: its number, the least age in clocks, and how many rows were read at that age, one older, and so on.
    reads: list[tuple[int, int, list[int]]] = []
    era: int = 0  # barriers that the worker has passed
    again: bool = False  # the server that it was sent to first has died
    parts: TickParts | None = None  # None: the increments are in `logs`
    host: HostLoad | None = None  # of the worker's host


@registered(20)
class AtBarrier(ToServer, frozen=True):
    """The script waits at a barrier, with so many clocks completed; the answer is Passed."""

    number: int
    clock: int
    passed: int | None = None  # sent again: the clock from which all went on


@registered(50)
class ClockStanding(ToServer, frozen=True):
    """To a server that was started again, before Ready: the clocks after this one can be sent again."""

    era: int
    clock: int


TableToServer = OpenTable | TableInit | Measures | Fetch | Forget | Tick | AtBarrier | ClockStanding

# -- to a worker -------------------------------------------------------------------------------------------------------


@registered(72)
class Opened(ToWorker, frozen=True):
    """The number of the opened table. `wanted`: send its first values; otherwise it can be used."""

    table: int
    wanted: bool


@registered(73)
class ClockRoster(ToWorker, frozen=True):
    """From that clock on, these workers share the work."""

    from_clock: int
    workers: list[int]


@registered(74)
class Entered(ToWorker, frozen=True):
    """The worker takes part from this clock on."""

    clock: int
    free_lead: float  # clocks by which it may lead the slowest worker without asking
    max_lead: float  # the largest age in clocks of anything it reads
    rosters: list[ClockRoster]
    paced: bool  # each Tick is answered by a Clocked
    state: bytes | None = None  # this worker's state, if the run resumes from a checkpoint
    keeps: bool = False  # keep clocks until they are Stored: a server that dies may be started again
    era: int = 0  # barriers passed, as the server knows it


@registered(75, in_place=True)
class Rows(ToWorker, frozen=True):
    """Rows of a table, with the slowest worker's clock at that time."""

    table: int
    rows: Indices | None
    values: Array
    slowest: int
    included: int  # the reader's own clocks that are in the values
    clock: int | None  # of the Fetch that this answers; None: sent unasked, and all other cached rows are unchanged
    parts: tuple[int, int] | None = None  # several servers send the values, under this number; and their bytes


@registered(76)
class Clocked(ToWorker, frozen=True):
    """The emulated clock ends in so many seconds; 0: it has ended."""

    seconds: float = 0.0


@registered(77)
class Included(ToWorker, frozen=True):
    """The number of the worker's own clocks that are in the tables."""

    clocks: int


@registered(78)
class Passed(ToWorker, frozen=True):
    """All workers reached the barrier: everything written before it is in the tables, and all go on from `clock`."""

    number: int
    clock: int


@registered(80)
class Save(ToWorker, frozen=True):
    """Send your SavedState under this number when you have completed the current clock."""

    number: int


@registered(110)
class Stored(ToWorker, frozen=True):
    """A checkpoint holds the worker's clocks up to this one: they need not be sent again."""

    era: int
    clock: int


@registered(79)
class EvaluateTables(ToWorker, frozen=True):
    """Ask the evaluator to evaluate these tables."""

    number: int
    names: list[str]
    values: list[Array]


TableToWorker = Opened | ClockRoster | Entered | Rows | Clocked | Included | Passed | Save | Stored | EvaluateTables
