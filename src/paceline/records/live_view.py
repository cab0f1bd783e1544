"""One screen of a run that goes on: how far it is, and a line for each worker with what it does, and why.

A fold over lines of the journal, complete ones or a selection: what a worker's row says comes from that worker's own
latest lines, and how far the run is (`Headway`) from whoever knows. Drawing is plain text with few styles, since a
table of rich takes several milliseconds and this is drawn beside the training.
"""

from collections import deque
from collections.abc import Sequence

import msgspec
from rich.text import Text

from paceline.core.actions import Cancel, Grant, Mark
from paceline.core.events import Event, Joined, Left, Pushed
from paceline.core.values import visible
from paceline.records.journal import Decision, Header, Line, Observation, PeerDecision

HEADINGS = ("worker", "now", "clock", "samples/s", "waits", "stale", "work", "state")
OPTIONAL = ("stale", "state")
LESS_NEEDED = tuple(map(HEADINGS.index, ("work", "stale", "clock")))  # what narrow terminals leave out, in this order
LEFT_ALIGNED = ("now", "state", "last reason")
ROOM_FOR_REASONS = 16  # columns that are left
FEWEST_ROWS = 3
OTHER_ROWS = 6  # headline, progress, an empty line, headings, what is summed up, and the cursor's
MOST_METRICS = 4
AVERAGED = 0.2  # weight of the newest push in a worker's speed
BAR, SHORTEST_BAR = 24, 5  # columns
KEPT_MOMENTS = 40  # for the rate
APART_S = 0.2  # between two of them
STYLES = {"waits": "yellow", "away": "dim", "done": "dim"}


class Headway(msgspec.Struct, frozen=True):
    """How far a run has come."""

    seconds: float = 0.0  # of the run's clock
    versions: int = 0
    done: int = 0  # samples
    total: float | None = None  # samples
    metrics: dict[str, float] = {}
    loss: float | None = None

    def numbers(self) -> list[str]:
        """Return metrics and loss, each as `name value`."""
        found = dict(self.metrics)
        if self.loss is not None:
            found.setdefault("loss", self.loss)
        return [f"{visible(name)} {value:.4g}" for name, value in sorted(found.items())[:MOST_METRICS]]


class WorkerRow(msgspec.Struct):
    """What is shown of one worker."""

    now: str = "waits"  # works | waits | away | done
    clock: int = 0
    state: str = ""
    speed: float = 0.0  # samples per second of computing and transfer
    work: int = 0
    stale: int = 0  # versions that its latest push had missed when it came
    busy_s: float = 0.0
    wait_s: float = 0.0
    reason: str = ""
    push: int = -1  # the latest, and its samples so far
    pushed_samples: int = 0

    def pushed(self, event: Pushed, version: int) -> None:
        """Take in a push, or one more piece of it, that came at this version."""
        self.clock, self.now, self.stale = event.clock, "waits", max(0, version - event.read_version)
        seconds = event.compute_s + event.transfer_s
        self.busy_s += seconds
        self.wait_s += event.wait_s
        samples = event.samples - (self.pushed_samples if event.push == self.push else 0)  # of this piece, as its times
        self.push, self.pushed_samples = event.push, event.samples
        # More than was granted: pieces before it are not among the lines that the view gets, and its times are its own.
        if seconds > 0 and 0 < samples <= (self.work or samples):
            speed = samples / seconds
            self.speed = speed if not self.speed else (1 - AVERAGED) * self.speed + AVERAGED * speed

    def cells(self, number: int, *, stale: bool) -> list[str]:
        """Return the row as text."""
        present = self.busy_s + self.wait_s
        return [
            str(number), self.now, f"{self.clock:,}", f"{self.speed:,.0f}" if self.speed else "-",
            f"{self.wait_s / present:.0%}" if present else "-", str(self.stale) if stale else "-", str(self.work),
            visible(self.state) or "-",
        ]  # fmt: skip

    def told(self, number: int, most: int) -> str:
        """Return the last reason without what the row says anyway: its number and its state."""
        text = self.reason[:most]
        for known in (f"w{number}: ", f"w{number} ", f"n{number} ", f"{self.state}: "):
            text = text.removeprefix(known)
        return visible(text)


class LiveView:
    """A screen that lines of a journal, and standings, keep up to date."""

    def __init__(self) -> None:
        self.standing = Headway()
        self.header: Header | None = None
        self.ended: str | None = None
        self.workers: dict[int, WorkerRow] = {}
        self._peers = False
        self._moments: deque[tuple[float, float, int]] = deque(maxlen=KEPT_MOMENTS)  # wall clock, run's clock, samples

    def write(self, line: Line, version: int) -> None:
        """Take in a line that was written at this version of the model."""
        if isinstance(line, Decision):
            self._happened(line.event, version)
            for action in line.actions:
                if isinstance(action, Grant):
                    row = self._row(action.worker)
                    row.work, row.now, row.reason = action.work, "works", action.reason
                elif isinstance(action, Cancel):
                    row = self._row(action.worker)
                    row.now, row.reason = "waits", action.reason
                elif isinstance(action, Mark):
                    self._row(action.worker).state = action.state
        elif isinstance(line, PeerDecision):
            self._peers = True
            if line.actions:
                self._row(line.node).reason = line.actions[0].reason
        elif isinstance(line, Header):
            self.header = line
        elif isinstance(line, Observation) and line.what == "end":
            self.ended = str(line.data["cause"])

    def _happened(self, event: Event, version: int) -> None:
        if isinstance(event, Pushed):
            self._row(event.worker).pushed(event, version)
        elif isinstance(event, Joined):
            row = self._row(event.worker)
            row.now = "waits" if row.now in ("away", "done") else row.now
        elif isinstance(event, Left):
            row, over = self._row(event.worker), event.cause in ("done", "idle")
            row.now, row.reason = "done" if over else "away", f"left: {event.cause}"

    def _row(self, worker: int) -> WorkerRow:
        row = self.workers.get(worker)
        if row is None:
            row = self.workers[worker] = WorkerRow()
        return row

    def stands(self, standing: Headway, now: float) -> None:
        """Take in how far the run is, as known at `now` by the watcher's clock."""
        if standing.done < self.standing.done:  # it went back to a checkpoint
            self._moments.clear()
        self.standing = standing
        if not self._moments or now - self._moments[-1][0] >= APART_S:
            self._moments.append((now, standing.seconds, standing.done))

    # -- drawing -----------------------------------------------------------------------------------------------------

    def rate(self) -> float | None:
        """Return samples per second of the run's clock, of late or, if that is not known, over all of it."""
        if len(self._moments) > 1:
            (_, begin, first), (_, end, last) = self._moments[0], self._moments[-1]
            if end > begin and last > first:
                return (last - first) / (end - begin)
        standing = self.standing
        return standing.done / standing.seconds if standing.seconds > 0 and standing.done else None

    def seconds_left(self) -> float | None:
        """Return for how long the run goes on by the watcher's clock, as far as its samples tell."""
        total = self.standing.total
        if total is None or len(self._moments) < 2 or self.ended is not None:
            return None
        (begin, _, first), (end, _, last) = self._moments[0], self._moments[-1]
        return max(0.0, (total - last) * (end - begin) / (last - first)) if last > first else None

    def line(self) -> str:
        """Return how far the run is, in one line."""
        standing = self.standing
        told = [f"{standing.seconds:,.1f} s", f"version {standing.versions:,}"]
        return " · ".join([*told, *self._progress(), *standing.numbers(), *self._end()])

    def _progress(self) -> list[str]:
        standing, rate, left = self.standing, self.rate(), self.seconds_left()
        told = [f"{min(1.0, standing.done / standing.total):.0%}"] if standing.total else []
        told += [f"{rate:,.0f} samples/s"] if rate is not None else []
        return told + ([f"{_duration(left)} left"] if left is not None else [])

    def _end(self) -> list[str]:
        return [f"ended: {visible(self.ended)}"] if self.ended is not None else []

    def drawn(self, width: int, height: int | None = None) -> Text:
        """Return the screen for a terminal of this size; without a height there is a row for every worker."""
        head = self._head(width)
        most = len(self.workers) if height is None else max(FEWEST_ROWS, height - OTHER_ROWS - len(head) + 1)
        lines = [*head, self._bar(width), Text(), *self._table(width, most)]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        screen = Text("\n").join(lines)
        screen.no_wrap, screen.overflow = True, "crop"
        return screen

    def _head(self, width: int) -> list[Text]:
        """Return what runs and how far it is: in two lines where they do not fit into one."""
        header, standing = self.header, self.standing
        whom = "starting" if header is None else f"{visible(header.strategy)} · {header.engine}"
        count = f" · {len(self.workers):,} workers" if self.workers else ""
        told = [f"{standing.seconds:,.1f} s", f"version {standing.versions:,}", *standing.numbers(), *self._end()]
        first, second = Text(whom + count, style="bold"), Text(" · ".join(told))
        if first.cell_len + 2 + second.cell_len > width:
            return [first, second]
        return [first.append("  ", style="not bold").append(second.plain, style="not bold")]

    def _bar(self, width: int) -> Text:
        """Return the progress; the bar is as long as its numbers leave room for."""
        standing, told = self.standing, ", ".join(self._progress())
        length = min(BAR, width - len(told) - 1)
        if not standing.total or length < SHORTEST_BAR:
            return Text(told)
        filled = round(length * min(1.0, standing.done / standing.total))
        bar = Text("━" * filled, style="green").append("─" * (length - filled), style="dim")
        return Text.assemble(bar, f" {told}")

    def _table(self, width: int, most: int) -> list[Text]:
        if not self.workers:
            return []
        shown = sorted(self.workers.items())[:most]
        rows = [(row.cells(number, stale=not self._peers), row) for number, row in shown]
        # A column that says nothing of anybody leaves its room to the reasons.
        kept = [at for at, name in enumerate(HEADINGS) if name not in OPTIONAL or any(c[at] != "-" for c, _ in rows)]
        widest = [max(len(HEADINGS[at]), *(len(cells[at]) for cells, _ in rows)) for at in range(len(HEADINGS))]
        for at in (each for each in LESS_NEEDED if each in kept):  # a number that is cut says something else
            if sum(widest[each] + 1 for each in kept) - 1 > width:
                kept.remove(at)
        named = [HEADINGS[at] for at in kept]
        rows = [([cells[at] for at in kept], row) for cells, row in rows]
        widths = [max(len(heading), *(len(cells[at]) for cells, _ in rows)) for at, heading in enumerate(named)]
        room = width - sum(widths) - len(widths)
        reasons = room >= ROOM_FOR_REASONS
        headings = [*named, *(["last reason"] if reasons else [])]
        lines = [Text(_aligned(headings, [*widths, room], headings), style="bold")]
        for cells, row in rows:
            told = [*cells, row.told(int(cells[0]), 2 * width)] if reasons else cells
            lines.append(Text(_aligned(told, [*widths, room], headings), style=STYLES.get(row.now, "")))
        rest = [row for _, row in sorted(self.workers.items())[most:]]
        return [*lines, *([_summed_up(rest)] if rest else [])]


def _aligned(cells: Sequence[str], widths: Sequence[int], headings: Sequence[str]) -> str:
    parts = [
        cell.ljust(width) if heading in LEFT_ALIGNED else cell.rjust(width)
        for cell, width, heading in zip(cells, widths, headings, strict=False)
    ]
    return " ".join(parts).rstrip()


def _summed_up(rows: Sequence[WorkerRow]) -> Text:
    """Return one line for the workers that have none."""
    counts = {now: sum(row.now == now for row in rows) for now in ("works", "waits", "away", "done")}
    told = [f"{count:,} {now}" for now, count in counts.items() if count]
    busy, wait = sum(row.busy_s for row in rows), sum(row.wait_s for row in rows)
    told += [f"{sum(row.speed for row in rows):,.0f} samples/s"]
    told += [f"waits {wait / (busy + wait):.0%}"] if busy + wait else []
    return Text(f"... {len(rows):,} more: {', '.join(told)}", style="dim")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
