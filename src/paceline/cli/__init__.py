"""The `paceline` command. Torch is loaded only by the command that trains.

Not public: use the command, or `paceline.launch` from Python.
"""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    from paceline.cli.app import run_app

    return run_app(arguments)


__all__ = ["main"]
