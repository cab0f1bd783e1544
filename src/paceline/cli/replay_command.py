"""`paceline replay`: does a fresh strategy decide as the journal says?"""

from pathlib import Path
from typing import Annotated

import typer


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A journal: journal.jsonl or .jsonl.gz.")],
    strategy: Annotated[
        str | None,
        typer.Option("--strategy", metavar="STRATEGY", help="Where it is now, if it has moved.", show_default=False),
    ] = None,
) -> int:
    """Feed a journal's events to a fresh strategy and compare every action (exit code 1 if one differs)."""
    from paceline.records import replay as replaying

    result = replaying.replay(file, strategy)
    if result.difference is None:
        print(f"{file}: {result.decisions} decisions replayed, all identical")
        return 0
    print(f"{file}: differs after {result.decisions} decisions\n{result.difference}")
    return 1
