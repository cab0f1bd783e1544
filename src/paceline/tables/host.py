"""The server's end of the conversation about tables: who may read what when.

Engine-neutral, as the coordinator is: messages come in through its methods, answers leave through `deliver`, and no
clock is read here. A completed clock is a push to the strategy; its increments are applied when the strategy says
Apply, and only then does the clock count. A read waits until the strategy has granted the clock it is made in, and, of
a table with a staleness of its own, until the slowest worker has come far enough.

`settle` is to be called after whatever may have let somebody go: it sends the answers that are due.
"""

from collections.abc import Callable
from math import inf

import numpy as np

from paceline.core.errors import InternalError
from paceline.core.updates import PushRef
from paceline.server.coordinator import Coordinator
from paceline.strategies.clocks import may_read, park, released
from paceline.tables import messages as t
from paceline.tables.table_store import UNTOLD, LazyRows, Reader, TableStore

Deliver = Callable[[int, t.TableToWorker], None]  # something is said to that worker


class Host:
    """What workers want of their tables, and wait for."""

    def __init__(self, coordinator: Coordinator, store: TableStore, deliver: Deliver, *, paced: bool) -> None:
        self._coordinator = coordinator
        self._store = store
        self._tables, self._clocks, self._readers = store.tables, store.clocks, store.readers
        self._due = store.due
        self._deliver = deliver
        self._paced = paced
        self._openers: dict[int, set[int]] = {}  # who waits for a table that has no values yet
        self._asked: dict[int, int] = {}  # who was asked for them
        self._waiting: dict[int, set[int]] = {}  # readers by the clock of the slowest that lets them go
        self._slowest = 0  # when it was looked at last
        self._rosters: list[t.ClockRoster] = []
        self.states: dict[int, bytes] = {}  # of workers whose run goes on from a checkpoint

    # -- tables ------------------------------------------------------------------------------------------------------

    def open(self, worker: int, message: t.OpenTable, alive: set[int], ready: set[int]) -> None:
        """A script opens a table: it can be used once everybody who is to come has opened it."""
        number = self._store.number_of(message.spec)
        table = self._tables[number]
        table.spec.require_same(message.spec, f"worker {worker}")
        if table.filled:
            self._deliver(worker, t.Opened(number, wanted=False))
            return
        self._openers.setdefault(number, set()).add(worker)
        self.look_at_openers(alive, ready)

    def look_at_openers(self, alive: set[int], ready: set[int]) -> None:
        """Ask the first worker for a table's values as soon as all are there.

        Those who wait for another table, or for the work to begin (`ready`), do not come: whoever is here is asked.
        """
        waiting = set(self._readers).union(ready, *self._openers.values())
        for number, openers in self._openers.items():
            openers &= alive
            if openers and (alive <= openers or alive <= waiting) and self._asked.get(number) not in openers:
                self._asked[number] = min(openers)
                self._deliver(min(openers), t.Opened(number, wanted=True))

    def fill(self, worker: int, message: t.TableInit) -> None:
        """The values that a table starts with."""
        if self._asked.get(message.table) != worker or message.table not in self._openers:
            raise InternalError(f"worker {worker} sent values of table {message.table}, and was not asked for them")
        self._tables[message.table].fill(message.values)
        for opener in sorted(self._openers.pop(message.table)):
            self._deliver(opener, t.Opened(message.table, wanted=False))

    # -- clocks ------------------------------------------------------------------------------------------------------

    def tick(self, worker: int, message: t.Tick, arrival: PushRef, at: float) -> None:
        """A clock is completed; `arrival` lacks what the grant and the message say."""
        reader = self._readers.get(worker)
        known = reader is not None and reader.incarnation == arrival.incarnation and reader.era == message.era
        if reader is None or not known or message.through <= reader.received:
            why = "it takes no part" if reader is None else f"{reader.received} are known"
            reason = f"clock {message.through} of worker {worker} is not expected ({why})"
            self._coordinator.observe(at, "refused", {"reason": reason, "samples": 0, "push": None}, worker)
            return
        reader.overtaking.setdefault(message.through, (message, arrival))
        while (following := reader.overtaking.pop(reader.received + 1, None)) is not None:
            reader.received += 1
            for table, first, ages in following[0].reads:
                name = self._tables[table].spec.name
                data = {"table": name, "clock": reader.received - 1, "first": first, "ages": ages}
                self._coordinator.observe(at, "reads", data, worker)
            reader.early.append(following)
            self._due.add(worker)

    def _pass_on(self, worker: int, reader: Reader, at: float) -> None:
        """Hand a completed clock to the strategy, as soon as it has granted it."""
        order = reader.order
        if order is None or not reader.early:
            return
        message, arrival = reader.early.popleft()
        reader.order = None
        arrival.ticket, arrival.samples = order.ticket, message.work
        self._store.ticks[order.ticket] = message
        arrival.norm, arrival.loss = 0.0, message.loss  # increments were found finite when they were made
        record = self._coordinator.records[worker]
        if record.work != message.work and message.through == reader.first:
            arrival.nominal = message.work
        # A worker that runs ahead computes while its last push is still on the way: only the rest is this clock's.
        present = at - record.granted_at
        arrival.compute_s = min(arrival.compute_s, present)
        arrival.transfer_s = present - arrival.compute_s
        self._coordinator.arrive(at, arrival)

    def has_taken(self, worker: int) -> bool:
        """Whether the strategy has been told of every clock that the worker delivered."""
        reader = self._readers.get(worker)
        return reader is None or not (reader.early or reader.overtaking)

    def left(self, worker: int, at: float) -> None:
        """The worker takes no more part: nobody waits for its clock. What it had delivered stays."""
        reader = self._readers.pop(worker, None)
        if reader is not None and worker in self._clocks.of:
            self._clocks.leave(worker)
        if reader is not None and reader.early:
            for message, _ in reader.early:  # delivered clocks stay, although the strategy had not yet let them count
                self._store.write(message.logs)
            self._coordinator.observe(at, "kept", {"clocks": len(reader.early)}, worker)
        record = self._coordinator.records.get(worker)
        if reader is not None and record is not None:
            self._coordinator.totals.round_samples -= max(0, record.work - 1)  # as it was before its first clock
        for openers in self._openers.values():
            openers.discard(worker)

    # -- reads -------------------------------------------------------------------------------------------------------

    def fetch(self, worker: int, message: t.Fetch) -> None:
        """Somebody wants rows."""
        reader = self._readers.get(worker)
        if reader is not None:  # else it has left meanwhile
            reader.parked.append(message)
            self._due.add(worker)

    def forget(self, worker: int, message: t.Forget) -> None:
        """Somebody no longer keeps rows of an eager table."""
        reader = self._readers.get(worker)
        if reader is not None and message.table in reader.kept:
            reader.kept[message.table][0][message.rows] = False

    def barrier(self, worker: int, message: t.AtBarrier) -> None:
        """Somebody waits for all."""
        reader = self._readers.get(worker)
        if reader is not None:
            reader.barrier = message
            self._due.add(worker)

    def settle(self, at: float) -> None:
        """Send every answer that is due."""
        while True:
            self._due.update(released(self._waiting, self._slowest, self._clocks.min))
            moved, self._slowest = self._clocks.min > self._slowest, self._clocks.min
            if moved:
                self._send_eagerly()
            if not self._due and not self._let_rest(at) and not self._open_barrier(at):
                break
            due = sorted(self._due)
            self._due.clear()
            for worker in due:
                reader = self._readers.get(worker)
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
            own, free = self._tables[read.table].spec.staleness, self._coordinator.strategy.free_lead
            # Within the free lead nobody is made to wait: the grant is certain, although it may not be made yet.
            bound = min(inf if own is None else own, inf if granted else free)
            if may_read(self._clocks.min, read.clock, bound):
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
            staleness = self._tables[read.table].spec.staleness
            if staleness is not None and not may_read(self._clocks.min, read.clock, staleness):
                park(self._waiting, worker, read.clock - staleness)
                return False
        reader.aside, reader.returns = False, True
        self._coordinator.join(worker, self._coordinator.records[worker].work, at)
        return True

    def _send(self, worker: int, reader: Reader, read: t.Fetch) -> None:
        table = self._tables[read.table]
        if table.changed is not None:
            kept = reader.kept.get(read.table)
            mask = np.zeros(table.spec.rows, dtype=np.bool_) if kept is None else kept[0]
            mask[slice(None) if read.rows is None else read.rows] = True
            # What was sent before and has changed since is still to be sent: the older mark stands.
            reader.kept[read.table] = (mask, table.changes if kept is None else kept[1])
        reader.told = reader.applied
        self._deliver(
            worker,
            t.Rows(read.table, read.rows, LazyRows(table, read.rows), self._clocks.min, reader.applied, read.clock),
        )

    def _tell_what_is_in(self, worker: int, reader: Reader) -> None:
        """A worker that reads nothing must hear from time to time that its increments arrived."""
        if reader.applied - reader.told >= UNTOLD:
            reader.told = reader.applied
            self._deliver(worker, t.Included(reader.applied))

    def _send_eagerly(self) -> None:
        """The slowest worker moved on: whoever keeps rows of an eager table gets what has changed in them."""
        for worker, reader in sorted(self._readers.items()):
            for number, (mask, since) in reader.kept.items():
                table = self._tables[number]
                if table.changed is None:
                    continue
                rows = np.flatnonzero(mask & (table.changed > since))
                reader.kept[number] = (mask, table.changes)
                reader.told = reader.applied
                values = LazyRows(table, rows)
                self._deliver(worker, t.Rows(number, rows, values, self._clocks.min, reader.applied, None))

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
        present = sorted(self._readers)
        if self._rosters and self._rosters[-1].workers == present:
            return
        lead = self._coordinator.strategy.max_lead
        ahead = max((reader.received for reader in self._readers.values()), default=0)
        if lead != inf:  # who only writes is not held back, and may be ahead of that
            ahead = max(ahead - 1, self._clocks.min + int(lead))
        roster = t.ClockRoster(0 if not self._rosters else ahead + 2, present)
        self._rosters = [*[r for r in self._rosters if r.from_clock < roster.from_clock][-8:], roster]
        for worker, reader in self._readers.items():
            if reader.entered:
                self._deliver(worker, roster)

    def _let_rest(self, at: float) -> bool:
        """Whoever has come to the barrier with all its clocks delivered holds nobody up; whether anybody has."""
        arrived = [
            (worker, reader)
            for worker, reader in sorted(self._readers.items())
            if reader.barrier is not None and worker in self._clocks.of
            if reader.received == reader.barrier.clock and not reader.early
        ]
        for worker, reader in arrived:
            self._clocks.leave(worker)
            reader.order, reader.rests_since = None, at
            self._coordinator.leave(worker, "done", at)
        return bool(arrived)

    def _open_barrier(self, at: float) -> bool:
        """Once all are there everybody goes on, from the same clock; whether that is so."""
        resting = [(worker, reader) for worker, reader in sorted(self._readers.items()) if reader.barrier is not None]
        if not resting or len(resting) < len(self._readers) or self._clocks.of:
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
