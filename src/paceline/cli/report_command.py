"""`paceline report`, `watch` and `export`: a run for people and for other tools, from its files alone."""

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.live_screen import displayed
from paceline.cli.streams import say
from paceline.core.errors import OptionError
from paceline.core.settings import DEFAULT_RUNS_DIR
from paceline.core.values import nearest, shown, visible

JOURNALS = ("journal.jsonl", "journal.jsonl.gz")
ENDED_EARLY = 1  # exit code
WIDE = 140  # columns of a screen that no terminal shows


def report(
    run: Annotated[str, typer.Argument(metavar="RUN|JOURNAL", help="A run's folder or name, or a journal.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: report.html beside the journal.")
    ] = None,
) -> int:
    """Write a page about a run, finished, crashed or still going on: what held it back, why, and what to try."""
    from paceline.records import page

    journal = find_journal(run)
    place = output or journal.parent / "report.html"
    if place.suffix not in (".html", ".htm"):
        raise OptionError(f"--output: {shown(str(place))} must end in .html")
    size = page.written(journal, place)
    print(visible(os.fspath(place)))
    say(f"{size / 1e6:.1f} MB; it opens in any browser, offline")
    return 0


def export(
    run: Annotated[str, typer.Argument(metavar="RUN|JOURNAL", help="A run's folder or name, or a journal.")],
    form: Annotated[str, typer.Option("--format", metavar="perfetto|tensorboard|csv|parquet", help="For which tool.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="PLACE", help="Default: beside it.")] = None,
) -> int:
    """Write a run's journal in the format of another tool."""
    from paceline.records import export as exporting

    known = next((each for each in exporting.FORMATS if each == form), None)
    if known is None:
        raise OptionError(f"--format: unknown {shown(form)}; {nearest(form, exporting.FORMATS)}")
    journal = find_journal(run)
    name = journal.name.removesuffix(".gz").removesuffix(".jsonl")
    place = output or journal.with_name(name + exporting.ENDINGS[known])
    exporting.export(journal, known, place)
    print(visible(os.fspath(place)))
    return 0


def watch(
    run: Annotated[str, typer.Argument(metavar="RUN|JOURNAL", help="A run's folder or name, or a journal.")],
    every: Annotated[
        float, typer.Option("--every", metavar="S", min=0.1, max=3600, help="Seconds between looks.")
    ] = 0.5,
) -> int:
    """Follow a run from another terminal until it ends: how far it is, and what every worker does, and why.

    Exit code 1: nobody writes its journal any more, and it has not ended.
    """
    from paceline.records.following import Followed, grown
    from paceline.records.live_view import LiveView

    journal = find_journal(run)
    if journal.suffix == ".gz":
        raise OptionError(f"{shown(str(journal))} is compressed and cannot be followed; `paceline report` reads it")
    view = LiveView()
    followed = Followed(view)
    with displayed(to_output=True, transient=False) as display:
        for lines in grown(journal, every):
            for line in lines:
                followed.write(line)
            followed.look(time.monotonic())
            display.show(view)
            if view.ended is not None:
                break
    if not sys.stdout.isatty():
        print(view.drawn(WIDE).plain)
    if view.ended is not None:
        return 0
    if view.header is None:
        raise OptionError(f"nobody writes {shown(str(journal))}, and no run has begun in it")
    say(
        f"nobody writes {shown(str(journal))} any more, and its run has not ended: it was killed, or its machine "
        f"is gone; `paceline report {shlex.quote(run)}` shows how far it came"
    )
    return ENDED_EARLY


def find_journal(run: str) -> Path:
    """Return the journal of a run that is named by its folder, its name in `runs`, or the journal itself."""
    for place in (Path(run), DEFAULT_RUNS_DIR / run):
        try:
            if place.is_file():
                return place
            found = [place / name for name in JOURNALS if (place / name).is_file()]
            if found:
                return found[0]
            if place.is_dir():
                list(place.iterdir())  # raises if it may not be read
                raise OptionError(f"{shown(str(place))} holds no journal; give a run's folder, or a journal itself")
            if place.exists():
                raise OptionError(
                    f"{shown(str(place))} is neither a folder nor a file; give a run's folder, or a journal"
                )
        except OSError as error:
            raise OptionError(f"cannot read {shown(str(place))}: {error.strerror}") from error
    raise OptionError(f"there is no run {shown(run)}: give its folder, its name in {DEFAULT_RUNS_DIR}, or a journal")
