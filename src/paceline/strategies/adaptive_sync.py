"""Adaptive synchronous parallel: Zhang et al., "Adaptive synchronous parallel strategy for distributed machine
learning", IEEE Access 6, 2018.

Rule: nodes that can keep step do so, a fast one with several pushes in a round, and one Apply of their pushes ends it;
every other node goes on by itself, and its pushes are merged into the Apply that comes next.

Published: a performance monitor watches every node; each node's synchronization is adjusted from its own compute and
transfer times; unrelated tasks on the cluster do not hurt training; the tolerance to staleness is finite and dynamic.
Reconstruction: everything else. A round is as long as one of the nodes takes for a push. Nodes that need no longer are
in step, each with as many pushes as fit into the round, added up on the version that the round began with, so that a
fast node neither waits nor is stale. Of all lengths that one is taken with which most is merged in a second: `M / (M +
1.5)` over the seconds, M the mass of the pushes in step, at most 1, so that of two lengths with the same mass in a
second the shorter is taken. `delta` of a round more is no obstacle, and another length has to be better by a tenth.
Slower nodes are apart: they go on at once, unless the round is about to end, for at most `cap + 1` starts in a round,
and at most `cap` rounds in a row end without a push of a node. Once half of the nodes in step have pushed, the round
waits for the rest only until 1.25 times the usual time, or the time until then if that is longer, so that a slow-down
of all leaves nobody behind. A late node goes on at once and is waited for again if it can be in time; if it cannot, its
push waits for the round's end, after which it is in step again. A push overdue by `max(gamma deviations, T / 4)` is
interference, and its node apart. Such times stay out of the estimate until 8 of them in a row show a level to stay;
while others load the node's host (load average, stolen time, a throttled group) 32 do, and 8 again if most nodes are
slow. If most nodes are overdue, none is disturbed more than the others, and none is apart for it. Who is in step is
set at a round's start; a push counts in the round in which it arrives. Weights are samples over the nominal round,
damped by `(1 + tau)^-4` with tau the mass applied since the push's read: under momentum what a node apart computed on
an old model harms for as long as the optimizer remembers it. A step is a whole one at most.
On tables, where clocks do not add up, a node of which several pushes fit into a round is apart as well.
"""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from operator import itemgetter
from typing import Annotated, assert_never

import msgspec
from msgspec import Meta, field

from paceline.core.actions import Action, Apply, Grant, Mark, SetTimer
from paceline.core.events import Applied, Event, Joined, Left, Pushed, TimerFired
from paceline.strategies.base import Options, State, Strategy
from paceline.strategies.clocks import Clocks
from paceline.strategies.interference import GRACE, Interference
from paceline.strategies.monitor import SHORTEST
from paceline.strategies.roster import Roster

LOST = 2.0  # usual times after which a round ends even if hardly anybody has pushed
DAMPING = 4  # power; at 2 and less the rate has to be lower, and targets come later
KNEE = 1.5  # mass of a step that is worth half of what a step can be; between 1 and 2.5 targets came alike
STAY = 1.1  # a round of another length has to be better by so much
NEXT = 1.05  # ratio; lengths that differ by less are not told apart
MOMENT = 0.125  # of its time: so long a node apart waits for the round's end, to begin on the version that comes
HALF = 0.5  # of the nodes that a round waits for; what they do is what can be expected of the rest
TIMER = "round"


class AdaptiveSyncOptions(Options, frozen=True):
    """What counts as like speed, as late, and how far tolerance goes."""

    delta: Annotated[
        float, Meta(ge=0, description="share; how much longer than the round a node in step may take for its pushes")
    ] = 0.15
    gamma: Annotated[
        float, Meta(ge=0, description="deviations; a node this late, and by a quarter of its time, is disturbed")
    ] = 4.0
    cap: Annotated[
        int, Meta(ge=0, description="iterations and rounds; most extra starts in a round and rounds without a node")
    ] = 16


class PendingPush(msgspec.Struct, frozen=True, gc=False):
    """A push for the next Apply."""

    worker: int
    push: int
    samples: int
    read_mass: float


class Sums:
    """Sorted times of nodes, and what the first of them add to a nominal round."""

    def __init__(self, nodes: Iterable[tuple[float, float]]) -> None:
        known = list(nodes)
        self.times = [time for time, _ in known]
        self._sums = [0.0, *accumulate(share for _, share in known)]

    def within(self, seconds: float) -> int:
        """Return how many take no longer."""
        return bisect_right(self.times, seconds)

    def share(self, first: int, after: int) -> float:
        """Return the share of the nodes of this range."""
        return self._sums[after] - self._sums[first]


class RoundLengths:
    """Lengths that a round may have: who of the present nodes fits into it, and what it is worth."""

    def __init__(
        self, times: list[tuple[float, int]], roster: Roster, options: AdaptiveSyncOptions, alone: set[int]
    ) -> None:
        """`alone` are not in step if more than one of their pushes fits."""
        self.times = sorted(times)
        self._most = options.cap + 1
        self._slack = 1 + options.delta
        self._alone = alone
        shares = [(time, roster.present[worker] / roster.round_samples, worker) for time, worker in self.times]
        self._adding = Sums((time, share) for time, share, worker in shares if worker not in alone)
        self._whole = Sums((time, share) for time, share, worker in shares if worker in alone)

    def pushes(self, length: float) -> dict[int, int]:
        """Return the nodes in step, and how many pushes each makes in a round."""
        room = length * self._slack
        fitting = {
            worker: min(self._most, int(room / max(time, SHORTEST))) for time, worker in self.times if time <= room
        }
        return {worker: count for worker, count in fitting.items() if count == 1 or worker not in self._alone}

    def value(self, length: float) -> float:
        """Return what a round of that length is worth a second; it lasts until the slowest in step is done."""
        room = length * self._slack
        first, after = self._whole.within(room / 2), self._whole.within(room)
        mass, seconds = self._whole.share(first, after), self._whole.times[after - 1] if after > first else 0.0
        making = self._adding.within(room)  # so many nodes make at least `number`
        for number in range(1, self._most + 1):
            if not making:
                break
            more = self._adding.within(room / (number + 1)) if number < self._most else 0
            if making > more:
                seconds = max(seconds, number * self._adding.times[making - 1])
            mass += self._adding.share(0, making)
            making = more
        mass = min(1.0, mass)
        return mass / (mass + KNEE) / max(seconds, SHORTEST)

    def best(self, before: float | None) -> float:
        """Return the length that is worth most a second: one of the times, or that of before."""
        best = last = self.times[0][0]
        most = self.value(best)
        for time, _ in self.times:
            if time < NEXT * last:
                continue
            last = time
            value = self.value(time)
            if value > most:
                best, most = time, value
        return before if before is not None and STAY * self.value(before) >= most else best


class AdaptiveSyncState(State):
    """The round under way, and what is known of every node."""

    roster: Roster = field(default_factory=Roster)
    clocks: Clocks = field(default_factory=Clocks)
    interference: Interference = field(default_factory=Interference)
    round: int = 0
    began: float = 0.0  # when the round did
    length: float | None = None  # seconds for which rounds are made
    usual: float | None = None  # seconds that the slowest in step takes for its pushes
    in_step: dict[int, int | bool] = {}  # with the pushes that each makes in a round; True in checkpoints of before
    unextended: set[int] = set()  # nodes whose pushes cannot be added up
    expected: dict[int, bool] = {}  # the computing nodes that the round waits for
    awaited: int = 0  # nodes that the round has waited for so far, and how many of them have pushed
    arrived: int = 0
    open_ended: bool = False  # the round waits for missing nodes, whenever they come
    closing: bool = False  # the round ends without the late at its timer
    passed: bool = False  # the timer has fired, and the round waits for overlong missing nodes alone
    mass: float = 0.0  # applied so far
    computing: dict[int, float] = {}  # with the mass that the node's version has
    extended: dict[int, PendingPush] = {}  # pushes to which their nodes in step are adding another
    starts: dict[int, int] = {}  # in this round
    latest: dict[int, int] = {}  # the round of a node's latest push
    parts: dict[int, str] = {}  # as marked
    waiting: list[PendingPush] = []  # pushes of nodes that wait for the round's end
    kept: list[PendingPush] = []  # those of nodes that went on at once
    keepers: set[int] = set()
    timed: bool = False


class AdaptiveSync(Strategy):
    """Each node gets the synchronization that its own performance allows."""

    name = "adaptive_sync"
    rule = (
        "Nodes step together, fast ones with several pushes a round; slow or disturbed ones are merged in when ready."
    )
    citation = "Zhang et al., Adaptive synchronous parallel strategy for distributed machine learning, IEEE Access 2018"
    Options = AdaptiveSyncOptions
    State = AdaptiveSyncState
    serves_tables = True
    waits_for_fast = True
    options: AdaptiveSyncOptions
    state: AdaptiveSyncState

    def handle(self, event: Event) -> list[Action]:
        """Update the state with an event and return what to do."""
        match event:
            case Pushed():
                return self._pushed(event)
            case Joined():
                return self._joined(event)
            case Left():
                return self._left(event)
            case TimerFired():
                return self._timer(event.at)
            case Applied():
                return []
            case _:
                assert_never(event)

    def _pushed(self, event: Pushed) -> list[Action]:
        state, worker = self.state, event.worker
        state.clocks.advance(worker, event.clock)
        kept = PendingPush(worker, event.push, event.samples, state.computing.pop(worker, state.mass))
        state.latest[worker] = state.round
        before = state.extended.pop(worker, None)
        waited_for = state.expected.pop(worker, False)
        with_others = waited_for and worker in state.in_step  # even if all of them took long
        marks = self._judge(event, event.samples - (before.samples if before else 0))
        if with_others and self._has_time_for_another(event):
            state.expected[worker] = True
            state.extended[worker] = kept
            return [self._extend(kept, event.clock), *marks]
        why = None if with_others else self._goes_on(event)
        if waited_for:
            state.arrived += 1
            if self._may_end():
                state.waiting.append(kept)
                return self._turn(event.at, marks)
        if why is None:
            state.waiting.append(kept)
            return [*(self._deadline(event.at) if waited_for else []), *marks]
        out: list[Action] = []
        if worker in state.keepers:
            out = self._apply(state.kept, f"w{worker} pushed again in round {state.round}")
            state.kept, state.keepers = [], set()
        state.kept.append(kept)
        state.keepers.add(worker)
        deadline = self._deadline(event.at) if waited_for else []
        return [*out, *self._grant({worker: why}), *deadline, *marks]

    def _has_time_for_another(self, event: Pushed) -> bool:
        """Whether a node in step computes another push in this round, to be added to the one that it has made."""
        state, worker = self.state, event.worker
        most = 1 if worker in state.unextended or not event.samples else state.in_step[worker]
        return (
            1 <= state.starts.get(worker, 0) < most  # a push that began in an earlier round is old
            and worker not in state.interference.disturbed
            and self._may_be_in_time(worker, event.at)
        )

    def _extend(self, kept: PendingPush, clock: int) -> Grant:
        """Let a node in step add another push to the one that it has made."""
        state, worker = self.state, kept.worker
        state.starts[worker] = start = state.starts.get(worker, 0) + 1
        state.computing[worker] = kept.read_mass
        reason = f"w{worker} in step: start {start} of {state.in_step[worker]} in round {state.round}"
        return Grant(worker, state.roster.present[worker], clock, reason, kept.push)

    def _goes_on(self, event: Pushed) -> str | None:
        """Return why a node that the round does not wait for goes on at once; None if it waits for the round's end."""
        state, worker = self.state, event.worker
        start, most = state.starts.get(worker, 0) + 1, self.options.cap + 1
        if start > most:
            return None
        if worker not in state.in_step and self._is_about_to_end(worker, event.at):
            return None
        if worker not in state.in_step or (worker in state.interference.disturbed and not self._most_are_disturbed()):
            return f"w{worker} is apart: start {start} of {most} in round {state.round}"
        if not self._may_be_in_time(worker, event.at):
            return None
        state.expected[worker] = True
        state.awaited += 1
        return f"w{worker} was late by {event.at - state.began:.4g} s and can be in time in round {state.round}"

    def _is_about_to_end(self, worker: int, now: float) -> bool:
        """Whether a node apart loses little by waiting for the round's end."""
        state, time = self.state, self.state.interference.monitor.time(worker)
        if state.usual is None or time is None or state.open_ended:
            return False
        return now >= state.began + state.usual - MOMENT * time

    def _may_be_in_time(self, worker: int, now: float) -> bool:
        """Whether a node that starts now is expected to push before the round goes on without it."""
        state, usual = self.state, self.state.usual
        if usual is None or not self.options.cap:
            return True
        time = state.interference.monitor.time(worker) or usual
        return now + time <= state.began + (1 + GRACE) * usual

    def _joined(self, event: Joined) -> list[Action]:
        state, worker = self.state, event.worker
        if not state.roster.join(event):
            return []
        if event.whole is True:
            state.unextended.add(worker)
        clock = state.clocks.join(worker)
        state.latest[worker] = state.round - 1
        if not state.expected:
            self._open(event.at, [])
        if self._may_be_in_time(worker, event.at):
            state.in_step[worker] = 1
            if worker not in state.expected:
                state.expected[worker] = True
                state.awaited += 1
        return self._grant({worker: f"w{worker} joined round {state.round} at clock {clock}"})

    def _left(self, event: Left) -> list[Action]:
        state, worker = self.state, event.worker
        if event.cause == "idle":
            state.interference.pause(worker)
        else:
            state.interference.forget(worker)
        # If the last worker leaves, its push is weighted by the round that still includes it.
        before = state.roster.round_samples
        if not state.roster.leave(event):
            return []
        state.clocks.leave(worker)
        if event.cause == "idle":
            state.starts[worker] = state.starts.get(worker, 1) - 1  # its last grant yielded nothing
        else:
            state.starts.pop(worker, None)
            state.parts.pop(worker, None)
        for of_present in (state.expected, state.in_step, state.latest, state.computing):
            of_present.pop(worker, None)
        if (made := state.extended.pop(worker, None)) is not None:
            state.kept.append(made)
        if not state.roster.present:
            out = self._apply([*state.waiting, *state.kept], f"w{worker} left: nobody is present", before)
            state.waiting, state.kept, state.keepers, state.starts = [], [], set(), {}
            return [*out, *self._clear()]
        return self._turn(event.at, []) if self._may_end() else self._deadline(event.at)

    def _judge(self, event: Pushed, samples: int) -> list[Action]:
        """Record the times of so many samples; return a mark if the node became disturbed or has a level of its own."""
        state, worker = self.state, event.worker
        interference, nominal = state.interference, state.roster.present[worker]
        if not self.options.cap:
            interference.monitor.record(worker, samples, nominal, event.compute_s, event.transfer_s)
            return []
        was, usual = worker in interference.disturbed, interference.monitor.time(worker)
        overdue = interference.overdue_in_a_row(worker)
        verdict = interference.judge(event, samples, nominal, self.options.gamma, len(state.roster.present))
        took = f"w{worker}: {event.compute_s + event.transfer_s:.4g} s for {samples} samples"
        if verdict == "overdue":
            return [] if was else [self._mark(worker, "disturbed", f"{took}, usual time {usual:.4g} s{of_host(event)}")]
        if verdict == "level":
            level = f"{took} is a level of its own after {overdue + 1} overdue pushes, not {usual:.4g} s"
            return [self._mark(worker, "apart", level)]
        return []

    def _most_are_disturbed(self) -> bool:
        return 2 * len(self.state.interference.disturbed) > len(self.state.roster.present)

    def _deadline(self, now: float) -> list[Action]:
        """Once enough nodes have pushed, set the time at which the round ends without the rest."""
        state = self.state
        if state.closing or not self.options.cap or state.arrived < HALF * state.awaited:
            return []
        state.closing = state.timed = True
        until = max(now + GRACE * (now - state.began), state.began + (1 + GRACE) * (state.usual or 0.0))
        reason = f"{state.arrived} of {state.awaited} pushed {now - state.began:.4g} s after round {state.round} began"
        return [SetTimer(TIMER, until, reason)]

    def _timer(self, now: float) -> list[Action]:
        self.state.timed, self.state.passed = False, True
        return self._turn(now, []) if self._may_end() else []

    def _may_end(self) -> bool:
        """Whether all have pushed that the round waits for, or the rest is late and may be missed once more."""
        state = self.state
        return not state.expected or (state.passed and not any(map(self._overlong, state.expected)))

    def _overlong(self, worker: int) -> bool:
        """Whether as many rounds have ended without the node as may."""
        return self.state.round - self.state.latest[worker] > self.options.cap

    def _turn(self, now: float, marks: list[Action]) -> list[Action]:
        """End the round and begin the next one."""
        state = self.state
        late = f", without {len(state.expected)} late" if state.expected else ""
        others = len(state.waiting) + len(state.kept) - state.arrived
        merged = f", with {others} pushes of others" if others > 0 else ""
        why = f"round {state.round} ends: {state.arrived} of {state.awaited} pushed{late}{merged}"
        out = self._apply([*state.waiting, *state.kept], why)
        state.waiting, state.kept, state.keepers = [], [], set()
        state.round += 1
        divided = self._divide()
        free = [worker for worker in state.roster.present if worker not in state.computing]
        free.sort(key=lambda worker: (worker not in state.in_step, worker))  # whom the round waits for comes first
        self._open(now, free)
        going = {worker: f"w{worker} {self._part(worker)}: start 1 in round {state.round}" for worker in free}
        return [*out, *self._grant(going), *self._watch(now), *marks, *divided]

    def _open(self, now: float, free: list[int]) -> None:
        """Begin a round and set whom it waits for: the nodes in step that begin with it, and the overlong missing."""
        state = self.state
        state.began, state.starts, state.arrived, state.closing, state.passed = now, {}, 0, False, False
        state.expected = {worker: True for worker in free if worker in state.in_step}
        overlong = {worker: True for worker in state.roster.present if self._overlong(worker)}
        state.expected |= overlong
        state.open_ended = bool(overlong)
        if not state.expected:
            state.expected = {worker: True for worker in state.roster.present if worker in state.in_step}
        if not state.expected:
            state.expected = dict.fromkeys(state.roster.present, True)
        state.awaited = len(state.expected)

    def _watch(self, now: float) -> list[Action]:
        """Set the time at which a round ends in which hardly anybody pushes."""
        state = self.state
        if self.options.cap and state.usual is not None:
            state.timed = True
            reason = f"round {state.round} lasts {LOST:g} times the usual {state.usual:.4g} s at most"
            return [SetTimer(TIMER, now + LOST * state.usual, reason)]
        return self._clear()

    def _clear(self) -> list[Action]:
        if not self.state.timed:
            return []
        self.state.timed = False
        return [SetTimer(TIMER, None, f"round {self.state.round} waits for nobody who might be late")]

    def _divide(self) -> list[Action]:
        """Choose the rounds' length, and mark who comes in step or falls out of it."""
        state = self.state
        nodes, disturbed, present = state.interference.monitor.nodes, state.interference.disturbed, state.roster.present
        if not self.options.cap:
            state.in_step = dict.fromkeys(present, 1)
            return []
        excused = {} if self._most_are_disturbed() else disturbed
        times = [(nodes[worker].time, worker) for worker in present if worker in nodes and worker not in excused]
        if not times:
            return []
        lengths = RoundLengths(times, state.roster, self.options, state.unextended)
        state.length = lengths.best(state.length)
        state.in_step = lengths.pushes(state.length)
        state.usual = max(
            (time * state.in_step[worker] for time, worker in times if worker in state.in_step), default=state.length
        )
        return [
            self._mark(worker, part, f"w{worker} takes {time:.4g} s, those in step {state.usual:.4g} s")
            for time, worker in sorted(times, key=itemgetter(1))
            if (part := self._part(worker)) != state.parts.get(worker)
        ]

    def _part(self, worker: int) -> str:
        state = self.state
        if worker in state.in_step:
            return "in step"
        return "disturbed" if worker in state.interference.disturbed else "apart"

    def _mark(self, worker: int, part: str, reason: str) -> Mark:
        self.state.parts[worker] = part
        return Mark(worker, part, reason)

    def _grant(self, reasons: dict[int, str]) -> list[Action]:
        """Let these nodes compute, in this order."""
        state = self.state
        for worker in reasons:
            state.starts[worker] = state.starts.get(worker, 0) + 1
            state.computing[worker] = state.mass
        present, of = state.roster.present, state.clocks.of
        return [Grant(worker, present[worker], of[worker] + 1, reason) for worker, reason in reasons.items()]

    def _apply(self, merged: list[PendingPush], reason: str, nominal: int | None = None) -> list[Action]:
        """Apply these pushes as one step, each weighted by its share of a nominal round and damped by its age."""
        state = self.state
        if not merged:
            return []
        ordered = sorted(merged, key=lambda each: (each.worker, each.push))
        nominal = state.roster.round_samples if nominal is None else nominal
        weights = tuple(each.samples / nominal * (1 + state.mass - each.read_mass) ** -DAMPING for each in ordered)
        if (mass := sum(weights)) > 1:
            weights = tuple(weight / mass for weight in weights)
        state.mass += min(mass, 1.0)
        return [Apply(tuple(each.push for each in ordered), weights, reason)]


def of_host(event: Pushed) -> str:
    """Return in words what went on on the node's host."""
    host = event.host
    return f"; load {host.load:g} per core, {host.steal:.0%} stolen, {host.throttled:.0%} throttled" if host else ""
