"""DASP, node-state-based parallelism: Ma et al., 2023.

Rule: nodes of similar speed form a group that steps together; a slower node never blocks anyone, its work is cut to
what it finishes in one of the group's rounds, and its push is merged into the group's next step.

Published: the server keeps state information of every node during training, divides the nodes into parallel states and
re-decides each node's state from it, which cuts both the time that fast nodes wait and the stale gradients.
Reconstruction: the states and their rules. `SYNC`, a member of the group: its push waits for the group's barrier, one
Apply. `ASYNC`: goes on at once on the current model; its push is kept for the group's next Apply, damped by
`(1 + tau)^-1/2` with tau the mass applied since its read. `WARMUP`, no estimate yet: asynchronous, except that those
who start together make their first round together, so that equal nodes lose nothing. The barrier is relaxed: once half
of the group has pushed it goes without a member later than `relax` times the longer of the usual round and the time
until then, and that member is `ASYNC` from there on. With `fit=join` a sized node is a member of the barrier, with
`fit=merge` it stays asynchronous. `theta` bounds the lead over the slowest clock; a member it parks is not expected. If
an asynchronous node pushes while an older push of its own is kept, the kept pushes are applied first; while no member
computes or waits they are applied at once. Weights are samples over the nominal round.
"""

from typing import Annotated, assert_never

import msgspec
from msgspec import Meta, field

from paceline.core.actions import Action, Apply, Grant, Mark, SetTimer
from paceline.core.events import Applied, Event, Joined, Left, Pushed, TimerFired
from paceline.strategies.base import Options, State, Strategy
from paceline.strategies.clocks import Clocks
from paceline.strategies.dasp_records import Fit, Name, Record, Records
from paceline.strategies.roster import Roster

TIMER = "barrier"


class DaspOptions(Options, frozen=True):
    """Who is in the group, how long it waits, and what the others do."""

    rho: Annotated[float, Meta(ge=1, description="ratio; a member's time is at most this many times the reference")] = (
        1.5
    )
    relax: Annotated[float, Meta(ge=1, description="ratio; the barrier waits this many usual rounds at most")] = 1.5
    fit: Annotated[Fit, Meta(description="join: nodes of sized work are members; merge: they are asynchronous")] = (
        "join"
    )
    theta: Annotated[int, Meta(ge=0, description="clocks; no node starts further ahead of the slowest")] | None = None


class Kept(msgspec.Struct, frozen=True, gc=False):
    """A push for the group's next Apply."""

    held: Pushed
    read_mass: float
    damped: bool


class DaspState(State):
    """Records of all nodes, and the group's round under way."""

    roster: Roster = field(default_factory=Roster)
    clocks: Clocks = field(default_factory=Clocks)
    records: Records = field(default_factory=Records)
    mass: float = 0.0  # applied so far
    began: float = 0.0  # when the round did
    expected: dict[int, bool] = {}  # members computing
    waiting: dict[int, Kept] = {}  # members at the barrier
    kept: list[Kept] = []
    keepers: set[int] = set()  # the nodes that sent them
    parked: dict[int, int] = {}  # by theta: the `min` that lets the node go
    timed: bool = False  # the barrier has a deadline


class Dasp(Strategy):
    """A synchronous group of the fast, everyone else merged in."""

    name = "dasp"
    rule = "Nodes of similar speed step together; a slower node gets less work, blocks nobody and is merged in."
    citation = "Ma et al., DASP, node-state-based parallelism for distributed training, 2023"
    Options = DaspOptions
    State = DaspState
    options: DaspOptions
    state: DaspState

    def handle(self, event: Event) -> list[Action]:
        match event:
            case Pushed():
                return self._pushed(event)
            case Joined():
                return self._joined(event)
            case Left():
                return self._left(event)
            case TimerFired():
                return self._deadline(event.at)
            case Applied():
                return []
            case _:
                assert_never(event)

    def _pushed(self, event: Pushed) -> list[Action]:
        state, worker, records = self.state, event.worker, self.state.records
        member = state.expected.pop(worker, False)
        released = self._released(state.clocks.advance(worker, event.clock))
        records.update(event, state.roster.present[worker], state.mass)
        if not (state.expected or state.waiting or state.parked):
            records.regroup(state.roster.present)
        first_round = records.reference is None
        marks = [] if first_round else self._decide(worker, event.at)
        kept = Kept(event, records.nodes[worker].read_mass, damped=not member)
        if records.nodes[worker].state == "SYNC" or (first_round and member):
            state.waiting[worker] = kept
            return self._settle(event.at, released, [], marks)
        applies: list[Action] = []
        if worker in state.keepers:
            applies.append(self._apply(f"w{worker} pushed again before the group's round ended"))
        state.kept.append(kept)
        state.keepers.add(worker)
        return self._settle(event.at, [*released, worker], applies, marks)

    def _joined(self, event: Joined) -> list[Action]:
        state, worker = self.state, event.worker
        if not state.roster.join(event):
            return []
        state.clocks.join(worker)
        marks: list[Action] = []
        if worker not in state.records.nodes:
            state.records.nodes[worker] = Record("WARMUP", event.at)
            marks.append(Mark(worker, "WARMUP", f"w{worker} joined: no estimate yet"))
        return self._settle(event.at, [worker], [], marks)

    def _left(self, event: Left) -> list[Action]:
        state, worker = self.state, event.worker
        if event.cause != "idle":
            state.records.forget(worker)
        # If the last worker leaves, its push is weighted by the round that still includes it.
        before = state.roster.round_samples
        if not state.roster.leave(event):
            return []
        state.parked.pop(worker, None)
        released = self._released(state.clocks.leave(worker))
        state.expected.pop(worker, None)
        if worker in state.waiting:
            state.kept.append(state.waiting.pop(worker))
        if not state.roster.present:
            applies: list[Action] = [self._apply(f"w{worker} left: nobody is present", before)] if state.kept else []
            if not state.roster.idle:
                state.records.reference, state.records.usual = None, 0.0
            return [*applies, *self._clear_timer()]
        return self._settle(event.at, released, [], [])

    def _deadline(self, now: float) -> list[Action]:
        state = self.state
        state.timed = False
        took, group = now - state.began, len(state.expected) + len(state.waiting)
        marks: list[Action] = []
        for worker in sorted(state.expected):
            reason = f"w{worker} is late at the barrier: {took:.4g} s, {len(state.waiting)} of {group} pushed"
            marks += self._enter(worker, "ASYNC", False, now, reason)
        state.expected = {}
        return self._settle(now, [], [], marks)

    def _settle(self, now: float, going: list[int], applies: list[Action], marks: list[Action]) -> list[Action]:
        """End the round if nobody is missing, then grant work to `going` and set the deadline."""
        state = self.state
        timers: list[Action] = []
        if not state.expected and state.waiting:
            going, timers = [*going, *state.waiting], self._clear_timer()
            members = len(state.waiting)
            state.kept += state.waiting.values()
            state.waiting = {}
            applies.append(self._apply(f"the group of {members} is complete, {len(state.kept) - members} merged"))
            first_round = state.records.reference is None
            state.records.regroup(state.roster.present)
            if first_round:
                marks += [mark for worker in sorted(going) for mark in self._decide(worker, now)]
                state.records.regroup(state.roster.present)
        elif not state.expected and state.kept:
            applies.append(self._apply(f"no member computes or waits, {len(state.kept)} pushes are kept"))
        if not state.expected and not state.waiting:
            state.began = now
        return [*applies, *self._grants(going), *timers, *self._set_deadline(now), *marks]

    def _grants(self, going: list[int]) -> list[Action]:
        state, theta = self.state, self.options.theta
        grants: list[Action] = []
        for worker in sorted(going):
            clock, record = state.clocks.of[worker], state.records.nodes[worker]
            if theta is not None and clock - state.clocks.min > theta:
                state.parked[worker] = clock - theta
                continue
            if record.state == "SYNC" or state.records.reference is None:
                state.expected[worker] = True
            record.read_mass = state.mass
            work, reason = state.records.work(worker, state.roster.present[worker])
            grants.append(Grant(worker, work, clock + 1, reason))
        return grants

    def _released(self, moved: bool) -> list[int]:
        """Unpark and return the nodes that a rise of the slowest clock releases from `theta`."""
        state = self.state
        if not moved or not state.parked:
            return []
        free = [worker for worker, until in state.parked.items() if until <= state.clocks.min]
        for worker in free:
            del state.parked[worker]
        return free

    def _decide(self, worker: int, now: float) -> list[Action]:
        """Re-decide the node's state."""
        name, sized, reason = self.state.records.decide(worker, self.options.rho, self.options.fit)
        return self._enter(worker, name, sized, now, reason)

    def _enter(self, worker: int, name: Name, sized: bool, now: float, reason: str) -> list[Action]:
        """Put the node into this state; return a mark if it changes."""
        record = self.state.records.nodes[worker]
        record.sized = sized
        if name == record.state:
            return []
        mark = Mark(worker, name, f"{reason}; after {now - record.since:.4g} s in {record.state}")
        record.state, record.since = name, now
        return [mark]

    def _set_deadline(self, now: float) -> list[Action]:
        """Give the barrier a deadline once half of the group has pushed."""
        state, relax = self.state, self.options.relax
        if state.timed or not state.expected or len(state.waiting) < len(state.expected) or not state.waiting:
            return []
        state.timed = True
        longer = max(state.records.usual, now - state.began)
        group = len(state.waiting) + len(state.expected)
        reason = f"{len(state.waiting)} of {group} pushed: {relax:g} times {longer:.4g} s for the others"
        return [SetTimer(TIMER, state.began + relax * longer, reason)]

    def _clear_timer(self) -> list[Action]:
        timed, self.state.timed = self.state.timed, False
        members = len(self.state.waiting)
        return [SetTimer(TIMER, None, f"nobody is missing: {members} members wait at the barrier")] if timed else []

    def _apply(self, reason: str, nominal: int | None = None) -> Action:
        """Apply all kept pushes as one step."""
        state = self.state
        kept = sorted(state.kept, key=lambda k: (k.held.worker, k.held.push))
        state.kept, state.keepers = [], set()
        nominal = nominal or state.roster.round_samples
        weights = tuple(
            k.held.samples / nominal * ((1 + state.mass - k.read_mass) ** -0.5 if k.damped else 1.0) for k in kept
        )
        state.mass += sum(weights)
        return Apply(tuple(k.held.push for k in kept), weights, reason)
