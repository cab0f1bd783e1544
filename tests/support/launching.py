"""Runs on real processes: every test starts them here."""

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
