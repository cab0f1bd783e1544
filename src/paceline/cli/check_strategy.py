"""`paceline check-strategy`: does a strategy keep the laws?"""

from typing import Annotated

import typer

SHOWN = 800  # characters of a breach: a decision with its event is long
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
