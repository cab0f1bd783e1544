"""Adaptive synchronous parallel: Zhang et al., "Adaptive synchronous parallel strategy for distributed machine
learning", IEEE Access 6, 2018.

Rule: a round ends when every node that is not disturbed has pushed in it, and within a round a node starts as many
iterations as it can finish while the slowest node makes one.

Published: a performance monitor watches every node; each node's synchronization is adjusted from its own compute and
transfer times; unrelated tasks on the cluster do not hurt training; the tolerance to staleness is finite and dynamic.
Reconstruction: everything else. A bound on the lead over the slowest clock brings everybody to the slowest node's pace
whatever its size, so the bound is per round: node i starts `1 + s_i` iterations, `s_i = floor(1.05 T_max / T_i) - 1`
within 0 and `cap`, and none does more than one while `T_max / T_min <= 1 + delta`. While all `s_i` are 0 a round is one
Apply, and a push waits for it; otherwise pushes are applied at once. A node overdue by `max(gamma deviations, T / 4)`,
or whose last push was, is in interference: rounds end without it, at most `cap` in a row, and its times stay out of the
estimate until 8 such pushes in a row show a level to stay. When all nodes are overdue nobody is disturbed more than the
others, and the round waits for everyone. Mode and allowances are set at a round's start; a push counts in the round in
which it arrives. Weights are the default ones, samples over the nominal round: a full round of one Apply has mass 1,
one that ended without a node has less.
"""

from math import floor
from typing import Annotated, assert_never

from msgspec import Meta, field

from paceline.core.actions import Action, Apply, Grant, Mark, SetTimer, Track
from paceline.core.events import Applied, Event, Joined, Left, Pushed, TimerFired
from paceline.strategies.base import Options, State, Strategy
from paceline.strategies.clocks import Clocks
from paceline.strategies.interference import GRACE, LEVEL_PUSHES, Interference, limit
from paceline.strategies.roster import Roster, in_worker_order

ROUNDING = 1.05  # a node that just misses another iteration within the round gets it
TIMER = "overdue:"


class AdaptiveSyncOptions(Options, frozen=True):
    """What counts as similar, as late, and how far tolerance goes."""

    delta: Annotated[
        float, Meta(ge=0, description="share; nodes whose times differ by no more synchronize every iteration")
    ] = 0.15
    gamma: Annotated[
        float, Meta(ge=0, description="deviations; a node this late, and by a quarter of its time, is disturbed")
    ] = 4.0
    cap: Annotated[
        int, Meta(ge=0, description="iterations and rounds; most extra starts in a round and rounds without a node")
    ] = 16


class AdaptiveSyncState(State):
    """The round under way, and what is known of every node."""

    roster: Roster = field(default_factory=Roster)
    clocks: Clocks = field(default_factory=Clocks)
    interference: Interference = field(default_factory=Interference)
    round: int = 0
    merged: bool = True  # this round is one Apply
    slowest: float | None = None  # T_max at the round's start
    extra: dict[int, int] = {}  # s_i of the nodes that have any
    starts: dict[int, int] = {}  # iterations started in this round
    pushed: dict[int, bool] = {}  # the nodes that have pushed in this round
    expected: dict[int, bool] = {}  # the nodes the round waits for
    computing: dict[int, bool] = {}  # with whether a timer watches the node
    all_disturbed: bool = False
    held: list[Pushed] = []


class AdaptiveSync(Strategy):
    """Each node gets the synchronization that its own performance allows."""

    name = "adaptive_sync"
    rule = "A round ends when all undisturbed nodes have pushed; a faster node starts more iterations in it."
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
                return self._overdue(event)
            case Applied():
                return []
            case _:
                assert_never(event)

    def _pushed(self, event: Pushed) -> list[Action]:
        state, worker = self.state, event.worker
        state.clocks.advance(worker, event.clock)
        timed = state.computing.pop(worker, False)
        state.pushed[worker] = True
        state.expected.pop(worker, None)
        notes = self._judge(event)
        out: list[Action] = []
        state.held.append(event)
        if not state.merged:
            reason = f"w{worker} pushed {event.samples} samples: round {state.round} is uneven"
            out = self._apply_held(reason, state.roster.round_samples)
        if not state.expected:
            return [*out, *self._turn(event.at, [worker] if timed else [], notes)]
        started, allowed = state.starts.get(worker, 0), 1 + state.extra.get(worker, 0)
        if not state.merged and started < allowed:
            reason = f"w{worker}: start {started + 1} of {allowed} in round {state.round}"
            return [*out, *self._grant({worker: reason}, event.at, [worker] if timed else []), *notes]
        return [*out, *self._clear([worker] if timed else []), *notes]

    def _joined(self, event: Joined) -> list[Action]:
        state, worker = self.state, event.worker
        if not state.roster.join(event):
            return []
        clock = state.clocks.join(worker)
        if worker not in state.pushed:
            state.expected[worker] = True
        self._review()
        return self._grant({worker: f"w{worker} joined round {state.round} at clock {clock}"}, event.at, [])

    def _left(self, event: Left) -> list[Action]:
        state, worker = self.state, event.worker
        if event.cause != "idle":
            state.interference.forget(worker)
        # If the last worker leaves, its push is weighted by the round that still includes it.
        before = state.roster.round_samples
        if not state.roster.leave(event):
            return []
        state.clocks.leave(worker)
        stopped = [worker] if state.computing.pop(worker, False) else []
        state.expected.pop(worker, None)
        state.interference.calm(worker)
        if event.cause == "idle":
            state.starts[worker] = state.starts.get(worker, 1) - 1  # its last grant yielded nothing
        else:
            state.starts.pop(worker, None)
            state.pushed.pop(worker, None)
        self._review()
        if not state.roster.present:
            out = self._apply_held(f"w{worker} left: nobody is present", before)
            state.pushed, state.starts = {}, {}
            return [*out, *self._clear(stopped)]
        if state.expected:
            return self._clear(stopped)
        return self._turn(event.at, stopped, [])

    def _overdue(self, event: TimerFired) -> list[Action]:
        state, worker = self.state, int(event.name.removeprefix(TIMER))
        if worker not in state.computing:
            return []
        state.computing[worker] = False
        state.interference.missed.setdefault(worker, 0)
        state.expected.pop(worker, None)
        self._review()
        usual = state.interference.monitor.time(worker)
        known = "without an estimate" if usual is None else f"usual time {usual:.4g} s"
        mark = Mark(worker, "disturbed", f"w{worker} is overdue in round {state.round}: {known}")
        return [mark] if state.expected else self._turn(event.at, [], [mark])

    def _judge(self, event: Pushed) -> list[Action]:
        """Record the push's times; return a mark if the node became disturbed or steady."""
        state, worker = self.state, event.worker
        interference, nominal = state.interference, state.roster.present[worker]
        if not self.options.cap:
            interference.monitor.record(worker, event.samples, nominal, event.compute_s, event.transfer_s)
            return []
        was, usual = worker in interference.missed, interference.monitor.time(worker)
        verdict = interference.judge(event, nominal, self.options.gamma)
        self._review()
        took = f"w{worker}: {event.compute_s + event.transfer_s:.4g} s for {event.samples} samples"
        if verdict == "level":
            return [Mark(worker, "steady", f"{took} is a level of its own after {LEVEL_PUSHES}, not {usual:.4g} s")]
        if verdict == "overdue" and not was:
            return [Mark(worker, "disturbed", f"{took}, usual time {usual:.4g} s")]
        if verdict == "in time" and was:
            return [Mark(worker, "steady", f"{took}, usual time {interference.monitor.time(worker):.4g} s")]
        return []

    def _review(self) -> None:
        """Update the expected nodes when all nodes become disturbed, which excuses none of them, or no longer are."""
        state = self.state
        every = 0 < len(state.roster.present) == len(state.interference.missed)
        if every != state.all_disturbed:
            state.all_disturbed = every
            self._expect()

    def _expect(self) -> None:
        state, missed, cap = self.state, self.state.interference.missed, self.options.cap
        state.expected = {
            worker: True
            for worker in state.roster.present
            if worker not in state.pushed and (state.all_disturbed or worker not in missed or missed[worker] >= cap)
        }

    def _turn(self, now: float, timed: list[int], marks: list[Action]) -> list[Action]:
        """End the round and begin the next one."""
        state = self.state
        missing = sum(worker not in state.pushed for worker in state.roster.present)
        without = f", without {missing} disturbed" if missing else ""
        out = self._apply_held(
            f"round {state.round} of {len(state.pushed)} nodes is complete{without}", state.roster.round_samples
        )
        state.interference.count_round(state.pushed)
        state.round += 1
        state.pushed, state.starts = {}, {}
        tracks = self._allow()
        self._expect()
        going = {
            worker: f"w{worker}: start 1 of {1 + state.extra.get(worker, 0)} in round {state.round}"
            for worker in sorted(state.roster.present)
            if worker not in state.computing
        }
        return [*out, *self._grant(going, now, timed), *marks, *tracks]

    def _allow(self) -> list[Action]:
        """Set the round's allowances and mode from the estimates of the undisturbed nodes."""
        state = self.state
        nodes, missed = state.interference.monitor.nodes, state.interference.missed
        times = {w: nodes[w].time for w in state.roster.present if w in nodes}
        calm = [time for worker, time in times.items() if state.all_disturbed or worker not in missed]
        before, state.extra = state.extra, {}
        state.slowest = max(calm, default=None)
        if state.slowest and state.slowest > (1 + self.options.delta) * min(calm):
            state.extra = {
                worker: extra
                for worker, time in times.items()
                if (extra := min(self.options.cap, floor(ROUNDING * state.slowest / time) - 1)) > 0
            }
        state.merged = not state.extra
        return [
            Track(
                "extra_starts", extra, f"w{w}: slowest {state.slowest or 0:.4g} s, its own {times.get(w, 0):.4g} s", w
            )
            for w in sorted(before.keys() | state.extra.keys())
            if (extra := state.extra.get(w, 0)) != before.get(w, 0)
        ]

    def _grant(self, reasons: dict[int, str], now: float, timed: list[int]) -> list[Action]:
        """Let these nodes compute, each watched by a timer where its time is known."""
        state = self.state
        grants: list[Action] = []
        timers: list[Action] = []
        for worker, reason in reasons.items():
            state.starts[worker] = state.starts.get(worker, 0) + 1
            grants.append(Grant(worker, state.roster.present[worker], state.clocks.of[worker] + 1, reason))
            patience = self._patience(worker)
            state.computing[worker] = patience is not None
            if patience is not None:
                timers.append(SetTimer(f"{TIMER}{worker}", now + patience, f"w{worker} overdue after {patience:.4g} s"))
        unwatched = [worker for worker in timed if not state.computing.get(worker)]
        return [*grants, *self._clear(unwatched), *timers]

    def _patience(self, worker: int) -> float | None:
        """Return the seconds until the node is overdue; None if unknown, or if being overdue would change nothing."""
        state = self.state
        if not self.options.cap or worker in state.interference.missed:
            return None
        node = state.interference.monitor.nodes.get(worker)
        if node is not None:
            return limit(node, self.options.gamma)
        return None if state.slowest is None else (1 + GRACE) * state.slowest

    def _clear(self, workers: list[int]) -> list[Action]:
        return [SetTimer(f"{TIMER}{worker}", None, f"w{worker} computes nothing") for worker in workers]

    def _apply_held(self, reason: str, nominal: int) -> list[Action]:
        """Apply all held pushes as one step, each weighted by its share of a nominal round."""
        held, self.state.held = in_worker_order(self.state.held), []
        if not held:
            return []
        return [Apply(tuple(h.push for h in held), tuple(h.samples / nominal for h in held), reason)]
