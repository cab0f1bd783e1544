"""Does the convergence guard leave healthy runs alone, and does it name those that diverge?

    python benchmarks/bench_guard.py                 # writes results/guard.md and .json
    python benchmarks/bench_guard.py --quick --json  # a few of the runs, one JSON object, writes nothing

The runs, and what it means that one is plainly diverging, are in guard_trials.py. Most run in virtual time, some by
themselves and one on real processes. They share the machine: `--jobs` changes no number but the seconds of the
processor.
"""

import math
import multiprocessing
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from contenders import bars
from contenders.bars import Bar
from guard_trials import Course, Trial, by_round, healthy, named_by_earlier_rule, plain_at, planted, run

HEALTHY, PLANTED = 200, 20
WITHIN = 100  # rounds from where a run is plainly diverging
QUICK = 12  # every so many of the runs are made


def row_of(trial: Trial, course: Course) -> dict[str, Any]:
    """One line of the table."""
    losses = [loss for loss in by_round(course) if math.isfinite(loss)]
    plain = plain_at(course) if trial.planted else None
    return {
        "run": trial.name,
        "planted": trial.planted,
        "rounds": round(math.fsum(course.rounds)),
        "first": losses[0] if losses else None,
        "lowest": min(losses, default=None),
        "last ten": statistics.fmean(losses[-10:]) if losses else None,
        "plain at": plain,
        "named at": course.named_at,
        "after": None if plain is None or course.named_at is None else max(0.0, course.named_at - plain),
        "earlier rule": named_by_earlier_rule(course),
        "cpu_s": course.seconds,
    }


def judge(rows: Sequence[dict[str, Any]], number_healthy: int = HEALTHY, number_planted: int = PLANTED) -> list[Bar]:
    """What the guard has to show."""
    good, bad = ([row for row in rows if bool(row["planted"]) == wanted] for wanted in (False, True))
    named = [row for row in bad if row["after"] is not None and row["after"] <= WITHIN]
    slowest = max((row["after"] for row in named), default=None)
    return [
        Bar("healthy", len(good), number_healthy, True, "healthy runs"),
        Bar("false_alarms", sum(row["named at"] is not None for row in good), 0, False,
            "healthy runs that are called diverging"),
        Bar("named", len(named), number_planted, True,
            f"planted divergences named within {WITHIN} rounds of where they are plain"),
        Bar("slowest", slowest, WITHIN, False, "rounds until the last of them is named", "none was named"),
    ]  # fmt: skip


def notes(rows: Sequence[dict[str, Any]]) -> str:
    """What the table shows, and how the rule before fared on the same losses."""
    good, bad = ([row for row in rows if bool(row["planted"]) == wanted] for wanted in (False, True))
    alarms = sum(row["earlier rule"] is not None for row in good)
    missed = sum(row["earlier rule"] is None or (row["plain at"] or 0) + WITHIN < row["earlier rule"] for row in bad)
    after = [row["after"] for row in bad if row["after"] is not None]
    return f"""
Every run of `guard_trials.py`, under `--on-divergence warn`. `first` is the loss of the first round, `lowest` that of
the best one, and `last ten` the mean of the last ten; all others are numbers of rounds. A planted divergence is plain
at the first round at which the mean of the last ten rounds is twice the first loss (and above it by half of what had
been gained), or twice the best such mean with three quarters of what had been gained lost again (not for losses below
zero), and from which it does not recover for fifty rounds: half way to the best, and a tenth below the first. One that
is not a number is plain at once. `after` is how many rounds later the guard named it, in the middle
{statistics.median(after) if after else math.nan:.0f}.

`earlier rule` is when the rule before this one (above four times its best for fifty rounds, unless below a hundredth of
the first) would have spoken: it calls {alarms} of the {len(good)} healthy runs diverging, and does not name {missed} of
the {len(bad)} planted ones within {WITHIN} rounds.
"""


def run_all(trials: Sequence[Trial], jobs: int) -> list[Course]:
    """Make all runs, several at a time; one job makes them in this process."""
    if jobs == 1:
        return [run(trial) for trial in trials]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(run, trials))


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    parser = bars.parser("false alarms and missed divergences of the convergence guard")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    given = parser.parse_args(arguments)
    options = bars.asked(given, 1)
    trials = [*healthy(), *planted()]
    if options.quick:
        trials = [trial for trial in trials[::QUICK] if trial.engine != "local"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = [row_of(trial, course) for trial, course in zip(trials, run_all(trials, given.jobs), strict=True)]
    expected = [sum(bool(trial.planted) == wanted for trial in trials) for wanted in (False, True)]
    verdicts = judge(rows, *(expected if options.quick else ()))
    bars.tell("guard", options, verdicts, rows, notes(rows))


if __name__ == "__main__":
    main()
