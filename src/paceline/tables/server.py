"""Tables at the server: messages between workers and the tables' host, each taking the time its scenario has for it.

Where no scenario is in force every message is there at once. A clock takes as long as its work does by the scenario:
a process is told how long to sleep, a virtual worker is let go when that time has passed.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from paceline.core.errors import CheckpointError, OptionError, UserError
from paceline.core.events import Cause
from paceline.core.updates import Contents, PushRef
from paceline.server.exchange import Result, RunExchange
from paceline.server.workers import GrantOrder, WorkerRecord
from paceline.strategies import names, strategy_class
from paceline.tables import messages as t
from paceline.tables.host import Host
from paceline.transport.messages import Hello

if TYPE_CHECKING:
    from paceline.server.run import ServerRun

Call = Callable[[], None]


class TableExchange(RunExchange):
    """Carries what workers and tables say to each other."""

    messages = t.TableToServer
    counts_rounds = True

    def __init__(self, run: "ServerRun") -> None:
        super().__init__(run)
        strategy = run.coordinator.strategy
        if not strategy.serves_tables:
            serving = [name for name in names() if strategy_class(name).serves_tables]
            raise OptionError(f"{strategy.name} does not work on tables: choose {', '.join(serving)}")
        self._ways = None if run.emulation is None else run.emulation.ways
        # A link copies rows as they are handed to it; what is under way for some time is copied before it sets out.
        self._copies = self._ways is not None or not run.engine.capabilities.own_processes
        self.host = Host(run.coordinator, self._deliver, paced=self._ways is not None)
        run.coordinator.use(self.host, 0, self)
        run.coordinator.watch.expect_no_losses()
        self._messages: dict[int, int] = {}  # of each worker, for the network's jitter
        self._in_order: dict[int, float] = {}  # before which nothing more arrives at a worker
        self._in_order_up: dict[int, float] = {}  # before which none of its questions arrives at the host
        self._bytes: dict[int, tuple[int, int]] = {}  # of each worker's current clock, beside its increments: up, down
        self._under_way: dict[int, int] = {}  # completed clocks of each worker that have not arrived
        self._parting: dict[int, tuple[int, list[Call]]] = {}  # whose script is at its end, and what waits for that

    @property
    def in_use(self) -> bool:
        return True

    @classmethod
    def restores(cls, contents: Contents) -> bool:
        return bool(contents.head.get("tables"))

    # -- from workers ------------------------------------------------------------------------------------------------

    def on_hello(self, worker: int, hello: Hello, at: float) -> None:
        """Nobody would ever answer: say so instead."""
        del hello, at
        if self.run.resumption is not None:
            path = self.run.resumption.found.path
            raise CheckpointError(f"{path} is of tables, and the script trains a model: resume the script it is of")
        raise UserError(f"worker {worker} prepares a model, others open tables; a run does one of them")

    def on_message(self, record: WorkerRecord | None, message: t.TableToServer, at: float) -> None:
        if record is None:
            if isinstance(message, t.Measures):
                self.run.evaluations.by_process()
                self.run.begin_phase_if_ready(at)
            return
        worker, waiting = record.worker, self.run.workers.waiting
        match message:
            case t.Tick():
                self._on_tick(record, message, at)
            case t.Fetch():
                size = 0 if message.rows is None else message.rows.nbytes
                self._count(worker, up=size)
                self._send_up(worker, size, at, lambda _: self.host.fetch(worker, message))
            case t.Forget():
                self._send_up(worker, message.rows.nbytes, at, lambda _: self.host.forget(worker, message))
            case t.AtBarrier():
                self._send_up(worker, 0, at, lambda _: self.host.barrier(worker, message))
            case t.OpenTable():
                self.run.has_come(record)
                self.host.open(worker, message, self.run.workers.alive, set(waiting))
            case t.TableInit():
                self.host.fill(worker, message)
            case t.Measures():
                evaluate = message.evaluate
                if evaluate is not None and not self.run.evaluations.possible:
                    self.run.evaluations.inline(lambda: self.host.measured(evaluate))

    def _on_tick(self, record: WorkerRecord, tick: t.Tick, at: float) -> None:
        """A script has gone through a clock."""
        worker, emulation = record.worker, self.run.emulation
        self._under_way[worker] = self._under_way.get(worker, 0) + 1
        record.script.pushed = True
        if emulation is None:
            self._ship(worker, record.incarnation, 0, tick, at, tick.compute_s)
            return
        began = at - tick.compute_s
        timing = emulation.compute(worker, tick.work, began, after_others=True)
        emulation.computed(tick.compute_s - timing.compute_s)
        seconds = max(timing.compute_s, tick.compute_s)
        going = (worker, record.incarnation, timing.attempt, tick, began + seconds, seconds)
        self.run.engine.call_at(began + seconds, self._computed, going)
        self.run.engine.dispatch(worker, t.Clocked(), timing)

    def _computed(self, going: tuple[int, int, int, t.Tick, float, float]) -> None:
        if self._is_here(going[0], going[1]):
            self._ship(*going)

    def _ship(
        self, worker: int, incarnation: int, attempt: int, tick: t.Tick, sent_at: float, compute_s: float
    ) -> None:
        """A clock's increments set out."""
        up, down = self._bytes.pop(worker, (0, 0))
        moments = [sent_at]
        if self._ways is not None:
            at = self._ways.up.arrival(worker, self._next(worker), tick.nbytes, sent_at)
            moments = self._ways.faults.deliveries(worker, attempt, sent_at, at)
        for number, moment in enumerate(moments):
            arrival = PushRef(worker, incarnation, 0, 0, compute_s, 0.0, tick.nbytes + up, down)
            self._when(moment, worker, partial(self._arrive, worker, tick, arrival, number == 0))

    def _arrive(self, worker: int, tick: t.Tick, arrival: PushRef, first: bool, at: float) -> None:
        self.host.tick(worker, tick, arrival, at)
        if first:
            self._under_way[worker] -= 1

    def _send_up(self, worker: int, size: int, at: float, call: Callable[[float], None]) -> None:
        if self._ways is not None:
            at = self._ways.up.arrival(worker, self._next(worker), size, at)
            at = self._in_order_up[worker] = max(at, self._in_order_up.get(worker, 0.0))
        self._when(at, worker, call)

    def _when(self, moment: float, worker: int, call: Callable[[float], None]) -> None:
        """Make the call once its moment has come, if its worker's process is then still there."""
        going = (worker, self._incarnation(worker), call)
        if moment <= self.run.engine.now():
            self._go(going)
        else:
            self.run.engine.call_at(moment, self._go, going)

    def _go(self, going: tuple[int, int | None, Callable[[float], None]]) -> None:
        worker, incarnation, call = going
        if self._is_here(worker, incarnation):
            at = self.run.moment()
            call(at)
            self.settle(at)

    # -- to workers --------------------------------------------------------------------------------------------------

    def _deliver(self, worker: int, message: t.TableToWorker) -> None:
        engine, ways = self.run.engine, self._ways
        at = engine.now()
        if isinstance(message, t.Rows):
            if self._copies:
                message = msgspec.structs.replace(message, values=np.asarray(message.values))
            size = message.values.nbytes + (
                message.rows.nbytes if message.clock is None and message.rows is not None else 0
            )
            self._count(worker, down=size)
            if ways is not None:
                at = ways.down.arrival(worker, self._next(worker), size, at)
        elif ways is not None and isinstance(message, t.Passed):
            at = ways.down.arrival(worker, self._next(worker), 0, at)
        if ways is None:
            engine.send(worker, message)
            return
        at = self._in_order[worker] = max(at, self._in_order.get(worker, 0.0))
        engine.call_at(at, self._send, (worker, self._incarnation(worker), message))

    def _send(self, going: tuple[int, int | None, t.TableToWorker]) -> None:
        worker, incarnation, message = going
        record = self.run.workers.get(worker, incarnation)
        if record is not None and not record.script.ended and self.run.active:
            self.run.engine.send(worker, message)

    # -- the run's side ----------------------------------------------------------------------------------------------

    def grant(self, order: GrantOrder) -> None:
        """The strategy lets a worker begin its next clock."""
        self.host.order(order)
        number = self.run.checkpoints.number_for(order.worker) if self.run.checkpoints.every is not None else None
        if number is not None:
            self.run.engine.send(order.worker, t.Save(number))

    def cancel(self, worker: int, ticket: int) -> None:
        """A clock that was made is made."""

    def on_script_end(self, record: WorkerRecord, then: Call) -> None:
        worker = record.worker
        if self._incarnation(worker) is None or self._has_arrived(worker):
            then()
        else:
            self._parting.setdefault(worker, (record.incarnation, []))[1].append(then)

    def is_parting(self, worker: int) -> bool:
        return worker in self._parting

    def _has_arrived(self, worker: int) -> bool:
        return not self._under_way.get(worker) and self.host.has_taken(worker)

    def _is_here(self, worker: int, incarnation: int | None) -> bool:
        """Whether that process is there, or what it wrote before its end is still to come."""
        return incarnation is not None and self._incarnation(worker) == incarnation and self.run.active

    def _incarnation(self, worker: int) -> int | None:
        found = self.run.workers.incarnation(worker)
        return self._parting[worker][0] if found is None and worker in self._parting else found

    def left(self, worker: int, cause: Cause, at: float) -> None:
        del cause
        self._parting.pop(worker, None)
        self._under_way.pop(worker, None)
        self.host.left(worker, at)
        self.look_at_waiting(at)
        self._bytes.pop(worker, None)
        self._in_order.pop(worker, None)
        self._in_order_up.pop(worker, None)
        self.settle(at)

    def look_at_waiting(self, at: float) -> None:
        """Somebody left, or waits for the work to begin: a table may have been waited for in vain."""
        del at
        self.host.look_at_openers(self.run.workers.alive, set(self.run.workers.waiting))

    def settle(self, at: float) -> None:
        if not self.run.active:
            return
        self.host.settle(at)
        for worker in [worker for worker in self._parting if self._has_arrived(worker)]:
            _, calls = self._parting.pop(worker, (0, []))  # one that leaves may let others go
            for call in calls:
                call()

    def _next(self, worker: int) -> int:
        number = self._messages.get(worker, 0)
        self._messages[worker] = number + 1
        return number

    def _count(self, worker: int, up: int = 0, down: int = 0) -> None:
        known = self._bytes.get(worker, (0, 0))
        self._bytes[worker] = (known[0] + up, known[1] + down)

    # -- evaluations, checkpoints, results ---------------------------------------------------------------------------

    @property
    def measurable(self) -> bool:
        return True

    def evaluation(self, number: int) -> t.EvaluateTables:
        tables = self.host.snapshot()
        return t.EvaluateTables(number, list(tables), list(tables.values()))

    def contents(self) -> Contents:
        return self.host.contents()

    def restore(self, contents: Contents, version: int, states: dict[int, bytes], extra: dict[str, Any]) -> None:
        del version, extra
        self.host.restore(contents)
        self.host.states = states

    def came_to_nothing(self) -> str | None:
        if self.run.coordinator.version:
            return None
        return "no clock was ever completed: does the script call session.clock()?"

    def result(self) -> Result:
        return Result(tables=self.host.snapshot())
