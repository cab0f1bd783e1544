"""The interpreter: event -> strategy -> actions -> store, ledger and outbox. No sockets, no clock, no decisions.

Messages pass one intake (known worker, incarnation, ticket) before they become events, whatever engine they come from,
so duplicates and late arrivals are refused by the same code everywhere. What an engine must carry out leaves through
its `Effects`. Follow-up events (`Applied`, `Left(idle)`, an idle worker's return) are fed after the actions of the
decision that caused them.
"""

import math
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from paceline.core.actions import Apply, Cancel, Discard, Grant, Mark, SetTimer, Track
from paceline.core.errors import InternalError
from paceline.core.events import Applied, Cause, Event, Joined, Left, Pushed, TimerFired
from paceline.core.ledger import Allotment, Indices, Ledger
from paceline.model.store import Store, gradient_norm
from paceline.records.journal import Decision, Observation, Sink
from paceline.server.divergence_watch import Watch
from paceline.server.timers import Timers
from paceline.server.workers import Effects, GrantOrder, Held, PushArrival, WorkerRecord, Workers, why_unexpected
from paceline.strategies.base import Strategy


class Coordinator:
    """Carries a strategy's decisions out."""

    def __init__(
        self, strategy: Strategy, outbox: Effects, sink: Sink | None, store: Store | None = None,
        max_versions: int | None = None,
    ) -> None:  # fmt: skip
        self.strategy = strategy
        self.outbox = outbox
        self.sink = sink
        self.store = store
        self.watch = Watch(lambda text: self.observe("warning", {"text": text}))
        self._last_version = sys.maxsize if max_versions is None else max_versions
        self.ledger: Ledger | None = None
        self.version = 0
        self.used_before = 0  # samples used in finished phases
        self.lost_before = 0
        self.position = 0.0  # of the run, in nominal rounds: what schedulers follow
        self.model_bytes = 0  # that a grant sends down
        self.round_samples = 1  # of the phase: joining and leaving do not change what its length was counted in
        self.now = 0.0
        self._attendance = Workers()
        self.seats = self._attendance.seats
        self.held: dict[int, Held] = {}
        self.on_version: Callable[[int, list[Held]], None] | None = None
        self.on_over: Callable[[], None] = _without_effect  # the phase's data or the run's versions are used up
        self.pushes = 0
        self.tickets = 0
        self._queue: deque[Event] = deque()
        self.busy = False  # in the middle of a decision
        self._idle = self._attendance.idle
        self._extended: set[int] = set()  # pushes whose workers compute more for them
        self.timers = Timers()
        self._interpreters: dict[type, Callable[[Any], None]] = {
            Discard: self._discard, Cancel: self._cancel, SetTimer: self._set_timer,
            Mark: _without_effect, Track: _without_effect,
        }  # fmt: skip

    # -- what engines call -------------------------------------------------------------------------------------------

    def open(self, ledger: Ledger, round_samples: int) -> None:
        """Start a phase: from here on there is work, and `round_samples` of it are a nominal round."""
        self.ledger = ledger
        self.round_samples = round_samples

    def keep_tables(self, tables: Any) -> None:
        """What pushes bring are increments of these tables."""
        self.store = tables
        self.watch.expect_no_losses()

    def seat(self, worker: int, incarnation: int) -> None:
        """A process took its seat; it takes work once it has joined."""
        self.seats[worker] = WorkerRecord(worker, incarnation)

    def join(self, worker: int, work: int, at: float) -> None:
        """The worker is ready for work."""
        self._attendance.occupy(self.seats[worker], work, at)
        self.feed(Joined(at, worker, work))

    def leave(self, worker: int, cause: Cause, at: float) -> None:
        """The worker takes no more work; what it had not delivered is issued again."""
        seat = self.seats[worker]
        if not (seat.present or seat.idle):
            return
        self.now = at
        self._take_back(seat, cause)
        self._attendance.vacate(seat, cause)
        self.feed(Left(at, worker, cause))

    def fire(self, name: str, generation: int, at: float) -> None:
        """A timer ran out."""
        if self.timers.take(name, generation):
            self.feed(TimerFired(at, name))

    def more(self, worker: int, incarnation: int, ticket: int, work: int) -> Allotment | None:
        """Further samples on the same grant, for a script that accumulates gradients."""
        seat = self.seats.get(worker)
        if seat is None or seat.incarnation != incarnation or seat.ticket != ticket or self.ledger is None:
            return None
        allotment = self.ledger.allot(worker, work)
        if allotment is not None:
            seat.allotments += (allotment,)
        return allotment

    def arrive(self, at: float, message: PushArrival) -> None:
        """A push came in: check it, keep it, tell the strategy."""
        worker = message.worker
        seat = self.seats.get(worker)
        if seat is None or message.ticket != seat.ticket or message.incarnation != seat.incarnation:
            self._turn_away(at, message)
            return
        seat.ticket = 0
        wait_s = seat.granted_at - seat.free_at
        seat.free_at = at
        samples, allotments = message.samples, seat.allotments
        gradient, norm, loss = message.gradient, None, None
        if message.kept is not None:
            self.now = at
            allotments = self._settle_skipped(seat, message.kept)
        if gradient is not None:
            self.now = at
            loss = gradient.loss
            norm = gradient_norm(gradient)
            if not math.isfinite(norm):
                self._refuse(seat, samples, norm)
                samples, allotments, gradient, norm, loss = 0, (), None, None, None
            elif not self.strategy.needs_norms:
                norm = None
        if message.nominal is not None and message.nominal != seat.work:
            self.round_samples += message.nominal - seat.work
            self._attendance.occupy(seat, message.nominal, at)
            self.feed(Joined(at, worker, message.nominal))
        push, read_version = seat.extends, seat.read_version
        if push is None:
            self.pushes = push = self.pushes + 1
            self.held[push] = Held(worker, samples, read_version, allotments, gradient)
        else:
            self._extended.discard(push)
            samples = self.held[push].extend(samples, allotments, gradient)
        self.feed(Pushed(
            at, worker, push, seat.through, read_version, samples, message.compute_s, message.transfer_s, wait_s,
            message.bytes_up, message.bytes_down, norm, loss,
        ))  # fmt: skip

    def close(self, at: float, reason: str = "the phase is over") -> None:
        """End a phase: running grants are taken back and everybody is idle; what is held gets applied."""
        self.now = at
        if self.ledger is not None:
            self.ledger.finished = True
        for seat in self._attendance.computing():
            self.outbox.cancel(seat.worker, seat.ticket)
            self._take_back(seat, "stop")
        for seat in self._attendance.present():
            if seat.present:  # the decision on another may have left it idle
                self._attendance.vacate(seat, "idle")
                self.feed(Left(at, seat.worker, "idle"))
        if self.held:
            raise InternalError(f"{len(self.held)} pushes are still held although nobody is present ({reason})")
        if self.ledger is not None:
            self.used_before += self.ledger.used
            self.lost_before += self.ledger.lost
            self.ledger = None
        self._idle.clear()

    def stop(self, at: float, reason: str) -> None:
        """End the run in mid-phase: running grants are taken back, held pushes discarded."""
        self.now = at
        for seat in self._attendance.computing():
            self._take_back(seat, "stop")
        self._discard_all(reason)

    def switch(self, strategy: Strategy, at: float) -> None:
        """Go on under another strategy: it meets the workers as if they had all just joined."""
        self.now = at
        present = self._attendance.present()
        for seat in self._attendance.computing():
            self.outbox.cancel(seat.worker, seat.ticket)
            self._take_back(seat, "cancel")
        self._discard_all("the strategy was changed")
        for name in self.timers.names():
            self._set_timer(SetTimer(name, None, "the strategy was changed"))
        self.strategy = strategy
        for seat in present:
            self.feed(Joined(at, seat.worker, seat.work))

    @property
    def used(self) -> int:
        """Samples used in the whole run."""
        return self.used_before + (self.ledger.used if self.ledger is not None else 0)

    @property
    def lost(self) -> int:
        """Samples of the whole run that were settled without being used."""
        return self.lost_before + (self.ledger.lost if self.ledger is not None else 0)

    @property
    def at_limit(self) -> bool:
        return self.version >= self._last_version

    @property
    def phase_over(self) -> bool:
        return self.ledger is not None and self.ledger.finished

    def observe(self, what: str, data: dict[str, Any], worker: int | None = None) -> None:
        """Put something beside the decisions on record."""
        if self.sink is not None:
            self.sink.write(Observation(self.now, what, data, worker))

    def observe_end(self, cause: str) -> None:
        """The last line of a journal."""
        data = {"cause": cause, "versions": self.version, "samples_used": self.used, "samples_lost": self.lost}
        self.observe("end", data)

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
                self.now = event.at
                actions = self.strategy.handle(event)
                if self.sink is not None:
                    self.sink.write(Decision(event, actions))
                for action in actions:
                    # Nearly all actions are of these two kinds, and a call spelled out costs half of one looked up.
                    if isinstance(action, Grant):
                        self._grant(action)
                    elif isinstance(action, Apply):
                        self._apply(action)
                    else:
                        self._interpreters[type(action)](action)
                if not queue:
                    if self._idle:
                        self._call_back_idle()
                    if not queue:
                        return
                event = queue.popleft()
        finally:
            self.busy = False

    def _call_back_idle(self) -> None:
        """While there is work, idle workers return one at a time, in worker order."""
        if self.ledger is None or self.ledger.finished or not self.ledger.has_unallotted or self.at_limit:
            return
        seat = self.seats[min(self._idle)]
        self._attendance.occupy(seat, seat.work, self.now)
        self._queue.append(Joined(self.now, seat.worker, seat.work))

    # -- actions -----------------------------------------------------------------------------------------------------

    def _grant(self, action: Grant) -> None:
        worker = action.worker
        seat = self.seats.get(worker)
        if seat is None or not seat.present or seat.ticket:
            raise InternalError(
                f"{self.strategy.name} granted work to worker {worker}, which cannot take any: {action}"
            )
        allotment = None
        ledger = self.ledger
        if ledger is not None and self.version < self._last_version and not ledger.finished:
            allotment = ledger.allot(worker, action.work)
        if allotment is None:
            self._attendance.vacate(seat, "idle")
            self._queue.append(Left(self.now, worker, "idle"))
            return
        self.tickets = ticket = self.tickets + 1
        now = self.now
        seat.ticket = ticket
        seat.granted_at = now
        seat.through = action.through
        seat.allotments = (allotment,)
        extends = seat.extends = action.extends
        if extends is None:
            seat.read_version = self.version
        elif extends in self.held and self.held[extends].worker == worker:
            self._extended.add(extends)
        else:
            raise InternalError(f"{self.strategy.name} extends push {extends}, which worker {worker} does not hold")
        self.outbox.order(GrantOrder(worker, seat.incarnation, ticket, allotment, extends is None, self.position, now))

    def _apply(self, action: Apply) -> None:
        weights = action.weights
        if len(weights) == 1:
            held, mass = [self._release(action.pushes[0])], weights[0]
            used = held[0].samples
        else:
            held, mass = [self._release(push) for push in action.pushes], math.fsum(weights)
            used = sum([h.samples for h in held])
        self._settle(used)
        if mass <= 0.0:
            return
        merged = None
        if self.store is not None:
            chosen = [i for i, h in enumerate(held) if h.gradient is not None]
            merged = self.store.apply(
                [held[i].gradient for i in chosen], [weights[i] for i in chosen],  # type: ignore[misc]
                [held[i].samples for i in chosen], stock=action.stock,
            )  # fmt: skip
            self.watch.applied(held, mass, merged.norm, self.version, self.strategy)
        self.version += 1
        if self.version == self._last_version:
            self.on_over()
        if self.on_version is not None:
            self.on_version(self.version, held)
        if self.strategy.needs_applied:
            norm, inner = (merged.norm, merged.inner_product) if merged is not None else (None, None)
            self._queue.append(Applied(self.now, self.version, action.pushes, mass, inner, norm, self.watch.loss))

    def _release(self, push: int) -> Held:
        held = self.held.pop(push, None)
        if held is None:
            raise InternalError(f"{self.strategy.name} applies push {push}, which is not held")
        if push in self._extended:
            raise InternalError(f"{self.strategy.name} applies push {push} while worker {held.worker} extends it")
        return held

    def _discard(self, action: Discard) -> None:
        held = self._release(action.push)
        self._give_back(held.worker, held.allotments)

    def _discard_all(self, reason: str) -> None:
        """What no decision of the strategy speaks of is on record as an observation."""
        for push, held in sorted(self.held.items()):
            data = {"push": push, "samples": held.samples, "reason": reason}
            self.observe("discarded", data, held.worker)
            self._discard(Discard(push, reason))

    def _cancel(self, action: Cancel) -> None:
        seat = self.seats[action.worker]
        if not seat.ticket:
            raise InternalError(f"{self.strategy.name} cancels worker {action.worker}, which computes nothing")
        self.outbox.cancel(action.worker, seat.ticket)
        self._take_back(seat, "cancel")

    def _set_timer(self, action: SetTimer) -> None:
        self.outbox.timer(action.name, action.at, self.timers.set(action.name, action.at))

    # -- bookkeeping -------------------------------------------------------------------------------------------------

    def _take_back(self, seat: WorkerRecord, cause: str) -> None:
        """Undelivered work returns to the ledger."""
        if not seat.ticket:
            return
        seconds, samples = self.now - seat.granted_at, sum(a.samples for a in seat.allotments)
        sent = self.model_bytes if seat.extends is None else 0
        data = {"samples": samples, "seconds": seconds, "cause": cause, "bytes_down": sent}
        self.observe("cancelled", data, seat.worker)
        self._give_back(seat.worker, seat.allotments)
        seat.cancelled, seat.ticket = seat.ticket, 0
        if seat.extends is not None:
            self._extended.discard(seat.extends)
        seat.free_at = self.now

    def _give_back(self, worker: int, allotments: tuple[Allotment, ...]) -> None:
        if self.ledger is not None:
            for allotment in allotments:
                self.ledger.give_back(worker, allotment)

    def _settle(self, used: int, lost: int = 0) -> None:
        ledger = self.ledger
        if ledger is not None:
            ledger.settle(used, lost)
            self.position += used / self.round_samples
            if ledger.finished:
                self.on_over()

    def _settle_skipped(self, seat: WorkerRecord, kept: list[Indices]) -> tuple[Allotment, ...]:
        remaining = tuple(Allotment(a.epoch, len(k), k) for a, k in zip(seat.allotments, kept, strict=True))
        skipped = sum(a.samples for a in seat.allotments) - sum(a.samples for a in remaining)
        if skipped:
            self._settle(0, lost=skipped)
            self.observe("skipped", {"samples": skipped, "reason": "the script made no gradient of them"}, seat.worker)
        return remaining

    def _refuse(self, seat: WorkerRecord, samples: int, norm: float) -> None:
        self._settle(0, lost=samples)
        reason = f"gradient norm {norm} at step {seat.through}"
        self.observe("refused", {"reason": reason, "samples": samples, "push": None}, seat.worker)
        self.watch.refused(seat.worker, seat.through, norm, self.version - seat.read_version)

    def _turn_away(self, at: float, message: PushArrival) -> None:
        self.now = at
        seat = self.seats.get(message.worker)
        if seat is not None and message.ticket == seat.cancelled and message.incarnation == seat.incarnation:
            seat.cancelled = 0
            data = {"samples": message.samples, "seconds": message.compute_s + message.transfer_s}
            self.observe("dropped", {**data, "bytes_up": message.bytes_up}, message.worker)
            return
        reason = why_unexpected(message, seat)
        self.observe("refused", {"reason": reason, "samples": 0, "push": None}, message.worker)


def _without_effect(*_: Any) -> None:
    """RowDedup and tracks are for the journal alone; and nobody need ask to be told that it is over."""
