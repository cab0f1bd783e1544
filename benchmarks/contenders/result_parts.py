"""A result that is measured in parts, each at its own time: one page with all of them, each with its date and commit.

What a part has found replaces what it found before; the others stay as they were measured.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

import results
from contenders.bars import Bar
from sources import Sources


class Part(msgspec.Struct, frozen=True):
    """What one part has found, and of what."""

    date: str
    commit: str
    tree: str
    machine: str
    minutes: float
    verdicts: list[results.Verdict]
    rows: list[dict[str, Any]]

    @staticmethod
    def of(bars: Sequence[Bar], rows: Sequence[dict[str, Any]], sources: Sources | None, minutes: float) -> "Part":
        """Make one of what was measured just now."""
        verdicts = [results.Verdict(f"{bar.meaning} (`{bar.name}`)", bar.value, bar.spelt, bar.passed) for bar in bars]
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        commit, tree = ("", "") if sources is None else (sources.commit, sources.tree)
        return Part(date, commit, tree, results.machine(), minutes, verdicts, list(rows))


def load(question: str, folder: Path = results.FOLDER) -> dict[str, Part]:
    """The parts of a result by name; none if there is no result, or one that was measured in one go."""
    path = folder / f"{question}.json"
    if not path.exists():
        return {}
    raw = json.loads(path.read_text())
    verdicts = {verdict["name"]: msgspec.convert(verdict, results.Verdict) for verdict in raw["verdicts"]}
    return {
        name: Part(
            **{key: told[key] for key in ("date", "commit", "tree", "machine", "minutes")},
            verdicts=[verdicts[bar] for bar in told["bars"]],
            rows=[row for row in raw["rows"] if row["part"] == name],
        )
        for name, told in raw.get("parts", {}).items()
    }


def write(
    question: str, command: str, parts: Mapping[str, Part], notes: Callable[[Mapping[str, Part]], str], of: Sources,
    folder: Path = results.FOLDER, packages: Sequence[str] = (),
) -> Path:  # fmt: skip
    """Write the page of all parts, in this order."""
    verdicts = [verdict for part in parts.values() for verdict in part.verdicts]
    rows = [{"part": name, **row} for name, part in parts.items() for row in part.rows]
    told = {
        name: {
            **{key: getattr(part, key) for key in ("date", "commit", "tree", "machine", "minutes")},
            "bars": [verdict.name for verdict in part.verdicts],
        }
        for name, part in parts.items()
    }
    return results.write(question, command, verdicts, rows, notes(parts), of, folder, packages, {"parts": told})


def table(parts: Mapping[str, Part]) -> str:
    """When and of what each part was measured."""
    return results.table([
        {
            "part": name, "measured": part.date, "commit": part.commit, "tree": part.tree,
            "minutes": f"{part.minutes:.0f}", "machine": part.machine,
            "bars met": f"{sum(verdict.passed for verdict in part.verdicts)} of {len(part.verdicts)}",
        }
        for name, part in parts.items()
    ])  # fmt: skip
