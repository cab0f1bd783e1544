"""A comparison as one HTML file that opens offline: the verdict, times, how each side learned, and the table."""

from collections.abc import Sequence
from pathlib import Path

from paceline.comparison.outcome import Comparison, Row, Trial
from paceline.comparison.tables import grid, legend
from paceline.core.errors import JournalError, OptionError
from paceline.core.values import visible
from paceline.records import page
from paceline.records.figures import COLOURS, NAMED, PATTERNS, Figure, axis, line_style, marker_style
from paceline.records.history import KINDS, Curve
from paceline.records.journal import Observation, read


def written(comparison: Comparison, place: Path) -> int:
    """Write the page; return its bytes."""
    found = [_times(comparison), _spent(comparison), _course(comparison)]
    drawn = [figure for figure in found if figure is not None]
    title = f"{len(comparison.rows)} strategies · {comparison.engine} · {comparison.workers:,} workers"
    head = f'<div class="verdict"><p><b>{page.safe(comparison.verdict)}</b></p></div>'
    table = f'<div class="wide">{page.grid(grid(comparison))}</div><p class="soft">{page.safe(legend(comparison))}</p>'
    text = page.document(title, head, drawn, f"<section><h2>Side by side</h2>{table}</section>")
    try:
        return place.write_bytes(text.encode())
    except OSError as error:
        raise OptionError(f"--report: cannot write {place}: {error.strerror}") from error


def _judged(comparison: Comparison, row: Row) -> list[Trial]:
    of = (row.strategy, row.options, False)
    found = [trial for trial in comparison.trials if (trial.strategy, trial.options, trial.tuning) == of]
    return [trial for trial in found if trial.report is not None]


def _times(comparison: Comparison) -> Figure | None:
    """A bar for each strategy, and a point for each seed."""
    rows = [row for row in comparison.rows if row.seconds is not None]
    if not rows:
        return None
    names = [visible(row.name) for row in rows]
    medians = [row.seconds.median for row in rows if row.seconds is not None]
    points = [
        (visible(row.name), trial.seconds, trial.seed)
        for row in rows
        for trial in _judged(comparison, row)
        if trial.seconds
    ]
    data = [
        {"type": "bar", "orientation": "h", "name": "median", "y": names, "x": medians, "marker": marker_style(0),
         "hovertemplate": "%{y}: %{x:.4g} s<extra></extra>"},
        {"type": "scatter", "mode": "markers", "name": "each seed", "y": [name for name, _, _ in points],
         "x": [seconds for _, seconds, _ in points], "customdata": [seed for _, _, seed in points],
         "marker": {"symbol": "diamond", "size": 10, "color": "#E69F00", "line": {"color": "#000000", "width": 1}},
         "hovertemplate": "%{y}, seed %{customdata}: %{x:.4g} s<extra></extra>"},
    ]  # fmt: skip
    goal = f"seconds until {comparison.target}" if comparison.target is not None else "seconds of the whole run"
    layout = {
        "height": 120 + 40 * len(rows),
        "xaxis": axis(goal, rangemode="tozero"),
        "yaxis": axis("", autorange="reversed"),
    }
    return {"id": "times", "title": "How long each takes", "data": data, "layout": layout, "note": ""}


def _spent(comparison: Comparison) -> Figure | None:
    """What the workers of each strategy spent their time on, in the first judged run."""
    runs = [(row, _judged(comparison, row)) for row in comparison.rows]
    names = [visible(row.name) for row, trials in runs if trials]
    reports = [trials[0].report for _, trials in runs if trials]
    data = []
    for kind in KINDS:
        shares = []
        for report in reports:
            workers = [] if report is None else report.per_worker
            whole = sum(each.compute_s + each.transfer_s + each.wait_s + each.lost_s for each in workers)
            shares.append(sum(getattr(each, f"{kind}_s") for each in workers) / whole if whole else 0.0)
        data.append({
            "type": "bar", "orientation": "h", "name": NAMED[kind], "y": names, "x": shares,
            "marker": {"color": COLOURS[kind], "pattern": {"shape": PATTERNS[kind], "size": 4}},
            "hovertemplate": f"%{{y}}: %{{x:.1%}} {NAMED[kind]}<extra></extra>",
        })  # fmt: skip
    layout = {
        "barmode": "stack", "height": 120 + 40 * len(names), "yaxis": axis("", autorange="reversed"),
        "xaxis": axis("share of the workers' time", tickformat=".0%", range=[0, 1]),
    }  # fmt: skip
    return {"id": "spent", "title": "What workers spend their time on", "data": data, "layout": layout,
            "note": "Of the first seed that is judged."} if names else None  # fmt: skip


def _course(comparison: Comparison) -> Figure | None:
    """The metric of each strategy against seconds, with the first judged seed."""
    data = []
    for number, row in enumerate(comparison.rows):
        columns = _curve(_judged(comparison, row), comparison.metric)
        if columns:
            data.append({
                "type": "scatter", "mode": "lines+markers", "name": visible(row.name), "x": columns[0], "y": columns[1],
                "line": line_style(number), "marker": {"symbol": number, "size": 6},
            })  # fmt: skip
    layout = {"height": 380, "xaxis": axis("seconds"), "yaxis": axis(visible(comparison.metric))}
    title = f"How {visible(comparison.metric)} goes"
    return {"id": "course", "title": title, "data": data, "layout": layout, "note": ""} if data else None


def _curve(trials: Sequence[Trial], metric: str) -> list[list[float]]:
    """Return the times and values of a metric in the first run's journal; nothing if that is gone."""
    report = trials[0].report if trials else None
    if report is None or report.journal is None:
        return []
    curve = Curve()
    try:
        for line in read(Path(report.journal)):
            if isinstance(line, Observation) and line.what == "evaluation" and metric in line.data["metrics"]:
                curve.add(line.at, float(line.data["metrics"][metric]))
    except JournalError:
        return []
    return curve.columns() if curve.points else []
