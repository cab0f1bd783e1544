"""`breakpoint()` in a worker's script: a debugger on the terminal where there is one worker, else a line that says why.

A worker leads its own session and its output goes through the launcher, so it opens the terminal by its name. The
launcher keeps its progress bar off the terminal as long as the debugger waits for a command.
"""

import os
import pdb
import sys
import types
from collections.abc import Callable
from typing import Any

NOT_HERE = (
    "paceline: WARNING: breakpoint() is ignored: {why}; run with --workers 1 in a terminal, run `python {script}`, or "
    "set PYTHONBREAKPOINT to a debugger that needs no terminal"
)

Announce = Callable[..., None]  # takes whether a debugger waits, and whether on the terminal


class TerminalDebugger(pdb.Pdb):
    """The debugger on a terminal that is not this process's own."""

    def __init__(self, terminal: str, announce: Announce) -> None:
        # Else a session's leader without a terminal would make it its own.
        descriptor = os.open(terminal, os.O_RDWR | os.O_NOCTTY)
        super().__init__(
            stdin=open(descriptor, encoding="utf-8", errors="replace", closefd=False),  # noqa: SIM115
            stdout=open(descriptor, "w", encoding="utf-8", errors="replace", closefd=False),  # noqa: SIM115
            nosigint=True,  # Ctrl-C is the launcher's
        )
        self._announce = announce

    def interaction(self, *given: Any, **named: Any) -> None:
        """Wait for commands, with the launcher's display off the terminal."""
        self._announce(True)
        try:
            super().interaction(*given, **named)
        finally:
            self._announce(False)


class BreakpointHook:
    """The `sys.breakpointhook` of a process that runs the script."""

    def __init__(
        self, terminal: str | None, why_not: str, script: str, warn: Callable[[str], bool], announce: Announce
    ) -> None:
        """`terminal` is where worker 0 may ask for commands; without one, `why_not` says why there is none.

        `warn` shows a line that all workers share once; it returns False if this process has to print it itself.
        """
        self._terminal = terminal
        self._not_here = NOT_HERE.format(why=why_not, script=script)
        self._warn = warn
        self._announce = announce
        self._debugger: TerminalDebugger | None = None

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Stop in the caller's frame, or warn that it cannot be done."""
        if os.environ.get("PYTHONBREAKPOINT", "") not in ("", "pdb.set_trace"):
            self._announce(True, on_terminal=False)  # from here on it may stop the script at any time
            return sys.__breakpointhook__(*given, **named)
        if self._terminal is None:
            if not self._warn(self._not_here):
                print(self._not_here, file=sys.stderr)
            return None
        self._debugger = self._debugger or TerminalDebugger(self._terminal, self._announce)
        frame: types.FrameType = sys._getframe(1)
        self._debugger.set_trace(frame)
        return None


def terminal_of_this_process() -> str | None:
    """Return the name of the terminal that this process reads from; None if it has none or runs in the background."""
    try:
        if os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp():
            return os.ttyname(0)
    except OSError:
        pass
    return None
