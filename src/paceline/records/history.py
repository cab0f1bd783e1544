"""What happened over time, as a fold over a journal: curves, each worker's spans of time, and what strategies track.

Everything kept is bounded, so that a journal of millions of lines makes a page that opens at once. Curves keep every
second, fourth, eighth ... point. The first spans are kept one by one, and all of them as sums over equal parts of the
run's time. Where workers are many, spans and states are those of some of them, evenly chosen.

A worker's spans add up to the report's seconds: `wait` until a grant, `transfer` and `compute` of a push, `lost` where
a grant was taken back. A push's transfer holds both directions; it is drawn half before and half after computing.
"""

import math
from collections.abc import Iterable
from typing import Literal

import msgspec

from paceline.core.actions import Apply, Cancel, Discard, Grant, Mark, Track
from paceline.core.events import Event, Joined, Left, Pushed
from paceline.records.journal import Decision, Header, Line, Observation

Kind = Literal["compute", "transfer", "wait", "lost"]
KINDS: tuple[Kind, ...] = ("compute", "transfer", "wait", "lost")
MOST_POINTS = 800  # of a curve
MOST_SPANS = 6_000
PARTS = 240  # of the run's time
MOST_LANES = 64  # beyond this, workers share a lane, and one of each lane is drawn
MOST_MARKS = 2_000
ROUNDING = 1e-9  # seconds: of times that an engine adds up


class Span(msgspec.Struct, frozen=True, gc=False):
    """What a worker did from one moment to another, and the reason of the grant that ended or began it."""

    worker: int
    begin: float
    seconds: float
    kind: Kind
    reason: str
    clock: int = 0
    samples: int = 0


class Curve:
    """Points over time, of which an even selection is kept."""

    def __init__(self) -> None:
        self.points: list[tuple[float, ...]] = []
        self._every = 1
        self._count = 0
        self.last: tuple[float, ...] | None = None  # also where it is not kept

    def add(self, *point: float) -> None:
        """Add a point; all of a curve's have as many numbers."""
        self.last = point
        if self._count % self._every == 0:
            self.points.append(point)
            if len(self.points) > 2 * MOST_POINTS:
                self.points = self.points[::2]
                self._every *= 2
        self._count += 1

    def columns(self) -> list[list[float]]:
        """Return the numbers by column, the last point included."""
        points = self.points if self.last in (None, self.points[-1]) else [*self.points, self.last]
        return [list(column) for column in zip(*points, strict=True)]


class _Busy(msgspec.Struct):
    """What is known of a worker between two lines."""

    free_at: float | None = None  # since when it has no grant; None: it has one, or is absent
    granted_at: float | None = None
    waited: float = 0.0  # before the running grant
    reason: str = ""
    clock: int = 0
    closed: list[Span] = msgspec.field(
        default_factory=list
    )  # grants ended by a Cancel or Left whose observation is still to come


class History:
    """A journal sink; `seconds` is the run's length and `workers` how many there were, as a first reading has found."""

    def __init__(self, seconds: float, workers: int) -> None:
        self.seconds = seconds
        self.workers = workers
        self.metrics: dict[str, Curve] = {}  # at, samples, version, value
        self.loss = Curve()  # the same, of pushes
        self.tracks: dict[tuple[str, int | None], Curve] = {}  # at, value
        self.states: dict[int, list[tuple[float, str, str]]] = {}  # at, state, reason
        self.marks_end: float | None = None  # since when states are not kept
        self.work: dict[int, Curve] = {}  # at, samples of a grant
        self.traffic = Curve()  # at, bytes up, bytes down, so far
        self.staleness: dict[int, int] = {}
        self.events: list[tuple[float, str]] = []  # of the scenario, and warnings
        self.spans: list[Span] = []
        self.left_out = 0  # later spans of the same workers, which are only in the sums
        self.sums = {kind: [[0.0] * PARTS for _ in range(self.lanes)] for kind in KINDS}
        self._busy: dict[int, _Busy] = {}
        self._held: dict[int, Pushed] = {}
        self._marks = 0
        self._samples = self._versions = 0
        self._at = 0.0

    @property
    def lanes(self) -> int:
        """How many workers are drawn."""
        return min(self.workers, MOST_LANES)

    # -- lines -------------------------------------------------------------------------------------------------------

    def write(self, line: Line) -> None:
        """Take in one line."""
        if isinstance(line, Decision):
            self._at = line.event.at
            self._happened(line.event)
            for action in line.actions:
                if isinstance(action, Grant):
                    self._grant(action)
                elif isinstance(action, Apply):
                    self._apply(action)
                elif isinstance(action, Cancel):
                    self._cancel(action)
                elif isinstance(action, Discard):
                    self._held.pop(action.push, None)
                elif isinstance(action, Mark):
                    self._mark(action)
                elif isinstance(action, Track):
                    self.tracks.setdefault((action.name, action.worker), Curve()).add(self._at, action.value)
        elif isinstance(line, Observation):
            self._observe(line)
        elif isinstance(line, Header) and line.restored is not None:
            self._versions, self._samples = line.restored.version, line.restored.samples_used
            for worker, busy in self._busy.items():
                self._leave(worker, self._at, broken=True)
                self._begin_anew(worker, busy)
            self._held.clear()

    def _happened(self, event: Event) -> None:
        if isinstance(event, Pushed):
            self._push(event)
        elif isinstance(event, Joined):
            busy = self._busy.setdefault(event.worker, _Busy())
            if busy.free_at is None and busy.granted_at is None:
                busy.free_at = event.at
                self._begin_anew(event.worker, busy)
        elif isinstance(event, Left):
            self._leave(event.worker, event.at)

    def _grant(self, action: Grant) -> None:
        busy = self._busy.setdefault(action.worker, _Busy())
        since = self._at if busy.free_at is None else busy.free_at
        busy.free_at, busy.granted_at, busy.waited = None, self._at, self._at - since
        busy.reason, busy.clock = action.reason, action.through
        if self.workers <= MOST_LANES:
            self.work.setdefault(action.worker, Curve()).add(self._at, action.work)

    def _push(self, event: Pushed) -> None:
        busy = self._busy.setdefault(event.worker, _Busy())
        began = event.at - event.compute_s - event.transfer_s
        way = event.transfer_s / 2
        self._span(event.worker, began - event.wait_s, event.wait_s, "wait", busy)
        self._span(event.worker, began, way, "transfer", busy)
        self._span(event.worker, began + way, event.compute_s, "compute", busy, event.samples)
        self._span(event.worker, event.at - way, way, "transfer", busy)
        busy.granted_at, busy.free_at = None, event.at
        self._held[event.push] = event
        _, up, down = self.traffic.last or (0.0, 0, 0)
        self.traffic.add(event.at, up + event.bytes_up, down + event.bytes_down)

    def _apply(self, action: Apply) -> None:
        counts = sum(action.weights) > 0
        for push, weight in zip(action.pushes, action.weights, strict=True):
            event = self._held.pop(push, None)
            if event is None:
                continue
            self._samples += event.samples
            if counts and weight > 0:
                age = self._versions - event.read_version
                self.staleness[age] = self.staleness.get(age, 0) + 1
            if counts and event.loss is not None and math.isfinite(event.loss):
                self.loss.add(self._at, self._samples, self._versions + 1, event.loss)
        self._versions += counts

    def _cancel(self, action: Cancel) -> None:
        busy = self._busy.setdefault(action.worker, _Busy())
        self._close(action.worker, busy, self._at, action.reason)

    def _close(self, worker: int, busy: _Busy, at: float, reason: str) -> None:
        """End a grant without a push; how much of its time was computing, an observation says."""
        if busy.granted_at is None:
            return
        self._span(worker, busy.granted_at - busy.waited, busy.waited, "wait", busy)
        busy.closed.append(Span(worker, busy.granted_at, at - busy.granted_at, "lost", reason, busy.clock))
        busy.granted_at, busy.free_at = None, at

    def _lose(self, worker: int, busy: _Busy, seconds: float | None) -> None:
        """Tell apart what a closed grant was held back and what it computed in vain; None: it computed all the time."""
        span = busy.closed.pop(0)
        lost = span.seconds if seconds is None else min(seconds, span.seconds)
        held = span.seconds - lost if span.seconds - lost > ROUNDING else 0.0
        told = _Busy(reason=span.reason, clock=span.clock)
        self._span(worker, span.begin, held, "wait", told)
        self._span(worker, span.begin + held, span.seconds - held, "lost", told)

    def _begin_anew(self, worker: int, busy: _Busy) -> None:
        """Count what was granted and never begun as waiting."""
        while busy.closed:
            self._lose(worker, busy, 0.0)

    def _leave(self, worker: int, at: float, *, broken: bool = False) -> None:
        busy = self._busy.get(worker)
        if busy is None:
            return
        if busy.granted_at is not None:
            self._close(worker, busy, at, "the server died" if broken else "it has left")
            if broken:
                self._lose(worker, busy, None)
        elif busy.free_at is not None:
            busy.reason = "nothing more to do"
            self._span(worker, busy.free_at, at - busy.free_at, "wait", busy)
        busy.free_at = busy.granted_at = None

    def _mark(self, action: Mark) -> None:
        if not self.is_drawn(action.worker):
            return
        if self._marks < MOST_MARKS:
            self._marks += 1
            self.states.setdefault(action.worker, []).append((self._at, action.state, action.reason))
        elif self.marks_end is None:
            self.marks_end = self._at

    def _observe(self, line: Observation) -> None:
        data = line.data
        if line.what == "evaluation":
            for name, value in data["metrics"].items():
                if math.isfinite(float(value)):
                    point = line.at, data["samples_used"], data["version"], float(value)
                    self.metrics.setdefault(name, Curve()).add(*point)
        elif line.what == "cancelled" and line.worker is not None:
            busy = self._busy.setdefault(line.worker, _Busy())
            if not busy.closed:
                self._close(line.worker, busy, line.at, str(data["cause"]))
            if busy.closed:
                self._lose(line.worker, busy, float(data["seconds"]))
        elif line.what == "scenario" and len(self.events) < MOST_POINTS:
            who = data.get("workers") if line.worker is None else [line.worker]
            self.events.append((line.at, f"{data['kind']} {', '.join(map(str, who or []))}".strip()))
        elif line.what == "end":
            for worker, busy in self._busy.items():
                self._leave(worker, line.at)
                self._begin_anew(worker, busy)
        self._at = max(self._at, line.at)

    # -- spans -------------------------------------------------------------------------------------------------------

    def lane(self, worker: int) -> int:
        """Return the lane of a worker: its own, or one that neighbours share."""
        return min(self.lanes - 1, worker * self.lanes // max(1, self.workers)) if worker < self.workers else 0

    def is_drawn(self, worker: int) -> bool:
        """Whether a worker's own spans and states are kept: the first of each lane's."""
        return worker == 0 or self.lane(worker) != self.lane(worker - 1)

    def _span(self, worker: int, begin: float, seconds: float, kind: Kind, busy: _Busy, samples: int = 0) -> None:
        if not (seconds > 0 and math.isfinite(begin) and math.isfinite(seconds)):  # a journal may come from anybody
            return
        if not self.is_drawn(worker):
            pass
        elif len(self.spans) < MOST_SPANS:
            self.spans.append(Span(worker, begin, seconds, kind, busy.reason, busy.clock, samples))
        else:
            self.left_out += 1
        if self.lanes and self.seconds > 0:
            self._add(self.sums[kind][self.lane(worker)], max(0.0, begin), seconds)

    def _add(self, parts: list[float], begin: float, seconds: float) -> None:
        width, end = self.seconds / PARTS, begin + seconds
        first, last = (int(min(PARTS - 1, at / self.seconds * PARTS)) for at in (begin, end))
        if first == last:
            parts[first] += seconds
            return
        parts[first] += (first + 1) * width - begin
        for between in range(first + 1, last):
            parts[between] += width
        parts[last] += end - last * width

    def seconds_of(self, kind: Kind) -> float:
        """Return the seconds of all spans of a kind."""
        return sum(sum(parts) for parts in self.sums[kind])


def fold(lines: Iterable[Line], seconds: float, workers: int) -> History:
    """Return the history of a whole journal."""
    history = History(seconds, workers)
    for line in lines:
        history.write(line)
    return history
