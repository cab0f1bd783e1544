"""How far the run is, shown on a terminal while it lasts."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.server.plan import Progress

Listener = Callable[["Progress"], None]


@contextlib.contextmanager
def progress_shown(*, quiet: bool) -> Iterator[Listener | None]:
    """A listener that draws a bar on standard error; None where nobody would see it."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TaskProgressColumn())
    console = Console(stderr=True)
    # A script's prints belong to standard output even while the bar is there, unless both are the same terminal.
    with Bar(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        line = bar.add_task("starting", total=None)

        def draw(progress: "Progress") -> None:
            total, done = progress.total_samples, progress.samples_used
            bar.update(line, description=describe(progress), total=total, completed=done)

        yield draw


def describe(progress: "Progress") -> str:
    """Where the run stands, in one line."""
    parts = [f"{progress.seconds:,.1f} s", f"version {progress.versions:,}"]
    numbers = dict(progress.metrics)
    if progress.loss is not None:
        numbers.setdefault("loss", progress.loss)
    parts += [f"{name} {value:.4g}" for name, value in sorted(numbers.items())]
    return " · ".join(parts)
