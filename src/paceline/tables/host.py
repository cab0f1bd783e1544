"""The tables of a run at the server: who may read what when, and whose increments are in them.

Engine-neutral, as the coordinator is: messages come in through its methods, answers leave through `deliver`, and no
clock is read here. A completed clock is a push to the strategy; its increments are applied when the strategy says
Apply, and only then does the clock count. A read waits until the strategy has granted the clock it is made in, and, of
a table with a staleness of its own, until the slowest worker has come far enough.

`settle` is to be called after whatever may have let somebody go: it sends the answers that are due.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import msgspec
import numpy as np
import torch

from paceline.core.errors import InternalError
from paceline.core.updates import UNMEASURED, Contents, Merged, PushRef
from paceline.server.coordinator import Coordinator
from paceline.server.workers import GrantOrder
from paceline.strategies.clocks import Clocks, may_read, park, released
from paceline.tables import messages as t
from paceline.tables.reader import OpLogs, Reader
from paceline.tables.server_table import LazyRows, ServerTable
from paceline.tables.table_spec import Array, TableSpec

TABLES = "tables.safetensors"  # a checkpoint's file
UNTOLD = 16  # own clocks applied before a worker that reads nothing is told so


class Host:
    """Tables, readers and what they wait for."""

    def __init__(
        self, coordinator: Coordinator, deliver: Callable[[int, t.TableToWorker], None], *, paced: bool
    ) -> None:
        self._coordinator = coordinator
        self._deliver = deliver
        self._paced = paced
        self.tables: list[ServerTable] = []
        self.clocks = Clocks()  # of whoever takes part, by what was applied
        self.readers: dict[int, Reader] = {}
        self._pushes: dict[int, OpLogs] = {}  # what delivered clocks bring, by ticket
        self._numbers: dict[str, int] = {}
        self._openers: dict[int, set[int]] = {}  # who waits for a table that has no values yet
        self._asked: dict[int, int] = {}  # who was asked for them
        self._waiting: dict[int, set[int]] = {}  # readers by the clock of the slowest that lets them go
        self._slowest = 0  # when it was looked at last
        self._due: set[int] = set()  # readers to be looked at
        self._rosters: list[t.ClockRoster] = []
        self.states: dict[int, bytes] = {}  # of workers whose run goes on from a checkpoint

    # -- tables ------------------------------------------------------------------------------------------------------

    def open(self, worker: int, message: t.OpenTable, alive: set[int], ready: set[int]) -> None:
        """A script opens a table: it can be used once everybody who is to come has opened it."""
        spec = message.spec
        number = self._numbers.get(spec.name)
        if number is None:
            number = self._numbers[spec.name] = len(self.tables)
            self.tables.append(ServerTable(spec))
            self._openers[number] = set()
        self.tables[number].spec.require_same(spec, f"worker {worker}")
        if number not in self._openers:
            self._deliver(worker, t.Opened(number, wanted=False))
            return
        self._openers[number].add(worker)
        self.look_at_openers(alive, ready)

    def look_at_openers(self, alive: set[int], ready: set[int]) -> None:
        """Ask the first worker for a table's values as soon as all are there.

        Those who wait for another table, or for the work to begin (`ready`), do not come: whoever is here is asked.
        """
        waiting = set(self.readers).union(ready, *self._openers.values())
        for number, openers in self._openers.items():
            openers &= alive
            if openers and (alive <= openers or alive <= waiting) and self._asked.get(number) not in openers:
                self._asked[number] = min(openers)
                self._deliver(min(openers), t.Opened(number, wanted=True))

    def fill(self, worker: int, message: t.TableInit) -> None:
        """The values that a table starts with."""
        if self._asked.get(message.table) != worker or message.table not in self._openers:
            raise InternalError(f"worker {worker} sent values of table {message.table}, and was not asked for them")
        self.tables[message.table].fill(message.values)
        for opener in sorted(self._openers.pop(message.table)):
            self._deliver(opener, t.Opened(message.table, wanted=False))

    @property
    def specs(self) -> list[TableSpec]:
        """Of the tables that have values."""
        return [table.spec for number, table in enumerate(self.tables) if number not in self._openers]

    def contents(self) -> Contents:
        """Every table's values and what its rule remembers, as they lie."""
        shards = {
            f"{spec.name}.{number}": torch.from_numpy(shard)
            for spec in self.specs
            for number, shard in enumerate(self.tables[self._numbers[spec.name]].shards)
        }
        return Contents({TABLES: shards}, {"tables": msgspec.to_builtins(self.specs)})

    def restore(self, contents: Contents) -> None:
        """Go on with these tables; they are opened again under the same names."""
        for spec in msgspec.convert(contents.head["tables"], list[TableSpec], strict=False):
            self._numbers[spec.name] = len(self.tables)
            table = ServerTable(spec)
            for number, home in enumerate(table.shards):
                home[:] = contents.files[TABLES][f"{spec.name}.{number}"].numpy()
            self.tables.append(table)

    def snapshot(self) -> dict[str, Array]:
        """Every table as it is, for whoever measures them."""
        return {table.spec.name: table.read(None)[:, : table.spec.width] for table in self.tables}

    def measured(self, evaluate: Callable[[dict[str, Any]], Mapping[str, float]]) -> dict[str, float]:
        """What a script's own function says of the tables."""
        return {name: float(value) for name, value in evaluate(self.snapshot()).items()}

    # -- clocks ------------------------------------------------------------------------------------------------------

    def order(self, order: GrantOrder) -> None:
        """The strategy lets a worker go through its next clock."""
        worker, through = order.worker, self._coordinator.records[order.worker].through
        reader = self.readers.get(worker)
        if reader is None or reader.incarnation != order.incarnation:
            reader = self.readers[worker] = Reader(order.incarnation)
        if worker not in self.clocks.of:  # it joins, or comes back from a barrier
            self.clocks.join(worker)
            # Workers that stepped aside are ahead of what the strategy counts, and nobody's clock goes back.
            start = max(self.clocks.min, through - 1)
            reader.first, reader.offset = start + 1, start - (through - 1)
            reader.received = reader.applied = reader.told = start
            self.clocks.advance(worker, start)
        elif reader.returns:
            reader.offset, reader.returns = reader.received - (through - 1), False
        reader.order, reader.granted = order, through + reader.offset
        self._due.add(worker)

    def tick(self, worker: int, message: t.Tick, arrival: PushRef, at: float) -> None:
        """A clock is completed; `arrival` lacks what the grant and the message say."""
        reader = self.readers.get(worker)
        known = reader is not None and reader.incarnation == arrival.incarnation and reader.era == message.era
        if reader is None or not known or message.through <= reader.received:
            self._refuse(worker, message, reader, at)
            return
        reader.overtaking.setdefault(message.through, (message, arrival))
        while (following := reader.overtaking.pop(reader.received + 1, None)) is not None:
            reader.received += 1
            for table, first, ages in following[0].reads:
                data = {
                    "table": self.tables[table].spec.name,
                    "clock": reader.received - 1,
                    "first": first,
                    "ages": ages,
                }
                self._coordinator.observe(at, "reads", data, worker)
            reader.early.append(following)
            self._due.add(worker)

    def _refuse(self, worker: int, message: t.Tick, reader: Reader | None, at: float) -> None:
        known = "it takes no part" if reader is None else f"{reader.received} are known"
        reason = f"clock {message.through} of worker {worker} is not expected ({known})"
        self._coordinator.observe(at, "refused", {"reason": reason, "samples": 0, "push": None}, worker)

    def _pass_on(self, worker: int, reader: Reader, at: float) -> None:
        """Hand a completed clock to the strategy, as soon as it has granted it."""
        order = reader.order
        if order is None or not reader.early:
            return
        message, arrival = reader.early.popleft()
        reader.order = None
        arrival.ticket, arrival.samples = order.ticket, message.work
        self._pushes[order.ticket] = OpLogs(worker, reader.incarnation, message.through, message.logs)
        arrival.norm, arrival.loss = 0.0, message.loss  # increments were found finite when they were made
        record = self._coordinator.records[worker]
        if record.work != message.work and message.through == reader.first:
            arrival.nominal = message.work
        # A worker that runs ahead computes while its last push is still on the way: only the rest is this clock's.
        present = at - record.granted_at
        arrival.compute_s = min(arrival.compute_s, present)
        arrival.transfer_s = present - arrival.compute_s
        self._coordinator.arrive(at, arrival)

    def apply(self, pushes: Sequence[PushRef], weights: Sequence[float], *, stock: bool) -> Merged:
        """The strategy's Apply: these clocks' increments are in the tables from here on, as the script wrote them."""
        del weights, stock  # of gradients
        for push in pushes:
            pushed = self._pushes.pop(push.ticket)
            self._write(pushed.logs)
            reader = self.readers.get(pushed.worker)
            if reader is not None and reader.incarnation == pushed.incarnation:
                reader.applied = pushed.through
                if reader.applied - reader.told >= UNTOLD:
                    self._due.add(pushed.worker)
                if pushed.worker in self.clocks.of:  # not resting at a barrier
                    self.clocks.advance(pushed.worker, pushed.through)
        return UNMEASURED

    def extend(self, held: PushRef, piece: PushRef) -> PushRef:
        """A clock comes whole."""
        raise InternalError(f"clock {held} of a table was extended by {piece}")

    def discard(self, push: PushRef) -> None:
        """Forget a clock's increments."""
        self._pushes.pop(push.ticket, None)

    def _write(self, logs: Sequence[t.TableLog]) -> None:
        for log in logs:
            self.tables[log.table].apply(log.rows, log.sums)

    def has_taken(self, worker: int) -> bool:
        """Whether the strategy has been told of every clock that the worker delivered."""
        reader = self.readers.get(worker)
        return reader is None or not (reader.early or reader.overtaking)

    def left(self, worker: int, at: float) -> None:
        """The worker takes no more part: nobody waits for its clock. What it had delivered stays."""
        reader = self.readers.pop(worker, None)
        if reader is not None and worker in self.clocks.of:
            self.clocks.leave(worker)
        if reader is not None and reader.early:
            for message, _ in reader.early:  # delivered clocks stay, although the strategy had not yet let them count
                self._write(message.logs)
            self._coordinator.observe(at, "kept", {"clocks": len(reader.early)}, worker)
        record = self._coordinator.records.get(worker)
        if reader is not None and record is not None:
            self._coordinator.totals.round_samples -= max(0, record.work - 1)  # as it was before its first clock
        for openers in self._openers.values():
            openers.discard(worker)

    # -- reads -------------------------------------------------------------------------------------------------------

    def fetch(self, worker: int, message: t.Fetch) -> None:
        """Somebody wants rows."""
        reader = self.readers.get(worker)
        if reader is not None:  # else it has left meanwhile
            reader.parked.append(message)
            self._due.add(worker)

    def forget(self, worker: int, message: t.Forget) -> None:
        """Somebody no longer keeps rows of an eager table."""
        reader = self.readers.get(worker)
        if reader is not None and message.table in reader.kept:
            reader.kept[message.table][0][message.rows] = False

    def barrier(self, worker: int, message: t.AtBarrier) -> None:
        """Somebody waits for all."""
        reader = self.readers.get(worker)
        if reader is not None:
            reader.barrier = message
            self._due.add(worker)

    def settle(self, at: float) -> None:
        """Send every answer that is due."""
        while True:
            self._due.update(released(self._waiting, self._slowest, self.clocks.min))
            moved, self._slowest = self.clocks.min > self._slowest, self.clocks.min
            if moved:
                self._send_eagerly()
            if not self._due and not self._let_rest(at) and not self._open_barrier(at):
                break
            due, self._due = sorted(self._due), set()
            for worker in due:
                reader = self.readers.get(worker)
                if reader is not None:
                    self._enter(worker, reader)
                    self._answer(worker, reader, at)
                    self._pass_on(worker, reader, at)
                    self._tell_what_is_in(worker, reader)
        self._deal_anew()

    def _answer(self, worker: int, reader: Reader, at: float) -> None:
        """Let those reads go that the strategy and the clocks of their tables allow."""
        if reader.aside and not self._comes_back(worker, reader, at):
            return
        remaining = []
        for read in reader.parked:
            granted = reader.granted > read.clock
            own, free = self.tables[read.table].spec.staleness, self._coordinator.strategy.free_lead
            # Within the free lead nobody is made to wait: the grant is certain, although it may not be made yet.
            bound = min(inf if own is None else own, inf if granted else free)
            if may_read(self.clocks.min, read.clock, bound):
                self._send(worker, reader, read)
                continue
            remaining.append(read)
            park(self._waiting, worker, read.clock - int(bound))
            if granted and reader.parked_since is None and reader.waits_for(read):
                reader.parked_since = at
        reader.parked = remaining
        if reader.parked_since is not None and self._coordinator.strategy.waits_for_fast:
            self._step_aside(worker, reader, at)
        if reader.parked_since is not None and not any(reader.waits_for(read) for read in remaining):
            record = self._coordinator.records[worker]
            record.granted_at += at - max(reader.parked_since, record.granted_at)  # that was no time to compute in
            reader.parked_since = None

    def _step_aside(self, worker: int, reader: Reader, at: float) -> None:
        """Where the slowest may be made to wait for a push of this worker, neither could ever go on: it is away until
        its table lets it read."""
        reader.aside, reader.order, reader.parked_since = True, None, None
        self._coordinator.leave(worker, "done", at)

    def _comes_back(self, worker: int, reader: Reader, at: float) -> bool:
        """Whether its tables let it read; if so it takes part again, at the clock at which it is."""
        for read in reader.parked:
            if not reader.waits_for(read):
                continue
            staleness = self.tables[read.table].spec.staleness
            if staleness is not None and not may_read(self.clocks.min, read.clock, staleness):
                park(self._waiting, worker, read.clock - staleness)
                return False
        reader.aside, reader.returns = False, True
        self._coordinator.join(worker, self._coordinator.records[worker].work, at)
        return True

    def _send(self, worker: int, reader: Reader, read: t.Fetch) -> None:
        shelf = self.tables[read.table]
        if shelf.changed is not None:
            kept = reader.kept.get(read.table)
            mask = np.zeros(shelf.spec.rows, dtype=np.bool_) if kept is None else kept[0]
            mask[slice(None) if read.rows is None else read.rows] = True
            # What was sent before and has changed since is still to be sent: the older mark stands.
            reader.kept[read.table] = (mask, shelf.changes if kept is None else kept[1])
        reader.told = reader.applied
        self._deliver(
            worker,
            t.Rows(read.table, read.rows, LazyRows(shelf, read.rows), self.clocks.min, reader.applied, read.clock),
        )

    def _tell_what_is_in(self, worker: int, reader: Reader) -> None:
        """A worker that reads nothing must hear from time to time that its increments arrived."""
        if reader.applied - reader.told >= UNTOLD:
            reader.told = reader.applied
            self._deliver(worker, t.Included(reader.applied))

    def _send_eagerly(self) -> None:
        """The slowest worker moved on: whoever keeps rows of an eager table gets what has changed in them."""
        for worker, reader in sorted(self.readers.items()):
            for table, (mask, since) in reader.kept.items():
                shelf = self.tables[table]
                if shelf.changed is None:
                    continue
                rows = np.flatnonzero(mask & (shelf.changed > since))
                reader.kept[table] = (mask, shelf.changes)
                reader.told = reader.applied
                self._deliver(worker, t.Rows(table, rows, LazyRows(shelf, rows), self.clocks.min, reader.applied, None))

    # -- everybody together ------------------------------------------------------------------------------------------

    def _enter(self, worker: int, reader: Reader) -> None:
        if reader.passing is not None:
            passing, reader.passing = reader.passing, None
            self._deliver(worker, t.Passed(passing.number, reader.applied))
        if not reader.entered:
            reader.entered = True
            self._deal_anew()
            strategy = self._coordinator.strategy
            self._deliver(
                worker,
                t.Entered(
                    reader.applied, strategy.free_lead, strategy.max_lead, list(self._rosters), self._paced,
                    self.states.pop(worker, None),
                ),
            )  # fmt: skip

    def _deal_anew(self) -> None:
        """Whoever takes part shares the work, from the first clock on that nobody can have begun: who leads by one more
        than is allowed may have asked for its share already."""
        present = sorted(self.readers)
        if self._rosters and self._rosters[-1].workers == present:
            return
        lead = self._coordinator.strategy.max_lead
        ahead = max(
            (reader.received for reader in self.readers.values()), default=0
        )  # who only writes is not held back
        if lead != inf:
            ahead = max(ahead - 1, self.clocks.min + int(lead))
        roster = t.ClockRoster(0 if not self._rosters else ahead + 2, present)
        self._rosters = [*[r for r in self._rosters if r.from_clock < roster.from_clock][-8:], roster]
        for worker, reader in self.readers.items():
            if reader.entered:
                self._deliver(worker, roster)

    def _let_rest(self, at: float) -> bool:
        """Whoever has come to the barrier with all its clocks delivered holds nobody up; whether anybody has."""
        arrived = [
            (worker, reader)
            for worker, reader in sorted(self.readers.items())
            if reader.barrier is not None and worker in self.clocks.of
            if reader.received == reader.barrier.clock and not reader.early
        ]
        for worker, reader in arrived:
            self.clocks.leave(worker)
            reader.order, reader.rests_since = None, at
            self._coordinator.leave(worker, "done", at)
        return bool(arrived)

    def _open_barrier(self, at: float) -> bool:
        """Once all are there everybody goes on, from the same clock; whether that is so."""
        resting = [(worker, reader) for worker, reader in sorted(self.readers.items()) if reader.barrier is not None]
        if not resting or len(resting) < len(self.readers) or self.clocks.of:
            return False
        if any(reader.applied < reader.received for _, reader in resting):
            return False
        for worker, reader in resting:
            self._coordinator.observe(at, "barrier", {"seconds": at - reader.rests_since}, worker)
            reader.passing, reader.barrier = reader.barrier, None
            reader.era += 1
            reader.overtaking.clear()
        for worker, _ in resting:
            self._coordinator.join(worker, self._coordinator.records[worker].work, at)
        return True
