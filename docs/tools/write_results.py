"""Write docs/results from benchmarks/results: `python docs/tools/write_results.py`.

Every page has the date, the commit and the machine of the measurement, a plot of its rows, how its bars stand, and what
to keep in mind. Nothing is measured here. What a result has to say lies in `result_pages.py`.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import quote  # noqa: E402
import result_pages  # noqa: E402
import results  # noqa: E402
import svg  # noqa: E402

FOLDER = ROOT / "docs" / "results"
MOST_BARS = 20  # verdicts in a table; of more than that only those that were missed are listed
MOST_WORDS = 1_400  # of a page: what was measured how is left to the result itself where it takes more


def pages() -> dict[Path, str]:
    """Return every file and its contents."""
    made: dict[Path, str] = {}
    for name, about in result_pages.PAGES.items():
        found = _read(name)
        if found is None:
            made[FOLDER / f"{name}.md"] = f"# {about.title}\n\n{about.question}\n\n*There is no result yet.*\n"
            continue
        drawn = about.plot(found["rows"])
        made[FOLDER / f"{name}.md"] = page(name, about, found, plotted=bool(drawn))
        if drawn:
            made[FOLDER / f"{name}.svg"] = svg.bars(about.plot_title, about.unit, drawn)
    made[FOLDER / "index.md"] = index()
    return made


def page(name: str, about: result_pages.Page, found: dict[str, Any], *, plotted: bool) -> str:
    """Return one page."""
    parts = [f"# {about.title}", about.question, when(found)]
    if plotted:
        parts.append(f"![{about.plot_title}]({name}.svg)")
    tables = [_unlinked(quote.QUOTES[table]()) for table in about.quote.split()] or [verdicts(found)]
    parts += ["## What was found", *tables]
    parts += ["## What to keep in mind", "\n".join(f"- {caveat}" for caveat in about.caveats)]
    source = f"Every row is in `benchmarks/results/{name}.md`, the raw numbers in `benchmarks/results/{name}.json`."
    told = notes(name, found)
    command = f"```text\n{found['command']}\n```"
    if told and _words([*parts, told, source]) <= MOST_WORDS:
        parts += ["## How it was measured", command, told, source]
    else:
        parts += ["## How it was measured", command, f"`benchmarks/results/{name}.md` describes it at length. {source}"]
    return "\n\n".join(parts) + "\n"


def when(found: dict[str, Any]) -> str:
    """Return date, commit and machine, as one line."""
    tree = found.get("tree", "not recorded")
    return f"*{found['date']} · commit {found['commit']} · tree: {tree} · {found['machine']}*"


def verdicts(found: dict[str, Any]) -> str:
    """Return how the bars stand: all of them, or where they are many those that were missed."""
    if len(found["verdicts"]) > MOST_BARS:
        return quote._met_and_missed(found)
    rows = [
        {
            "bar": f"{verdict['name']} {verdict['bar']}",
            "measured": verdict["value"],
            "": "met" if verdict["passed"] else "**missed**",
        }
        for verdict in found["verdicts"]
    ]
    return results.table(rows) if rows else "It has no bars."


def notes(name: str, found: dict[str, Any]) -> str:
    """Return what the benchmark says about itself: plain text, without pictures, links and tables."""
    text = (results.FOLDER / f"{name}.md").read_text(encoding="utf-8")
    text = text.partition(f"    {found['command']}\n")[2]
    text = re.split(r"^## (?:Verdicts|Measurements)", text, maxsplit=1, flags=re.M)[0]
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = _unlinked(text)
    text = re.sub(r"^#+ (.*)$", r"**\1**", text, flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def index() -> str:
    """Return the list of all results, each with its date and how many of its bars are met."""
    rows = []
    for name, about in result_pages.PAGES.items():
        found = _read(name)
        met = sum(verdict["passed"] for verdict in found["verdicts"]) if found else 0
        rows.append(
            {
                "result": f"[{about.title}]({name}.md)",
                "question": about.question,
                "date": found["date"].split()[0] if found else "none yet",
                "bars met": f"{met} of {len(found['verdicts'])}" if found else "",
            }
        )
    head = (
        "# Results\n\nWhat was measured, when, at which commit and on which machine, and what was missed. Each page is "
        "written from a result in `benchmarks/results` by `docs/tools/write_results.py`; `make bench` measures anew. A "
        "bar is what was asked for before it was measured. One that was missed stays there as missed.\n\n"
        "What the strategies' publications claim, beside what was measured: [claim by claim](publications.md).\n\n"
    )
    return f"{head}{results.table(rows)}\n"


def _read(name: str) -> dict[str, Any] | None:
    path = results.FOLDER / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _unlinked(text: str) -> str:
    """Links of results lead to files that the pages do not have."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def _words(parts: list[str]) -> int:
    return len(" ".join(parts).split())


if __name__ == "__main__":
    for path, contents in pages().items():
        path.write_text(contents, encoding="utf-8")
