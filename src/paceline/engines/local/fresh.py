"""The first lines of a process that is an interpreter of its own: it is tied to its parent before it loads torch."""

from typing import NoReturn

from paceline.engines.local.prctl import resume_when_parent_dies


def main() -> NoReturn:
    """Be the process that the command line names, and exit."""
    resume_when_parent_dies()
    from paceline.engines.local import child

    child.main()
