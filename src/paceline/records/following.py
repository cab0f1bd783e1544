"""Follow a run as it goes on: its journal read as it grows, and one screen of what every worker does, and why."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.core.actions import Apply, Cancel, Grant, Mark
from paceline.core.errors import OptionError
from paceline.core.events import Joined, Left, Pushed
from paceline.core.values import visible
from paceline.records.journal import MAX_LINE, Decision, Line, Observation, parse
from paceline.records.metrics import Metrics
from paceline.records.report import Report

MOST_WORKERS = 40  # rows; the rest are counted
ROOM_FOR_REASONS = 100  # terminal columns
AVERAGED = 0.2  # weight of the newest push in a worker's speed


def grown(path: Path, patience_s: float) -> Iterator[list[Line]]:
    """Yield the lines that have been added, again and again, at most `patience_s` apart; the first are those there."""
    number, rest = 0, b""
    try:
        with path.open("rb") as file:
            while True:
                data = rest + file.read(MAX_LINE)
                *whole, rest = data.split(b"\n")
                lines = [parse(text, number + place, path) for place, text in enumerate(whole, 1)]
                number += len(whole)
                yield lines
                if len(data) < MAX_LINE // 2:
                    time.sleep(patience_s)
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror}") from error


class Watched(msgspec.Struct):
    """What is shown of one worker."""

    present: bool = True
    clock: int = 0
    state: str = ""
    speed: float = 0.0  # samples per second of computing and transfer
    work: int = 0
    busy: bool = False
    stale: int = 0
    reason: str = ""


class LiveView:
    """A journal sink that can be drawn at any time."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.total: float | None = None  # samples of the current loop
        self._before = 0  # samples of the loops before it
        self._workers: dict[int, Watched] = {}
        self._read: dict[int, tuple[int, int]] = {}  # worker and version read of each held push
        self._recent: list[tuple[float, int]] = []  # times and samples used, for the rate

    def write(self, line: Line) -> None:
        """Take in one line."""
        self.metrics.write(line)
        if isinstance(line, Observation) and line.what == "phase":
            size, epochs = line.data.get("size"), line.data.get("epochs")
            self._before = self.metrics.samples_used
            self.total = size * epochs if size and epochs else None
        elif isinstance(line, Decision):
            self._decided(line)

    def _decided(self, line: Decision) -> None:
        event = line.event
        if isinstance(event, Joined):
            self._worker(event.worker).present = True
        elif isinstance(event, Left):
            worker = self._worker(event.worker)
            worker.present, worker.busy, worker.reason = False, False, f"left: {event.cause}"
        elif isinstance(event, Pushed):
            worker = self._worker(event.worker)
            worker.clock, worker.busy = event.clock, False
            seconds = event.compute_s + event.transfer_s
            if seconds > 0 and event.samples:
                speed = event.samples / seconds
                worker.speed = speed if not worker.speed else (1 - AVERAGED) * worker.speed + AVERAGED * speed
            self._read[event.push] = event.worker, event.read_version
        for action in line.actions:
            if isinstance(action, Grant):
                worker = self._worker(action.worker)
                worker.work, worker.busy, worker.reason = action.work, True, action.reason
            elif isinstance(action, Cancel):
                worker = self._worker(action.worker)
                worker.busy, worker.reason = False, action.reason
            elif isinstance(action, Mark):
                self._worker(action.worker).state = action.state
            elif isinstance(action, Apply):
                for push in action.pushes:
                    number, version = self._read.pop(push, (None, 0))
                    if number is not None:
                        self._worker(number).stale = self.metrics.versions - 1 - version
        if not self._recent or event.at - self._recent[-1][0] > 0.2:
            self._recent = [*self._recent[-30:], (event.at, self.metrics.samples_used)]

    def _worker(self, number: int) -> Watched:
        return self._workers.setdefault(number, Watched())

    # -- drawing -----------------------------------------------------------------------------------------------------

    def rate(self) -> float | None:
        """Return samples per second of the run's last seconds."""
        if len(self._recent) < 2:
            return None
        (begin, first), (end, last) = self._recent[0], self._recent[-1]
        return (last - first) / (end - begin) if end > begin else None

    def drawn(self, width: int) -> RenderableType:
        """Return the screen: how far the run is, then one line for each worker."""
        report = self.metrics.report(None)
        return Group(self._head(report), self._progress(report, width), Text(), self._table(report, width))

    def _head(self, report: Report) -> Text:
        text = Text(f"{visible(report.strategy)} · {report.engine} · {report.workers} workers", style="bold")
        numbers = {**report.metrics, **({"loss": report.loss} if report.loss is not None else {})}
        told = [f"{report.seconds:,.1f} s", f"version {report.versions:,}"]
        told += [f"{visible(name)} {value:.4g}" for name, value in sorted(numbers.items())[:4]]
        if self.metrics.ended is not None:
            told.append(f"ended: {visible(self.metrics.ended)}")
        return text.append(f"  {' · '.join(told)}", style="not bold")

    def _progress(self, report: Report, width: int) -> RenderableType:
        rate, done = self.rate(), report.samples_used - self._before
        told = "" if rate is None else f"{rate:,.0f} samples/s"
        if not self.total:
            return Text(told)
        left = self.total - done
        if rate and left > 0 and self.metrics.ended is None:
            told += f", {left / rate:,.0f} s left"
        table = Table.grid(padding=(0, 1))
        table.add_row(
            ProgressBar(self.total, done, width=min(40, width // 3)), Text(f"{done / self.total:.0%}"), Text(told)
        )
        return table

    def _table(self, report: Report, width: int) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        reasons = width >= ROOM_FOR_REASONS
        for number, name in enumerate(["worker", "now", "clock", "samples/s", "waits", "stale", "work", "state"]):
            table.add_column(name, justify="left" if number in (1, 7) else "right", no_wrap=True)
        if reasons:
            table.add_column("last reason", no_wrap=True, overflow="ellipsis")
        times = {each.worker: each for each in report.per_worker}
        for number, worker in sorted(self._workers.items())[:MOST_WORKERS]:
            spent = times.get(number)
            present = 0.0 if spent is None else spent.compute_s + spent.transfer_s + spent.wait_s + spent.lost_s
            waits = f"{spent.wait_s / present:.0%}" if spent is not None and present else "-"
            now = "works" if worker.busy else "waits" if worker.present else "away"
            cells = [
                str(number), now, f"{worker.clock:,}", f"{worker.speed:,.0f}" if worker.speed else "-", waits,
                str(worker.stale), str(worker.work), visible(worker.state) or "-",
            ]  # fmt: skip
            style = {"waits": "yellow", "away": "dim"}.get(now, "")
            table.add_row(
                *(Text(cell) for cell in cells), *([Text(visible(worker.reason))] if reasons else []), style=style
            )
        if len(self._workers) > MOST_WORKERS:
            table.add_row(Text("..."), Text(f"{len(self._workers) - MOST_WORKERS} more"))
        return table
