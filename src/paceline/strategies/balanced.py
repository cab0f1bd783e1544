"""balanced: work in proportion to measured speed. Ours; no publication.

Rule: every round covers the same global batch, a free worker takes from it what its share of the total speed allows and
what it can finish by the round's predicted end, and the round is one whole step weighted by samples.

So a run has the statistics of BSP at nearly the sum of all workers' speeds. With `pieces=guided` a worker takes half or
more of its share of what remains, then of its share of the rest, and so on; each piece extends its held push. The more
even its times, the larger the pieces; where a request costs more than the unevenness it could remove, the worker takes
all that fits at once. If nobody computes and samples of the round remain, the end is predicted again; samples that a
grant did not yield, or that a leaver did not deliver, return to the round.
With `pieces=one` each worker gets one share per round, and the round is what arrives, and waits for everybody.
The global batch is the nominal work of the workers present and idle at the round's start. A round in which workers
come together, as the first one, has no prediction: a newcomer adds its own nominal work. A worker too slow for even one
sample in a round is left out and marked; within 20 rounds it is tried with one sample, which is taken back if the
others are done before it.
On a server's line where models and gradients wait for each other, the fastest get their models first and push last, and
each worker's share is what fits between (see `balanced_line`); a piece more is then rarely worth its push.
Guided, a worker is late when half of the others are done and more than its usual deviations, and more than the others
would take for its samples, have passed since it should have answered; while fewer are done, three quarters of a
predicted round. In a round without prediction the time of the first who is done stands for it, and who has never
answered may be 8 times slower than the others. The samples of a late worker return to the round, and it gets a few
others outside the round, for which nobody waits: once it has answered, it takes part again. What it pushes for the
grant that was taken back is dropped on arrival, so nothing counts twice.
"""

from collections import Counter
from collections.abc import Iterable
from math import ceil
from typing import Annotated, Literal, assert_never

from msgspec import Meta, field

from paceline.core.actions import Action, Apply, Cancel, Discard, Grant, Mark, SetTimer
from paceline.core.events import Applied, Event, Joined, Left, Pushed, TimerFired
from paceline.strategies.balanced_lateness import Lateness
from paceline.strategies.balanced_line import Line
from paceline.strategies.balanced_pace import Pace, Paces, seconds_for
from paceline.strategies.base import Options, State, Strategy
from paceline.strategies.roster import Roster, whole_step

RETRY_ROUNDS = 20  # a left-out worker costs one slow sample per this many rounds
PROBE = 8  # a worker of unknown speed starts with this fraction of its nominal work
TIMER = "late"
MARGIN = 0.15  # predicted rounds that a worker may be late at least: the others would only be idle for so long
MOST = 0.75  # likewise, while more than half still compute, and where no round was predicted
UNKNOWN = 8  # times as slow as those who are measured on average: so slow may a worker be that nobody has measured
PATIENCE = 6  # mean deviations of a worker's times; likewise
HICCUP_S = 0.02  # likewise: a busy host does not run a process for so long
CHANGED = 1.5  # a worker that takes so many times as long for a sample is not as fast as it was
ORDER = (Apply, Discard, Cancel, Grant, SetTimer, Mark)


def in_order(actions: list[Action]) -> list[Action]:
    """Return the actions of one decision by their kinds."""
    return sorted(actions, key=lambda action: ORDER.index(type(action)))


class BalancedOptions(Options, frozen=True):
    """How a share is handed out."""

    pieces: Annotated[
        Literal["guided", "one"],
        Meta(description="guided: a share in shrinking pieces, robust to jitter; one: one request per round"),
    ] = "guided"


class BalancedState(State):
    """The round under way, and every worker's pace."""

    roster: Roster = field(default_factory=Roster)
    paces: Paces = field(default_factory=Paces)
    line: Line = field(default_factory=Line)
    completed: int = 0
    gathering: bool = True  # the round has no prediction yet, and each newcomer adds its nominal work
    remaining: int = 0  # samples of the round that are not granted
    end: float | None = None  # predicted
    speeds: dict[int, float] = {}  # samples per second of the measured workers that take part
    speed: float = 0.0  # their sum
    asked: dict[int, int] = {}  # samples of the grant under way
    open: dict[int, Pushed] = {}  # pushes that can be extended
    closed: list[Pushed] = []  # refused ones, and those of processes that are gone
    left_out: dict[int, int] = {}  # with the round in which the worker is tried again
    on_trial: set[int] = set()  # left-out workers that compute one sample to be measured again
    served: dict[int, int] = {}  # the round in which a worker last got samples
    lateness: Lateness = field(default_factory=Lateness)
    checked: dict[int, float] = {}  # workers that do not answer: seconds per sample of the answer before, 0 if none


class Balanced(Strategy):
    """All workers finish together."""

    name = "balanced"
    rule = "Every round covers the same global batch, split by measured speed so that all finish together."
    citation = "paceline's own"
    Options = BalancedOptions
    State = BalancedState
    options: BalancedOptions
    state: BalancedState

    def handle(self, event: Event) -> list[Action]:
        match event:
            case Pushed():
                return self._pushed(event)
            case Joined():
                return self._joined(event)
            case Left():
                return self._left(event)
            case TimerFired():
                return self._timer_fired(event.at)
            case Applied():
                return []
            case _:
                assert_never(event)

    def _pushed(self, event: Pushed) -> list[Action]:
        state, worker = self.state, event.worker
        if worker in state.checked:
            return self._answered(event)
        asked, before = state.asked.pop(worker), state.open.pop(worker, None)
        marks: list[Action] = []
        if worker in state.on_trial:
            state.on_trial.discard(worker)
            state.paces.forget(worker)
            marks.append(Mark(worker, "active", f"w{worker} finished a sample within the round: measured again"))
        if event.samples == 0:
            # The ledger settles refused samples as lost, so they do not return to the round.
            state.closed.append(event)
        else:
            state.open[worker] = event
            piece = event.samples - (before.samples if before else 0)
            if self.options.pieces == "guided":
                # A script that accumulates gradients pushes more than its grant.
                state.remaining = max(0, state.remaining + asked - piece)
            if piece > 0:
                state.line.measure(event)
                state.paces.measure(event, piece, state.roster.present[worker], before is not None)
                self._count(worker)
        return self._go_on(event.at, [worker], marks)

    def _joined(self, event: Joined) -> list[Action]:
        state, worker = self.state, event.worker
        known = state.roster.present.get(worker, 0)
        if state.gathering:
            if not state.roster.present:
                state.lateness.begin(event.at, 0.0)
            state.remaining = max(0, state.remaining + event.work - known)
        if not state.roster.join(event):
            return []
        state.served[worker] = state.completed
        self._count(worker)
        guided = self.options.pieces == "guided"
        if guided and not state.gathering and not state.asked:
            return self._go_on(event.at, [worker], [])  # it comes back for samples that others did not deliver
        return self._pieces(event.at, [worker]) if state.gathering or guided else []

    def _left(self, event: Left) -> list[Action]:
        state, worker = self.state, event.worker
        gone = event.cause != "idle"
        if gone:
            state.paces.forget(worker)
            if worker in state.open:
                state.closed.append(state.open.pop(worker))
        if not state.roster.leave(event):
            return []
        state.speed -= state.speeds.pop(worker, 0.0)
        state.left_out.pop(worker, None)
        state.served.pop(worker, None)
        state.on_trial.discard(worker)
        state.checked.pop(worker, None)
        state.lateness.forget(worker)
        state.line.forget(worker)
        asked = state.asked.pop(worker, 0)
        if not state.roster.present:
            state.gathering, state.remaining, state.end = True, 0, None
            return self._apply(f"w{worker} left: nobody is present")
        if not gone:
            self._admit(state.on_trial)  # the data has run out, and perhaps their grants with it: cancel none
        if self.options.pieces == "guided":
            state.remaining += asked
            if asked and gone and state.asked:
                return [*self._share_anew(event.at), *self._watch(event.at)]
        return self._go_on(event.at, [], [])

    def _go_on(self, now: float, free: list[int], others: list[Action]) -> list[Action]:
        """Offer the free workers more samples; if nobody computes any more, finish the round."""
        actions = [*others, *self._next(now, free), *self._watch(now)]
        return in_order(actions)

    def _next(self, now: float, free: list[int]) -> list[Action]:
        state, guided = self.state, self.options.pieces == "guided"
        grants = self._pieces(now, free) if guided else []
        if len(state.asked) > len(state.on_trial):
            return grants
        if guided and state.remaining:
            return self._share_anew(now)
        cancels: list[Action] = []
        for worker in sorted(state.on_trial):
            state.remaining += state.asked.pop(worker)
            state.left_out[worker] = state.completed + RETRY_ROUNDS
            reason = f"w{worker} is too slow for one sample in a round: all others are done"
            marked = f"{reason}; tried again in round {state.left_out[worker] + 1}"
            cancels += [Cancel(worker, reason), Mark(worker, "left out", marked)]
        state.on_trial = set()
        if guided and state.remaining:
            return [*cancels, *self._share_anew(now)]
        return [*self._apply(f"round {state.completed + 1} is complete"), *cancels, *self._begin(now)]

    def _share_anew(self, now: float) -> list[Action]:
        """Predict the round's end again, for the ungranted samples and the free workers, and grant pieces."""
        state = self.state
        present = [w for w in state.roster.present if w not in state.asked and w not in state.checked]
        free = [worker for worker in present if worker not in state.left_out]
        if not free and state.on_trial:
            self._admit(state.on_trial)
            return []
        if not present:
            return []
        if not free:
            self._admit(present)
            free = present
        if state.end is not None:
            known = [worker for worker in free if state.paces.known(worker)]
            self._line_up(known)
            paces = [self._pace(worker, worker in state.open) for worker in known]
            seconds = seconds_for(state.remaining, paces) if paces else 0.0
            if state.checked:
                # No more than a round's time at once: those who do not answer may soon be back for the rest.
                seconds = min(seconds, state.lateness.span)
            state.end = max(state.end, now + seconds) if paces else None
        return self._some_pieces(now, free)

    def _admit(self, workers: Iterable[int]) -> None:
        """Let these workers take part, however slow they are."""
        state = self.state
        for worker in sorted(workers):
            state.on_trial.discard(worker)
            state.left_out.pop(worker, None)
            self._count(worker)

    def _some_pieces(self, now: float, free: list[int]) -> list[Action]:
        """Return grants for these workers; ignore the predicted end if it is too near for any."""
        grants = self._pieces(now, free)
        if grants or self.state.asked:
            return grants
        self.state.end = None
        return self._pieces(now, free)

    def _begin(self, now: float) -> list[Action]:
        """Start a round: predict its end, and leave out workers too slow for it."""
        state, guided = self.state, self.options.pieces == "guided"
        timers: list[Action] = []
        if state.lateness.timer:
            timers.append(SetTimer(TIMER, None, f"round {state.completed + 1} is complete: nobody is late"))
        present = [worker for worker in state.roster.present if worker not in state.checked]
        state.completed += 1
        state.gathering, state.end = False, None
        state.remaining = state.roster.round_samples if guided else sum(state.roster.present.values())
        marks: list[Action] = []
        known = [worker for worker in sorted(present) if state.paces.known(worker)]
        state.line.place, state.line.sharing, span = {}, 0, 0.0
        self._line_up(known, len(present) - len(known))
        if known:
            unknown = sum(self._first_piece(worker) for worker in present if not state.paces.known(worker))
            samples = max(1, state.remaining - unknown)
            paces = {worker: self._pace(worker, False) for worker in known}
            span = seconds_for(samples, paces.values())
            if state.line.each:
                state.line.sharing = sum(pace.fitting(span) > 0 for pace in paces.values())
                paces = {worker: self._pace(worker, False) for worker in known}
                span = seconds_for(samples, paces.values())
            state.end = now + span
            for worker, pace in paces.items():
                marks += self._take_in(worker, pace.fitting(span), span)
        state.lateness.begin(now, span)
        state.speeds, state.speed = {}, 0.0
        for worker in present:
            self._count(worker)
        return [*self._some_pieces(now, present), *timers, *marks]

    def _line_up(self, workers: list[int], before: int = 0) -> None:
        self.state.line.line_up({worker: self.state.paces.of(worker, False) for worker in workers}, before)

    def _pace(self, worker: int, goes_on: bool) -> Pace:
        """Return the pace of its next piece, with what it waits for others on the server's line."""
        paces = self.state.paces
        return self.state.line.delayed(
            worker, paces.of(worker, goes_on), paces.spread.get(worker, 0.0), goes_on=goes_on
        )

    def _take_in(self, worker: int, fitting: int, span: float) -> list[Action]:
        """Decide whether the worker takes part in the round; return the marks of a change."""
        state = self.state
        retry = state.left_out.get(worker)
        if fitting:
            state.left_out.pop(worker, None)
            return [] if retry is None else [Mark(worker, "active", f"w{worker}: {fitting} samples fit {span:.4g} s")]
        if retry is None:
            retry = self._retry_round(worker)
        if worker not in state.left_out and retry > state.completed:
            state.left_out[worker] = retry
            per_sample = state.paces.of(worker, False).per_sample
            reason = f"w{worker} is left out: {per_sample:.4g} s for a sample, the round takes {span:.4g} s"
            return [Mark(worker, "left out", f"{reason}; tried again in round {retry + 1}")]
        if state.completed >= retry:
            state.left_out.pop(worker, None)
            state.on_trial.add(worker)
            return [Mark(worker, "on trial", f"w{worker} is tried with one sample after {RETRY_ROUNDS} rounds")]
        return []

    def _retry_round(self, worker: int) -> int:
        """Return the last of the next rounds in which the fewest others are tried: trials share the server's line."""
        state, planned = self.state, Counter(self.state.left_out.values())
        latest = min(state.served.get(worker, state.completed) + 1, state.completed) + RETRY_ROUNDS
        rounds = range(latest, min(latest - 1, state.completed), -1)
        return min(rounds, key=lambda number: planned[number])

    def _pieces(self, now: float, free: list[int]) -> list[Action]:
        """Return grants for these workers, as far as samples of the round remain and fit."""
        state = self.state
        remaining = state.remaining  # each share is of what remained before this decision
        grants: dict[int, Action] = {}
        # Workers to be measured come first: by the prediction the others would take every sample.
        for worker in sorted(free, key=lambda w: (not self._must_be_measured(w), w)):
            if worker in state.left_out or worker in state.asked or worker in state.checked:
                continue
            work, reason = self._piece(worker, now, remaining)
            if min(work, state.remaining) > 0:
                grants[worker] = self._grant(worker, min(work, state.remaining), now, reason)
        order = state.line.in_turn(grants)
        for worker in order:
            if worker not in state.open:
                state.line.note_model(worker, now)
        return [grants[worker] for worker in order]

    def _must_be_measured(self, worker: int) -> bool:
        """Whether its speed is unknown, or was measured so long ago that it may have changed."""
        state = self.state
        long_ago = state.completed - state.served.get(worker, 0) >= RETRY_ROUNDS
        return long_ago or worker in state.on_trial or not state.paces.known(worker)

    def _piece(self, worker: int, now: float, remaining: int) -> tuple[int, str]:
        state, paces = self.state, self.state.paces
        if worker in state.on_trial:
            return 1, f"w{worker} on trial: one sample"
        if not paces.known(worker) or (state.gathering and self.options.pieces == "one"):
            work = self._first_piece(worker)
            nominal = state.roster.present[worker]
            return work, f"w{worker}: {work} of {nominal} nominal samples, its time cannot be predicted"
        active = self._taking_part()
        fair = remaining * state.speeds[worker] / state.speed * len(state.speeds) / active
        goes_on = worker in state.open
        cost = state.line.cost(active - 1, state.lateness.span if state.end is not None else 0.0)
        if state.end is None:
            # No piece shorter than the line takes for one of everybody.
            least = cost / paces.of(worker, goes_on).per_sample
            fitting, until = max(1, round(fair), min(remaining, ceil(least))), ""
        else:
            fitting = self._pace(worker, goes_on).fitting(state.end - now)
            until = f", {fitting} fit until {state.end:.4g} s"
        work = fitting if self.options.pieces == "one" else paces.piece(worker, fair, fitting, goes_on, cost)
        return work, f"w{worker}: {work} of {remaining} samples left, its share {fair:.4g}{until}"

    def _first_piece(self, worker: int) -> int:
        """Return the samples for a worker of unknown speed."""
        nominal = self.state.roster.present[worker]
        return nominal if self.options.pieces == "one" else max(1, nominal // PROBE)

    def _taking_part(self) -> int:
        """Count the workers that share the round."""
        state = self.state
        return len(state.roster.present) - len(state.left_out) - len(state.on_trial) - len(state.checked)

    def _grant(self, worker: int, work: int, now: float, reason: str) -> Action:
        state = self.state
        if state.paces.known(worker):
            pace = self._pace(worker, worker in state.open)
            state.lateness.due[worker] = now + pace.start + work * pace.per_sample
        else:
            state.lateness.due[worker] = now + state.lateness.span
        state.asked[worker] = work
        state.served[worker] = state.completed
        state.remaining -= work
        held = state.open.get(worker)
        return Grant(worker, work, state.completed + 1, reason, held.push if held else None)

    def _count(self, worker: int) -> None:
        """Add the worker to the total speed if it is measured and takes part."""
        state = self.state
        out = worker in state.left_out or worker in state.on_trial or worker in state.checked
        if state.paces.known(worker) and not out and worker not in state.speeds:
            state.speeds[worker] = 1 / state.paces.of(worker, False).per_sample
            state.speed += state.speeds[worker]

    # -- workers that do not answer ----------------------------------------------------------------------------------

    def _watch(self, now: float) -> list[Action]:
        """Once a worker is done, and again once half of them are, set the time from which one of the others is late."""
        state, lateness = self.state, self.state.lateness
        if self._data_is_held() and not lateness.timer:
            lateness.timer = "half"
            at = now + max(lateness.span, HICCUP_S)
            return [SetTimer(TIMER, at, f"{len(state.checked)} workers that do not answer hold data")]
        if self.options.pieces == "one" or lateness.timer == "half":
            return []
        computing = [worker for worker in state.asked if worker not in state.on_trial]
        active = self._taking_part()
        half = 2 * len(computing) <= active
        if not 0 < len(computing) < active or (lateness.timer == "most" and not half):
            return []
        lateness.some_are_done(now, half)
        if not lateness.span:
            return []
        lateness.timer = "half" if half else "most"
        at, first = min((self._late_at(worker, half), worker) for worker in computing)
        reason = f"{len(computing)} of {active} workers compute, w{first} is late from {at:.4g} s on"
        return [SetTimer(TIMER, at, reason)]

    def _data_is_held(self) -> bool:
        """Whether others are idle for want of data while workers that do not answer have the last of it."""
        state = self.state
        return bool(state.checked and state.roster.idle) and not state.asked

    def _late_at(self, worker: int, half: bool) -> float:
        """Return from when on the worker counts as one that does not answer; `half`: of the workers are done.

        Waiting is worth as long as the others would take to compute its samples again.
        """
        state, span = self.state, self.state.lateness.span
        others = state.speed - state.speeds.get(worker, 0.0)
        again = state.asked[worker] / others if others > 0 else span
        # Without a prediction nobody's place on the line is known: it may be last down and last up.
        turns = self._taking_part() * (0.5 if state.lateness.predicted else 2.0)
        spread = PATIENCE * state.paces.spread.get(worker, 0.0)
        if state.lateness.predicted:
            # The first rounds tell little of how much times vary.
            rounds = max(MARGIN, spread, 1 / max(1, state.completed), 0.0 if half else MOST)
        else:
            # The span has what the others did for the silent ones; the margin is of the round that all would make.
            known = len(state.speeds) / self._taking_part()
            all_of_them = state.roster.round_samples / state.speed * known / span if state.speed > 0 else known
            rounds = max(MARGIN, spread, MOST * min(known, all_of_them))
        at = state.lateness.late_at(worker, max(rounds * span, again, turns * state.line.each, HICCUP_S))
        if state.lateness.predicted or state.paces.known(worker) or state.speed <= 0:
            return at
        # Nobody has measured it, and it may be honest and slow.
        return max(at, state.lateness.began + UNKNOWN * state.asked[worker] * len(state.speeds) / state.speed)

    def _timer_fired(self, now: float) -> list[Action]:
        """Return the samples of late workers to the round, and see with a few others whether they still answer."""
        state, lateness = self.state, self.state.lateness
        lateness.timer = ""
        if self._data_is_held():
            return self._give_up(now)
        computing = [worker for worker in sorted(state.asked) if worker not in state.on_trial]
        half = 2 * len(computing) <= self._taking_part()
        late = [worker for worker in computing if lateness.span and self._late_at(worker, half) <= now]
        if not late:
            return self._watch(now)
        lateness.settled = True
        actions: list[Action] = []
        checks: list[Action] = []
        for worker in late:
            asked = state.asked.pop(worker)
            state.remaining += asked
            state.checked[worker] = 0.0
            state.line.forget(worker)
            state.speed -= state.speeds.pop(worker, 0.0)
            reason = f"w{worker} has not answered for {now - lateness.began:.4g} s of a round of {lateness.span:.4g} s"
            actions.append(Cancel(worker, f"{reason}: its {asked} samples return to the round"))
            actions.append(Mark(worker, "silent", reason))
            checks.append(self._check(worker))
        if len(state.asked) > len(state.on_trial):
            # Some still compute in time; those who are done take over without waiting for them.
            return in_order([*actions, *self._share_anew(now), *self._watch(now), *checks])
        return in_order([*self._go_on(now, [], actions), *checks])

    def _check(self, worker: int, found: str = "") -> Action:
        """Grant samples outside the round, for which nobody waits: their push says that the worker is back."""
        work = max(1, self.state.roster.present[worker] // PROBE)
        reason = f"w{worker}: samples outside the round, {work}, to see when it answers{found}"
        return Grant(worker, work, self.state.completed + 1, reason)

    def _give_up(self, now: float) -> list[Action]:
        """Take back the checks at the end of the data: the others come back from being idle for these samples."""
        state = self.state
        actions: list[Action] = []
        for worker in sorted(state.checked):
            state.left_out[worker] = state.completed + RETRY_ROUNDS
            reason = f"w{worker} still does not answer at {now:.4g} s, and no other samples are left"
            actions += [Cancel(worker, reason), Mark(worker, "left out", reason)]
        state.checked = {}
        return in_order(actions)

    def _answered(self, event: Pushed) -> list[Action]:
        """Let a worker that answers again take part, unless it has just been found slower than before or is unknown.

        Then the answer may have been held up by the very trouble that has ended with it, and a second one must agree.
        """
        state, worker = self.state, event.worker
        took = event.compute_s / event.samples if event.samples else 0.0
        discard = Discard(event.push, f"w{worker} answers: samples outside the round, {event.samples}")
        before = state.checked[worker]
        usual = state.paces.per_sample(worker)
        tolerance = max(CHANGED, 1 + PATIENCE * state.paces.spread.get(worker, 0.0))
        if took > tolerance * (usual or 0.0):
            if took > tolerance * before:
                state.checked[worker] = took
                known = "never measured" if usual is None else f"{usual:.4g} s before"
                return [discard, self._check(worker, f": {took:.4g} s for a sample, {known}")]
            if usual is None:
                state.paces.measure(event, event.samples, state.roster.present[worker], False)
            else:
                state.paces.renew(worker, took)
        del state.checked[worker]
        state.served[worker] = state.completed
        self._count(worker)
        mark = Mark(worker, "active", f"w{worker} answers again: {took:.4g} s for a sample")
        return self._go_on(event.at, [worker], [discard, mark])

    def _apply(self, reason: str) -> list[Action]:
        """Apply all pushes of the round as one whole step, and add its times to the averages."""
        state = self.state
        state.paces.end_round()
        held = [*state.open.values(), *state.closed]
        state.open, state.closed = {}, []
        if not held:
            return []
        return [whole_step(held, f"{reason}: {sum(h.samples for h in held)} samples of {len(held)} pushes")]
