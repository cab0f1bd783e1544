"""The commands that train nothing: they list strategies, tasks and scenarios, and check strategies and journals."""

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.claims import Claims, load_claims
from paceline.cli.report_command import find_journal
from paceline.core.scenario.file import builtin_names, builtin_text, describe, load
from paceline.core.settings import resolve
from paceline.core.values import visible

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.strategies import Description


def strategies(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One of them, or FILE.py:CLASS, in detail.", show_default=False)
    ] = None,
) -> None:
    """List the strategies, or show one with its options, its citation, and its claims beside what was measured."""
    from rich.console import Console

    from paceline import strategies as registry

    console, claims = Console(), load_claims()
    if name is not None:
        shown = registry.describe(registry.machine_class(name))
        _show_one(shown, console)
        if shown.name in claims:
            _show_claims(claims[shown.name], console)
        return
    known = [*registry.names(), *registry.peer_names(), *registry.other_names()]
    _show_all([registry.describe(registry.machine_class(each)) for each in known], claims, console)


def _show_all(descriptions: "list[Description]", claims: dict[str, Claims], console: "Console") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column("strategy", style="bold", no_wrap=True)
    table.add_column("rule")
    for each in descriptions:
        # Text, not str: rich would take square brackets in a rule for markup.
        options = ", ".join(f"{option.name}={option.default or '?'}" for option in each.options)
        stands = claims[each.name].standing if each.name in claims else ""
        told = Text(each.rule) + Text(f"\n{options}" if options else "", style="dim")
        table.add_row(each.name, told + Text(f"\nclaims: {stands}" if stands else "", style="dim"))
    console.print(table)
    note = "`paceline strategies NAME` shows the options, the citation, and each claim beside what was measured."
    console.print(note, style="dim", highlight=False)


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


def _show_claims(claims: Claims, console: "Console") -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(Text(f"\nClaims of {claims.publication}: {claims.standing}\n", style="bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
    for column in ("claim", "publication", "measured here", "verdict"):
        table.add_column(column, no_wrap=column == "verdict")
    for each in claims.claims:
        table.add_row(*(Text(cell) for cell in (each.claim, each.figure, each.ours, each.verdict)))
    console.print(table)
    for command in claims.commands:
        console.print(Text(command, style="dim"))


def tasks() -> None:
    """List the built-in tasks for `paceline run --task NAME`."""
    from rich.console import Console
    from rich.table import Table

    from paceline import tasks as workloads

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("task", style="bold", no_wrap=True)
    table.add_column("what it trains")
    for name in workloads.names():
        table.add_row(name, workloads.describe(name))
    Console().print(table)


def scenario(
    target: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A built-in scenario or a TOML file.")],
    check: Annotated[bool, typer.Option("--check", help="Check the file only.")] = False,
) -> None:
    """Print a built-in scenario, or check a file and describe its cluster in words."""
    cluster = load(target)
    resolve({}, {}, cluster.run)  # refuses what a run would refuse
    if check:
        print(f"{visible(target)}: valid, {cluster.count} workers, {len(cluster.events)} events")
    elif target not in builtin_names():
        print(describe(cluster))
    else:  # its file with the description as comments, so that it can be saved and edited
        comments = "\n".join(f"# {line}" for line in describe(cluster).splitlines())
        print(f"{builtin_text(target).rstrip()}\n\n# In words:\n{comments}")


def replay(
    run: Annotated[str, typer.Argument(metavar="RUN|JOURNAL", help="A run's folder or name, or a journal.")],
    strategy: Annotated[
        str | None,
        typer.Option("--strategy", metavar="STRATEGY", help="Where it is now, if it has moved.", show_default=False),
    ] = None,
) -> int:
    """Feed a journal's events to a fresh strategy and compare every action (exit code 1 if one differs)."""
    from paceline.records import replay as replaying

    file = find_journal(run)
    result = replaying.replay(file, strategy)
    if result.difference is None:
        cut = "" if result.complete else "; the journal ends before the run did"
        print(f"{visible(str(file))}: {result.decisions} decisions replayed, all identical{cut}")
        return 0
    print(f"{visible(str(file))}: differs after {result.decisions} decisions")
    for line in str(result.difference).split("\n"):
        print(visible(line))
    return 1


SHOWN = 800  # characters of a breach; a decision with its event is long
EXPLAINED = {
    "purity": "its source uses what a strategy may not",
    "errors": "the run failed",
    "replay": "the same events led to other actions",
    "snapshot": "restored from a snapshot it decided otherwise",
}


def check_strategy(
    strategy: Annotated[str, typer.Argument(metavar="STRATEGY", help="FILE.py:CLASS, MODULE:CLASS or a name.")],
    clusters: Annotated[int, typer.Option("--clusters", min=1, max=100_000, help="Made clusters to try it on.")] = 60,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the clusters.")] = 0,
) -> int:
    """Try a strategy on made clusters and name the laws it breaks (exit code 1 if any)."""
    from paceline.laws.check import check_strategy as check

    verdict = check(strategy, clusters, seed)
    if not verdict.breaches:
        print(
            f"{strategy} keeps the laws: {verdict.clusters} clusters, {verdict.decisions:,} decisions, replayed and "
            "restored from snapshots; its source is pure"
        )
        return 0
    broken = verdict.first_of_each()
    print(f"{strategy} breaks {len(broken)} law{'s' * (len(broken) > 1)}, tried on {verdict.clusters} clusters")
    for breach, places in broken:
        where = "" if breach.cluster is None else f" (on {places} of them, first on cluster {breach.cluster})"
        print(f"  {breach.law}{where}: {EXPLAINED.get(breach.law, 'in the journal of the run')}")
        texts = [each.text for each in verdict.breaches if each.law == breach.law and each.cluster == breach.cluster]
        for text in texts[:3]:
            print(f"    {' '.join(text.split())[:SHOWN]}")
    return 1
