"""The plots of a report as plotly figures: plain data, without plotly itself.

Colours are Okabe and Ito's, which colour-blind people tell apart, and never stand alone: lines have dashes, bars have
patterns. Text and grid get their colours from the page, light or dark.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.values import visible
from paceline.records.history import KINDS, PARTS, History
from paceline.records.wait_attribution import Waited

Figure = dict[str, Any]  # `title`, `data`, `layout`, and `note`, a sentence below
COLOURS = {"compute": "#009E73", "transfer": "#0072B2", "wait": "#E69F00", "lost": "#D55E00"}
PATTERNS = {"compute": "", "transfer": "/", "wait": ".", "lost": "x"}
NAMED = {"compute": "computing", "transfer": "transfer", "wait": "waiting", "lost": "lost work"}
LINES = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"]
SHAPES = ["", "/", ".", "x", "\\", "+", "-", "|"]
MOST_LINES = 12  # in one plot
MOST_TICKS = 40  # of lanes; with more, plotly chooses
MOST_BARS = 200  # of staleness
AXES = (("seconds", 0), ("samples", 1), ("versions", 2))


def figures(history: History, waited: Sequence[Waited]) -> list[Figure]:
    """Return all plots for which the run has data, the most telling first."""
    found = [
        lanes(history), waits(waited), course(history), staleness(history), shares(history), work(history),
        tracks(history), states(history), traffic(history),
    ]  # fmt: skip
    return [figure for figure in found if figure is not None]


def line_style(number: int) -> dict[str, Any]:
    """Return the colour and dashes of a plot's line."""
    return {"color": LINES[number % len(LINES)], "dash": DASHES[number % len(DASHES)], "width": 2}


def marker_style(number: int) -> dict[str, Any]:
    """Return the colour and pattern of a plot's bars."""
    return {"color": LINES[number % len(LINES)], "pattern": {"shape": SHAPES[number % len(SHAPES)], "size": 4}}


def _name(worker: int | None) -> str:
    return "no worker" if worker is None else f"worker {worker}"


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Return an axis with this title."""
    return {"title": {"text": title}, "automargin": True, **more}


def _lane_axis(workers: Sequence[int]) -> tuple[dict[str, Any], float]:
    """Return the axis of lanes, the lowest number at the top, and how high a bar is.

    Without a height each trace takes its own, and one that few workers have covers the lanes of others.
    """
    apart = min((after - before for before, after in itertools.pairwise(workers)), default=1)
    ends = [workers[-1] + apart / 2, workers[0] - apart / 2]
    return axis("worker", range=ends, dtick=1 if len(workers) <= MOST_TICKS else None), 0.85 * apart


def lanes(history: History) -> Figure | None:
    """What each worker did when; a bar's text says why."""
    if not history.spans:
        return None
    workers = sorted({span.worker for span in history.spans})
    lane, height = _lane_axis(workers)
    data = []
    for kind in KINDS:
        spans = [span for span in history.spans if span.kind == kind]
        if spans:
            data.append({
                "type": "bar", "orientation": "h", "name": NAMED[kind], "width": height,
                "y": [span.worker for span in spans],
                "x": [round(span.seconds, 6) for span in spans],
                "base": [round(span.begin, 6) for span in spans],
                "customdata": [[span.clock, span.samples, visible(span.reason)] for span in spans],
                "hovertemplate": f"worker %{{y}}: {NAMED[kind]}, %{{x:.4g}} s from %{{base:.4g}} s<br>"
                                 "clock %{customdata[0]}<br>%{customdata[2]}<extra></extra>",
                "marker": {"color": COLOURS[kind], "pattern": {"shape": PATTERNS[kind], "size": 4}},
            })  # fmt: skip
    end = max(span.begin + span.seconds for span in history.spans)
    note = "Drag to zoom, double-click to see all; click a bar to read the reason of its decision."
    some = f"{len(workers)} of {history.workers:,} workers" if history.workers > history.lanes else ""
    first = f"the first {end:.3g} s" if history.left_out else ""
    if some or first:
        note += f" Shown: {' in '.join(filter(None, (first, some)))}; all of the run is below, in sums."
    return {
        "id": "lanes", "title": "What each worker did", "data": data, "note": note,
        "layout": {
            "barmode": "overlay", "height": max(260, 60 + 26 * len(workers)),
            "xaxis": axis("seconds", range=[0, end]),
            "yaxis": lane,
            "shapes": [_moment(at) for at, _ in history.events[:200]],
        },
    }  # fmt: skip


def _moment(at: float) -> dict[str, Any]:
    line = {"color": "#888888", "width": 1, "dash": "dot"}
    return {"type": "line", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def waits(waited: Sequence[Waited]) -> Figure | None:
    """Who was waited for, and why; the bars add up to all waiting."""
    if not waited:
        return None
    totals: dict[int | None, float] = {}
    for each in waited:
        totals[each.culprit] = totals.get(each.culprit, 0.0) + each.seconds
    order = sorted(totals, key=lambda worker: -totals[worker])
    shown, rest = order[:30], set(order[30:])
    names = [_name(worker) for worker in shown] + (["the others"] if rest else [])
    causes = sorted({each.cause for each in waited})
    data = []
    for number, cause in enumerate(causes):
        by = dict.fromkeys(shown, 0.0)
        others = 0.0
        for each in waited:
            if each.cause == cause and each.culprit in by:
                by[each.culprit] += each.seconds
            elif each.cause == cause:
                others += each.seconds
        data.append({
            "type": "bar", "orientation": "h", "name": cause, "y": names,
            "x": [*by.values(), *([others] if rest else [])],
            "hovertemplate": f"%{{x:.4g}} s for %{{y}}: {cause}<extra></extra>",
            "marker": marker_style(number),
        })  # fmt: skip
    whole = sum(totals.values())
    return {
        "id": "waits", "title": "Who was waited for, and why", "data": data,
        "note": f"Seconds of all waiting workers together; they add up to {whole:.4g} s, all the waiting of the run.",
        "layout": {
            "barmode": "stack", "height": max(220, 90 + 26 * len(names)), "xaxis": axis("seconds waited"),
            "yaxis": axis("", autorange="reversed"), "showlegend": True,
        },
    }  # fmt: skip


def course(history: History) -> Figure | None:
    """Metrics and loss, against time, samples or versions."""
    curves = [*((name, curve.columns()) for name, curve in sorted(history.metrics.items()))]
    if history.loss.points and "loss" not in history.metrics:
        curves.append(("loss of pushes", history.loss.columns()))
    if not curves:
        return None
    curves = curves[:MOST_LINES]
    data = [
        {"type": "scatter", "mode": "lines+markers" if len(columns[0]) < 60 else "lines", "name": visible(name),
         "x": columns[0], "y": columns[3], "line": line_style(number), "marker": {"symbol": number, "size": 6},
         "yaxis": "y2" if "loss" in name.lower() and len(curves) > 1 else "y"}
        for number, (name, columns) in enumerate(curves)
    ]  # fmt: skip
    buttons = [
        {"label": f"against {name}", "method": "update",
         "args": [{"x": [columns[column] for _, columns in curves]}, {"xaxis.title.text": name}]}
        for name, column in AXES
    ]  # fmt: skip
    layout: dict[str, Any] = {
        "height": 380, "xaxis": axis("seconds"), "yaxis": axis("metric"), "showlegend": True,
        "updatemenus": [{"type": "buttons", "direction": "right", "x": 0, "y": 1.18, "xanchor": "left",
                         "buttons": buttons, "showactive": True}],
    }  # fmt: skip
    if any(trace["yaxis"] == "y2" for trace in data):
        layout["yaxis2"] = axis("loss", overlaying="y", side="right", showgrid=False)
    return {"id": "course", "title": "How it learned", "data": data, "layout": layout, "note": ""}


def staleness(history: History) -> Figure | None:
    """How many updates applied pushes had missed."""
    if not history.staleness:
        return None
    least, most = min(history.staleness), max(history.staleness)
    width = -(-(most - least + 1) // MOST_BARS)
    counts: dict[int, int] = {}
    for age, count in history.staleness.items():
        begin = least + (age - least) // width * width
        counts[begin] = counts.get(begin, 0) + count
    begins = sorted(counts)
    bar: dict[str, Any] = {
        "type": "bar", "y": [counts[begin] for begin in begins], "marker": {"color": LINES[0]},
        "x": [begin + (width - 1) / 2 for begin in begins] if width > 1 else begins,
    }  # fmt: skip
    if width > 1:
        bar |= {
            "width": width, "customdata": [f"{begin} to {begin + width - 1}" for begin in begins],
            "hovertemplate": "%{customdata} missed: %{y} pushes<extra></extra>",
        }  # fmt: skip
    ticks = {"dtick": 1} if most - least < 20 else {"tickformat": "d"}  # there is no half of an update
    layout = {"height": 260, "xaxis": axis("updates missed", **ticks), "yaxis": axis("pushes"), "showlegend": False}
    note = f"Each bar is of {width} numbers of updates." if width > 1 else ""
    return {"id": "staleness", "title": "Staleness", "data": [bar], "layout": layout, "note": note}


def shares(history: History) -> Figure | None:
    """How all workers together spent their time, over the run."""
    if not history.seconds:
        return None
    moments = [(part + 0.5) * history.seconds / PARTS for part in range(PARTS)]
    width = history.seconds / PARTS
    data = []
    for kind in KINDS:
        sums = [sum(lane[part] for lane in history.sums[kind]) / width for part in range(PARTS)]
        if any(sums):
            data.append({
                "type": "scatter", "mode": "lines", "stackgroup": "one", "name": NAMED[kind], "x": moments,
                "y": [round(each, 4) for each in sums],
                "line": {"color": COLOURS[kind], "dash": DASHES[KINDS.index(kind)], "width": 1},
                "fillpattern": {"shape": PATTERNS[kind], "size": 5},
                "hovertemplate": f"%{{y:.3g}} workers {NAMED[kind]}<extra></extra>",
            })  # fmt: skip
    if not data:
        return None
    layout = {"height": 300, "xaxis": axis("seconds"), "yaxis": axis("workers"), "hovermode": "x unified"}
    return {"id": "shares", "title": "Workers by what they do", "data": data, "layout": layout, "note": ""}


def _many(curves: Mapping[Any, Any], name: Any) -> list[dict[str, Any]]:
    chosen = list(curves.items())[:MOST_LINES]
    return [
        {"type": "scatter", "mode": "lines", "name": name(key), "x": columns[0], "y": columns[1],
         "line": {**line_style(number), "shape": "hv"}}
        for number, (key, curve) in enumerate(chosen)
        for columns in [curve.columns()]
    ]  # fmt: skip


def work(history: History) -> Figure | None:
    """Samples of each worker's grants."""
    if not history.work:
        return None
    layout = {"height": 320, "xaxis": axis("seconds"), "yaxis": axis("samples granted", rangemode="tozero")}
    left = len(history.work) - MOST_LINES
    note = f"{left} more workers are not shown." if left > 0 else ""
    return {
        "id": "work",
        "title": "Work granted",
        "data": _many(dict(sorted(history.work.items())), _name),
        "layout": layout,
        "note": note,
    }


def tracks(history: History) -> Figure | None:
    """What the strategy tracks: k, thresholds, bounds, shares."""
    if not history.tracks:
        return None

    def name(key: tuple[str, int | None]) -> str:
        return visible(key[0]) if key[1] is None else f"{visible(key[0])}, worker {key[1]}"

    layout = {"height": 320, "xaxis": axis("seconds"), "yaxis": axis("value")}
    return {
        "id": "tracks",
        "title": "What the strategy tracks",
        "data": _many(history.tracks, name),
        "layout": layout,
        "note": "",
    }


def states(history: History) -> Figure | None:
    """The state that the strategy gave each worker."""
    if not history.states:
        return None
    names = sorted({state for marks in history.states.values() for _, state, _ in marks})
    over = history.seconds if history.marks_end is None else history.marks_end
    lane, height = _lane_axis(sorted(history.states))
    data = []
    for number, state in enumerate(names):
        bars = [
            (worker, end - at, at, visible(reason))
            for worker, marks in sorted(history.states.items())
            for (at, found, reason), end in zip(marks, [*(at for at, _, _ in marks[1:]), over], strict=True)
            if found == state and end > at
        ]
        y, x, base, why = map(list, zip(*bars, strict=True)) if bars else ([], [], [], [])
        data.append({
            "type": "bar", "orientation": "h", "name": visible(state), "y": y, "x": x, "base": base, "customdata": why,
            "width": height,
            "hovertemplate": f"worker %{{y}}: {visible(state)}<br>%{{customdata}}<extra></extra>",
            "marker": marker_style(number),
        })  # fmt: skip
    layout = {
        "barmode": "overlay", "height": max(220, 60 + 22 * len(history.states)), "xaxis": axis("seconds"),
        "yaxis": lane,
    }  # fmt: skip
    some = f"{len(history.states)} of {history.workers:,} workers" if history.workers > history.lanes else ""
    first = f"the first {over:.3g} s" if history.marks_end is not None else ""
    note = f"Shown: {' in '.join(filter(None, (first, some)))}." if some or first else ""
    return {"id": "states", "title": "States", "data": data, "layout": layout, "note": note}


def traffic(history: History) -> Figure | None:
    """Bytes up and down so far."""
    if not history.traffic.points:
        return None
    at, up, down = history.traffic.columns()
    if not up[-1] and not down[-1]:
        return None
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": at,
            "y": [value / 1e6 for value in values],
            "line": line_style(number),
        }
        for number, (name, values) in enumerate((("up", up), ("down", down)))
    ]
    layout = {"height": 280, "xaxis": axis("seconds"), "yaxis": axis("MB so far")}
    return {"id": "traffic", "title": "Traffic", "data": data, "layout": layout, "note": ""}
