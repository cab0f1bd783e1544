"""Check a strategy against the laws: on random clusters, by replay, by restored snapshots, and by its source.

Seeds fix everything: the same strategy breaks the same laws on the same clusters on every machine.
"""

import random
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from paceline.core.errors import OptionError
from paceline.laws.checker import check
from paceline.laws.clusters import ClusterPlan, play, random_plan
from paceline.laws.purity import impurities_of
from paceline.records.journal import Decision, Line, Lines, spelled_out
from paceline.scenario import parse
from paceline.strategies import Strategy, build, canonical, machine_class, strategy_class

CLUSTERS = 60  # a strategy that passes on so many by luck would break a law in few runs
RESTORES = 7  # decisions between two snapshots; small, so that early states are restored too


class Breach(msgspec.Struct, frozen=True):
    """A law that the strategy breaks, first seen on that cluster (None: in its source)."""

    law: str
    text: str
    cluster: int | None = None


def first_difference(lines: Iterable[Line], fresh: Callable[[], Strategy], every: int, after: int = 0) -> str | None:
    """Feed the events again, replacing the strategy by a restored one every `every` decisions from `after` on.

    `fresh` makes the one to restore into; the snapshot passes through JSON, as in a checkpoint.
    """
    strategy, first = fresh(), True
    for count, line in enumerate(line for line in lines if isinstance(line, Decision)):
        if count >= after and (count - after) % every == 0 and not first:
            written = msgspec.json.encode(spelled_out(strategy.snapshot()))
            strategy = fresh().restore(msgspec.json.decode(written))
        first = False
        actions = strategy.handle(line.event)
        if actions != line.actions:
            return f"decision {count + 1} on {line.event}: {actions} instead of {line.actions}"
    return None


class Verdict(msgspec.Struct, frozen=True):
    """The result of a check."""

    spec: str
    clusters: int
    decisions: int
    breaches: list[Breach]

    def first_of_each(self) -> list[tuple[Breach, int]]:
        """Return the first breach of each law, and on how many clusters the law was broken."""
        first: dict[str, Breach] = {}
        places: dict[str, set[int | None]] = {}
        for breach in self.breaches:
            first.setdefault(breach.law, breach)
            places.setdefault(breach.law, set()).add(breach.cluster)
        return [(breach, len(places[law])) for law, breach in first.items()]


def check_strategy(spec: str, clusters: int = CLUSTERS, seed: int = 0) -> Verdict:
    """Check the strategy on that many clusters against the laws in docs/howto/write-a-strategy.md."""
    strategy_class(spec)
    spec = canonical(build(spec, 0))
    found = [Breach("purity", text) for text in impurities_of(machine_class(spec))]
    tried = decisions = number = 0
    while tried < clusters and number < 20 * clusters:
        plan = random_plan(random.Random(f"{seed}:cluster:{number}"))
        if _suits(spec, plan):
            tried += 1
            lines, broken = _on(plan, spec, number)
            decisions += sum(isinstance(line, Decision) for line in lines)
            found += broken
        number += 1
    if not tried:
        raise OptionError(f"{spec} refuses every cluster of up to 9 workers; check it with other options")
    return Verdict(spec, tried, decisions, found)


def _suits(spec: str, plan: ClusterPlan) -> bool:
    try:
        build(spec, plan.seed).check(parse(plan.scenario, "made", Path()).count)
    except OptionError:
        return False
    return True


def _on(plan: ClusterPlan, spec: str, number: int) -> tuple[Lines, list[Breach]]:
    try:
        lines = play(build(spec, plan.seed), plan, spec=spec)
    except Exception as error:  # noqa: BLE001 - a strategy and its actions may raise anything
        return Lines(), [Breach("errors", _worded(error), number)]
    found = [Breach(broken.law, str(broken), number) for broken in check(lines, exact_work=plan.size is None)]
    seeds = iter([plan.seed])

    def fresh() -> Strategy:
        """Build the first with the run's seed, others with another: their randomness must come from the snapshot."""
        return build(spec, next(seeds, plan.seed + 1))

    for law, every in (("replay", len(lines) + 1), ("snapshot", RESTORES)):
        seeds = iter([plan.seed])
        try:
            different = first_difference(lines, fresh, every)
        except Exception as error:  # noqa: BLE001
            different = _worded(error)
        if different is not None:
            return lines, [*found, Breach(law, different, number)]
    return lines, found


def _worded(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno})"
