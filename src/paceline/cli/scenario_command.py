"""`paceline scenario`: print, describe and check a cluster."""

from typing import Annotated

import typer


def scenario(
    target: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A built-in scenario or a TOML file.")],
    check: Annotated[bool, typer.Option("--check", help="Check the file only.")] = False,
) -> None:
    """Print a built-in scenario, or check a file and describe its cluster in words."""
    from paceline.cli.scenario import show

    print(show(target, check))
