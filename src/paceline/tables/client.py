"""The worker's side of the table protocol: its clock, the increments it sent, and the answers it waits for.

Reads within the bound come from the caches, without a message. Messages that the server sends unasked (rows of eager
tables, rosters) are handled whenever the worker waits, and at each clock.
"""

from collections.abc import Callable, Mapping
from time import perf_counter, sleep
from typing import Any, NoReturn

import numpy as np

from paceline.core.errors import InternalError, OptionError, UserError
from paceline.tables import messages as t
from paceline.tables.rowwise import Array, Rows
from paceline.tables.sent_clocks import SentClocks
from paceline.tables.table_spec import TableSpec
from paceline.tables.worker_table import WorkerTable
from paceline.transport.base import Closed, Endpoint, Lost
from paceline.transport.messages import Ended, Evaluated, Over, Ready, SavedState
from paceline.worker.host_watch import host_watch
from paceline.worker.state import WorkerState

Evaluate = Callable[[dict[str, Any]], Mapping[str, float]]
CLOCK = "clock()"
MOST_AHEAD = 256  # clocks that a worker may send before the server confirms the first of them


class Answers:
    """Answers of the server that the worker has not acted on yet."""

    def __init__(self) -> None:
        self.clocked: t.Clocked | None = None
        self.opened: t.Opened | None = None
        self.save: int | None = None  # the number to send this worker's state under, if wanted
        self.passed = 0  # the number of the barrier that the server opened last
        self.over: Over | None = None


class Stopwatch:
    """Time spent in the current clock, less the time spent waiting for the server."""

    def __init__(self) -> None:
        self.began = perf_counter()
        self.blocked_s = 0.0

    @property
    def computing_s(self) -> float:
        return perf_counter() - self.began - self.blocked_s


class Client:
    """One worker's tables and its clock."""

    def __init__(self, endpoint: Endpoint, worker: int, ready: Ready | None, state: WorkerState) -> None:
        """`ready` is the message that joins the run; None in a process that only evaluates the tables."""
        self._endpoint = endpoint
        self._worker = worker
        self._ready = ready
        self._state = state
        self._answers = Answers()
        self._losses_of_server = 0
        self._takes_part = False
        self._included = 0  # own clocks that the server has confirmed as applied
        self._tables: dict[str, WorkerTable] = {}
        self._by_number: dict[int, WorkerTable] = {}
        self.clock = 0  # clocks completed
        self._entered: t.Entered | None = None
        self._rosters: list[t.ClockRoster] = []
        self._sent = SentClocks(worker)
        self._awaited: dict[tuple[int, int], list[Rows | None]] = {}  # rows of pending fetches, by table and clock
        self._barriers = 0
        self._passed = 0  # of these
        self._losses: list[float] = []  # of this clock
        self._watch = Stopwatch()

    # -- called by the session ---------------------------------------------------------------------------------------

    def open(self, spec: TableSpec, first_values: Callable[[], Array], cache_rows: int | None) -> WorkerTable:
        """Open the table on the server and return this worker's view of it; reopening returns the same view."""
        known = self._tables.get(spec.name)
        if known is not None:
            known.spec.require_same(spec, f"worker {self._worker}")
            return known
        if self._entered is not None:
            raise UserError(
                f"table {spec.name!r} is opened after the work has begun (clock, get, inc, share, barrier): open all "
                "tables before that"
            )
        if self._ready is None:
            return WorkerTable(spec, len(self._tables), 1, first_values)
        number = None
        while number is None:
            number = self._number_of(spec, first_values, self._wait)
        table = self._tables[spec.name] = WorkerTable(spec, number, cache_rows, first_values)
        self._by_number[number] = table
        return table

    def _number_of(self, spec: TableSpec, values: Callable[[], Array], wait: Callable[..., None]) -> int | None:
        """Open a table and return its number, once every worker has opened it; None if the server was lost."""
        server, self._answers.opened = self._losses_of_server, None
        self._endpoint.send(t.OpenTable(spec))
        while True:
            wait(lambda: self._answers.opened is not None or self._losses_of_server != server)
            opened, self._answers.opened = self._answers.opened, None
            if opened is None:
                return None
            if not opened.wanted:
                return opened.table
            self._endpoint.send(t.TableInit(opened.table, values()))

    def complete_clock(self, work: int) -> bool:
        """Send this clock's increments and go on to the next clock; False once the run is over."""
        self.require_going(CLOCK)
        if isinstance(work, bool) or not isinstance(work, int | np.integer) or work < 1:
            raise OptionError(f"clock(work=...) must be a whole number >= 1, not {work!r}")
        compute_s = self._watch.computing_s
        logs = [log for table in self._tables.values() if (log := table.take_log()) is not None]
        reads = [(table.number, *ages) for table in self._tables.values() if (ages := table.take_ages()) is not None]
        tick = t.Tick(
            self.clock + 1,
            int(work),
            logs,
            self._mean_loss(),
            compute_s,
            reads,
            self._passed,
            host=host_watch().sample(),
        )
        self._endpoint.send(tick)
        self._sent.add(tick)
        self.clock += 1
        if self._entered is not None and self._entered.paced:
            answers, server = self._answers, self._losses_of_server
            answers.clocked = None
            self._wait(lambda: bool(answers.clocked or answers.over) or self._losses_of_server != server)
            if answers.clocked is not None and answers.clocked.seconds > 0:
                sleep(answers.clocked.seconds)  # emulation: stretch the clock to the scenario's time
        while self._answers.over is None and self._endpoint.poll():
            self._wait_once()
        # A worker that only writes must not run ahead of a slow server without limit.
        self._wait(lambda: self.clock - self._included <= MOST_AHEAD or self._answers.over is not None)
        self._send_state()
        self._watch = Stopwatch()
        return self._answers.over is None

    def _send_state(self) -> None:
        """Send the worker's state if it is wanted: only here, between two iterations, it is that of its clock."""
        if self._answers.save is not None:
            self._endpoint.send(SavedState(self._answers.save, self._state.capture(self._phase, over=False)))
            self._answers.save = None

    @property
    def _phase(self) -> int:
        return 0 if self._ready is None else self._ready.phase

    def barrier(self) -> None:
        """Wait for all workers; afterwards everybody sees what any completed clock wrote."""
        self.require_going("barrier()")
        self._barriers += 1
        while self._passed < self._barriers:
            server = self._losses_of_server
            self._endpoint.send(t.AtBarrier(self._barriers, self.clock))
            self._wait(lambda: self._passed >= self._barriers or self._losses_of_server != server)  # noqa: B023
        for table in self._tables.values():
            table.expire()

    def share(self, count: int) -> Rows:
        """Return this worker's part of `count` rows at this clock."""
        self.require_going("share()")
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 0:
            raise OptionError(f"share(n) needs a whole number >= 0, not {count!r}")
        current = [r for r in self._rosters if r.from_clock <= self.clock]
        workers = current[-1].workers if current else []
        if self._worker not in workers:
            return np.empty(0, dtype=np.int64)
        place, of = workers.index(self._worker), len(workers)
        return np.arange(count * place // of, count * (place + 1) // of, dtype=np.int64)

    def report_loss(self, loss: float) -> None:
        """Record a loss for this clock; the clock reports the mean of its losses."""
        self._losses.append(loss)

    def require_going(self, what: str) -> None:
        """Join the run at the first call; raise once the run is over."""
        if self._answers.over is not None:
            if what != CLOCK:
                raise Closed
            raise UserError(f"{what} after the run ended: leave the loop when session.clock() returns False")
        if self._ready is None:
            raise Closed  # an evaluator does not work on tables, and this script registered nothing to evaluate
        if not self._tables:
            raise UserError(f"{what} was called before session.table(...): open the tables first")
        if self._entered is None:
            self._takes_part = True
            self._endpoint.send(self._ready)
            self._wait(lambda: self._entered is not None)
            self._watch = Stopwatch()

    # -- called by tables --------------------------------------------------------------------------------------------

    def fetch(self, table: WorkerTable, rows: Rows, clock: int) -> None:
        """Request rows that are fresh enough to be read at that clock."""
        named = None if len(rows) == table.spec.rows else rows
        self._awaited.setdefault((table.number, clock), []).append(named)
        self._endpoint.send(t.Fetch(table.number, clock, named))

    def await_rows(self, table: WorkerTable) -> bool:
        """Wait for all pending fetches of this table at this clock; False if there were none."""
        if (table.number, self.clock) not in self._awaited:
            return False
        self._wait(lambda: (table.number, self.clock) not in self._awaited)
        return True

    # -- messages of the server --------------------------------------------------------------------------------------

    def _wait(self, done: Callable[[], bool]) -> None:
        began = perf_counter()
        while not done():
            if self._answers.over is not None:
                raise Closed  # the answer will never come
            self._wait_once()
        self._watch.blocked_s += perf_counter() - began

    def _wait_once(self) -> None:
        """Handle one message; if the server is lost, wait for its successor and register there."""
        try:
            self._take_in()
        except Lost:
            self._meet_another_server()

    def _take_in(self) -> None:
        message = self._endpoint.receive()
        match message:
            case t.Rows():
                self._on_rows(message)
            case t.ClockRoster():
                self._rosters.append(message)
            case t.Included():
                self._are_included(message.clocks)
            case t.Clocked():
                self._answers.clocked = message
            case t.Opened():
                self._answers.opened = message
            case t.Passed():
                self._on_passed(message)
            case t.Entered():
                self._on_entered(message)
            case t.Save():
                self._answers.save = message.number
            case t.Stored():
                self._sent.stored(message.era, message.clock)
            case Over():
                self._answers.over = message
                self._answers.save = self._answers.save if message.save is None else message.save
            case _:
                raise InternalError(f"{type(message).__name__} has no meaning to a worker on tables")

    def _on_entered(self, message: t.Entered) -> None:
        self._entered, self._included = message, message.clock
        self._rosters = message.rosters + self._rosters
        for table in self._tables.values():
            table.enter(message.free_lead, message.max_lead)
        if self._sent.since is None:  # else the script has begun, and goes on where it is
            self.clock = message.clock
            self._sent.begin(message.clock, keeps=message.keeps)
            self._state.welcome(message.state)
            self._state.reach(self._phase, over=False)

    def _on_passed(self, message: t.Passed) -> None:
        self._answers.passed = message.number
        if message.number > self._passed:  # else it was passed under an earlier server
            self._sent.passed(t.AtBarrier(message.number, self.clock), message.clock)
            self._passed, self.clock, self._included = message.number, message.clock, message.clock

    def find_server(self) -> None:
        """Wait for the successor of a lost server and register there."""
        self._meet_another_server()

    @property
    def has_begun(self) -> bool:
        """Whether this worker has begun to work on its tables."""
        return self._takes_part

    def _meet_another_server(self) -> None:
        """Wait for the next server and send it again what its last checkpoint lacks. Cached rows are invalid."""
        while True:
            self._endpoint.reconnect()
            self._losses_of_server += 1
            self._awaited.clear()
            self._rosters, self._entered, self._answers.save = [], None, None
            try:
                self._introduce_again()
            except Lost:
                continue
            return

    def _introduce_again(self) -> None:
        self._by_number = {}
        for table in self._tables.values():
            table.expire()
            number = self._number_of(table.spec, table.first_values, self._wait_for_this_server)
            if number is None:  # for the type checker: here a lost server raises Lost and the run's end Closed
                return
            table.number = number
            self._by_number[number] = table
        if self._takes_part and self._ready is not None:
            if self._sent.since is not None:
                self._endpoint.send(self._sent.since)
            self._endpoint.send(self._ready)
            self._wait_for_this_server(lambda: self._entered is not None)
            self._send_again()

    def _send_again(self) -> None:
        """Send the clocks and barriers that follow those which the server knows."""
        if self._entered is None:
            return
        for item in self._sent.again(self._entered.era, self._entered.clock):
            self._answers.passed = 0
            self._endpoint.send(item)
            if isinstance(item, t.AtBarrier):
                self._wait_for_this_server(lambda: self._answers.passed >= item.number)  # noqa: B023
                self._included = self._entered.clock if item.passed is None else item.passed

    def outlast_server(self) -> None:
        """After the script's end, stay until the run's: a server that is started again may lack its last clocks."""
        while self._entered is not None and self._entered.keeps and self._answers.over is None:
            server = self._losses_of_server
            self._wait_once()
            if self._losses_of_server != server:
                self._endpoint.send(Ended())

    def _wait_for_this_server(self, done: Callable[[], bool]) -> None:
        while not done():
            if self._answers.over is not None:
                raise Closed
            self._take_in()

    def _on_rows(self, message: t.Rows) -> None:
        self._are_included(message.included)
        table = self._by_number[message.table]
        if message.clock is not None:  # the server answers fetches of one table at one clock in order
            fetch = (message.table, message.clock)
            fetches = self._awaited.get(fetch, [])
            del fetches[:1]
            if not fetches:
                self._awaited.pop(fetch, None)
        later = [log for tick in self._sent.lacking for log in tick.logs if log.table == message.table]
        for rows in table.take_in(message, later, self.clock):
            self._forget(table.number, rows)

    def _forget(self, table: int, rows: Rows) -> None:
        """Tell the server which rows of an eager table the cache evicted, except those that are being fetched again."""
        for (number, _), fetches in self._awaited.items():
            for wanted in fetches:
                if number == table:
                    rows = rows[:0] if wanted is None else rows[~np.isin(rows, wanted)]
        if len(rows):
            self._endpoint.send(t.Forget(table, rows))

    def _are_included(self, clocks: int) -> None:
        self._included = clocks
        self._sent.included(clocks)

    def _mean_loss(self) -> float | None:
        losses, self._losses = self._losses, []
        return sum(losses) / len(losses) if losses else None


def serve_evaluations(endpoint: Endpoint, evaluate: Evaluate) -> NoReturn:
    """Run the evaluator: evaluate the tables whenever the server asks, until the link closes."""
    endpoint.send(t.Measures())
    while True:
        try:
            message = endpoint.receive()
        except Lost:
            endpoint.reconnect()
            endpoint.send(t.Measures())
            continue
        if isinstance(message, t.EvaluateTables):
            metrics = evaluate(dict(zip(message.names, message.values, strict=True)))
            endpoint.send(Evaluated(message.number, {name: float(value) for name, value in metrics.items()}))
