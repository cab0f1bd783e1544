"""The runs of a comparison: which there are, in what order, and which of them tune the others.

With more than one set of options, each strategy first tries all of them with one seed, and the best of them is judged
with other seeds: nobody is judged by the luck that chose it. Sides take turns seed by seed, so that a comparison that
is ended early has as many runs of each.
"""

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Protocol

from paceline.comparison.outcome import Comparison, Trial, chosen, metric_of, rows_of, verdict
from paceline.core.errors import JournalError, OptionError
from paceline.core.values import shown
from paceline.records.journal import read
from paceline.records.wait_attribution import Culprit, fold

MOST_SETS = 1_000  # of options, for one strategy
_TUNED = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<values>[^=\s]+)")


class TrialCarrier(Protocol):
    """Makes runs, at most `at_once` at a time."""

    at_once: int

    def run(self, trial: Trial) -> Trial:
        """Make this run, and return it with its report or failure."""
        ...

    def stop(self) -> None:
        """End the runs that are under way."""
        ...


def is_tuning(text: str) -> bool:
    """Whether this is a tuned option, such as `lr=0.1,0.2`."""
    return _TUNED.fullmatch(text) is not None


def tuned_options(texts: Sequence[str]) -> dict[str, list[str]]:
    """Read `lr=0.05,0.1` and `momentum=0,0.9`, each alone or several with spaces between them."""
    found: dict[str, list[str]] = {}
    for text in " ".join(texts).split():
        match = _TUNED.fullmatch(text)
        if match is None:
            raise OptionError(f"--tune: must be a name and values, such as lr=0.05,0.1,0.2, not {shown(text)}")
        if match["name"] in found:
            raise OptionError(f"--tune: {match['name']} is there twice; give all its values at once")
        values = list(dict.fromkeys(filter(None, match["values"].split(","))))
        if not values:
            raise OptionError(f"--tune: {match['name']} has no values, such as {match['name']}=0.05,0.1")
        found[match["name"]] = values
    count = math.prod(map(len, found.values()))
    if count > MOST_SETS:
        raise OptionError(
            f"--tune: {count:,} sets of options for each strategy, at most {MOST_SETS:,}; give fewer values"
        )
    return found


def option_sets(tune: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Return every combination of values."""
    return [dict(zip(tune, values, strict=True)) for values in itertools.product(*tune.values())]


def carried_out(
    strategies: Sequence[str], tune: Mapping[str, Sequence[str]], first_seed: int, seeds: int, carrier: TrialCarrier,
    tell: Callable[[Trial, int, int], None],
) -> list[Trial]:  # fmt: skip
    """Make all runs and return them. `tell` is called after each with how many are done, and how many there are."""
    sets = option_sets(tune)
    tuned = len(sets) > 1
    judged = range(first_seed + tuned, first_seed + tuned + seeds)
    total, done = len(strategies) * (seeds + tuned * len(sets)), 0

    def told(trials: Sequence[Trial]) -> Iterator[Trial]:
        nonlocal done
        for trial in _side_by_side(trials, carrier):
            done += 1
            tell(trial, done, total)
            yield trial

    best = dict.fromkeys(strategies, sets[0])
    tried: list[Trial] = []
    if tuned:
        asked = [Trial(strategy=s, options=o, seed=first_seed, tuning=True) for o in sets for s in strategies]
        tried = sorted(told(asked), key=_place(asked))
        best = {each: chosen([trial for trial in tried if trial.strategy == each]) for each in strategies}
    asked = [Trial(strategy=each, options=best[each], seed=seed) for seed in judged for each in strategies]
    return [*tried, *sorted(told(asked), key=_place(asked))]


def _place(asked: Sequence[Trial]) -> Callable[[Trial], int]:
    places = {(trial.name, trial.seed): place for place, trial in enumerate(asked)}
    return lambda trial: places[trial.name, trial.seed]


def _side_by_side(trials: Sequence[Trial], carrier: TrialCarrier) -> Iterator[Trial]:
    """Yield finished runs as they finish; an exception here ends those that are under way."""
    if carrier.at_once == 1:
        yield from map(carrier.run, trials)
        return
    with ThreadPoolExecutor(carrier.at_once) as pool:
        waiting: set[Future[Trial]] = {pool.submit(carrier.run, trial) for trial in trials}
        try:
            while waiting:
                finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for each in finished:
                    yield each.result()
        except BaseException:
            for each in waiting:
                each.cancel()
            carrier.stop()
            raise


def summary(trials: Sequence[Trial]) -> Comparison:
    """Return what these runs show."""
    reports = [trial.report for trial in trials if trial.report is not None]
    if not reports:
        raise OptionError("no run of the comparison succeeded: " + (trials[0].failure or "no reason is known"))
    rows = rows_of(trials)
    culprits = {row.strategy: who for row in rows if (who := _waited_for(row.strategy, trials)) is not None}
    target = next((f"{report.target.metric}={report.target.value:g}" for report in reports if report.target), None)
    return Comparison(
        engine=reports[0].engine,
        workers=reports[0].workers,
        metric=metric_of(trials),
        target=target,
        rows=rows,
        verdict=verdict(rows, target, culprits),
        trials=list(trials),
    )


def _waited_for(strategy: str, trials: Sequence[Trial]) -> Culprit | None:
    """Return whom the others waited for most in the first judged run of a strategy; None if its journal is gone."""
    runs = [trial for trial in trials if trial.strategy == strategy and not trial.tuning and trial.report is not None]
    if not runs or runs[0].report is None:
        return None
    culprits, journal = runs[0].waited_for, runs[0].report.journal
    if not culprits and journal is not None:
        with contextlib.suppress(JournalError):
            culprits = fold(read(Path(journal))).culprits()
    return next((each for each in culprits if each.worker is not None), None)
