"""The interpreter: event -> strategy -> actions -> weights, ledger and effects. No sockets, no clock, no decisions.

Messages from every engine pass the same check (known worker, incarnation, ticket) before they become events, so one
piece of code refuses duplicates and late arrivals. The coordinator sees no tensors: a push is a reference, and
`Updates` holds its gradient. Time comes with every call. Effects leave through `Carrier` and `Effects`. Follow-up
events (`Applied`, `Left(idle)`, an idle worker's return) are fed after the actions of the decision that caused them.
"""

import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

from msgspec import UNSET

from paceline.core.actions import Apply, Cancel, Discard, Grant, SetTimer
from paceline.core.errors import InternalError
from paceline.core.events import Applied, Cause, Event, Joined, Left, Pushed, TimerFired
from paceline.core.ledger import Allotment, Indices, Ledger
from paceline.core.updates import PushRef, Updates
from paceline.records.journal import Decision, Observation, Sink
from paceline.server.contributions import Contributions, warning
from paceline.server.guard import Watch
from paceline.server.workers import Carrier, Effects, GrantOrder, WorkerRecord, Workers, turned_away
from paceline.strategies.base import Strategy
from paceline.transport.messages import OwnUpdate

PULLS = (
    "{}: workers cannot compute their own updates as the server does, so each of their clocks pulls the model: a cache "
    "needs SGD without momentum and weight decay, and parameters in float32 or float64"
)

OnVersion = Callable[[int, float], None]  # takes the version's number and time


class Timers:
    """The timers that a strategy has set, by name: number and time; one that was replaced or cleared never fires."""

    def __init__(self) -> None:
        self._current: dict[str, tuple[int, float]] = {}
        self._made = 0

    def set(self, name: str, at: float | None) -> int:
        """Set, replace or clear (`at` is None) a timer; return the number of this setting."""
        self._made += 1
        if at is None:
            self._current.pop(name, None)
        else:
            self._current[name] = self._made, at
        return self._made

    def take(self, name: str, number: int) -> bool:
        """Remove an expired setting; return whether it was still in force."""
        if self._current.get(name, (0, 0.0))[0] != number:
            return False
        del self._current[name]
        return True

    def names(self) -> list[str]:
        """Return the names of all timers that are set."""
        return list(self._current)

    def pending(self) -> dict[str, float]:
        """Return when each timer expires."""
        return {name: at for name, (_, at) in self._current.items()}


class Totals:
    """Counts over the whole run: grants, pushes, samples of finished phases, and rounds, which schedulers follow."""

    def __init__(self) -> None:
        self.used_before = 0
        self.lost_before = 0
        self.tickets = 0  # grants
        self.pushes = 0
        self.rounds_done = 0.0
        self.killers: set[int] = set()  # samples of finished phases that killed their processes
        self.round_samples = 1  # of the phase, whose length is counted in it: not changed by joining and leaving


class Coordinator:
    """Carries out a strategy's decisions."""

    def __init__(
        self, strategy: Strategy, effects: Effects, sink: Sink | None, updates: Updates | None = None,
        max_versions: int | None = None, workers: Workers | None = None, carrier: Carrier | None = None,
        on_version: Sequence[OnVersion] = (),
    ) -> None:  # fmt: skip
        """Call each of `on_version` at every version; the caller may extend a list that it passes."""
        self.strategy = strategy
        self.effects = effects
        self._out = cast("Carrier", carrier)  # a run sets it before its first grant, with `use`
        self._on_version = on_version
        self.sink = sink
        self.updates = updates
        self.workers = Workers() if workers is None else workers
        self.records = self.workers.records
        self.watch = Watch(self._warn, effects)
        self.totals = Totals()
        self._contributions = Contributions()
        self.ledger: Ledger | None = None
        self.version = 0
        self.model_bytes = 0  # sent down with a grant
        self.at = 0.0  # time of the event decided last
        self.held: dict[int, PushRef] = {}
        self.busy = False  # in the middle of a decision
        self.undecided = False  # a decision was not carried out to its end
        self.timers = Timers()
        self._told_pulls = False  # that nobody can go on from what it has
        self._last_version = sys.maxsize if max_versions is None else max_versions
        self._queue: deque[Event] = deque()

    # -- what a run calls --------------------------------------------------------------------------------------------

    def open(self, ledger: Ledger, round_samples: int) -> None:
        """Start a phase on the work in `ledger`; `round_samples` samples are a nominal round."""
        self.ledger = ledger
        ledger.killers.update(self.totals.killers)
        self.totals.round_samples = round_samples

    def use(self, updates: Updates, model_bytes: int, carrier: Carrier) -> None:
        """Set what merges pushes, how many bytes a grant sends down, and what carries grants to workers."""
        self.updates = updates
        self._out = carrier
        self.model_bytes = model_bytes

    def join(self, worker: int, work: int, at: float) -> None:
        """Add a worker that is ready for work."""
        self.workers.occupy(self.records[worker], work, at)
        self._contributions.joined(worker)
        self.feed(self._joined(at, worker, work))

    def _joined(self, at: float, worker: int, work: int) -> Joined:
        whole = self.updates is not None and self.updates.of_clocks
        return Joined(at, worker, work, True) if whole else Joined(at, worker, work)

    def leave(self, worker: int, cause: Cause, at: float, *, suspects: bool = False) -> bool:
        """Remove a worker; what it has not delivered is issued again.

        `suspects`: that may have killed it. Return whether it had been suspected before.
        """
        record = self.records[worker]
        if cause == "done":  # with a loop: what it has missed counts on in the next one
            self._contributions.pause(worker)
        else:
            self._contributions.left(worker)
        if not (record.present or record.idle):
            return False
        tried = self._take_back(record, cause, at, suspects=suspects)
        self.workers.vacate(record, cause)
        self.feed(Left(at, worker, cause))
        return tried

    def fire(self, name: str, generation: int, at: float) -> None:
        """Feed the event of an expired timer, unless it was replaced or cleared."""
        if self.timers.take(name, generation):
            self.feed(TimerFired(at, name))

    def more(self, worker: int, incarnation: int, ticket: int, work: int) -> Allotment | None:
        """Allot further samples on the same grant, for a script that accumulates gradients."""
        record = self.records.get(worker)
        if record is None or record.incarnation != incarnation or record.ticket != ticket or self.ledger is None:
            return None
        allotment = self.ledger.allot(worker, work)
        if allotment is not None:
            record.allotments += (allotment,)
        return allotment

    def fewer(self, worker: int, incarnation: int, ticket: int, samples: int) -> None:
        """Take back the last samples of a grant, for which the worker's stream has no data."""
        record = self.records.get(worker)
        if record is None or record.incarnation != incarnation or record.ticket != ticket:
            return
        last = record.allotments[-1]
        kept = max(0, last.samples - samples)
        record.allotments = (*record.allotments[:-1], Allotment(last.epoch, kept, last.indices[:kept]))
        self._give_back(worker, (Allotment(last.epoch, last.samples - kept, last.indices[kept:]),))

    def arrive(self, at: float, arrived: PushRef) -> None:
        """Check a push, hold it, and tell the strategy."""
        worker = arrived.worker
        record = self.records.get(worker)
        if record is None or arrived.ticket != record.ticket or arrived.incarnation != record.incarnation:
            self.observe(at, *turned_away(arrived, record), worker)
            return
        record.ticket, record.delivered = 0, arrived.ticket
        if self.ledger is not None:
            self.ledger.delivered(worker)
        wait_s = record.granted_at - record.free_at
        record.free_at = at
        arrived.read_version, arrived.allotments = record.read_version, record.allotments
        if arrived.kept is not None:
            arrived.allotments = self._settle_skipped(record, arrived.kept, at)
        if arrived.norm is not None and not math.isfinite(arrived.norm):
            self._refuse(record, arrived, arrived.norm, at)
        elif record.refusals:
            record.refusals = 0
        nominal, norm, loss = arrived.nominal, arrived.norm, arrived.loss
        if nominal is not None and nominal != record.work:
            self.totals.round_samples += nominal - record.work
            self.workers.occupy(record, nominal, at)
            self.feed(self._joined(at, worker, nominal))
        push = record.extends
        if push is None:
            self.totals.pushes = push = self.totals.pushes + 1
            self.held[push] = arrived
            samples = arrived.samples
        else:
            samples = self._extend(push, arrived)
        self.feed(Pushed(
            at, worker, push, record.through, record.read_version, samples, arrived.compute_s, arrived.transfer_s,
            wait_s, arrived.bytes_up, arrived.bytes_down,
            norm if norm is not None and self.strategy.needs_norms else None, loss,
            arrived.queued_down_s, arrived.queued_up_s,
            UNSET if arrived.host is None else arrived.host,
        ))  # fmt: skip

    def close(self, at: float, reason: str = "the phase is over") -> None:
        """End a phase: take back running grants and make all workers idle, so that held pushes are applied."""
        if self.ledger is not None:
            self.ledger.finished = True
        for record in self.workers.computing():
            self._out.cancel(record.worker, record.ticket)
            self._take_back(record, "stop", at)
        for record in self.workers.present():
            if record.present:  # the decision on another worker may have made it idle
                self.workers.vacate(record, "idle")
                self._contributions.pause(record.worker)
                self.feed(Left(at, record.worker, "idle"))
        if self.held:
            raise InternalError(f"{len(self.held)} pushes are still held although nobody is present ({reason})")
        if self.ledger is not None:
            self.totals.used_before += self.ledger.used
            self.totals.lost_before += self.ledger.lost
            self.totals.killers = set(self.ledger.killers)
            self.ledger = None
        self.workers.idle.clear()

    def stop(self, at: float, reason: str) -> None:
        """End the run in mid-phase: take back running grants and discard held pushes."""
        for record in self.workers.computing():
            self._take_back(record, "stop", at)
        self._discard_all(reason, at)

    def switch(self, strategy: Strategy, at: float) -> None:
        """Continue under another strategy, which sees all workers as if they had just joined."""
        present = self.workers.present()
        for record in self.workers.computing():
            self._out.cancel(record.worker, record.ticket)
            self._take_back(record, "cancel", at)
        self._discard_all("the strategy was changed", at)
        for name in self.timers.names():
            self.effects.set_timer(name, None, self.timers.set(name, None))
        self.strategy = strategy
        for record in present:
            self.feed(self._joined(at, record.worker, record.work))

    @property
    def used(self) -> int:
        """Samples used in the whole run."""
        return self.totals.used_before + (self.ledger.used if self.ledger is not None else 0)

    @property
    def lost(self) -> int:
        """Samples of the whole run that were settled without being used."""
        return self.totals.lost_before + (self.ledger.lost if self.ledger is not None else 0)

    @property
    def at_limit(self) -> bool:
        return self.version >= self._last_version

    @property
    def phase_over(self) -> bool:
        return self.ledger is not None and self.ledger.finished

    def observe(self, at: float, what: str, data: dict[str, Any], worker: int | None = None) -> None:
        """Write an observation to the journal."""
        if self.sink is not None:
            self.sink.write(Observation(at, what, data, worker))

    def observe_end(self, at: float, cause: str) -> None:
        """Write the last line of the journal."""
        data = {"cause": cause, "versions": self.version, "samples_used": self.used, "samples_lost": self.lost}
        self.observe(at, "end", data)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Let the strategy decide on an event and on all that follows from it at the same instant."""
        queue = self._queue
        if self.busy:
            queue.append(event)
            return
        self.busy = True
        try:
            while True:
                self.at = event.at
                actions = self.strategy.handle(event)
                if self.sink is not None:
                    self.sink.write(Decision(event, actions))
                for action in actions:
                    # Nearly all actions are of the first two kinds; a direct call costs half of one through a table.
                    if isinstance(action, Grant):
                        self._grant(action)
                    elif isinstance(action, Apply):
                        self._apply(action)
                    elif isinstance(action, Discard):
                        self._discard(action.push)
                    elif isinstance(action, Cancel):
                        self._cancel(action)
                    elif isinstance(action, SetTimer):
                        self.effects.set_timer(action.name, action.at, self.timers.set(action.name, action.at))
                if not queue:
                    if self.workers.idle:
                        self._call_back_idle()
                    if not queue:
                        return
                event = queue.popleft()
        except BaseException:
            self.undecided = True
            raise
        finally:
            self.busy = False

    def _call_back_idle(self) -> None:
        """Let one idle worker rejoin if there is work; the lowest number first."""
        if self.ledger is None or self.ledger.finished or not self.ledger.has_unallotted or self.at_limit:
            return
        record = self.records[min(self.workers.idle)]
        self.workers.occupy(record, record.work, self.at)
        self._contributions.joined(record.worker)
        self._queue.append(self._joined(self.at, record.worker, record.work))

    # -- actions -----------------------------------------------------------------------------------------------------

    def _grant(self, action: Grant) -> None:
        worker = action.worker
        record = self.records.get(worker)
        if record is None or not record.present or record.ticket:
            raise InternalError(
                f"{self.strategy.name} granted work to worker {worker}, which cannot take any: {action}"
            )
        allotment = None
        ledger = self.ledger
        if ledger is not None and self.version < self._last_version and not ledger.finished:
            allotment = ledger.allot(worker, action.work)
        if allotment is None:
            self.workers.vacate(record, "idle")
            self._contributions.pause(worker)
            self._queue.append(Left(self.at, worker, "idle"))
            return
        totals = self.totals
        totals.tickets = ticket = totals.tickets + 1
        at = self.at
        record.ticket = ticket
        record.granted_at = at
        record.through = action.through
        record.allotments = (allotment,)
        extends = record.extends = action.extends
        own = self._own_update(record) if action.cached else None
        record.applied = None
        record.fresh = fresh = extends is None and own is None
        if fresh:
            record.read_version = self.version
        elif extends is None:
            pass  # it reads the version that it had, and its own update
        elif extends in self.held and self.held[extends].worker == worker:
            self.held[extends].extending = True
        else:
            raise InternalError(f"{self.strategy.name} extends push {extends}, which worker {worker} does not hold")
        self._out.grant(GrantOrder(worker, record.incarnation, ticket, allotment, fresh, totals.rounds_done, at, own))

    def _own_update(self, record: WorkerRecord) -> OwnUpdate | None:
        """Return what the worker must add to what it has instead of a pull; None if it cannot do so exactly."""
        applied = record.applied
        if applied is not None:
            return OwnUpdate(applied.weights[0], applied.stock)
        if not self._told_pulls and self.updates is not None and self.version:
            self._told_pulls = True
            self._warn(PULLS.format(self.strategy.name))
        return None

    def _apply(self, action: Apply) -> None:
        weights = action.weights
        if len(weights) == 1:
            only = self.held.pop(action.pushes[0], None)
            if only is None or only.extending:
                raise self._not_held(action.pushes[0], only)
            held, mass, used = [only], weights[0], only.samples
        else:
            held, mass = [self._release(push) for push in action.pushes], math.fsum(weights)
            used = sum([push.samples for push in held])
        self.settle(used)
        if mass <= 0.0:
            for push in held:
                self._forget(push)
            if len(held) == 1:
                self._note_alone(held[0], action)
            return
        merged = None
        if self.updates is not None:
            chosen = [i for i, push in enumerate(held) if push.norm is not None]
            merged = self.updates.apply(
                [held[i] for i in chosen], [weights[i] for i in chosen], stock=action.stock
            )  # fmt: skip
            share = used / self.totals.round_samples
            self.watch.applied(held, share, mass, merged.norm, self.version, self.strategy)
        if self.strategy.keeps_models and len(held) == 1 and (merged is None or merged.plain):
            self._note_alone(held[0], action)
        self.version += 1
        if self.version == self._last_version:
            self.effects.on_work_used_up()
        if self._on_version:
            for call in self._on_version:
                call(self.version, self.at)
        if self.strategy.may_leave_out:
            self._name_who_brings_nothing(held)
        if self.strategy.needs_applied:
            norm, inner = (merged.norm, merged.inner_product) if merged is not None else (None, None)
            self._queue.append(Applied(self.at, self.version, action.pushes, mass, inner, norm, self.watch.loss))

    def _note_alone(self, push: PushRef, action: Apply) -> None:
        """Note that a worker's last push, which extended no other, was applied alone."""
        record = self.records.get(push.worker)
        if record is not None and record.incarnation == push.incarnation and record.extends is None:
            record.applied = action if record.delivered == push.ticket else None

    def _name_who_brings_nothing(self, applied: Sequence[PushRef]) -> None:
        silent = self._contributions.applied(push.worker for push in applied)
        if silent is not None:
            self._warn(warning(silent, self.strategy, self.ledger))

    def _release(self, push: int) -> PushRef:
        held = self.held.pop(push, None)
        if held is None or held.extending:
            raise self._not_held(push, held)
        return held

    def _not_held(self, push: int, found: PushRef | None) -> InternalError:
        what = "which is not held" if found is None else f"while worker {found.worker} extends it"
        return InternalError(f"{self.strategy.name} applies push {push}, {what}")

    def _discard(self, push: int) -> None:
        held = self._release(push)
        self._forget(held)
        self._give_back(held.worker, held.allotments)

    def _forget(self, push: PushRef) -> None:
        if push.norm is not None and self.updates is not None:
            self.updates.discard(push)

    def _discard_all(self, reason: str, at: float) -> None:
        """Discard all held pushes, each recorded as an observation since no decision names it."""
        for push, held in sorted(self.held.items()):
            self.observe(at, "discarded", {"push": push, "samples": held.samples, "reason": reason}, held.worker)
            self._discard(push)

    def _cancel(self, action: Cancel) -> None:
        record = self.records[action.worker]
        if not record.ticket:
            raise InternalError(f"{self.strategy.name} cancels worker {action.worker}, which computes nothing")
        self._out.cancel(action.worker, record.ticket)
        self._take_back(record, "cancel", self.at)

    # -- bookkeeping -------------------------------------------------------------------------------------------------

    def _extend(self, push: int, piece: PushRef) -> int:
        """Add a piece to a held push and return its total of samples."""
        held = self.held[push]
        held.extending = False
        if piece.norm is not None and self.updates is not None:
            held = self.held[push] = self.updates.extend(held, piece)
            return held.samples
        held.samples += piece.samples
        held.allotments += piece.allotments
        return held.samples

    def _take_back(self, record: WorkerRecord, cause: str, at: float, *, suspects: bool = False) -> bool:
        """Return undelivered work to the ledger; return whether it was suspected before of killing processes."""
        if not record.ticket:
            return False
        seconds, samples = at - record.granted_at, sum(a.samples for a in record.allotments)
        sent = self.model_bytes if record.fresh else 0
        data = {"samples": samples, "seconds": seconds, "cause": cause, "bytes_down": sent}
        self.observe(at, "cancelled", data, record.worker)
        tried = suspects and self._accuse(record, at)
        if not suspects:
            self._give_back(record.worker, record.allotments)
        record.cancelled, record.ticket = record.ticket, 0
        if record.extends in self.held:
            self.held[record.extends].extending = False
        record.free_at = at
        return tried

    def _accuse(self, record: WorkerRecord, at: float) -> bool:
        """Return to the ledger what a dead process had; name the samples that are given up because they kill.

        Return whether the process had samples that were suspected before.
        """
        if self.ledger is None:
            return False
        verdict = self.ledger.accuse(record.worker, record.allotments)
        if verdict.lost:
            self.settle(0, lost=len(verdict.lost))
            which = f"sample{'s' * (len(verdict.lost) > 1)} {', '.join(map(str, verdict.lost))}"
            text = f"{which} killed each process that computed nothing else: left out of this epoch"
            data = {"samples": len(verdict.lost), "reason": text, "indices": list(verdict.lost)}
            self.observe(at, "lost", data, record.worker)
            self.observe(at, "warning", {"text": text})
        return verdict.tried

    def _give_back(self, worker: int, allotments: tuple[Allotment, ...]) -> None:
        if self.ledger is not None:
            for allotment in allotments:
                self.ledger.give_back(worker, allotment)

    def settle(self, used: int, lost: int = 0) -> None:
        """Mark allotted samples as used or lost."""
        ledger = self.ledger
        if ledger is not None:
            totals = self.totals
            totals.rounds_done += used / totals.round_samples
            if ledger.settle(used, lost):
                self.effects.on_work_used_up()

    def _settle_skipped(self, record: WorkerRecord, kept: list[Indices], at: float) -> tuple[Allotment, ...]:
        remaining = tuple(Allotment(a.epoch, len(k), k) for a, k in zip(record.allotments, kept, strict=True))
        skipped = sum(a.samples for a in record.allotments) - sum(a.samples for a in remaining)
        if skipped:
            self.settle(0, lost=skipped)
            data = {"samples": skipped, "reason": "the script made no gradient of them"}
            self.observe(at, "skipped", data, record.worker)
        return remaining

    def _refuse(self, record: WorkerRecord, push: PushRef, norm: float, at: float) -> None:
        """Empty a push that is not finite: it still answers its grant, but brings nothing."""
        record.refusals += 1
        self._forget(push)
        self.settle(0, lost=push.samples)
        reason = f"gradient norm {norm} at step {record.through}"
        self.observe(at, "refused", {"reason": reason, "samples": push.samples, "push": None}, record.worker)
        self.at = at  # the time of the warning
        self.watch.refused(record.worker, record.through, norm, self.version - record.read_version)
        push.samples, push.allotments, push.norm, push.loss = 0, (), None, None

    def _warn(self, text: str) -> None:
        self.observe(self.at, "warning", {"text": text})
