"""What a comparison has found: one row for each strategy, and a verdict with its reason.

Times are those to the target; without one, those of the whole run. A strategy is compared with the first one seed by
seed, and the geometric mean of these ratios counts, so that a seed that is easy for all decides nothing.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

import msgspec

from paceline.core.quantities import FALLING
from paceline.records.report import Report
from paceline.records.wait_attribution import Culprit

CLOSE = 0.03  # by which two times are taken for equal
FEW = 0.02  # of the workers' time: a difference in waiting that explains nothing


class Spread(msgspec.Struct, frozen=True):
    """The median over the seeds, and the range."""

    median: float
    least: float
    most: float


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a comparison."""

    strategy: str
    options: dict[str, str]  # that were tuned
    seed: int
    tuning: bool = False  # made to choose the options; judged by none
    report: Report | None = None  # None: it failed
    failure: str | None = None
    reused: bool = False  # of an earlier comparison
    waited_for: list[Culprit] = []  # the most costly first; empty: as the journal has it

    @property
    def seconds(self) -> float | None:
        """The time to the target, or of the whole run where there is none; None: not reached."""
        if self.report is None:
            return None
        target = self.report.target
        return self.report.seconds if target is None else target.reached_at_seconds

    @property
    def name(self) -> str:
        """The strategy with its options, as a person would write them."""
        return _named(self.strategy, self.options)


def _named(strategy: str, options: Mapping[str, str]) -> str:
    return " ".join([strategy, *(f"{name}={value}" for name, value in options.items())])


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy, over all seeds."""

    strategy: str
    options: dict[str, str]
    runs: int  # that did not fail
    reached: int  # of them, that came to the target
    seconds: Spread | None  # of those that did
    speedup: float | None  # against the first strategy
    samples: float | None  # to the target, the median
    samples_per_second: float | None
    wait_fraction: float | None
    staleness: float | None
    megabytes: float | None  # up and down
    discarded: float | None  # share of the computed samples
    metric: Spread | None  # the last measured

    @property
    def name(self) -> str:
        """The strategy with its options, as a person would write them."""
        return _named(self.strategy, self.options)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Several strategies on one task and cluster."""

    engine: str
    workers: int
    metric: str  # that `Row.metric` is of
    target: str | None
    rows: list[Row]
    verdict: str
    trials: list[Trial]

    def _repr_html_(self) -> str:
        from paceline.comparison.tables import html  # it loads rich

        return html(self)


def chosen(trials: Sequence[Trial]) -> dict[str, str]:
    """Return the options with which a strategy did best: most seeds to the target, then the least time; without a
    target, the best metric."""
    sides: dict[tuple[tuple[str, str], ...], list[Trial]] = {}
    for trial in trials:
        sides.setdefault(tuple(trial.options.items()), []).append(trial)
    return dict(min(sides.items(), key=lambda side: _rank(side[1]))[0])


def _rank(trials: Sequence[Trial]) -> tuple[float, float]:
    """Return what is smaller for a better side."""
    if any(trial.report is not None and trial.report.target is not None for trial in trials):
        times = [trial.seconds for trial in trials if trial.seconds is not None]
        return len(trials) - len(times), statistics.median(times) if times else math.inf
    name = metric_of(trials)
    values = [value for trial in trials if (value := _metric(trial, name)) is not None and math.isfinite(value)]
    sign = 1.0 if name.lower().endswith(FALLING) else -1.0
    return len(trials) - len(values), sign * statistics.median(values) if values else math.inf


def metric_of(trials: Sequence[Trial]) -> str:
    """Return the metric by which runs are shown and, without a target, judged."""
    reports = [trial.report for trial in trials if trial.report is not None]
    named = next((report.target.metric for report in reports if report.target is not None), None)
    return named or ("accuracy" if any(report.accuracy is not None for report in reports) else "loss")


def _metric(trial: Trial, name: str) -> float | None:
    report = trial.report
    return None if report is None else report.metrics.get(name, report.loss if name == "loss" else None)


def rows_of(trials: Sequence[Trial]) -> list[Row]:
    """Return a row for each strategy, in the order of the trials; tuning is left out."""
    judged: dict[tuple[str, tuple[tuple[str, str], ...]], list[Trial]] = {}
    for trial in trials:
        if not trial.tuning:
            judged.setdefault((trial.strategy, tuple(trial.options.items())), []).append(trial)
    first = next(iter(judged.values()), [])
    name = metric_of(trials)
    return [_row(side, first, name) for side in judged.values()]


def _row(side: Sequence[Trial], first: Sequence[Trial], name: str) -> Row:
    reports = [trial.report for trial in side if trial.report is not None]
    times = [trial.seconds for trial in side if trial.seconds is not None]
    used = [float(report.samples_used) for report in reports]
    metrics = [value for trial in side if (value := _metric(trial, name)) is not None]
    computed = [report.samples_used + report.samples_discarded for report in reports]
    lost = [report.samples_discarded / all_ for report, all_ in zip(reports, computed, strict=True) if all_]
    return Row(
        strategy=side[0].strategy,
        options=side[0].options,
        runs=len(reports),
        reached=len(times),
        seconds=_spread(times),
        speedup=_speedup(side, first),
        samples=_median(used),
        samples_per_second=_median([report.samples_per_second for report in reports]),
        wait_fraction=_median([report.wait_fraction for report in reports]),
        staleness=_median([report.staleness.mean for report in reports]),
        megabytes=_median([(report.bytes_up + report.bytes_down) / 1e6 for report in reports]),
        discarded=_median(lost),
        metric=_spread(metrics),
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _spread(values: Sequence[float]) -> Spread | None:
    return Spread(statistics.median(values), min(values), max(values)) if values else None


def _speedup(side: Sequence[Trial], first: Sequence[Trial]) -> float | None:
    """Return how many times sooner this side is than the first, over the seeds that both have; None without any."""
    before = {trial.seed: trial.seconds for trial in first}
    pairs = [(before.get(trial.seed), trial.seconds) for trial in side]
    ratios = [theirs / ours for theirs, ours in pairs if theirs is not None and ours]
    return statistics.geometric_mean(ratios) if ratios else None


def verdict(rows: Sequence[Row], target: str | None, culprits: Mapping[str, Culprit]) -> str:
    """Say in two sentences who is first, and why. `culprits` has for each strategy whom its workers waited for most."""
    goal = f"{target} is reached" if target is not None else "the run ends"
    there = [row for row in rows if row.seconds is not None]
    if not there:
        return f"No strategy gets to {target}: train for longer, or aim lower." if rows else "Nothing was compared."
    most = max(row.reached for row in there)
    best = min((row for row in there if row.reached == most), key=_seconds)
    others = [row for row in there if row is not best]
    after = f"{goal} after {_seconds(best):.3g} s in the median of {best.reached} run{'s' * (best.reached != 1)}"
    if not others:
        rest = [row.strategy for row in rows if row is not best]
        return f"{best.strategy}: {after}." + (f" {_listed(rest)} did not get there." if rest else "")
    rival = others[0] if others[0] is rows[0] else min(others, key=_seconds)
    reason = _reason(best, rival, culprits)
    if rival.reached < most:
        less = f"{rival.strategy} gets there in {rival.reached} of {rival.runs}"
        return f"{best.strategy} is first: {after}; {less}. {reason}"
    ratio = _seconds(rival) / _seconds(best)
    if best.speedup is not None and rival.speedup is not None:
        ratio = best.speedup / rival.speedup
    if ratio < 1 + CLOSE:
        return f"{best.strategy} and {rival.strategy} take equally long, within {CLOSE:.0%}: {after}. {reason}"
    return f"{best.strategy} is first: {after}, {ratio:.3g} times sooner than {rival.strategy}. {reason}"


def _seconds(row: Row) -> float:
    return math.inf if row.seconds is None else row.seconds.median


def _reason(best: Row, rival: Row, culprits: Mapping[str, Culprit]) -> str:
    """Return the sentence that says where the time went: samples a second, waiting, and samples needed."""
    parts = []
    if best.samples_per_second and rival.samples_per_second:
        pace = best.samples_per_second / rival.samples_per_second
        parts.append(f"{best.strategy} trains on {pace:.3g} times as many samples a second")
    if best.wait_fraction is not None and rival.wait_fraction is not None:
        waiting = f"its workers wait {best.wait_fraction:.0%} of their time"
        waiting += f", those of {rival.strategy} {rival.wait_fraction:.0%}"
        worse = culprits.get(rival.strategy)
        if rival.wait_fraction - best.wait_fraction > FEW and worse is not None and worse.worker is not None:
            waiting += f", mostly for worker {worse.worker} ({max(worse.causes, key=worse.causes.__getitem__)})"
        parts.append(waiting)
    if best.samples and rival.samples:
        parts.append(f"it needs {best.samples / rival.samples:.3g} times as many samples")
    if parts and not parts[0].startswith(best.strategy):
        parts[0] = f"{best.strategy}: {parts[0]}"
    return f"{'; '.join(parts)}." if parts else ""


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
