"""Does a report of a million events open? `paceline report` on long journals, and its page in a browser.

    python benchmarks/bench_pages.py            # writes results/pages.md and .json; needs chromium and playwright
    python benchmarks/bench_pages.py --quick    # short journals; writes nothing

The journals are those of the simulator's light workers, a line for each decision, as every engine writes them.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

import results
import sources
from paceline import scenario as scenarios
from paceline.engines.sim.light import simulate
from paceline.records.journal import Writer
from paceline.strategies import build
from results import Verdict

STRATEGIES = ("bsp", "asp", "dasp")  # one Apply for all, one for each, states and tracks of each worker
WORKERS, EVENTS = 1_000, 1_000_000
QUICK = (60, 5_000)
WORK = 16  # samples of a push
OPENED = 5  # times
MOST_REPORT_S, MOST_MB, MOST_PAGE_MB, MOST_OPEN_S = 60.0, 2_000.0, 8.0, 3.0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
COMMAND = "python benchmarks/bench_pages.py"
SCENARIO = """
seed = 7
[compute]
seconds_per_sample = 0.01
jitter = "lognormal:0.3"
[network]
latency_ms = 1
[[workers]]
count = {fast}
[[workers]]
count = {slow}
speed = 0.4
[[events]]
kind = "slow"
worker = 3
at = 10.0
for = 20.0
factor = 4.0
[[events]]
kind = "crash"
worker = 5
at = 12.0
[[events]]
kind = "rejoin"
worker = 5
at = 20.0
"""
OPEN_JS = """() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done({
    seconds: performance.now() / 1000,
    plots: document.querySelectorAll('.js-plotly-plot .main-svg:first-of-type').length,
    elements: document.querySelectorAll('*').length,
}))))"""
NOTES = f"""\
Each journal is of {WORKERS:,} workers, 60 of 100 of them 2.5 times faster than the others, with jitter, a slow-down, a
crash and a return. It has a decision for each of {EVENTS:,} pushes and is written by light workers of the simulator,
whose lines are those of every engine. `paceline report` is a process of its own: `report_s` is from its start to its
end by the clock, `report_cpu_s` its processor time, `peak_mb` its largest resident memory as the kernel counts it.

`open_s` is the median of {OPENED} openings of the page in a new tab of a headless Chromium that is running already,
1100 by 900 pixels, from a file. It is the browser's own time from the start of the navigation until the second frame
after every plot was drawn (`performance.now()`), Plotly's script, which is in the page, included.
"""
# Its parent's accounts have its largest memory, too, but there the parent's own memory counts until `exec`.
REPORT = """
import re, sys
from pathlib import Path
from paceline.cli import main
code = main(sys.argv[1:])
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
sys.exit(code)
"""


class Row(msgspec.Struct, frozen=True):
    """One journal and its page."""

    strategy: str
    workers: int
    decisions: int
    journal_mb: float
    report_s: float
    report_cpu_s: float
    peak_mb: float
    page_mb: float
    plots: int = 0
    elements: int = 0
    open_s: float | None = None  # None: not opened
    slowest_open_s: float | None = None


def make(strategy: str, workers: int, events: int, place: Path) -> None:
    """Write a journal with so many pushes."""
    slow = workers * 2 // 5
    text = SCENARIO.format(fast=workers - slow, slow=slow)
    writer = Writer(place)
    simulate(
        build(strategy, 0), scenarios.parse(text, "pages", Path()), work=WORK, model_bytes=4_000_000,
        samples=WORK * events, sink=writer,
    )  # fmt: skip
    writer.close()


def reported(strategy: str, workers: int, journal: Path, place: Path) -> Row:
    """Run `paceline report` in a process of its own, and measure it."""
    with journal.open("rb") as file:
        decisions = sum(line.startswith(b'{"type":"decision"') for line in file)
    began = time.monotonic()
    command = [sys.executable, "-c", REPORT, "report", str(journal), "--output", str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        said = process.stdout.read().decode(errors="replace") if process.stdout is not None else ""
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"`paceline report` failed: {said}")
    return Row(
        strategy, workers, decisions, journal.stat().st_size / 1e6, seconds, used.ru_utime + used.ru_stime,
        int(said.split()[-1]) * 1024 / 1e6, place.stat().st_size / 1e6,
    )  # fmt: skip


def opened(browser: Any, row: Row, page: Path) -> Row:
    """Open a page some times, each in a new tab."""
    found = []
    for _ in range(OPENED):
        tab = browser.new_page(viewport={"width": 1100, "height": 900})
        tab.goto(page.as_uri(), wait_until="commit")
        tab.wait_for_selector("body[data-drawn=yes]")
        found.append(tab.evaluate(OPEN_JS))
        tab.close()
    seconds = [each["seconds"] for each in found]
    last = found[-1]
    if not last["plots"]:
        raise SystemExit(f"the page of {row.strategy} shows no plot")
    return msgspec.structs.replace(
        row, plots=last["plots"], elements=last["elements"], open_s=statistics.median(seconds),
        slowest_open_s=max(seconds),
    )  # fmt: skip


def measure(strategies: Sequence[str], workers: int, events: int, folder: Path, browser: Any) -> list[Row]:
    """Make each journal and its page, one after the other."""
    rows = []
    for strategy in strategies:
        journal, page = folder / f"{strategy}.jsonl", folder / f"{strategy}.html"
        make(strategy, workers, events, journal)
        row = reported(strategy, workers, journal, page)
        rows.append(row if browser is None else opened(browser, row, page))
        journal.unlink()
        print(rows[-1], flush=True)
    return rows


def judge(rows: list[Row]) -> list[Verdict]:
    """Four bars, each held against the worst of all journals."""
    found = []
    for name, value, most, unit in (
        ("seconds of `paceline report`", max(row.report_s for row in rows), MOST_REPORT_S, "s"),
        ("its largest memory", max(row.peak_mb for row in rows), MOST_MB, "MB"),
        ("the page", max(row.page_mb for row in rows), MOST_PAGE_MB, "MB"),
        ("until every plot is drawn", max(row.open_s or 0.0 for row in rows), MOST_OPEN_S, "s"),
    ):
        found.append(Verdict(name, f"{value:,.3g} {unit}", f"<= {most:,g} {unit}", value <= most))
    return found


def main() -> int:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short journals, to see that it works; writes no result")
    parser.add_argument("--out", type=Path, help="folder of the result, instead of benchmarks/results")
    sources.add_options(parser)
    given = parser.parse_args()
    if CHROMIUM is None:
        raise SystemExit("needs chromium: apt-get install chromium")
    of = sources.checked(given) if not given.quick or given.out else None
    from playwright.sync_api import sync_playwright

    workers, events = QUICK if given.quick else (WORKERS, EVENTS)
    with tempfile.TemporaryDirectory(prefix="paceline-pages-") as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        facts = {"chromium": browser.version}
        browser.new_page().close()
        rows = measure(STRATEGIES, workers, events, Path(folder), browser)
        browser.close()
    verdicts = judge(rows)
    for each in verdicts:
        print(f"{each.name}: {each.value} ({each.bar}): {'met' if each.passed else 'MISSED'}")
    if of is not None:
        notes = f"{NOTES}\nChromium {facts['chromium']}.\n"
        told = [msgspec.to_builtins(row) for row in rows]
        place = given.out or results.FOLDER
        print(results.write("pages", COMMAND, verdicts, told, notes, of, place, ["plotly"], facts))
    return 0 if all(each.passed for each in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
