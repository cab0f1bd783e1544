"""Runs on real processes: every test starts them here."""

import contextlib
from pathlib import Path

import paceline
from paceline.records import journal


def launch(script, folder=None, **settings):
    """Two workers of one thread each, and nothing is evaluated, unless the settings say otherwise.

    The run's own folder is made in `folder`; without one it leaves nothing.
    """
    given = {"engine": "local", "threads": 1, "evaluate_every": "off", **settings}
    if folder is not None:
        given.setdefault("runs_dir", folder / "runs")
    if "scenario" not in given:  # which says itself how many there are
        given.setdefault("workers", 2)
    return paceline.launch(script, **given)


def lines_of(run):
    """Its journal."""
    return list(journal.read(run.journal))


def named_children(launcher):
    """The processes of a launcher that runs in its program's main thread, by the names it gave them."""
    named = {}
    for number in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            command = Path(f"/proc/{number}/cmdline").read_text().rstrip("\0").split("\0")
            name = command[-2] if len(command) > 1 else command[0]
            named["nursery" if "nursery import main" in command[-1] else name.removeprefix("paceline: ")] = int(number)
    return named
