"""One of four workers is four times slower: who reaches the target first, on real processes?

    python benchmarks/bench_uneven_real.py                 # writes results/uneven_real.md and .json; about an hour
    python benchmarks/bench_uneven_real.py --quick --json  # two strategies and DDP, one JSON object, writes nothing
    python benchmarks/bench_uneven_real.py --only dasp balanced ddp

Every strategy of paceline, DDP over Gloo and hivemind's Optimizer train the same model on the same data. A batch takes
the same modelled seconds on every side, reached by sleeping the difference. Each side gets the learning rate of one
common grid that is fastest on seeds of their own, hivemind also its best matchmaking time, asynchronous strategies also
the better of momentum and none; other seeds are then timed.

Processes sleep nearly all of the time, so that two races (`--jobs`) take place side by side; a batch that took longer
than its modelled time is an overrun, and every row says how many there were.

hivemind lives in an environment of its own:
    python3.11 -m venv .rivals/hivemind && .rivals/hivemind/bin/pip install torch==2.13.0 hivemind==1.1.12
"""

import argparse
import math
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

import learning_trials
from contenders import bars, digits
from contenders.bars import Bar
from contenders.isolation import ask
from contenders.questions import Race, Raced
from paceline import scenario, strategies
from paceline.core.scenario.costs import Times

HIVEMIND = Path(__file__).parents[1] / ".rivals" / "hivemind" / "bin" / "python"
NO_HIVEMIND = "hivemind's environment is not at .rivals/hivemind: the head of bench_uneven_real.py says how to make it"
SPEEDS = (1.0, 1.0, 1.0, 0.25)
BATCH = 32
MOMENTUM = 0.9
TARGET = 0.35  # loss on held-out data
MATCHMAKING_S = (0.3, 1.0, 3.0)  # the last is what hivemind's guide advises for small local runs
RATES = (0.2, 0.4, 0.1, 0.8)  # the likeliest first, since a rate is given up once it is too far behind the best so far
TUNING_SEEDS = (100, 101)  # all rates on the first, those that may still be the best on both
# The same settings took up to 1.67 times as long on one seed as on another (DDP at 0.4, five seeds). Who is further
# behind than that on the first seed is not tried on the second; a race is given up much later, since giving up at 1.25
# times the best so far once left a strategy with a rate that missed the target on every other seed.
SPREAD = 1.7
GIVEN_UP = 3.0
ASYNCHRONOUS = ("asp", "ssp", "dssp", "adaptive_sync", "k_async")  # stale gradients may want no momentum
JOBS = 2
STEPS = 2000  # of each worker whose times are drawn; they are gone through again if a race takes longer
SCENARIO = """
seed = {seed}
[compute]
seconds_per_sample = {seconds_per_sample!r}
jitter = "lognormal:0.1"
"""


class Size(msgspec.Struct, frozen=True):
    """How much is measured."""

    nominal_s: float  # of a batch at full speed
    max_s: float
    repeats: int
    rates: tuple[float, ...] = RATES


FULL = Size(nominal_s=0.2, max_s=120.0, repeats=3)
QUICK = Size(nominal_s=0.02, max_s=6.0, repeats=1, rates=(0.2,))
QUICK_ENTRIES = ("balanced", "dasp", "ddp")


class Entry(msgspec.Struct, frozen=True):
    """One who takes part; `variants` are the settings to be tuned beside the learning rate."""

    name: str
    side: str
    python: str = sys.executable
    variants: tuple[dict[str, Any], ...] = ({},)


def entries(only: Sequence[str]) -> list[Entry]:
    """Everybody who can take part here, or those that were asked for."""
    found = [Entry("ddp", "ddp")]
    if HIVEMIND.exists():
        variants = tuple({"matchmaking_s": seconds} for seconds in MATCHMAKING_S)
        found.append(Entry("hivemind", "hivemind_peers", str(HIVEMIND), variants))
    for name in strategies.names():
        # Options as in the learning trials that have 4 workers too.
        spec = learning_trials.strategy_spec("linreg", name)
        found.append(Entry(name, "paceline_local", variants=forms(name, spec)))
    unknown = sorted(set(only) - {entry.name for entry in found})
    if unknown:
        raise SystemExit(f"--only {' '.join(unknown)}: there are {', '.join(entry.name for entry in found)}")
    return [entry for entry in found if not only or entry.name in only]


def forms(name: str, spec: str) -> tuple[dict[str, Any], ...]:
    """A strategy as it is tried: asynchronous ones also without momentum, and with a whole step for each push."""
    found: list[dict[str, Any]] = [{"strategy": spec}]
    if name in ASYNCHRONOUS:
        found.append({"strategy": spec, "momentum": 0.0})
    if any(option.name == "whole_steps" for option in strategies.describe(strategies.machine_class(name)).options):
        found.append({"strategy": f"{spec}{',' if ':' in spec else ':'}whole_steps=true"})
    return tuple(found)


class Course:
    """The data, the cluster and the limits of a race."""

    def __init__(self, size: Size, data: Path) -> None:
        self._size = size
        self._data = data
        digits.save(data)

    def run(self, entry: Entry, variant: dict[str, Any], lr: float, seed: int, max_s: float) -> Raced:
        """One race of one entry."""
        text = self.scenario_text(seed)
        times = Times(scenario.parse(text, "race", Path()))
        step_s = [
            [times.compute_s(worker, attempt, BATCH, 0.0) for attempt in range(STEPS)] for worker in range(len(SPEEDS))
        ]
        question = Race(
            data=str(self._data), step_s=step_s, lr=lr, seed=seed, batch_size=BATCH, target=TARGET, max_s=max_s,
            momentum=variant.get("momentum", MOMENTUM), options={**variant, "scenario": text},
        )  # fmt: skip
        answer: Raced = ask(entry.side, question, python=entry.python)
        return answer

    def scenario_text(self, seed: int) -> str:
        """No network: what the sides' messages take is real."""
        workers = "".join(f"[[workers]]\nspeed = {speed}\n" for speed in SPEEDS)
        return SCENARIO.format(seed=seed + 1, seconds_per_sample=self._size.nominal_s / BATCH) + workers

    def tune(self, entry: Entry) -> tuple[dict[str, Any], float, list[dict[str, Any]]]:
        """The variant and learning rate that are fastest, and all that was tried."""
        tuning = Tuning(self, entry, self._size.max_s)
        for variant in entry.variants:
            for lr in self._size.rates:
                tuning.attempt(variant, lr)
            if len(self._size.rates) > 1:
                tuning.leave_the_edges(variant)
        best = tuning.decide() if len(self._size.rates) > 1 else tuning.ranked()[0]
        return *best, tuning.rows


Choice = tuple[dict[str, Any], float]  # settings and learning rate


class Tuning:
    """The search for an entry's best settings."""

    def __init__(self, course: Course, entry: Entry, max_s: float) -> None:
        self._course = course
        self._entry = entry
        self._max_s = max_s
        self._found: list[tuple[float, Choice]] = []
        self.rows: list[dict[str, Any]] = []

    def attempt(self, variant: dict[str, Any], lr: float) -> None:
        """Race with these on the first seed, for as long as they may turn out to be the variant's best."""
        limit = min([self._max_s, *(GIVEN_UP * seconds for seconds, _ in self._tried(variant))])
        self._found.append((self._seconds((variant, lr), TUNING_SEEDS[0], limit), (variant, lr)))

    def leave_the_edges(self, variant: dict[str, Any]) -> None:
        """Go on beyond the grid while its last rate is the variant's best."""
        while True:
            tried = self._tried(variant)
            rates = [lr for _, lr in tried]
            seconds, best = min(tried)
            if math.isinf(seconds) or min(rates) < best < max(rates):
                return
            self.attempt(variant, best * 2 if best == max(rates) else best / 2)

    def decide(self) -> Choice:
        """The best by both seeds of all that chance may have put behind; who is alone there need not race again."""
        ranked = self.ranked()
        leader = min(seconds for seconds, _ in self._found)
        near = [(seconds, choice) for seconds, choice in self._found if seconds <= SPREAD * leader]
        if math.isinf(leader) or len(near) == 1:
            return ranked[0]
        totals = [(seconds + self._seconds(choice, TUNING_SEEDS[1], self._max_s), choice) for seconds, choice in near]
        return min(totals, key=lambda pair: pair[0])[1]

    def _tried(self, variant: dict[str, Any]) -> list[tuple[float, float]]:
        """Seconds and rate of every attempt with these settings."""
        return [(seconds, lr) for seconds, (settings, lr) in self._found if settings == variant]

    def ranked(self) -> list[Choice]:
        """What was tried, the fastest first; earlier ones before others that never got there either."""
        return [choice for _, choice in sorted(self._found, key=lambda pair: pair[0])]

    def _seconds(self, choice: Choice, seed: int, limit: float) -> float:
        answer = self._course.run(self._entry, *choice, seed, limit)
        self.rows.append(_row(self._entry, *choice, seed, answer, tuning=True))
        return math.inf if answer.reached_s is None else answer.reached_s


def measure(course: Course, entry: Entry, size: Size, repeats: int) -> list[dict[str, Any]]:
    """Tune an entry, then time it on each seed."""
    variant, lr, rows = course.tune(entry)
    for seed in range(repeats):
        answer = course.run(entry, variant, lr, seed, size.max_s)
        rows.append(_row(entry, variant, lr, seed, answer, tuning=False))
    return rows


def _row(
    entry: Entry, variant: dict[str, Any], lr: float, seed: int, answer: Raced, *, tuning: bool
) -> dict[str, Any]:  # fmt: skip
    settings = ", ".join(f"{key}={value}" for key, value in variant.items() if value != entry.name)
    return {
        "side": entry.name, "settings": settings, "lr": lr, "seed": seed, "tuning": tuning,
        "reached_s": answer.reached_s, "samples_per_s": answer.samples_per_s, "seconds": answer.seconds,
        "updates": answer.updates, **answer.facts,
    }  # fmt: skip


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each side's medians over the timed seeds; a target that was missed counts as later than any."""
    found = []
    for name in dict.fromkeys(row["side"] for row in rows):
        timed = [row for row in rows if row["side"] == name and not row["tuning"]]
        reached = [math.inf if row["reached_s"] is None else row["reached_s"] for row in timed]
        middle = statistics.median(reached)
        found.append({
            "side": name, "settings": timed[0]["settings"], "lr": timed[0]["lr"],
            "to_target_s": None if math.isinf(middle) else middle,
            "from_s": None if math.isinf(min(reached)) else min(reached),
            "to_s": None if math.isinf(max(reached)) else max(reached),
            "samples_per_s": statistics.median(row["samples_per_s"] for row in timed),
        })  # fmt: skip
    return found


def judge(sides: Sequence[dict[str, Any]], max_s: float) -> list[Bar]:
    """`balanced` and `dasp` against both rivals, by time to target."""
    times = {side["side"]: side["to_target_s"] for side in sides}
    found = []
    for name in ("balanced", "dasp"):
        for rival, bound in (("ddp", 2.0), ("hivemind", 1.0)):
            # A rival that never got there took at least as long as it was given.
            ratio = (times[rival] or max_s) / times[name] if rival in times and times.get(name) else None
            why = ""
            if rival not in times:
                why = NO_HIVEMIND if rival == "hivemind" and not HIVEMIND.exists() else f"{rival} took no part"
            elif ratio is None:
                why = f"{name} missed the target in {max_s:g} s" if name in times else f"{name} took no part"
            meaning = f"time to target of {rival} over {name}'s"
            found.append(Bar(f"{name}_over_{rival}", ratio, bound, True, meaning, why))
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    parser: argparse.ArgumentParser = bars.parser("uneven workers, to a target, against DDP and hivemind")
    parser.add_argument("--only", nargs="+", default=[], metavar="SIDE", help="strategies, ddp, hivemind; else all")
    parser.add_argument("--jobs", type=int, default=JOBS, help="races side by side (default: %(default)s)")
    given = parser.parse_args(arguments)
    size = QUICK if given.quick else FULL
    options = bars.asked(given, size.repeats)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        course = Course(size, Path(folder) / "digits.pt")
        # Whoever asks a contender ends all that is left of it among its own descendants: one process for each.
        with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
            racing = [
                pool.submit(measure, course, entry, size, options.repeats)
                for entry in entries(given.only or (QUICK_ENTRIES if given.quick else ()))
            ]
            for race in racing:
                rows += race.result()
                if not given.json:
                    print(summary(rows)[-1], flush=True)
    sides = summary(rows)
    bars.tell(
        "uneven_real", options, judge(sides, size.max_s), [*sides, *rows], notes(size, options.repeats, given.jobs)
    )


def notes(size: Size, repeats: int, jobs: int) -> str:
    """What the numbers mean."""
    return f"""
Digits, an MLP, SGD with momentum {MOMENTUM:g} unless shown, {len(SPEEDS)} workers of speeds {SPEEDS}, batches of
{BATCH}: {size.nominal_s:g} s of modelled time for a batch at speed 1 (lognormal jitter of sigma 0.1, the same draws for
every side), slept out. Seconds from the first batch to a loss of {TARGET} on held-out data: the mean of three
evaluations in a row, one per {len(SPEEDS) * BATCH} samples or update, at the middle one's time, at most
{size.max_s:g} s. A seed gives every side the same first model. Learning rates from {sorted(size.rates)},
beyond an edge while the best of these settings lies on it, by seed {TUNING_SEEDS[0]}; a race is given up at
{GIVEN_UP:g} times the best so far of its settings. All that are less than
{SPREAD:g} times behind the best, which is how much the same settings were seen to differ between seeds, by seed
{TUNING_SEEDS[1]} too. {", ".join(ASYNCHRONOUS)} are tried without momentum besides, and with
`whole_steps` where they have it. Medians over seeds 0 to {repeats - 1}. {jobs} races took place at a time.
DDP sleeps before backward, in which it exchanges gradients. hivemind 1.1.12 accumulates to a target batch of
{len(SPEEDS) * BATCH}, as many samples as one of DDP's updates has; matchmaking times of {MATCHMAKING_S} s were tried at
each rate, and its progress is looked up five times as often as by default. The first rows are the medians; the raw ones
follow, those of the tuning included.
"""


if __name__ == "__main__":
    main()
