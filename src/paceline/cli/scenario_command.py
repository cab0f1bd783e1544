"""`paceline scenario`: a built-in file to start from, the cluster of a file in words, or a check."""

from typing import Annotated

import typer

from paceline.core.scenario.file import builtin_names, builtin_text, describe, load


def scenario(
    target: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A built-in scenario or a TOML file.")],
    check: Annotated[bool, typer.Option("--check", help="Check the file only.")] = False,
) -> None:
    """Print a built-in scenario, or check a file and describe its cluster in words."""
    cluster = load(target)
    if check:
        print(f"{target}: valid, {cluster.count} workers, {len(cluster.events)} events")
    elif target not in builtin_names():
        print(describe(cluster))
    else:  # its file with the description as comments, so that it can be saved and edited
        comments = "\n".join(f"# {line}" for line in describe(cluster).splitlines())
        print(f"{builtin_text(target).rstrip()}\n\n# In words:\n{comments}")
