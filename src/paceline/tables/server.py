"""The exchange of a run on tables: passes workers' messages to the host when they arrive, and sends its answers.

Under a scenario a clock takes the scenario's time for its work: a process is told how long to sleep, a virtual worker
resumes when that time has passed.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from paceline.core.errors import CheckpointError, OptionError, PeerError, UserError
from paceline.core.events import Cause
from paceline.core.settings import RunConfig
from paceline.core.updates import Contents, PushRef
from paceline.server.exchange import Result, RunExchange
from paceline.server.workers import WorkerRecord
from paceline.strategies import names, strategy_class
from paceline.tables import messages as t
from paceline.tables.host import Host
from paceline.tables.positions import Cut, Position, RestoredPositions
from paceline.tables.rowwise import bytes_of_logs
from paceline.tables.table_store import TableStore
from paceline.transport.messages import Hello

if TYPE_CHECKING:
    from paceline.server.run import ServerRun

Call = Callable[[], None]
MOST_UNSAVED = 1 << 29  # bytes of increments since the last checkpoint, which workers keep: more ask for another one


class TableTraffic:
    """When messages about tables arrive under a scenario, in both directions, and how many bytes each clock moves.

    Without a scenario every message arrives at once.
    """

    def __init__(self, run: "ServerRun") -> None:
        self._run = run
        self._ways = None if run.emulation is None else run.emulation.ways
        # A real link copies rows when it sends them; a message that is delayed or passed by reference is copied first.
        self._copies = self._ways is not None or not run.engine.capabilities.own_processes
        self._messages: dict[int, int] = {}  # messages of each worker so far: the network's jitter is drawn by number
        self._in_order: dict[int, float] = {}  # when the last message arrives at each worker: none may overtake it
        self._in_order_up: dict[int, float] = {}  # the same of its questions to the host
        self._bytes: dict[int, tuple[int, int]] = {}  # up and down in each worker's current clock, less its increments

    def question_arrives(self, worker: int, size: int, sent_at: float) -> float:
        """Return when a worker's question arrives; questions keep their order."""
        if self._ways is None:
            return sent_at
        at = self._ways.up.arrival(worker, self._next(worker), size, sent_at)
        at = self._in_order_up[worker] = max(at, self._in_order_up.get(worker, 0.0))
        return at

    def increments_arrive(self, worker: int, attempt: int, size: int, sent_at: float) -> list[float]:
        """Return when a clock's increments arrive: once, unless a message fault strikes them."""
        if self._ways is None:
            return [sent_at]
        at = self._ways.up.arrival(worker, self._next(worker), size, sent_at)
        return self._ways.faults.deliveries(worker, attempt, sent_at, at)

    def deliver(self, worker: int, message: t.TableToWorker) -> None:
        """Send a message to a worker, after its link's delay."""
        engine, ways = self._run.engine, self._ways
        at = engine.now()
        if isinstance(message, t.Rows):
            if self._copies:
                message = msgspec.structs.replace(message, values=np.asarray(message.values))
            size = message.values.nbytes if message.parts is None else message.parts[1]
            size += message.rows.nbytes if message.clock is None and message.rows is not None else 0
            self.count(worker, down=size)
            if ways is not None:
                at = ways.down.arrival(worker, self._next(worker), size, at)
        elif ways is not None and isinstance(message, t.Passed):
            at = ways.down.arrival(worker, self._next(worker), 0, at)
        if ways is None:
            engine.send(worker, message)
            return
        at = self._in_order[worker] = max(at, self._in_order.get(worker, 0.0))
        engine.call_at(at, self._send, (self._run.workers.records[worker], message))

    def _send(self, going: tuple[WorkerRecord, t.TableToWorker]) -> None:
        record, message = going
        if not (record.script.gone or record.script.ended) and self._run.cause is None:
            self._run.engine.send(record.worker, message)

    def count(self, worker: int, up: int = 0, down: int = 0) -> None:
        """Add bytes to the worker's current clock."""
        known = self._bytes.get(worker, (0, 0))
        self._bytes[worker] = (known[0] + up, known[1] + down)

    def take_bytes(self, worker: int) -> tuple[int, int]:
        """Return the bytes of the clock that ends, up and down, and start over."""
        return self._bytes.pop(worker, (0, 0))

    def left(self, worker: int) -> None:
        """Drop what was kept for a worker that left."""
        for kept in (self._bytes, self._in_order, self._in_order_up):
            kept.pop(worker, None)

    def _next(self, worker: int) -> int:
        number = self._messages.get(worker, 0)
        self._messages[worker] = number + 1
        return number


def _refuse_others(config: RunConfig) -> None:
    """Refuse settings that a run on tables does not have: of batches and rates."""
    for flag, given in (("--global-batch", config.global_batch), ("--scale-lr", config.scale_lr)):
        if given not in (None, "none"):
            raise OptionError(f"{flag} {given}: the script works on tables, without batches and rates; leave it out")


class TableExchange(RunExchange):
    """The exchange of a run whose workers share tables."""

    messages = t.TableToServer
    counts_rounds = True
    needs_states = True
    steps_by = t.Tick
    can_rejoin = False  # its caches and the clocks under way are of before: a fresh process begins anew

    def __init__(self, run: "ServerRun") -> None:
        super().__init__(run)
        strategy = run.coordinator.strategy
        if not strategy.serves_tables:
            serving = [name for name in names() if strategy_class(name).serves_tables]
            raise OptionError(f"{strategy.name} does not work on tables: choose {', '.join(serving)}")
        if strategy.keeps_models:
            raise OptionError(f"{strategy.name}: cache is for models; tables have caches of their own: leave it out")
        _refuse_others(run.plan.config)
        self.store = self._make_store(run)
        self._traffic = TableTraffic(run)
        self._host = Host(run.coordinator, self.store, self._traffic.deliver, paced=run.emulation is not None)
        run.coordinator.use(self.store, 0, self.store)
        run.coordinator.watch.expect_no_losses()
        self._under_way: dict[int, dict[int, t.Tick]] = {}  # completed clocks that have not arrived, by worker
        self._parting: dict[int, list[Call]] = {}  # workers whose script has ended: calls that wait for their clocks
        self._ended: dict[int, Position] = {}  # where workers stood that take no more part
        self._cut: Cut | None = None  # of the checkpoint under way
        self._unsaved = 0  # bytes of increments since the last checkpoint

    def _make_store(self, run: "ServerRun") -> TableStore:
        return TableStore(run)

    @property
    def in_use(self) -> bool:
        return True

    @classmethod
    def restores(cls, contents: Contents) -> bool:
        return bool(contents.head.get("tables"))

    # -- from workers ------------------------------------------------------------------------------------------------

    def on_hello(self, worker: int, hello: Hello, at: float) -> None:
        """Refuse a worker that prepares a model, since nobody would ever answer it."""
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
        worker, host, workers = record.worker, self._host, self.run.workers
        match message:
            case t.Tick():
                self._on_tick(record, message, at)
            case t.Fetch():
                size = 0 if message.rows is None else message.rows.nbytes
                self._traffic.count(worker, up=size)
                self._ask(record, size, at, lambda _: host.fetch(worker, message))
            case t.Forget():
                self._ask(record, message.rows.nbytes, at, lambda _: host.forget(worker, message))
            case t.AtBarrier():
                self._ask(record, 0, at, lambda _: host.barrier(worker, message))
            case t.OpenTable():
                self.run.has_come(record)
                host.open(worker, message, workers.alive, set(workers.waiting))
            case t.TableInit():
                host.fill(worker, message)
            case t.ClockStanding():
                self.store.standing[worker] = message
            case t.Measures():
                evaluate = message.evaluate
                if evaluate is not None and not self.run.evaluations.possible:
                    self.run.evaluations.inline(
                        lambda: {name: float(value) for name, value in evaluate(self.store.snapshot()).items()}
                    )

    def _on_tick(self, record: WorkerRecord, tick: t.Tick, at: float) -> None:
        """Time a completed clock, and ship its increments when that time has passed."""
        worker, emulation = record.worker, self.run.emulation
        if tick.logs and (tick.parts is not None) != self.store.in_parts:
            raise PeerError(
                f"worker {worker} sent the increments of clock {tick.through} to another server than theirs"
            )
        self._under_way.setdefault(worker, {})[tick.through] = tick
        if self._cut is not None:
            self._cut.record(worker, tick)
        record.script.pushed = True
        if emulation is None or tick.again:  # what is sent again has taken its time before
            self._ship((record, 0, tick, at, tick.compute_s))
            return
        began = at - tick.compute_s
        timing = emulation.compute(worker, tick.work, began, after_others=True)
        emulation.computed(tick.compute_s - timing.compute_s)
        seconds = max(timing.compute_s, tick.compute_s)
        going = (record, timing.attempt, tick, began + seconds, seconds)
        self.run.engine.call_at(began + seconds, self._ship, going)
        self.run.engine.dispatch(worker, t.Clocked(), timing)

    def _ship(self, going: tuple[WorkerRecord, int, t.Tick, float, float]) -> None:
        """Send a clock's increments on their way, unless its worker's process is gone."""
        record, attempt, tick, sent_at, compute_s = going
        if record.script.gone or self.run.cause is not None:
            return
        worker = record.worker
        size = bytes_of_logs(tick.logs) if tick.parts is None else tick.parts.nbytes
        up, down = self._traffic.take_bytes(worker)
        self._unsaved += size
        if self._unsaved > MOST_UNSAVED:
            self._unsaved = 0
            self.run.checkpoints.ask()
        moments = [sent_at] if tick.again else self._traffic.increments_arrive(worker, attempt, size, sent_at)
        for number, moment in enumerate(moments):
            arrival = PushRef(worker, record.incarnation, 0, 0, compute_s, 0.0, size + up, down, host=tick.host)
            self._when(moment, record, partial(self._arrive, worker, tick, arrival, number == 0))

    def _arrive(self, worker: int, tick: t.Tick, arrival: PushRef, first: bool, at: float) -> None:
        self._host.tick(worker, tick, arrival, at)
        if first:
            self._under_way[worker].pop(tick.through, None)

    def _ask(self, record: WorkerRecord, size: int, at: float, call: Callable[[float], None]) -> None:
        self._when(self._traffic.question_arrives(record.worker, size, at), record, call)

    def _when(self, moment: float, record: WorkerRecord, call: Callable[[float], None]) -> None:
        """Make the call at that moment, unless its worker's process is gone by then."""
        if moment <= self.run.engine.now():
            self._go((record, call))
        else:
            self.run.engine.call_at(moment, self._go, (record, call))

    def _go(self, going: tuple[WorkerRecord, Callable[[float], None]]) -> None:
        (record, call), run = going, self.run
        if not record.script.gone and run.cause is None:
            at = run.engine.now() if run.stood_at is None else run.stood_at
            call(at)
            self.settle(at)

    # -- the run's side ----------------------------------------------------------------------------------------------

    def on_script_end(self, record: WorkerRecord, then: Call) -> None:
        if self._has_arrived(record.worker):
            then()
        else:
            self._parting.setdefault(record.worker, []).append(then)

    def is_parting(self, worker: int) -> bool:
        return worker in self._parting

    def _has_arrived(self, worker: int) -> bool:
        return not self._under_way.get(worker) and self._host.has_taken(worker)

    def begin_phase(self, members: Sequence[int], at: float) -> None:
        self.store.restored.leave_behind(members)
        kept = self.store.write_loose()
        if kept:
            self.run.coordinator.observe(at, "kept", {"clocks": kept})

    def left(self, worker: int, cause: Cause, at: float) -> None:
        self._parting.pop(worker, None)
        self._under_way.pop(worker, None)
        self.store.standing.pop(worker, None)
        reader = self.store.readers.get(worker)
        lost = cause != "done" and self.run.active
        if reader is not None:
            self._ended[worker] = Position(reader.incarnation, reader.era, reader.received, gone=lost)
        if self._cut is not None:
            self._cut.close(worker, lost=lost)
        self._host.left(worker, at)
        self.run.checkpoints.on_removed(worker)  # an ended script's process stays
        self.look_at_waiting(at)
        self._traffic.left(worker)
        self.settle(at)

    def look_at_waiting(self, at: float) -> None:
        """Ask for tables' values again: a worker left or waits for the work to begin, so no opener need wait for it."""
        del at
        self._host.look_at_openers(self.run.workers.alive, set(self.run.workers.waiting))

    def waits_for_all(self, worker: int) -> str | None:
        return "table()" if self._host.is_opening(worker) else None

    def excuses(self, worker: int) -> bool:
        return self._host.is_waiting(worker)

    def settle(self, at: float) -> None:
        if self.run.cause is not None:
            return
        self._host.settle(at)
        for worker in [worker for worker in self._parting if self._has_arrived(worker)]:
            for call in self._parting.pop(worker, ()):  # a call may settle again, and so pop other workers
                call()

    # -- evaluations, checkpoints, results ---------------------------------------------------------------------------

    @property
    def measurable(self) -> bool:
        return True

    def evaluation(self, number: int) -> t.EvaluateTables:
        tables = self.store.snapshot()
        return t.EvaluateTables(number, list(tables), list(tables.values()))

    def contents(self) -> Contents:
        return self.store.contents()

    def checkpoint_begins(self) -> None:
        positions, loose = self.store.positions()
        for worker, ticks in self._under_way.items():
            if worker in positions:
                positions[worker].ticks += [tick for _, tick in sorted(ticks.items())]
        ended = {worker: position for worker, position in self._ended.items() if worker not in positions}
        self._unsaved = 0
        self._cut = Cut({**positions, **ended}, loose, self.store.restored.repeats)
        for worker in {*ended, *self.store.restored.absent}:
            self._cut.close(worker)

    def state_came(self, worker: int) -> None:
        if self._cut is not None:
            self._cut.close(worker)

    def late_contents(self) -> Contents | None:
        return None if self._cut is None else self.store.late_contents(self._cut)

    def checkpoint_written(self) -> None:
        cut, self._cut = self._cut, None
        for worker, position in ({} if cut is None else cut.positions).items():
            reader = self.store.readers.get(worker)
            if reader is not None and reader.incarnation == position.incarnation:
                self.run.engine.send(worker, t.Stored(position.era, position.clock))

    def restore(self, contents: Contents, version: int, states: dict[int, bytes], extra: dict[str, Any]) -> None:
        del version
        self.store.restore(contents)
        self._host.states = states
        resumption, folder = self.run.resumption, self.run.plan.folder
        if resumption is not None:
            own = folder is not None and resumption.found.path.is_relative_to(folder)
            self.store.restored = RestoredPositions(
                live=resumption.workers_live, of_this_run=own and resumption.workers_live
            )
            self.store.restored.load(contents, extra, self.store.numbers, self.store.keep)

    def came_to_nothing(self) -> str | None:
        if self.run.coordinator.version:
            return None
        return "no clock was ever completed: does the script call session.clock()?"

    def result(self) -> Result:
        return Result(tables=self.store.snapshot())
