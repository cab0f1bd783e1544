"""The `paceline` command. Torch is loaded only by the command that trains.

Not public: use the command, or `paceline.launch` from Python.
"""

import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, or these arguments, and return the exit code."""
    try:
        from paceline.cli.app import run_app
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] == "paceline":
            raise
        print(f"paceline: cannot start without {error.name}: {error}; pip install paceline, on Linux", file=sys.stderr)
        return 2
    code = run_app(arguments)
    if arguments is None:  # the process ends now, which takes a while, and its exit code must be the command's
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    return code


__all__ = ["main"]
