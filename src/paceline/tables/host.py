"""The server's side of the table protocol: which read is answered when.

Independent of the engine, like the coordinator: messages come in through methods, answers go out through `deliver`, and
nothing here reads the time. A completed clock is a push to the strategy; its increments are applied when the strategy
says Apply, and only then does the clock count. A read waits until the strategy has granted its clock and, if the table
has its own staleness, until the slowest worker is within it.

Callers run `settle` after every change that may release a read: it sends all answers that are due.
"""

from collections.abc import Callable
from math import inf

import numpy as np

from paceline.core.errors import PeerError
from paceline.core.updates import PushRef
from paceline.server.coordinator import Coordinator
from paceline.strategies.clocks import may_read, park, released
from paceline.tables import messages as t
from paceline.tables.table_store import UNTOLD, Reader, TableStore

Deliver = Callable[[int, t.TableToWorker], None]  # sends a message to a worker


class Host:
    """Answers workers' requests about tables, as the strategy and the clocks allow."""

    def __init__(self, coordinator: Coordinator, store: TableStore, deliver: Deliver, *, paced: bool) -> None:
        self._coordinator = coordinator
        self._store = store
        self._tables, self._clocks, self._readers = store.tables, store.clocks, store.readers
        self._due = store.due
        self._deliver = deliver
        self._paced = paced
        self._openers: dict[int, set[int]] = {}  # workers that wait for a table without values, by table
        self._asked: dict[int, int] = {}  # the worker that was asked for the values, by table
        self._waiting: dict[int, set[int]] = {}  # parked readers, by the slowest worker's clock that releases them
        self._slowest = 0  # the slowest worker's clock at the last `settle`
        self._rosters: list[t.ClockRoster] = []
        self._ahead: set[int] = set()  # workers that wait for the slowest to come to where they went on from
        self.states: dict[int, bytes] = {}  # workers' states of the checkpoint that the run resumes from

    # -- tables ------------------------------------------------------------------------------------------------------

    def open(self, worker: int, message: t.OpenTable, alive: set[int], ready: set[int]) -> None:
        """Open a table for a worker; it can be used once it has values, for which every expected worker is awaited."""
        number = self._store.number_of(message.spec)
        table = self._tables[number]
        table.spec.require_same(message.spec, f"worker {worker}")
        if table.filled:
            self._deliver(worker, t.Opened(number, wanted=False))
            return
        self._openers.setdefault(number, set()).add(worker)
        self.look_at_openers(alive, ready)

    def look_at_openers(self, alive: set[int], ready: set[int]) -> None:
        """Ask the lowest-numbered opener of a table for its values as soon as all workers alive have opened it.

        Workers that wait for another table, or for the work to begin (`ready`), are not waited for.
        """
        waiting = set(self._readers).union(ready, *self._openers.values())
        for number, openers in self._openers.items():
            openers &= alive
            if openers and (alive <= openers or alive <= waiting) and self._asked.get(number) not in openers:
                self._asked[number] = min(openers)
                self._deliver(min(openers), t.Opened(number, wanted=True))

    def is_waiting(self, worker: int) -> bool:
        """Return whether the worker waits for rows, or at the barrier, until others have come further."""
        reader = self._readers.get(worker)
        return reader is not None and (bool(reader.parked) or reader.barrier is not None or reader.aside)

    def is_opening(self, worker: int) -> bool:
        """Return whether the worker waits for a table that others have not opened yet."""
        return any(worker in openers for openers in self._openers.values())

    def fill(self, worker: int, message: t.TableInit) -> None:
        """Set a table's first values and let its openers go on."""
        if self._asked.get(message.table) != worker or message.table not in self._openers:
            raise PeerError(f"worker {worker} sent values of table {message.table}, and was not asked for them")
        self._tables[message.table].fill(message.values)
        for opener in sorted(self._openers.pop(message.table)):
            self._deliver(opener, t.Opened(message.table, wanted=False))

    # -- clocks ------------------------------------------------------------------------------------------------------

    def tick(self, worker: int, message: t.Tick, arrival: PushRef, at: float) -> None:
        """Accept a completed clock, in order; `arrival` still lacks the fields that the grant and the message give."""
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
        """Pass a completed clock to the strategy once that clock is granted."""
        order = reader.order
        if order is None or not reader.early:
            return
        message, arrival = reader.early.popleft()
        reader.order = None
        arrival.ticket, arrival.samples = order.ticket, message.work
        self._store.ticks[order.ticket] = message
        arrival.norm, arrival.loss = 0.0, message.loss  # the worker checked that its increments are finite
        record = self._coordinator.records[worker]
        if record.work != message.work and message.through == reader.first:
            arrival.nominal = message.work
        # A worker that runs ahead computes before its clock is granted: only the time since the grant counts here.
        present = at - record.granted_at
        arrival.compute_s = min(arrival.compute_s, present)
        arrival.transfer_s = present - arrival.compute_s
        self._coordinator.arrive(at, arrival)

    def has_taken(self, worker: int) -> bool:
        """Whether every clock that the worker delivered has reached the strategy."""
        reader = self._readers.get(worker)
        return reader is None or not (reader.early or reader.overtaking)

    def left(self, worker: int, at: float) -> None:
        """Remove a worker, so that nobody waits for its clock. Clocks that it delivered stay."""
        reader = self._readers.pop(worker, None)
        self._ahead.discard(worker)
        if reader is not None and worker in self._clocks.of:
            self._clocks.leave(worker)
        if reader is not None and reader.early:
            for message, _ in reader.early:  # delivered, although the strategy had not granted them yet
                self._store.write(message)
            self._coordinator.observe(at, "kept", {"clocks": len(reader.early)}, worker)
        record = self._coordinator.records.get(worker)
        if reader is not None and record is not None:
            self._coordinator.totals.round_samples -= max(0, record.work - 1)  # back to its work before its first clock
        for number, openers in self._openers.items():
            openers.discard(worker)
            if self._asked.get(number) == worker:
                del self._asked[number]  # the process in its place has to be asked anew

    # -- reads -------------------------------------------------------------------------------------------------------

    def fetch(self, worker: int, message: t.Fetch) -> None:
        """Queue a read."""
        reader = self._readers.get(worker)
        if reader is not None:  # else the worker has left
            reader.parked.append(message)
            self._due.add(worker)

    def forget(self, worker: int, message: t.Forget) -> None:
        """Stop sending rows of an eager table that the worker no longer caches."""
        reader = self._readers.get(worker)
        if reader is not None and message.table in reader.kept:
            reader.kept[message.table][0][message.rows] = False

    def barrier(self, worker: int, message: t.AtBarrier) -> None:
        """Note that a worker waits at the barrier."""
        reader = self._readers.get(worker)
        if reader is not None:
            reader.barrier = message
            self._due.add(worker)

    def settle(self, at: float) -> None:
        """Send every answer that is due."""
        while True:
            self._due.update(released(self._waiting, self._slowest, self._clocks.min))
            moved, self._slowest = self._clocks.min > self._slowest, self._clocks.min
            if self._store.leading:
                self._hold_back(at)
            if moved:
                self._send_eagerly()
            if not self._due and not self._let_rest(at) and not self._open_barrier(at):
                break
            # Those that come back join the strategy before others pass on clocks, or it would count them too far ahead.
            due = sorted(self._due, key=lambda worker: (not self._is_aside(worker), worker))
            self._due.clear()
            for worker in due:
                reader = self._readers.get(worker)
                if reader is not None:
                    self._enter(worker, reader)
                    self._answer(worker, reader, at)
                    self._pass_on(worker, reader, at)
                    self._tell_what_is_in(worker, reader)
        self._deal_anew()

    def _is_aside(self, worker: int) -> bool:
        reader = self._readers.get(worker)
        return reader is not None and reader.aside

    def _answer(self, worker: int, reader: Reader, at: float) -> None:
        """Answer the parked reads that the strategy and their tables' bounds allow."""
        if reader.aside and not self._comes_back(worker, reader, at):
            return
        remaining = []
        for read in reader.parked:
            granted = reader.granted > read.clock
            own, strategy = self._tables[read.table].spec.staleness, self._coordinator.strategy
            # Within the free lead the strategy never makes a worker wait, so the grant is certain to come. A granted
            # clock is within the largest lead, unless workers of a restored table stood at clocks far apart.
            bound = min(inf if own is None else own, strategy.max_lead if granted else strategy.free_lead)
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
            record.granted_at += at - max(reader.parked_since, record.granted_at)  # parked time is not computing time
            reader.parked_since = None

    def _hold_back(self, at: float) -> None:
        """Make workers that went on ahead of the slowest wait for it, unless the strategy bounds no lead: it counts
        them all from the slowest's clock."""
        for worker in sorted(self._store.leading):
            reader = self._readers.get(worker)
            bounded = self._coordinator.strategy.max_lead != inf
            if reader is not None and reader.order is not None and bounded and reader.passed_on > self._clocks.min:
                self._step_aside(worker, reader, at)
                self._ahead.add(worker)
                park(self._waiting, worker, reader.passed_on)
        self._store.leading.clear()

    def _step_aside(self, worker: int, reader: Reader, at: float) -> None:
        """Remove the worker from the strategy until its table lets it read: the strategy may make the slowest worker
        wait for a push of this one, which waits for the slowest's clock, and both would wait forever."""
        reader.aside, reader.order, reader.parked_since = True, None, None
        self._coordinator.leave(worker, "done", at)

    def _comes_back(self, worker: int, reader: Reader, at: float) -> bool:
        """Let the worker join again, at its own clock, if its tables let it read; return whether they do."""
        if worker in self._ahead:
            if reader.passed_on > self._clocks.min:
                return False
            self._ahead.discard(worker)
        for read in reader.parked:
            # A read that follows clocks which the strategy does not know yet: nobody reaches it before they are in.
            if not reader.waits_for(read) or read.clock > reader.passed_on:
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
            # Keep the older mark: rows sent before that have changed since must still be sent.
            reader.kept[read.table] = (mask, table.changes if kept is None else kept[1])
        self._deliver(worker, self._store.rows(worker, read.table, read.rows, read.clock))

    def _tell_what_is_in(self, worker: int, reader: Reader) -> None:
        """Confirm applied clocks from time to time to a worker that reads nothing, or `MOST_AHEAD` would stop it."""
        if reader.applied - reader.told >= UNTOLD:
            reader.told = reader.applied
            self._deliver(worker, t.Included(reader.applied))

    def _send_eagerly(self) -> None:
        """Send every reader the rows of eager tables that it caches and that have changed."""
        for worker, reader in sorted(self._readers.items()):
            for number, (mask, since) in reader.kept.items():
                table = self._tables[number]
                if table.changed is None:
                    continue
                rows = np.flatnonzero(mask & (table.changed > since))
                reader.kept[number] = (mask, table.changes)
                self._deliver(worker, self._store.rows(worker, number, rows, None))

    # -- rosters and barriers ----------------------------------------------------------------------------------------

    def _enter(self, worker: int, reader: Reader) -> None:
        if reader.passing is not None:
            passing, reader.passing = reader.passing, None
            self._deliver(worker, t.Passed(passing.number, reader.applied))
        if not reader.entered and reader.applied == reader.received:  # else a read could lack its own clocks
            reader.entered = True
            self._deal_anew()
            strategy = self._coordinator.strategy
            self._deliver(
                worker,
                t.Entered(
                    reader.applied, strategy.free_lead, strategy.max_lead, list(self._rosters), self._paced,
                    None if worker in self._store.standing else self.states.pop(worker, None),
                    self._store.may_restart, reader.era,
                ),
            )  # fmt: skip

    def _deal_anew(self) -> None:
        """Share the work among the workers present, from the first clock that none of them can have begun: a worker at
        the largest allowed lead may have asked for its share of the next clock already."""
        present = sorted(self._readers)
        if self._rosters and self._rosters[-1].workers == present:
            return
        lead = self._coordinator.strategy.max_lead
        ahead = max((reader.received for reader in self._readers.values()), default=0)
        if lead != inf:  # a worker that only writes may exceed the lead, since only reads are held back
            ahead = max(ahead - 1, self._clocks.min + int(lead))
        roster = t.ClockRoster(0 if not self._rosters else ahead + 2, present)
        self._rosters = [*[r for r in self._rosters if r.from_clock < roster.from_clock][-8:], roster]
        for worker, reader in self._readers.items():
            if reader.entered:
                self._deliver(worker, roster)

    def _let_rest(self, at: float) -> bool:
        """Take workers at the barrier whose clocks are all delivered out of the strategy, so that nobody waits for
        them; return whether there were any."""
        arrived = [
            (worker, reader)
            for worker, reader in sorted(self._readers.items())
            if reader.barrier is not None and worker in self._clocks.of
            if reader.received == reader.barrier.clock and not reader.early
        ]
        for worker, reader in arrived:
            self._clocks.leave(worker)
            self._ahead.discard(worker)
            reader.order, reader.rests_since, reader.aside = None, at, False
            self._coordinator.leave(worker, "done", at)
        return bool(arrived)

    def _open_barrier(self, at: float) -> bool:
        """Open the barrier once all workers are there; they go on from the same clock. Return whether it opened."""
        resting = [(worker, reader) for worker, reader in sorted(self._readers.items()) if reader.barrier is not None]
        if not resting or len(resting) < len(self._readers) or self._clocks.of:
            return False
        if any(reader.applied < reader.received for _, reader in resting):
            return False
        self._store.open_barrier(resting)
        for worker, reader in resting:
            self._coordinator.observe(at, "barrier", {"seconds": at - reader.rests_since}, worker)
            reader.passing, reader.barrier = reader.barrier, None
            reader.era += 1
            reader.overtaking.clear()
        for worker, _ in resting:
            self._coordinator.join(worker, self._coordinator.records[worker].work, at)
        return True
