"""A cluster in virtual time for tests of strategies: no coordinator, no ledger, no tensors.

It keeps a heap of what will happen, feeds each event to the strategy, carries out the actions and refuses actions
that break the contract of `paceline.core.actions`. Times of a worker's attempts depend on (seed, worker, attempt)
alone, so two strategies that make the same decisions see the same arrivals.

    cluster = VirtualCluster(strategies.build("ssp:staleness=3", seed=0), seconds=[1, 1, 4], jitter=0.2)
    cluster.at(30.0, "crash", worker=1)
    cluster.at(50.0, "join", worker=1)
    cluster.run(pushes=500)
    assert cluster.mean_staleness() < 3
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.core.actions import Action, Apply, Cancel, Discard, Grant, Mark, SetTimer, Track
from paceline.core.events import Applied, Event, Joined, Left, Pushed, TimerFired
from paceline.strategies.base import Strategy

ORDER = {kind: place for place, kind in enumerate((Apply, Discard, Cancel, Grant, SetTimer, Mark, Track))}
Happening = Literal["join", "crash", "leave", "done", "timeout", "slow", "work"]


@dataclass
class Push:
    """A gradient as the store knows it."""

    push: int
    worker: int
    incarnation: int
    clock: int
    read_version: int
    samples: int


@dataclass
class Attempt:
    """A grant that is being computed."""

    push: int
    clock: int
    read_version: int
    samples: int  # of this piece
    started: float
    compute_s: float
    transfer_s: float
    wait_s: float
    extends: int | None


@dataclass
class VirtualWorker:
    """`seconds` is the time of one nominal push at factor 1, `transfer` is added to each push."""

    seconds: float
    work: int
    transfer: float
    factor: float = 1.0
    incarnation: int = 0
    attempts: int = 0
    present: bool = False
    idle: bool = False
    free_since: float = 0.0
    attempt: Attempt | None = None
    read: int | None = None  # the version that it has
    waited: float = 0.0
    lost: float = 0.0
    pushes: int = 0


@dataclass(frozen=True)
class Decision:
    """One event and the actions it led to."""

    event: Event
    actions: list[Action]


Statistics = Callable[[Apply, list[Push]], tuple[float | None, float | None, float | None]]
LossOf = Callable[[int, int], float | None]  # (worker, read version) -> loss of the push


@dataclass
class VirtualCluster:
    """Drives one strategy; `samples` bounds the data (None: endless), `refuse` is the share of refused pushes."""

    strategy: Strategy
    seconds: list[float]
    work: int | list[int] = 8
    transfer: float | list[float] = 0.0
    jitter: float = 0.0  # sigma of a lognormal factor of median 1 on compute and transfer
    exponential: bool = False  # compute and transfer times exponential with the given means instead
    seed: int = 0
    samples: int | None = None
    refuse: float = 0.0
    statistics: Statistics | None = None  # of an Apply: inner product, norm, loss
    loss_of: LossOf | None = None
    after: Callable[["VirtualCluster", Decision], None] | None = None  # called after each decision

    now: float = 0.0
    version: int = 0
    decisions: list[Decision] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    held: dict[int, Push] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)
    arrived: int = 0  # pushes, extensions included
    pulls: int = 0
    cancelled: int = 0
    discarded: int = 0
    states: dict[int, str] = field(default_factory=dict)
    tracks: list[tuple[float, str, float, int | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = len(self.seconds)
        works = self.work if isinstance(self.work, list) else [self.work] * count
        transfers = self.transfer if isinstance(self.transfer, list) else [self.transfer] * count
        self.workers = {
            i: VirtualWorker(s, w, t) for i, (s, w, t) in enumerate(zip(self.seconds, works, transfers, strict=True))
        }
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.timers: dict[str, int] = {}
        self.pending: deque[Callable[[], None]] = deque()
        self.unallotted = self.samples
        self.started = False
        self._sequence = 0
        self._push = 0
        self._timers_in_a_row = 0

    # What the test arranges

    def at(self, time: float, what: Happening, worker: int, value: float = 1.0) -> None:
        """Let something happen: `slow` multiplies times by `value`, `work` corrects the nominal work to `value`."""
        self._schedule(time, lambda: self._happen(what, worker, value))

    def absent(self, *workers: int) -> None:
        """These workers do not take part in the start; a later `join` brings them in."""
        for worker in workers:
            self.workers[worker].incarnation = -1

    def run(self, pushes: int | None = None, until: float | None = None) -> "VirtualCluster":
        """Go on until so many pushes arrived in all, or that time has come, or nothing happens any more."""
        if not self.started:
            self.started = True
            for i, worker in self.workers.items():
                if worker.incarnation >= 0:
                    self._join(i)
            self._settle()
        while self._alive() and (pushes is None or self.arrived < pushes):
            if until is not None and self.heap[0][0] > until:
                self.now = until
                break
            self.now, _, act = heapq.heappop(self.heap)
            act()
            self._settle()
        return self

    # What the test reads

    def mean_staleness(self) -> float:
        return sum(self.staleness) / len(self.staleness)

    def waited(self) -> float:
        """Seconds that workers waited between a push and the grant that answered it."""
        return sum(worker.waited for worker in self.workers.values())

    def computing(self) -> list[int]:
        return [i for i, worker in self.workers.items() if worker.attempt]

    def grants(self) -> list[tuple[float, int, int, int]]:
        """(time, worker, work, through) of every grant."""
        return [
            (d.event.at, a.worker, a.work, a.through) for d in self.decisions for a in d.actions if isinstance(a, Grant)
        ]

    def applies(self) -> list[Apply]:
        return [a for d in self.decisions for a in d.actions if isinstance(a, Apply)]

    def without_reasons(self, *ignored: type) -> list[tuple[Event, list[tuple[Any, ...]]]]:
        """Every decision in a comparable form, reasons (and kinds of action in `ignored`) left out."""
        return [(d.event, [_bare(a) for a in d.actions if not isinstance(a, ignored)]) for d in self.decisions]

    # The engine's part

    def _alive(self) -> bool:
        """Timers alone do not keep a run alive once nobody is present."""
        present = any(worker.present for worker in self.workers.values())
        return bool(self.heap) if present else len(self.heap) > len(self.timers)

    def _schedule(self, time: float, act: Callable[[], None]) -> int:
        self._sequence += 1
        heapq.heappush(self.heap, (time, self._sequence, act))
        return self._sequence

    def _settle(self) -> None:
        """Feed what decisions led to; then, while data is there, take idle workers back one at a time."""
        while True:
            if self.pending:
                self.pending.popleft()()
                continue
            idle = next((i for i, w in self.workers.items() if w.idle), None)
            if idle is None or self.unallotted == 0:
                return
            self.workers[idle].idle = False
            self._join(idle)

    def _join(self, i: int) -> None:
        worker = self.workers[i]
        worker.present, worker.free_since = True, self.now
        self._feed(Joined(self.now, i, worker.work))

    def _happen(self, what: Happening, i: int, value: float) -> None:
        worker = self.workers[i]
        if what == "slow":
            worker.factor = value
        elif what == "work":
            worker.work = int(value)
            if worker.present:
                self._feed(Joined(self.now, i, worker.work))
        elif what == "join":
            if not worker.present and not worker.idle:
                worker.incarnation += 1
                self._join(i)
        elif worker.present or worker.idle:
            self._give_back(worker)
            worker.present = worker.idle = False
            worker.read = None
            worker.incarnation += 1
            self._feed(Left(self.now, i, what))

    def _give_back(self, worker: VirtualWorker) -> None:
        if worker.attempt:
            worker.lost += self.now - worker.attempt.started
            if self.unallotted is not None:
                self.unallotted += worker.attempt.samples
            worker.attempt = None

    def _feed(self, event: Event) -> None:
        self._timers_in_a_row = self._timers_in_a_row + 1 if isinstance(event, TimerFired) else 0
        assert self._timers_in_a_row < 1000, f"timers follow each other without end: {event}"
        decision = Decision(event, self.strategy.handle(event))
        self.decisions.append(decision)
        self._check_form(decision)
        for action in decision.actions:
            match action:
                case Apply():
                    self._apply(action)
                case Discard():
                    push = self.held.pop(action.push)
                    self.discarded += 1
                    self.settled.add(action.push)
                    if self.unallotted is not None:
                        self.unallotted += push.samples
                case Cancel():
                    worker = self.workers[action.worker]
                    assert worker.attempt, f"cancel of w{action.worker}, which computes nothing"
                    self._give_back(worker)
                    worker.free_since = self.now
                    self.cancelled += 1
                case Grant():
                    self._grant(action)
                case SetTimer():
                    self._set_timer(action)
                case Mark():
                    self.states[action.worker] = action.state
                case Track():
                    self.tracks.append((self.now, action.name, action.value, action.worker))
        if self.after:
            self.after(self, decision)

    @staticmethod
    def _check_form(decision: Decision) -> None:
        places = [ORDER[type(a)] for a in decision.actions]
        assert places == sorted(places), f"actions out of order: {decision}"
        assert all(a.reason.strip() for a in decision.actions), f"an action without a reason: {decision}"
        granted = [a.worker for a in decision.actions if isinstance(a, Grant)]
        assert len(granted) == len(set(granted)), f"two grants for one worker: {decision}"

    def _apply(self, action: Apply) -> None:
        assert action.pushes, "an Apply of nothing"
        assert len(action.pushes) == len(action.weights)
        extended = {w.attempt.extends for w in self.workers.values() if w.attempt}
        pushes = []
        for push in action.pushes:
            assert push in self.held, f"push {push} is unknown or settled already"
            assert push not in extended, f"push {push} is applied while it is being extended"
            pushes.append(self.held.pop(push))
            self.settled.add(push)
        order = [(p.worker, p.push) for p in pushes]
        assert order == sorted(order), f"pushes out of worker order: {action}"
        self.staleness += [self.version - p.read_version for p in pushes]
        mass = sum(action.weights)
        if mass > 0:
            self.version += 1
        if self.strategy.needs_applied:
            inner, norm, loss = self.statistics(action, pushes) if self.statistics else (None, None, None)
            applied = Applied(self.now, self.version, action.pushes, mass, inner, norm, loss)
            self.pending.append(lambda: self._feed(applied))

    def _grant(self, action: Grant) -> None:
        i, worker = action.worker, self.workers[action.worker]
        assert worker.present, f"w{i} is granted work while absent"
        assert worker.attempt is None, f"w{i} is granted work while it computes"
        assert action.work >= 1, f"a grant of {action.work} samples"
        before = self._extended(action) if action.extends is not None else None
        samples = action.work if self.unallotted is None else min(action.work, self.unallotted)
        if samples == 0:
            worker.present, worker.idle = False, True
            left = Left(self.now, i, "idle")
            self.pending.append(lambda: self._feed(left))
            return
        if self.unallotted is not None:
            self.unallotted -= samples
        worker.attempts += 1
        compute, transfer = self._times(i, worker, samples)
        if before is None:
            self._push += 1
        attempt = Attempt(
            push=before.push if before else self._push,
            clock=action.through,
            read_version=before.read_version if before else self._read(worker, action),
            samples=samples,
            started=self.now,
            compute_s=compute,
            transfer_s=transfer,
            wait_s=self.now - worker.free_since,
            extends=action.extends,
        )
        worker.waited += attempt.wait_s
        worker.attempt = attempt
        self._schedule(self.now + compute + transfer, lambda: self._arrive(i, attempt))

    def _read(self, worker: VirtualWorker, action: Grant) -> int:
        """The version that a new push is computed on; a worker whose last push was applied can keep its own."""
        assert not action.cached or worker.read is not None, f"w{action.worker} has no model to go on from"
        if worker.read is None or not action.cached:
            worker.read = self.version
            self.pulls += 1
        return worker.read

    def _extended(self, action: Grant) -> Push:
        push = self.held[action.extends or 0]
        owner = (action.worker, self.workers[action.worker].incarnation)
        assert (push.worker, push.incarnation) == owner, f"{action} extends another's push"
        assert push.clock == action.through, f"{action} changes the clock of the push it extends from {push.clock}"
        return push

    def _times(self, i: int, worker: VirtualWorker, samples: int) -> tuple[float, float]:
        draws = random.Random(f"{self.seed}:{i}:{worker.attempts}")
        compute = worker.seconds * samples / worker.work * worker.factor
        if self.exponential:
            return compute * draws.expovariate(1.0), worker.transfer * draws.expovariate(1.0)
        return compute * draws.lognormvariate(0, self.jitter), worker.transfer * draws.lognormvariate(0, self.jitter)

    def _arrive(self, i: int, attempt: Attempt) -> None:
        worker = self.workers[i]
        if worker.attempt is not attempt:
            return
        worker.attempt = None
        worker.free_since = self.now
        worker.pushes += 1
        self.arrived += 1
        before = self.held.get(attempt.extends) if attempt.extends is not None else None
        samples = attempt.samples + (before.samples if before else 0)
        if self.refuse and random.Random(f"{self.seed}:refuse:{i}:{worker.attempts}").random() < self.refuse:
            samples = 0
        self.held[attempt.push] = Push(
            attempt.push, i, worker.incarnation, attempt.clock, attempt.read_version, samples
        )
        self._feed(
            Pushed(
                at=self.now,
                worker=i,
                push=attempt.push,
                clock=attempt.clock,
                read_version=attempt.read_version,
                samples=samples,
                compute_s=attempt.compute_s,
                transfer_s=attempt.transfer_s,
                wait_s=attempt.wait_s,
                bytes_up=1000,
                bytes_down=1000,
                norm=1.0,
                loss=self.loss_of(i, attempt.read_version) if self.loss_of else None,
            )
        )

    def _set_timer(self, action: SetTimer) -> None:
        name = action.name
        self.timers.pop(name, None)
        if action.at is None:
            return

        def fire() -> None:
            if self.timers.get(name) == number:
                del self.timers[name]
                self._feed(TimerFired(self.now, name))

        number = self._schedule(max(action.at, self.now), fire)
        self.timers[name] = number


def _bare(action: Action) -> tuple[Any, ...]:
    values = tuple(getattr(action, name) for name in action.__struct_fields__ if name != "reason")
    return (type(action).__name__, *values)
