"""The part of a session that works on tables."""

from typing import Any

from paceline.core.errors import OptionError, UserError
from paceline.tables.client import Client, Evaluate, serve_evaluations
from paceline.tables.messages import Measures
from paceline.tables.table import Table, initial_values
from paceline.tables.table_spec import make_spec
from paceline.transport.base import Endpoint
from paceline.transport.messages import Ready
from paceline.worker.context import WorkerContext
from paceline.worker.identity import WorkerIdentity
from paceline.worker.state import WorkerState

CLOCKS = 1 << 40  # stands for the size of the data where there is none


class TableSession(WorkerIdentity):
    """Opens tables and completes clocks."""

    def __init__(self, given: WorkerContext, endpoint: Endpoint, state: WorkerState) -> None:
        super().__init__(given, endpoint)
        self._state = state
        self._tables: Client | None = None
        self._handles: dict[str, Table] = {}  # one per open table

    @property
    def _trains(self) -> bool:
        return False

    def table(
        self,
        name: str,
        rows: int,
        width: int = 1,
        *,
        dtype: Any = "float32",
        staleness: int | None = None,
        init: Any = None,
        update: str = "add",
        eager: bool = False,
        cache_rows: int | None = None,
    ) -> Table:
        """Open a table that all workers share: rows of a fixed width, read with `get` and added to with `inc`.

        `staleness` bounds the age of what is read, in clocks, where it is tighter than the strategy's bound. `init` is
        a number, an array, or a function of rows and width; the first worker's is taken. `update` is what an increment
        does at the server (`add`, `clip:limit=...`, `adagrad:rate=...`). With `eager` the server resends
        rows that this worker has read as they change. `cache_rows` bounds how many rows it caches.
        """
        if self._trains:
            raise UserError("table() was called after prepare(): a run trains a model or works on tables")
        spec = make_spec(name, rows, width, dtype, staleness, update, eager)
        if self._tables is None:
            ready = None if self._context.evaluator else Ready(0, CLOCKS, 1, 1, "clocks", 1)
            self._tables = Client(self._endpoint, self._context.worker, ready, self._state)
            self._context.after_script.append(self._tables.outlast_server)
        opened = self._tables.open(spec, initial_values(spec, init), cache_rows)
        return self._handles.setdefault(spec.name, Table(self._tables, opened))

    def clock(self, work: int = 1) -> bool:
        """Complete an iteration on tables and send what this worker wrote; return False once the run is over.

        `work` is what the iteration cost, in samples, tokens, ratings; a scenario's times are per unit of it.
        """
        return self._on_tables("clock()").complete_clock(work)

    @property
    def clocks(self) -> int:
        """Iterations on tables that this worker has completed. A newcomer starts at the slowest worker's number, a
        resumed run where it stopped."""
        client = self._on_tables("clocks")
        client.require_going("clocks")
        return client.clock

    def share(self, count: int) -> Any:
        """Return this worker's part of `count` rows, an array of row numbers; it changes as workers join or leave."""
        return self._on_tables("share()").share(count)

    def measure(self, evaluate: Evaluate) -> None:
        """Measure the tables as the run goes on: `evaluate(tables)` gets arrays by name and returns numbers by name.

        Call it before the first `get` or `clock`. It takes none of the workers' time.
        """
        if not callable(evaluate):
            raise OptionError(f"evaluate must be a function of the tables, not {type(evaluate).__name__}")
        if self._context.evaluator:
            serve_evaluations(self._endpoint, evaluate)
        self._endpoint.send(Measures(evaluate if self._context.evaluates else None))

    def _on_tables(self, what: str) -> Client:
        if self._tables is None:
            raise UserError(f"{what} was called before session.table(...): open the tables first")
        return self._tables
