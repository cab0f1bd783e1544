"""The report of a run as one HTML file that opens offline: verdict first, then the plots, then the numbers.

Plotly's script is in the file. The page follows the reader's light or dark setting, and prints light.
"""

import importlib.util
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from paceline.core.errors import OptionError
from paceline.core.values import visible
from paceline.records import history as histories
from paceline.records.diagnosis import diagnose
from paceline.records.figures import Figure, figures
from paceline.records.journal import Sink, read, spelled_out
from paceline.records.metrics import Metrics
from paceline.records.report import Report
from paceline.records.text import facts, worker_rows
from paceline.records.wait_attribution import WaitAttribution

INSTALL = "pip install 'paceline[report]'"
STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #ffffff; --soft: #5c5c5c; --line: #d9d9d9; --card: #f5f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececec; --paper: #16181c; --soft: #a6a6a6; --line: #3a3d44; --card: #20242b; }
}
@media print {
  :root { --ink: #000000; --paper: #ffffff; --soft: #444444; --line: #cccccc; --card: #ffffff; }
  section { break-inside: avoid; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1100px; padding: 1.5rem; background: var(--paper); color: var(--ink);
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
.soft, figcaption { color: var(--soft); font-size: .9rem; }
.verdict { background: var(--card); border-left: 5px solid #0072b2; padding: .8rem 1.1rem; margin: 1rem 0; }
.verdict p { margin: .25rem 0; } figure { margin: 0; }
#said { background: var(--card); padding: .5rem .8rem; margin: .4rem 0; min-height: 1.5rem; white-space: pre-wrap; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .15rem .7rem .15rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } td.text { text-align: left; white-space: normal; }
"""
DRAW = """
const figures = JSON.parse(document.getElementById("figures").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
function themed(layout, light) {
  const ink = light ? "#1a1a1a" : "#ececec", line = light ? "#d9d9d9" : "#3a3d44";
  const found = structuredClone(layout);
  for (const name of Object.keys(found).filter(name => /^[xy]axis/.test(name)))
    Object.assign(found[name], {gridcolor: line, zerolinecolor: line, linecolor: line});
  // Plotly draws the chosen button nearly white in any case, so all of them are bright, with dark words.
  for (const menu of found.updatemenus ?? []) Object.assign(menu, {bgcolor: "#d5d9e0", font: {color: "#1a1a1a"}});
  return Object.assign(found, {paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: {color: ink},
    margin: {l: 50, r: 20, t: layout.updatemenus ? 60 : 40, b: 40},
    legend: layout.updatemenus ? {orientation: "h", y: -0.25} : {orientation: "h", y: 1.02, yanchor: "bottom"},
    modebar: {bgcolor: "rgba(0,0,0,0)", color: "#888888"}});
}
function draw(light) {
  for (const figure of figures)
    Plotly.react(figure.id, figure.data, themed(figure.layout, light), {responsive: true, displaylogo: false});
}
draw(!dark.matches);
dark.addEventListener("change", () => draw(!dark.matches));
window.addEventListener("beforeprint", () => draw(true));
window.addEventListener("afterprint", () => draw(!dark.matches));
const lanes = document.getElementById("lanes");
if (lanes) lanes.on("plotly_click", event => {
  const point = event.points[0], told = point.customdata;
  const what = `worker ${point.y}, ${point.data.name}: ${point.x.toPrecision(4)} s from ${point.base.toPrecision(6)} s`;
  const more = `, clock ${told[0]}${told[1] ? `, ${told[1]} samples` : ""}\\n${told[2]}`;
  document.getElementById("said").textContent = what + more;
});
document.body.dataset.drawn = "yes";
"""


def written(journal: Path, place: Path) -> int:
    """Write the page of a journal, finished or growing; return its bytes."""
    metrics, waits = Metrics(), WaitAttribution()
    _fill(journal, metrics, waits)
    if metrics.header is None:
        raise OptionError(f"{journal} holds no run yet: it has no header")
    report = metrics.report(str(journal))
    workers = max((each.worker for each in report.per_worker), default=-1) + 1
    history = histories.History(report.seconds, workers)
    _fill(journal, history)
    over = metrics.ended is not None
    text = page(report, figures(history, waits.waited_for()), waits, finished=over)
    try:
        return place.write_bytes(text.encode())
    except OSError as error:
        raise OptionError(f"--output: cannot write {place}: {error.strerror}") from error


def _fill(journal: Path, *sinks: Sink) -> None:
    for line in read(journal):
        for sink in sinks:
            sink.write(line)


def page(report: Report, drawn: Sequence[Figure], waits: WaitAttribution, *, finished: bool) -> str:
    """Return the page."""
    found = diagnose(report, waits.culprits())
    title = f"{report.strategy} · {report.engine} · {report.workers:,} workers · seed {report.seed}"
    state = "" if finished else "<p>The run goes on, or was killed: this is what its journal holds so far.</p>"
    warnings = "".join(f"<li>{safe(text)}</li>" for text in report.warnings)
    head = f"""{state}<div class="verdict"><p><b>What held it back:</b> {safe(found.what)}</p>
<p><b>Why:</b> {safe(found.why)}</p><p><b>What to try:</b> {_coded(found.advice)}</p></div>
{f"<h2>Warnings</h2><ul>{warnings}</ul>" if warnings else ""}"""
    tail = f"""<section><h2>Numbers</h2>{_table(facts(report))}</section>
<section><h2>Workers</h2><div class="wide">{grid(worker_rows(report))}</div></section>"""
    return document(title, head, drawn, tail)


def document(title: str, head: str, drawn: Sequence[Figure], tail: str) -> str:
    """Return a page with this markup before and after its plots."""
    data = json.dumps(spelled_out(list(drawn)), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{safe(title)}</title><style>{STYLE}</style></head><body>
<h1>{safe(title)}</h1>
{head}{"".join(_section(figure) for figure in drawn)}{tail}
<script type="application/json" id="figures">{data}</script>
<script>{_plotly()}</script><script>{DRAW}</script></body></html>
"""


def _section(figure: Figure) -> str:
    name, title = figure["id"], safe(figure["title"])
    said = '<div id="said" class="soft" aria-live="polite">Nothing is clicked yet.</div>' if name == "lanes" else ""
    note = f"<figcaption>{safe(figure['note'])}</figcaption>" if figure["note"] else ""
    plot = f'<div id="{name}" role="img" aria-label="{title}"></div>'
    return f"<section><h2>{title}</h2><figure>{plot}{note}</figure>{said}</section>"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = [f'<th scope="row">{safe(name)}</th><td class="text">{safe(text)}</td>' for name, text in rows]
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the first row holds the headings."""
    head = "".join(f'<th scope="col">{safe(cell)}</th>' for cell in rows[0])
    cells = ["".join(f"<td>{safe(cell)}</td>" for cell in row) for row in rows[1:]]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in cells)}</tbody></table>"


def require_script() -> None:
    """Raise if the script that draws a page is not installed."""
    if importlib.util.find_spec("plotly") is None:
        raise OptionError(f"the page needs plotly's script: {INSTALL}")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise OptionError(f"the page needs plotly's script: {INSTALL}") from None
    script: Any = get_plotlyjs()
    return str(script).replace("</script", "<\\/script")


def _coded(text: str) -> str:
    """Return the text with what stands between backquotes as code."""
    return "".join(f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(safe(text).split("`")))


def safe(text: str) -> str:
    """Return the text as markup, with control characters escaped."""
    return escape(visible(text))
