"""A comparison for people: a table in the terminal, rows for a spreadsheet, and a table with a plot in a notebook."""

import csv
import io
from collections.abc import Sequence
from html import escape

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.comparison.outcome import Comparison, Row, Spread
from paceline.core.values import visible

NOTHING = "-"
NAME_WIDTH = 20  # of a strategy in a narrow terminal; a longer one is broken
_BAR, _LINE, _NAMES = 420, 26, 190  # of the plot: width of the bars, height of a line, room for names, in pixels


def show(comparison: Comparison, console: Console) -> None:
    """Print the verdict, then a row for each strategy."""
    console.print(Text(comparison.verdict, style="bold"))
    console.print()
    headings, *rows = grid(comparison)
    if _least_width(headings, rows) <= console.width:
        console.print(_table(headings, rows))
    else:  # one below the other: cells that are cut say something else
        for name, *cells in rows:
            console.print(Text(name, style="bold"))
            for heading, cell in zip(headings[1:], cells, strict=True):
                console.print(Text(f"  {heading:<{max(map(len, headings))}} {cell}"))
    console.print(Text(legend(comparison), style="dim"))


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(headings):
        table.add_column(
            Text(heading), justify="left" if number == 0 else "right", no_wrap=number != 0, overflow="fold"
        )
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _least_width(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return the columns that the table needs if names are broken at their spaces, or at NAME_WIDTH."""
    names, *others = zip(headings, *rows, strict=True)
    longest = max(len(word) for name in names for word in name.split())
    return min(longest, NAME_WIDTH) + sum(1 + max(map(len, cells)) for cells in others)


def legend(comparison: Comparison) -> str:
    """Say what the columns are."""
    goal = f"until {comparison.target}" if comparison.target is not None else "of the whole run"
    count = max((row.runs for row in comparison.rows), default=0)
    runs = f"{count} run{'s' * (count != 1)}"
    return (
        f"seconds: {goal}, median and half the range of {runs}. faster: times sooner than the first, geometric mean "
        "over seeds. waits: of the workers' time. stale: updates missed by a push. MB: up and down. "
        "lost: of the samples computed."
    )


def grid(comparison: Comparison) -> list[list[str]]:
    """Return the cells of the table; the first row holds the headings."""
    columns = ["strategy", "seconds", "faster", "samples/s", "waits", "stale", "MB", "lost"]
    return [[*columns, comparison.metric], *(_cells(row) for row in comparison.rows)]


def _cells(row: Row) -> list[str]:
    missed = "" if row.reached == row.runs else f", {row.reached} of {row.runs}"
    return [
        visible(row.name),
        _ranged(row.seconds) + missed,
        _number(row.speedup),
        _number(row.samples_per_second),
        _share(row.wait_fraction),
        _number(row.staleness),
        _number(row.megabytes),
        _share(row.discarded),
        _ranged(row.metric),
    ]


def _number(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0%}"


def _ranged(spread: Spread | None) -> str:
    if spread is None:
        return NOTHING
    middle = _number(spread.median)
    return middle if spread.least == spread.most else f"{middle} ±{(spread.most - spread.least) / 2:.2g}"


def to_csv(comparison: Comparison) -> str:
    """Return one line for each run, tuning included."""
    file = io.StringIO()
    options = sorted({name for trial in comparison.trials for name in trial.options})
    fields = (
        "seconds", "versions", "pushes", "samples_used", "samples_discarded", "samples_per_second", "wait_fraction",
        "bytes_up", "bytes_down", "loss", "accuracy", "journal",
    )  # fmt: skip
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["strategy", *options, "seed", "tuning", "to_target_s", "staleness", *fields, "failure"])
    for trial in comparison.trials:
        report = trial.report
        found = [getattr(report, field, None) for field in fields]
        staleness = None if report is None else report.staleness.mean
        given = [trial.options.get(name, "") for name in options]
        reached = trial.seconds if report is not None and report.target is not None else None
        row = [trial.strategy, *given, trial.seed, trial.tuning, reached, staleness, *found, trial.failure]
        writer.writerow(["" if cell is None else cell for cell in row])
    return file.getvalue()


def html(comparison: Comparison) -> str:
    """Render verdict, plot and table without colours of text, so that they fit a light or a dark notebook."""
    headings, *rows = grid(comparison)
    left = 'style="text-align:left"'
    head = "".join(f'<th scope="col" {left}>{_safe(each)}</th>' for each in headings)
    cells = ["".join(f"<td {left}>{_safe(each)}</td>" for each in row) for row in rows]
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    first, last = _safe(comparison.verdict), _safe(legend(comparison))
    return f"<div><p><b>{first}</b></p>{plot(comparison.rows)}{table}<p>{last}</p></div>"


def plot(rows: Sequence[Row]) -> str:
    """Draw the seconds of each strategy as a bar, with the range over seeds as a line across its end."""
    most = max((row.seconds.most for row in rows if row.seconds is not None), default=0.0)
    if not most:
        return ""
    parts = []
    for number, row in enumerate(rows):
        y, text = number * _LINE, f'y="{number * _LINE + 17}" fill="currentColor"'
        parts.append(f'<text x="{_NAMES - 8}" text-anchor="end" {text}>{_safe(row.strategy)}</text>')
        if row.seconds is None:
            parts.append(f'<text x="{_NAMES}" {text}>not reached</text>')
            continue
        width, low, high = (_BAR * each / most for each in (row.seconds.median, row.seconds.least, row.seconds.most))
        line = f"M{_NAMES + low:.1f} {y + _LINE / 2}H{_NAMES + high:.1f}"
        parts += [
            f'<rect x="{_NAMES}" y="{y + 5}" width="{width:.1f}" height="{_LINE - 10}" fill="#0072b2"/>',
            f'<path d="{line}" stroke="currentColor" stroke-width="2"/>',
            f'<text x="{_NAMES + high + 6:.1f}" {text}>{_number(row.seconds.median)} s</text>',
        ]
    size = f'width="{_NAMES + _BAR + 80}" height="{_LINE * len(rows)}"'
    return f'<svg {size} role="img" aria-label="seconds of each strategy" font-size="13">{"".join(parts)}</svg>'


def _safe(text: str) -> str:
    return escape(visible(text))
