"""DASP, node-state-based parallelism: Ma et al., 2023.

Rule: nodes of similar speed form a group that steps together; a slower node never blocks anyone, its push is merged
into the group's next step, and it goes on from there with the fresh model.

Published: the server keeps state information of every node during training, divides the nodes into parallel states and
re-decides each node's state from it, which cuts both the time that fast nodes wait and the stale gradients.
Reconstruction: the states and their rules. `SYNC`, a member of the group: its push waits for the group's barrier, one
Apply. `ASYNC`: its push is kept for the group's next Apply, damped by `(1 + tau)^-2` with tau the mass applied since
its read, and it goes on when that is done; had it gone on at once, its next push would be staler by one step of the
group. It waits for `relax` usual rounds at most, then the kept pushes are applied by themselves.
`WARMUP`, no estimate yet: asynchronous, except that those who start together make their first round together, so that
equal nodes lose nothing. States are decided from time, read version and transfers (dasp_records.py).
The barrier is relaxed: once half of the group has pushed it goes without a member later than `relax` times the longer
of the usual round and the time until then; up to twice that long if times vary so much. Its push is damped and merged
into the next Apply, and it stays a member, because one late push may be chance. A member that two Applies in a row
went without, or whose average is outside the bound, is `ASYNC` from there on.

Our addition: what a slower node is given. `fit=none`: full work, states alone. `fit=merge`: what it finishes in one
usual round, so that its push is hardly stale; `fit=join`: the same, as a member of the barrier. If so few samples fit
that they are not worth a push, work is not cut, and the node is `ASYNC`. Nor is it where the server's line is busy,
because a push of few samples occupies it like a full one; but under `join` the members of such a line share a nominal
round by their turns on it (dasp_shares.py), where the engine tells how long pushes waited for others.
`theta` bounds the lead over the slowest clock; a member it parks is not expected. While no member computes or waits,
pushes are applied at once. Weights are samples over the nominal round.
"""

from typing import Annotated, ClassVar, assert_never

import msgspec
from msgspec import Meta, field

from paceline.core.actions import Action, Apply, Grant, Mark, SetTimer
from paceline.core.events import Applied, Event, Joined, Left, Pushed, TimerFired
from paceline.strategies.base import Options, State, Strategy
from paceline.strategies.clocks import Clocks
from paceline.strategies.dasp_records import LATE_STEPS, Fit, Name, Record, Records
from paceline.strategies.roster import Roster

TIMER, PATIENCE = "barrier", "merge"


class DaspOptions(Options, frozen=True):
    """Who is in the group, how long it waits, and what the others do."""

    rho: Annotated[float, Meta(ge=1, description="ratio; a member's time is at most this many times the reference")] = (
        1.5
    )
    relax: Annotated[
        float, Meta(ge=1, description="ratio; the barrier waits this many usual rounds at most, up to 2 if times vary")
    ] = 1.5
    fit: Annotated[
        Fit,
        Meta(description="a slower node: merge: less work, asynchronous; join: less work, a member; none: full work"),
    ] = "join"
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
    version: int = 0  # of the model
    began: float = 0.0  # when the round did
    expected: dict[int, bool] = {}  # members computing
    missing: set[int] = set()  # members computing that the group goes without
    waiting: dict[int, Kept] = {}  # members at the barrier
    kept: list[Kept] = []
    following: set[int] = set()  # the nodes that sent them and go on after the next Apply
    patient: bool = False  # they have a deadline
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
    damping: ClassVar[float] = 2  # power; under momentum a stale push harms for as long as the optimizer remembers it

    def handle(self, event: Event) -> list[Action]:
        match event:
            case Pushed():
                return self._pushed(event)
            case Joined():
                return self._joined(event)
            case Left():
                return self._left(event)
            case TimerFired() if event.name == PATIENCE:
                return self._out_of_patience(event.at)
            case TimerFired():
                return self._deadline(event.at)
            case Applied():
                return []
            case _:
                assert_never(event)

    def _pushed(self, event: Pushed) -> list[Action]:
        state, worker, records = self.state, event.worker, self.state.records
        member = state.expected.pop(worker, False)
        state.missing.discard(worker)
        if member:
            records.nodes[worker].late = 0
        released = self._released(state.clocks.advance(worker, event.clock))
        state.version = max(state.version, event.read_version)
        records.update(event, state.roster.present[worker], state.version)
        if not (state.expected or state.waiting or state.parked):
            records.regroup(state.roster.present, self.options.fit)
        first_round = records.reference is None
        marks = [] if first_round else self._decide(worker, event.at)
        kept = Kept(event, records.nodes[worker].read_mass, damped=not member)
        if records.nodes[worker].state == "SYNC" or (first_round and member):
            state.waiting[worker] = kept
        else:
            state.kept.append(kept)
            state.following.add(worker)
        return self._settle(event.at, released, marks)

    def _joined(self, event: Joined) -> list[Action]:
        state, worker = self.state, event.worker
        if not state.roster.join(event):
            return []
        state.clocks.join(worker)
        marks: list[Action] = []
        if worker not in state.records.nodes:
            state.records.nodes[worker] = Record("WARMUP", event.at)
            marks.append(Mark(worker, "WARMUP", f"w{worker} joined: no estimate yet"))
        return self._settle(event.at, [worker], marks)

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
        state.missing.discard(worker)
        state.following.discard(worker)
        if worker in state.waiting:
            state.kept.append(state.waiting.pop(worker))
        if not state.roster.present:
            applies: list[Action] = [self._apply(f"w{worker} left: nobody is present", before)] if state.kept else []
            if not state.roster.idle:
                state.records.reference, state.records.usual = None, 0.0
            return [*applies, *self._clear_timers()]
        return self._settle(event.at, released, [])

    def _deadline(self, now: float) -> list[Action]:
        state = self.state
        state.timed = False
        # Who has no estimate yet is no member yet, and one without a first push stays so.
        state.missing |= {worker for worker in state.expected if state.records.nodes[worker].state == "SYNC"}
        late = ", ".join(f"w{worker}" for worker in sorted(state.expected))
        state.expected = {}
        return self._settle(now, [], [], f", without {late}, late after {now - state.began:.4g} s")

    def _missed(self, now: float) -> list[Action]:
        """Count a step of the group for the members that it goes without; who missed too many leaves it."""
        state = self.state
        marks: list[Action] = []
        for worker in sorted(state.missing):
            record = state.records.nodes[worker]
            record.late += 1
            if record.late >= LATE_STEPS:
                state.missing.discard(worker)
                marks += self._enter(
                    worker, "ASYNC", False, now, f"w{worker} was late for {record.late} steps in a row"
                )
        return marks

    def _out_of_patience(self, now: float) -> list[Action]:
        """Apply the kept pushes without the group, which takes too long, and let their nodes go on."""
        state = self.state
        state.patient = False
        going, state.following = sorted(state.following), set()
        applies = [self._apply(f"the group is not complete, {len(state.kept)} pushes have waited for it")]
        return [*applies, *self._grants(going, now), *self._set_deadline(now)]

    def _settle(self, now: float, going: list[int], marks: list[Action], without: str = "") -> list[Action]:
        """End the round if nobody is missing, then grant work to `going` and set the deadlines."""
        state = self.state
        applies: list[Action] = []
        timers: list[Action] = []
        if not state.expected and state.waiting:
            members = len(state.waiting)
            going = [*going, *state.waiting]
            state.kept += state.waiting.values()
            timers, state.waiting = self._clear_timers(), {}
            merged = len(state.kept) - members
            applies.append(self._apply(f"the group of {members} is complete{without}, {merged} merged"))
            marks += self._missed(now)
            first_round = state.records.reference is None
            state.records.regroup(state.roster.present, self.options.fit)
            if first_round:
                marks += [mark for worker in sorted(going) for mark in self._decide(worker, now)]
                state.records.regroup(state.roster.present, self.options.fit)
        elif not state.expected and state.kept:
            timers = self._clear_timers()
            applies.append(self._apply(f"no member computes or waits, {len(state.kept)} pushes are kept"))
        if applies:
            going, state.following = [*going, *state.following], set()
        if not state.expected and not state.waiting:
            state.began = now
        return [*applies, *self._grants(going, now), *timers, *self._set_deadline(now), *marks]

    def _grants(self, going: list[int], now: float) -> list[Action]:
        state, theta = self.state, self.options.theta
        grants: list[Action] = []
        for worker in self._in_turn(going):
            clock, record = state.clocks.of[worker], state.records.nodes[worker]
            if theta is not None and clock - state.clocks.min > theta:
                state.parked[worker] = clock - theta
                continue
            if record.state == "SYNC" or state.records.reference is None:
                state.expected[worker] = True
            record.read_mass = state.mass
            work, reason = state.records.work(worker, state.roster.present[worker])
            state.records.shares.line.note_model(worker, now)
            grants.append(Grant(worker, work, clock + 1, reason))
        return grants

    def _in_turn(self, workers: list[int]) -> list[int]:
        """Return the workers in the order of their models."""
        shares = self.state.records.shares
        return shares.line.in_turn(workers) if shares.of else sorted(workers)

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
        name, sized, reason = self.state.records.decide(
            worker, self.options.rho, self.options.fit, bool(self.state.expected or self.state.waiting)
        )
        return self._enter(worker, name, sized, now, reason)

    def _enter(self, worker: int, name: Name, sized: bool, now: float, reason: str) -> list[Action]:
        """Put the node into this state; return a mark if it changes."""
        record = self.state.records.nodes[worker]
        record.sized = sized
        if name == record.state:
            return []
        record.late = 0
        mark = Mark(worker, name, f"{reason}; after {now - record.since:.4g} s in {record.state}")
        record.state, record.since = name, now
        return [mark]

    def _set_deadline(self, now: float) -> list[Action]:
        """Give the barrier a deadline once half of the group has pushed, and those who wait to be merged another."""
        state, relax = self.state, self.options.relax
        if not state.expected:
            return []
        timers: list[Action] = []
        usual, pushed = state.records.usual, len(state.waiting)
        if not state.timed and pushed >= len(state.expected):
            state.timed = True
            longer = max(usual, now - state.began)
            group = pushed + len(state.expected)
            patience = state.records.patience(relax)
            reason = f"{pushed} of {group} pushed: {patience:.3g} times {longer:.4g} s for the others"
            timers.append(SetTimer(TIMER, state.began + patience * longer, reason))
        if not state.patient and state.following:
            state.patient = True
            reason = f"waiting for the group's step: {len(state.following)}; {relax:g} times {usual:.4g} s at most"
            timers.append(SetTimer(PATIENCE, now + relax * usual, reason))
        return timers

    def _clear_timers(self) -> list[Action]:
        state, members = self.state, len(self.state.waiting)
        timers: list[Action] = []
        if state.timed:
            timers.append(SetTimer(TIMER, None, f"nobody is missing: {members} members wait at the barrier"))
        if state.patient:
            timers.append(SetTimer(PATIENCE, None, f"nobody waits for the group's step: {len(state.following)} merged"))
        state.timed = state.patient = False
        return timers

    def _apply(self, reason: str, nominal: int | None = None) -> Action:
        """Apply all kept pushes as one step."""
        state = self.state
        kept = sorted(state.kept, key=lambda k: (k.held.worker, k.held.push))
        state.kept = []
        nominal = nominal or state.roster.round_samples
        weights = tuple(
            k.held.samples / nominal * ((1 + state.mass - k.read_mass) ** -self.damping if k.damped else 1.0)
            for k in kept
        )
        state.mass += sum(weights)
        state.version += sum(weights) > 0
        return Apply(tuple(k.held.push for k in kept), weights, reason)
