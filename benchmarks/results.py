"""Dated results of benchmarks: `results/<question>.md` for people, the raw rows as `.json` beside it.

A result is written by the command that measured it and by nothing else, which may explain the same numbers anew later
on. A bar that was missed stays there as missed.
"""

import json
import os
import platform
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

import sources
from sources import Sources

FOLDER = Path(__file__).parent / "results"
PACKAGES = ("paceline", "torch", "numpy", "msgspec", "simpy", "scikit-learn")


class Verdict(msgspec.Struct, frozen=True):
    """One bar and how the measurement stands to it."""

    name: str
    value: str
    bar: str
    passed: bool


def write(
    question: str,
    command: str,
    verdicts: Sequence[Verdict],
    rows: Sequence[dict[str, Any]],
    notes: str,
    of: Sources,
    folder: Path = FOLDER,
    packages: Sequence[str] = (),
    details: dict[str, Any] | None = None,
) -> Path:
    """Write the result of one run; the rows become its table.

    `of` is what was found before the measurement; `packages` are those it compares, beside the usual; `details` are
    further facts for the raw file alone. If the sources changed while they were measured, the result is kept aside and
    SystemExit says where.
    """
    problem = changed_since(of)
    if problem:
        folder = Path(tempfile.mkdtemp(prefix="paceline-result-"))
        of = Sources(of.commit, (*of.problems, problem))
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "question": question,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": of.commit,
        "tree": of.tree,
        "machine": machine(),
        "versions": {"python": platform.python_version(), **_versions(*PACKAGES, *packages)},
        "command": command,
    }
    raw = {**facts, "verdicts": [msgspec.to_builtins(verdict) for verdict in verdicts], "rows": list(rows)}
    raw |= details or {}
    (folder / f"{question}.json").write_text(json.dumps(raw, indent=1) + "\n")
    page = folder / f"{question}.md"
    page.write_text(_page(facts, verdicts, rows, notes))
    if problem:
        raise SystemExit(f"{problem}: this is no result of commit {of.commit}; what was measured is in {folder}")
    return page


def changed_since(of: Sources) -> str:
    """What happened to the sources since they were looked at; empty if nothing did, or if they were unclean already."""
    if of.copied or not of.clean:
        return ""
    return "" if sources.look() == of else "the sources changed while they were measured"


def retell(question: str, notes: str, folder: Path = FOLDER) -> Path:
    """Write the page of a result anew from its raw rows, with other explanations: nothing that was measured changes."""
    raw = json.loads((folder / f"{question}.json").read_text())
    verdicts = [msgspec.convert(verdict, Verdict) for verdict in raw.pop("verdicts")]
    rows = raw.pop("rows")
    page = folder / f"{question}.md"
    page.write_text(_page(raw, verdicts, rows, notes))
    return page


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a Markdown table; columns in the order they first appear."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def _page(facts: dict[str, Any], verdicts: Sequence[Verdict], rows: Sequence[dict[str, Any]], notes: str) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    parts = [
        f"# {facts['question']}",
        f"{facts['date']} · commit {facts['commit']} · tree: {facts.get('tree', 'not recorded')} · {facts['machine']}",
        f"{versions}",
        f"    {facts['command']}",
        notes.strip(),
    ]
    if verdicts:
        parts.append("## Verdicts")
        parts.append(table([_verdict_row(verdict) for verdict in verdicts]))
    if rows:
        parts += ["## Measurements", table(rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdict_row(verdict: Verdict) -> dict[str, str]:
    return {
        "bar": f"{verdict.name} {verdict.bar}",
        "measured": verdict.value,
        "verdict": "met" if verdict.passed else "**missed**",
    }


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split()).replace("|", "\\|")


def machine() -> str:
    """Processor, cores and memory."""
    model = platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    information = Path("/proc/cpuinfo")
    if information.exists():
        names = [line for line in information.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":")[1].strip() if names else model
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB"


def _versions(*names: str) -> dict[str, str]:
    return {name: version(name) for name in names}
