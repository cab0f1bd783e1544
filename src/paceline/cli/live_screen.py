"""The live view on a terminal, and its plain lines where there is none.

What scripts print appears above the view. The cursor stays visible, so a process that is killed leaves a terminal in
order. Drawing takes at most a small share of one core: the costlier a screen is, the rarer it is drawn.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from paceline.cli.streams import say
from paceline.records.terminals import closed_is_fine

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from paceline.records.live_view import LiveView
    from paceline.server.progress import Progress

DRAW_S = 0.5  # between two screens, at least
DRAW_SHARE = 0.004  # of one core's time, at most
LINE_S = 10.0  # between two plain lines, at least
LINE_SHARE = 0.05  # of the time so far, at least: a run of days is not told in a hundred thousand lines

Listener = Callable[["Progress"], None]


class Display(Protocol):
    """Where a view is shown."""

    def show(self, view: "LiveView") -> None:
        """Show the view, unless it was shown a moment ago."""

    def pause(self) -> None:
        """Leave the terminal to somebody else until the next `show`."""


class LiveScreen:
    """Draws a view at the bottom of a terminal."""

    def __init__(self, console: "Console", live: "Live") -> None:
        self._console = console
        self._live = live
        self._next = 0.0  # the moment of the next screen

    @closed_is_fine()
    def show(self, view: "LiveView") -> None:
        """Draw the view, unless it was drawn a moment ago."""
        began = time.monotonic()
        if began < self._next and view.ended is None:
            return
        used = time.thread_time()
        if not self._live.is_started:
            self.start()
        self._live.update(view.drawn(self._console.width, self._console.height), refresh=True)
        self._next = began + max(DRAW_S, (time.thread_time() - used) / DRAW_SHARE)

    def start(self) -> None:
        """Take the terminal's last lines."""
        self._live.start()
        self._console.show_cursor(True)

    @closed_is_fine()
    def pause(self) -> None:
        """Remove the view until it is shown again."""
        self._live.stop()
        self._next = 0.0


class PlainLines:
    """Tells a view in single lines, ever less often."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = self._began + LINE_S

    def show(self, view: "LiveView") -> None:
        """Print a line, unless one was printed a while ago."""
        now = time.monotonic()
        if now >= self._next:
            say(view.line())
            self._next = now + max(LINE_S, LINE_SHARE * (now - self._began))

    def pause(self) -> None:
        """Do nothing: lines come so rarely that they disturb nobody."""


@contextlib.contextmanager
def displayed(*, to_output: bool = False, transient: bool = True) -> Iterator[Display]:
    """Yield where to show a view: standard error, or output. A `transient` screen is removed at the end."""
    stream = sys.stdout if to_output else sys.stderr
    if not stream.isatty():
        yield PlainLines()
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=not to_output)
    # What a script prints goes to standard output even under the view, unless both are the same terminal.
    live = Live(
        Text("starting"), console=console, auto_refresh=False, transient=transient, vertical_overflow="crop",
        redirect_stdout=sys.stdout.isatty(), redirect_stderr=True,
    )  # fmt: skip
    screen = LiveScreen(console, live)
    try:
        with closed_is_fine():
            screen.start()
            live.refresh()
        yield screen
    finally:
        with closed_is_fine():
            live.stop()


@contextlib.contextmanager
def progress_shown(*, quiet: bool, json: bool = False) -> Iterator[Listener | None]:
    """Yield a listener that shows a run as it goes on; None if nothing is to be shown.

    With `json`, lines that no terminal shows would only be in the way of whoever reads the report.
    """
    if quiet or (json and not sys.stderr.isatty()):
        yield None
        return
    from paceline.records.live_view import Headway, LiveView

    view = LiveView()
    with displayed() as display:

        def listen(progress: "Progress") -> None:
            if progress.paused:
                display.pause()
                return
            for recent in progress.recent:
                view.write(recent.line, recent.version)
            done = progress.samples_used + progress.samples_lost
            standing = Headway(
                progress.seconds, progress.versions, done, progress.total_samples, progress.metrics, progress.loss
            )
            view.stands(standing, time.monotonic())
            display.show(view)

        yield listen
