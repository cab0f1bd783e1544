"""`paceline strategies`: the rules, their options and where they were published."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.strategies import Description


def strategies(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One of them, or FILE.py:CLASS, in detail.", show_default=False)
    ] = None,
) -> None:
    """List the strategies, or show one with its options, units, defaults and citation."""
    from rich.console import Console

    from paceline import strategies as registry

    console = Console()
    if name is not None:
        _show_one(registry.describe(registry.machine_class(name)), console)
        return
    known = [*registry.names(), *registry.peer_names(), *registry.other_names()]
    _show_all([registry.describe(registry.machine_class(each)) for each in known], console)


def _show_all(descriptions: "list[Description]", console: "Console") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column("strategy", style="bold", no_wrap=True)
    table.add_column("rule")
    for each in descriptions:
        # Text, not str: square brackets in a rule are no markup.
        options = ", ".join(f"{option.name}={option.default or '?'}" for option in each.options)
        table.add_row(each.name, Text(each.rule) + Text(f"\n{options}" if options else "", style="dim"))
    console.print(table)
    console.print("`paceline strategies NAME` shows the options and the citation.", style="dim", highlight=False)


def _show_one(description: "Description", console: "Console") -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(Text(description.name, style="bold"))
    console.print(Text(description.rule))
    console.print(Text(f"\n{description.citation}\n", style="dim"))
    if not description.options:
        console.print(Text("no options"))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("option", "type", "default", "bounds", "meaning"):
        table.add_column(column, style="bold" if column == "option" else "", no_wrap=column in ("option", "default"))
    for option in description.options:
        default = "must be given" if option.default is None else option.default
        table.add_row(*(Text(cell) for cell in (option.name, option.type, default, option.bounds, option.description)))
    console.print(table)
