"""Photograph what docs/howto shows: `python docs/tools/write_screens.py` (needs chromium and playwright).

A report of eight workers in a light browser, a comparison in a dark one, and the live view of a run that is halfway,
all of the simulator. Not part of `make pages`: the same page is other bytes in another version of the browser or with
other fonts.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

import paceline.tasks
from paceline.cli import main
from paceline.records import Lines, page
from paceline.records.following import Followed
from paceline.records.live_view import LiveView

FOLDER = Path(__file__).parents[1] / "howto"
WIDTH = 900  # pixels, of which a reader's column shows most
COLUMNS, ROWS = 91, 14  # of the terminal that is shown
MOST_BYTES = 150_000
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def pages(folder: Path) -> dict[str, tuple[Path, str, int]]:
    """Make both pages; return for each picture the page, the colours and the height that is shown."""
    run = paceline.launch(
        paceline.tasks.get("digits"), engine="sim", strategy="bsp", scenario="uneven8", epochs=1,
        runs_dir=folder / "runs",
    )  # fmt: skip
    page.written(run.journal, folder / "report.html")
    strategies = [word for name in ("bsp", "dasp", "balanced") for word in ("--strategy", name)]
    with contextlib.chdir(folder), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
        code = main(["compare", *strategies, "--scenario", "uneven8", "--task", "digits", "--target", "accuracy=0.85",
                     "--seeds", "2", "--report", "compare.html"])  # fmt: skip
    if code:
        raise SystemExit(f"the comparison failed with exit code {code}")
    (folder / "live.html").write_text(live_page(), encoding="utf-8")
    return {
        "report.png": (folder / "report.html", "light", 980),
        "comparison.png": (folder / "compare.html", "dark", 760),
        "live.png": (folder / "live.html", "dark", 250),
    }


def live_page() -> str:
    """Return the live view as a page: what `paceline watch` draws when it has read half of a journal."""
    lines, view = Lines(), LiveView()
    digits = paceline.tasks.get("digits")
    paceline.launch(
        digits, engine="sim", strategy="dasp", scenario="uneven8", epochs=4, runs_dir=None, sink=lines
    )  # fmt: skip
    followed = Followed(view)
    for line in lines[: len(lines) // 2]:
        followed.write(line)
        followed.look(getattr(line, "at", 0.0))
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(view.drawn(COLUMNS, ROWS))
    html = console.export_html(theme=MONOKAI, inline_styles=True)
    return html.replace("<body>", '<body data-drawn="yes">')


def photograph() -> None:
    """Write the pictures."""
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        raise SystemExit("needs chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="paceline-screens-") as made, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for name, (place, colours, height) in pages(Path(made)).items():
            tab = browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme=colours)
            tab.goto(place.as_uri())
            tab.wait_for_selector("body[data-drawn=yes]")
            tab.screenshot(path=FOLDER / name)
            tab.close()
            if (FOLDER / name).stat().st_size > MOST_BYTES:
                raise SystemExit(f"{name} has more than {MOST_BYTES:,} bytes: show less of the page")
        browser.close()


if __name__ == "__main__":
    sys.exit(photograph())
