"""The report in the terminal: headline numbers with units, a table of the workers, target and warnings."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from paceline.core.values import visible
from paceline.records.report import (
    BatchReport,
    FaultReport,
    NodesNumber,
    PeerReport,
    Report,
    ReportedNumber,
    TargetReport,
    WorkerReport,
)

MOST_ROWS = 16  # beyond this, workers of similar score and equal state share a row
SCORED = "score: speed relative to the fastest worker's; higher is better"
GROUPED = "clock, seconds and score: means over the group; samples: its sum"
ROOM_FOR_BARS = 96  # terminal columns
MOST_METRICS = 3  # in one line
WHOLE = 0.02  # how far the mean mass of whole steps may be from 1
SIMILAR = 0.75  # lowest score in a row, relative to its fastest worker


def show(report: Report, console: Console, *, warnings: bool = True) -> None:
    """Print the summary of a run; without its warnings where they were shown as they came."""
    console.print(
        f"[bold]{escape(report.strategy)}[/bold] [dim]· {report.engine} · {_crowd(report)} · seed {report.seed}[/dim]",
        highlight=False,
    )
    console.print(_headline(report))
    if report.per_worker:
        console.print()
        console.print(_workers(report.per_worker, bars=console.width >= ROOM_FOR_BARS))
    for warning in report.warnings if warnings else ():
        console.print(f"[yellow]warning:[/yellow] {_verbatim(warning)}", highlight=False, soft_wrap=True)
    trained = "model" if report.table_reads is None else "tables"
    for label, path in (("folder", report.folder), (trained, report.model), ("journal", report.journal)):
        if path is not None:
            console.print(f"[dim]{label:<7} {_verbatim(path)}[/dim]", highlight=False, soft_wrap=True)


def one_line(report: Report, ended: str | None = None) -> str:
    """Return `bsp on sim, 2 workers: 6.0 s virtual, 1 version, accuracy 0.9`, for a `repr`."""
    seconds = _seconds(report.seconds) if report.seconds else "0 s"
    parts = [f"{seconds} {_clock(report)}", f"{report.versions:,} version{'s' if report.versions != 1 else ''}"]
    results = _results(report)
    parts += results[:MOST_METRICS] + (["..."] if len(results) > MOST_METRICS else [])
    if report.target is not None:
        parts.append(f"target {_target(report.target)}")
    if ended is not None:
        parts.append(f"ended: {_verbatim(ended)}")
    return plain(f"{_verbatim(report.strategy)} on {_verbatim(report.engine)}, {_crowd(report)}: {', '.join(parts)}")


def facts(report: Report) -> list[tuple[str, str]]:
    """Return the headline numbers without colours, as (label, text)."""
    return [(label, plain(text)) for label, text in _facts(report)]


def worker_rows(report: Report) -> list[list[str]]:
    """Return the table of the workers without colours; the first row holds the headings."""
    grid = _grid(report.per_worker, bars=False)
    return [[plain(cell) for cell in row] for row in [grid.headings, *grid.rows]]


def plain(markup: str) -> str:
    """Return the text of rich markup, without colours and on one line."""
    return visible(Text.from_markup(markup, emoji=False).plain)


def _verbatim(text: str) -> str:
    """Escape text that no tag follows: `escape` alone would double a backslash at its end."""
    return escape(text + " ")[:-1]


def _crowd(report: Report) -> str:
    return f"{report.workers} worker{'s' if report.workers != 1 else ''}"


def _clock(report: Report) -> str:
    return "virtual" if report.engine == "sim" else "wall-clock"


def _headline(report: Report) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    for label, text in _facts(report):
        grid.add_row(label, text)
    return grid


def _facts(report: Report) -> list[tuple[str, str]]:
    facts = [("time", f"[bold]{_seconds(report.seconds)}[/bold] {_clock(report)}")]
    if report.batch is not None:
        facts = [*_batch_facts(report, report.batch), *facts]
    if report.target is not None:
        facts.append(("target", _target(report.target)))
    if results := _results(report):
        facts.append(("result", ", ".join(results)))
    if report.reported:
        facts.append(("reported", "; ".join(_reported(name, number) for name, number in report.reported.items())))
    rate = f", [bold]{_count(report.samples_per_second)}[/bold] a second" if report.samples_per_second else ""
    lost = f", {_count(report.samples_discarded)} discarded" if report.samples_discarded else ""
    facts.append(("samples", f"{_count(report.samples_used)} used{rate}{lost}"))
    if faults := _faults(report.faults):
        facts.append(("faults", faults))
    if report.streams:
        facts.append(("data", "streams of the script, which decides what samples come and how often"))
    facts.append(("updates", f"{report.versions:,} versions from {report.pushes:,} pushes"))
    if report.wait_fraction is not None:
        facts.append(("waiting", f"[bold]{report.wait_fraction:.1%}[/bold] of the workers' time"))
    stale = report.staleness
    if stale.mean is not None:
        facts.append(("staleness", f"mean {stale.mean:.2f}, 95 % within {stale.p95}, at most {stale.max} versions"))
    for name, reads in (report.table_reads or {}).items():
        mean = sum(age * count for age, count in enumerate(reads.ages)) / max(1, reads.rows)
        text = f"{_count(reads.rows)} rows of {_verbatim(name)}, {mean:.2f} clocks old, at most {reads.max_age}"
        facts.append(("reads", text))
    facts.append(("traffic", f"{_bytes(report.bytes_up)} up, {_bytes(report.bytes_down)} down"))
    if report.exchanges is not None:
        facts.append(("exchanges", f"{report.exchanges:,}{_of_nodes(report.peers)}"))
    return facts


def _faults(faults: FaultReport) -> str:
    parts = []
    if faults.timeouts:
        parts.append(f"{faults.timeouts:,} worker{'s' * (faults.timeouts > 1)} taken out for silence")
    if faults.killers:
        parts.append(f"left out what killed processes: sample {', '.join(map(str, faults.killers))}")
    if faults.not_finite:
        parts.append(f"{faults.not_finite:,} model{'s' * (faults.not_finite > 1)} not finite")
    if faults.set_aside:
        parts.append(f"set aside: worker {', '.join(map(str, faults.set_aside))}")
    return "; ".join(parts)


def _batch_facts(report: Report, batch: BatchReport) -> list[tuple[str, str]]:
    """Return how many samples an update takes, and what that means for the learning rate."""
    workers, size = report.workers, batch.batch_size
    if report.exchanges is not None:
        return [("batch", f"{size:,} samples a step of each node; no update is common to all")]
    if not batch.update_pushes:
        return []
    samples, pushes = batch.update_samples, batch.update_pushes
    passes = samples / (pushes * size)  # more than one of a script that accumulates
    size *= int(passes) if passes.is_integer() else 1
    if workers == 1:
        return [("batch", f"{_count(samples)} samples an update")]
    everybody = f"{workers} workers x {size:,} = {workers * size:,}"
    if (pushes, samples) == (workers, workers * size):
        text = f"{everybody} samples an update (1 worker: {size:,})"
    else:
        merged = "1 push" if pushes == 1 else f"{_count(pushes)} pushes"
        text = f"{merged} of {_count(samples)} samples an update; {everybody} a round"
    return [("batch", text), ("rate", _rate(batch, workers * size))]


def _rate(batch: BatchReport, round_samples: int) -> str:
    scaled = "" if batch.scale_lr == "none" else f" times {batch.rate_factor:.4g} (--scale-lr {batch.scale_lr})"
    mass = batch.update_mass or 1.0
    if math.isclose(mass, 1.0, rel_tol=WHOLE):
        return f"the script's{scaled}, for a step over {_count(batch.update_samples)} samples"
    parts = round(1 / mass)
    share = f"1/{parts}" if math.isclose(mass * parts, 1.0, rel_tol=WHOLE) else f"{mass:.2g}"
    return f"the script's{scaled}, for a round of {round_samples:,} samples: an update is {share} of a step"


def _reported(name: str, number: ReportedNumber) -> str:
    mean = f" (mean {number.mean:.4g} of {number.count:,})" if number.count > 1 else ""
    return f"{_verbatim(name)} {number.last:.4g}{mean}"


def _of_nodes(peers: PeerReport | None) -> str:
    if peers is None or peers.mean_interval is None:
        return ""
    apart = "" if peers.consensus is None else f"; models {peers.consensus:.3g} from their mean"
    return f", one in {peers.mean_interval:.1f} steps of a node{apart}"


def _target(target: TargetReport) -> str:
    name = f"{_verbatim(target.metric)} {target.value:g}"
    if target.reached_at_seconds is None:
        return f"{name} [yellow]not reached[/yellow]"
    return f"{name} [green]reached at [bold]{_seconds(target.reached_at_seconds)}[/bold][/green]"


def _results(report: Report) -> list[str]:
    numbers = {"loss": report.loss, "accuracy": report.accuracy, **report.metrics}
    own = {} if report.peers is None else report.peers.nodes
    return [
        f"{_verbatim(name)} {value:.4g}{_own(own.get(name))}" for name, value in numbers.items() if value is not None
    ]


def _own(number: NodesNumber | None) -> str:
    if number is None:
        return ""
    return f" (of the nodes' own models {number.mean:.4g}, {number.min:.4g} to {number.max:.4g})"


class _Row(NamedTuple):
    workers: Sequence[WorkerReport]
    name: str


class _Grid(NamedTuple):
    headings: list[str]
    rows: list[list[str]]
    grouped: bool


def _grid(workers: Sequence[WorkerReport], bars: bool) -> _Grid:
    rows = [_Row([w], str(w.worker)) for w in workers] if len(workers) <= MOST_ROWS else _groups(workers)
    states = any(w.state is not None for w in workers)
    grouped = len(rows) != len(workers)
    headings = ["workers" if grouped else "worker", "clock", "samples", "compute", "transfer", "wait", "lost", "score"]
    headings += ["waiting", *(["state"] if states else [])]
    return _Grid(headings, [_cells(row, states, bars) for row in rows], grouped)


def _workers(workers: Sequence[WorkerReport], bars: bool) -> Table:
    grid = _grid(workers, bars)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="dim", show_edge=False)
    for heading in grid.headings:
        left = heading in ("workers", "state")
        table.add_column(heading, justify="left" if left else "right")
    for row in grid.rows:
        table.add_row(*row)
    notes = [SCORED] if any(worker.score is not None for worker in workers) else []
    if grid.grouped:
        notes.append(GROUPED)
    if notes:
        table.caption = "\n".join(notes)
        table.caption_justify = "left"
    return table


def _cells(row: _Row, states: bool, bars: bool) -> list[str]:
    workers, count = row.workers, len(row.workers)
    parts = [sum(getattr(w, name) for w in workers) for name in ("compute_s", "transfer_s", "wait_s", "lost_s")]
    scores = [w.score for w in workers if w.score is not None]
    cells = [
        row.name,
        f"{sum(w.clock for w in workers) / count:.0f}",
        f"{sum(w.samples for w in workers):,}",
        *(_seconds(part / count) for part in parts),
        f"{sum(scores) / len(scores):.2f}" if scores else "-",
        _share(parts[2] / sum(parts), bars) if sum(parts) > 0 else "-",
    ]
    return [*cells, _verbatim(workers[0].state or "-")] if states else cells


def _groups(workers: Sequence[WorkerReport]) -> list[_Row]:
    """Group workers of similar score and equal state, the fastest first; those never measured come last."""
    groups: list[list[WorkerReport]] = []
    heads: dict[str | None, WorkerReport] = {}  # the fastest of the open group of each state
    rows: dict[int, list[WorkerReport]] = {}
    for worker in sorted(workers, key=lambda w: (-(w.score or 0.0), w.worker)):
        head = heads.get(worker.state)
        if head is None or (worker.score or 0.0) < SIMILAR * (head.score or 0.0):
            head = heads[worker.state] = worker
            groups.append(rows.setdefault(worker.worker, []))
        rows[head.worker].append(worker)
    return [_Row(group, _names(group)) for group in groups]


def _names(group: Sequence[WorkerReport]) -> str:
    """Return `0-3, 8 (5)`: runs of numbers, shortened if there are many, and the number of workers."""
    numbers = sorted(worker.worker for worker in group)
    starts = [numbers[0]] + [later for earlier, later in pairwise(numbers) if later != earlier + 1]
    ends = [earlier for earlier, later in pairwise(numbers) if later != earlier + 1] + [numbers[-1]]
    runs = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    named = ", ".join(runs[:3]) + (", ..." if len(runs) > 3 else "")
    return f"{named} ({len(numbers)})" if len(numbers) > 1 else named


def _share(share: float, bars: bool) -> str:
    color = "red" if share > 0.5 else "yellow" if share > 0.2 else "green"
    if not bars:
        return f"[{color}]{share:.0%}[/{color}]"
    filled = round(10 * share)
    return f"[{color}]{'━' * filled}[/{color}][dim]{'─' * (10 - filled)}[/dim] {share:4.0%}"


def _seconds(seconds: float) -> str:
    if seconds == 0:
        return "-"
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds < 0.1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 1000:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _count(number: float) -> str:
    if not math.isfinite(number):
        return str(number)
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:.3g}"


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}" if unit != "B" else f"{number:.0f} B"
        number /= 1000
    return f"{number:,.3g} TB"
