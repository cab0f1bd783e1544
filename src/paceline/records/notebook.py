"""The report in a notebook: the terminal's facts and table of workers as self-contained HTML.

It sets no colours, so it fits a light or a dark notebook. Every text is escaped: names of metrics, states and warnings
come from scripts and journals.
"""

from collections.abc import Iterable
from html import escape

from paceline.core.values import visible
from paceline.records.report import Report
from paceline.records.text import facts, worker_rows

LEFT = ' style="text-align:left"'
RIGHT = ' style="text-align:right"'


def html(report: Report, more: Iterable[tuple[str, str]] = ()) -> str:
    """Render a table of facts, with `more` facts at its end, and workers and warnings below."""
    title = f"{report.strategy} · {report.engine} · seed {report.seed}"
    rows = [*facts(report), ("workers", f"{report.workers:,}"), *more]
    if report.journal is not None:
        rows.append(("journal", report.journal))
    parts = [_facts_table(title, rows)]
    if report.per_worker:
        parts.append(f"<details><summary>each worker</summary>{_workers_table(worker_rows(report))}</details>")
    if report.warnings:
        parts.append(f"<ul>{''.join(f'<li>warning: {_safe(text)}</li>' for text in report.warnings)}</ul>")
    return f"<div>{''.join(parts)}</div>"


def _facts_table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    body = "".join(
        f'<tr><th scope="row"{LEFT}>{_safe(name)}</th><td{LEFT}>{_safe(value)}</td></tr>' for name, value in rows
    )
    return f"<table><caption{LEFT}>{_safe(title)}</caption><tbody>{body}</tbody></table>"


def _workers_table(rows: list[list[str]]) -> str:
    headings = "".join(f'<th scope="col"{RIGHT}>{_safe(heading)}</th>' for heading in rows[0])
    body = "".join(f"<tr>{''.join(f'<td{RIGHT}>{_safe(cell)}</td>' for cell in row)}</tr>" for row in rows[1:])
    return f"<table><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table>"


def _safe(text: str) -> str:
    return escape(visible(text))
