"""What a worker and its server say to each other about tables. Rows are distinct; None stands for all of them."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from paceline.core.ledger import Indices
from paceline.tables.table_spec import TableSpec
from paceline.transport.messages import Array, ToServer, ToWorker, registered

# -- to the server -----------------------------------------------------------------------------------------------------


@registered(14)
class OpenTable(ToServer, frozen=True):
    """The script opens this table; the answer is Opened."""

    spec: TableSpec


@registered(15)
class TableInit(ToServer, frozen=True):
    """The values that the table starts with, as Opened asked for them; all rows, or one that stands for all."""

    table: int
    values: Array


@registered(16, local=("evaluate",))
class Measures(ToServer, frozen=True):
    """The script can measure the tables: a function of this process. Of another process, `evaluate` is None."""

    evaluate: Callable[[dict[str, Any]], Mapping[str, float]] | None = None


@registered(17)
class Fetch(ToServer, frozen=True):
    """Rows as they may be read at that clock; the answer is Rows."""

    table: int
    clock: int
    rows: Indices | None


@registered(18)
class Forget(ToServer, frozen=True):
    """These rows of an eager table are no longer kept: they need not be sent."""

    table: int
    rows: Indices


class TableLog(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one clock adds to one table; rows are distinct."""

    table: int
    rows: Indices | None
    sums: Array


@registered(19)
class Tick(ToServer, frozen=True):
    """A clock is completed: its increments, what it cost, and how old the rows were that it read."""

    through: int  # clocks completed with this one
    work: int
    logs: list[TableLog]
    loss: float | None = None
    compute_s: float = 0.0  # by the worker's own clock
    reads: list[tuple[int, int, list[int]]] = []  # by table: an age in clocks, and how many rows were so old, or older
    era: int = 0  # barriers that the worker has passed


@registered(20)
class AtBarrier(ToServer, frozen=True):
    """The script waits for everybody, with so many clocks completed; the answer is Passed."""

    number: int
    clock: int


TableToServer = OpenTable | TableInit | Measures | Fetch | Forget | Tick | AtBarrier

# -- to a worker -------------------------------------------------------------------------------------------------------


@registered(72)
class Opened(ToWorker, frozen=True):
    """The table has this number. `wanted`: say what it starts with; otherwise it can be used."""

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
    free_lead: float  # clocks by which it may lead the slowest without asking
    max_lead: float  # clocks by which nothing it reads can be older
    rosters: list[ClockRoster]
    paced: bool  # each Tick is answered by a Clocked
    state: bytes | None = None  # of this worker, where the run goes on from a checkpoint


@registered(75, in_place=True)
class Rows(ToWorker, frozen=True):
    """Rows of a table as of some clock of the slowest worker."""

    table: int
    rows: Indices | None
    values: Array
    slowest: int
    included: int  # so many of the reader's own clocks are in the values
    clock: int | None  # of the Fetch that this answers; None: sent unasked, and all other rows kept are unchanged


@registered(76)
class Clocked(ToWorker, frozen=True):
    """The clock's time is over, or will be in so many seconds."""

    seconds: float = 0.0


@registered(77)
class Included(ToWorker, frozen=True):
    """So many of the worker's own clocks are in the tables."""

    clocks: int


@registered(78)
class Passed(ToWorker, frozen=True):
    """Everybody was at the barrier; all that was written before it is in the tables, and all go on from one clock."""

    number: int
    clock: int


@registered(80)
class Save(ToWorker, frozen=True):
    """Send your State under this number when you have completed the clock you are in."""

    number: int


@registered(79)
class EvaluateTables(ToWorker, frozen=True):
    """To the evaluator: measure these."""

    number: int
    names: list[str]
    values: list[Array]


TableToWorker = Opened | ClockRoster | Entered | Rows | Clocked | Included | Passed | Save | EvaluateTables
