"""Mixed GPU generations, as fast as they were measured: what does each strategy make of K80, P100 and V100 together?

    python benchmarks/bench_mixed_gpus.py                 # writes results/mixed_gpus.md and .json; half an hour
    python benchmarks/bench_mixed_gpus.py --quick --json  # few runs, one JSON object, writes nothing
    python benchmarks/bench_mixed_gpus.py --minutes 9     # goes on for so long; the next call goes on from there

Speeds are Gavel's throughputs of 26 job types (../shared/data/trace_gavel_throughputs). Without gradients every
strategy runs on clusters of every job type. With real gradients the sides race to an accuracy on those three whose
fastest GPU is nearest to 2, 4 and 8 times as fast as its slowest. Every side has its learning rate and its momentum
tuned over the same grid, on seeds of their own; the rival is picked on these, too, and five fresh seeds judge. Rows
are kept under a key of what they depend on (kept_rows.py): after a change of one strategy a call measures this one
anew.
"""

import math
import re
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import paceline
import publications
import results
import sources
from contenders import bars, gavel
from contenders.bars import Bar
from contenders.gavel import Mix
from contenders.strategy_code import codes_of
from kept_rows import Kept, behaviour, key_of, learning
from paceline import strategies, tasks
from paceline.engines.sim.light import simulate
from paceline.records.metrics import Metrics
from paceline.scenario import Scenario

MIXES = (Mix(4, 4, 4), Mix(3, 3, 2))
RACED = MIXES[1]
SPREADS = (2.0, 4.0, 8.0)  # of the raced job types, fastest over slowest
SECONDS_PER_SAMPLE = 0.002  # of the fastest GPU
SIGMA = 0.1  # of the lognormal jitter
WORK = 64  # samples of a push without gradients
ROUNDS = 80  # of all workers' nominal work, without gradients
COST_PROBE, RACE_PROBE = 12, 60  # rounds whose decisions say whether a kept row is still true
TASK, BATCH, TARGET, EPOCHS = "digits", 16, "accuracy>=0.93", 40
EVALUATE = "0.05e"  # a step of it is at most 3 % of the time to the target
CENTRE = 0.1  # the task's own learning rate; the grid is a factor 2 apart
START = (-1, 0, 1)
SMALLEST, LARGEST = -7, 6
MOMENTA = (0.9, 0.0)
CUT = 3.0  # times the best so far of the side on the seed
TUNING_SEEDS = (100, 101, 102)
FRESH_SEEDS = (0, 1, 2, 3, 4)
T_90 = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132, 6: 2.015, 7: 1.943, 8: 1.895}  # by seeds: two-sided 90 %, Student
CALM = ("bsp", "asp", "ssp", "dssp")  # the publication's rivals
SOONER = 0.169  # the publication's least
WITH_STATES_ALONE = "dasp:fit=none"  # where the package has it


def cost_sides(workers: int) -> list[str]:
    """Strategies without gradients: those that need numbers of a gradient are left out."""
    found = ["bsp", "asp", "ssp", "dssp", "adaptive_sync", "dasp", "balanced", "balanced:pieces=one",
             f"fastest_k:k={2 * workers // 3}", f"k_async:k={workers // 2}"]  # fmt: skip
    return [*found, *states_alone()]


def race_sides() -> list[str]:
    return ["bsp", "asp", "ssp", "dssp", "adaptive_sync", "dasp", "balanced", "fastest_k:k=6", "k_async:k=4",
            *states_alone()]  # fmt: skip


def states_alone() -> list[str]:
    """`dasp` without sized work, where it has that form."""
    try:
        strategies.parse(WITH_STATES_ALONE)
    except paceline.OptionError:
        return []
    return [WITH_STATES_ALONE]


# -- without gradients -----------------------------------------------------------------------------------------------


class Cost(msgspec.Struct, frozen=True):
    """One run of light workers."""

    job: str
    mix: Mix
    strategy: str
    jitter: float
    rounds: int = ROUNDS

    def cluster(self) -> Scenario:
        jitter = f"lognormal:{self.jitter}" if self.jitter else "none"
        return gavel.cluster(self.job, self.mix, SECONDS_PER_SAMPLE, jitter, 1)

    def run(self) -> dict[str, Any]:
        cluster, metrics = self.cluster(), Metrics()
        simulate(strategies.build(self.strategy, 0), cluster, work=WORK, samples=self.rounds * WORK * cluster.count,
                 sink=metrics)  # fmt: skip
        told = metrics.report(None)
        ideal = sum(worker.speed for worker in cluster.workers) / SECONDS_PER_SAMPLE / math.exp(self.jitter**2 / 2)
        return {
            "part": "cost", "job": self.job, "mix": self.mix.name, "jitter": self.jitter, "side": self.strategy,
            "spread": gavel.spread([worker.speed for worker in cluster.workers]),
            "share": (told.samples_per_second or 0.0) / ideal, "waiting": told.wait_fraction,
            "staleness": told.staleness.mean, "staleness_p95": told.staleness.p95,
        }  # fmt: skip


def costs(jobs: Sequence[str], mixes: Sequence[Mix], kept: Kept, rounds: int) -> list[dict[str, Any]]:
    """Every strategy on every cluster, with jitter and without."""
    found = []
    for job in jobs:
        for mix in mixes:
            for jitter in (SIGMA, 0.0):
                for side in cost_sides(sum(mix.counts)):
                    cost = Cost(job, mix, side, jitter, rounds)
                    acts = behaviour(side, cost.cluster(), WORK, COST_PROBE * WORK * sum(mix.counts))
                    found.append(kept.row(key_of("cost", cost, WORK, SECONDS_PER_SAMPLE, acts), cost.run))
    return found


# -- with gradients --------------------------------------------------------------------------------------------------


class Form(msgspec.Struct, frozen=True):
    """A side as it is tuned."""

    spec: str
    momentum: float


def forms(side: str) -> list[Form]:
    """With and without momentum; who can make a whole step of each push is tried in this form, too.

    Without momentum the two are the same arithmetic.
    """
    found = []
    options = {option.name for option in strategies.describe(strategies.machine_class(side)).options}
    for momentum in MOMENTA:
        found.append(Form(side, momentum))
        if momentum and "whole_steps" in options:
            found.append(Form(f"{side}:whole_steps=true", momentum))
    return found


class TimeIsUpError(Exception):
    """The minutes of this call are over."""


class Races:
    """Runs with real gradients on the cluster of one job type."""

    def __init__(self, job: str, kept: Kept, seeds: Sequence[int], until: float = math.inf) -> None:
        self.job = job
        self._kept = kept
        self._seeds = seeds  # to tune by
        self._until = until
        self._behaves: dict[Form, str] = {}

    def cluster(self, seed: int) -> Scenario:
        return gavel.cluster(self.job, RACED, SECONDS_PER_SAMPLE, f"lognormal:{SIGMA}", seed + 1)

    def row(self, side: str, form: Form, lr: float, seed: int, limit_s: float, tuning: bool) -> dict[str, Any]:
        """One race; it is given up at the limit, and a kept one counts that was not given up sooner."""
        if form not in self._behaves:
            calm = self.cluster(0)
            self._behaves[form] = key_of(
                behaviour(form.spec, calm, BATCH, RACE_PROBE * BATCH * calm.count),
                learning(TASK, form.spec, calm, {"lr": CENTRE / 4, "momentum": form.momentum}),
            )
        key = key_of("race", self.job, RACED, form, lr, seed, TASK, TARGET, EPOCHS, SIGMA, self._behaves[form])

        def measure() -> dict[str, Any]:
            if time.monotonic() > self._until:
                raise TimeIsUpError
            return self._race(side, form, lr, seed, limit_s, tuning)

        def good(found: dict[str, Any]) -> bool:
            return found["reached_s"] is not None or (found["limit_s"] or math.inf) >= limit_s

        found = self._kept.row(key, measure, good)
        late = found["reached_s"] is not None and found["reached_s"] > limit_s
        return {**found, "tuning": tuning, **({"reached_s": None} if late else {})}

    def _race(self, side: str, form: Form, lr: float, seed: int, limit_s: float, tuning: bool) -> dict[str, Any]:
        began = time.process_time()
        run = paceline.launch(
            tasks.get(TASK), engine="sim", scenario=self.cluster(seed), strategy=form.spec, target=TARGET, seed=seed,
            options={"lr": lr, "momentum": form.momentum, "batch_size": BATCH}, epochs=EPOCHS, evaluate_every=EVALUATE,
            **({} if limit_s == math.inf else {"max_seconds": limit_s}),
        )  # fmt: skip
        told = run.summary
        reached = told.target.reached_at_seconds if run.ended == "target" and told.target else None
        return {
            "part": "race", "job": self.job, "side": side, "strategy": form.spec, "momentum": form.momentum, "lr": lr,
            "seed": seed, "tuning": tuning, "reached_s": reached, "limit_s": None if limit_s == math.inf else limit_s,
            "samples_per_s": told.samples_per_second, "waiting": told.wait_fraction,
            "staleness": told.staleness.mean, "staleness_p95": told.staleness.p95, "accuracy": told.accuracy,
            "cpu_s": round(time.process_time() - began, 2),
        }  # fmt: skip

    def tune(self, side: str) -> tuple[Form, float, float, list[dict[str, Any]]]:
        """The form and rate with the best geometric mean over the seeds, its mean, and all that was tried."""
        best_s = dict.fromkeys(self._seeds, math.inf)
        rows: list[dict[str, Any]] = []
        scores: dict[tuple[Form, int], float] = {}
        for form in forms(side):
            mine: dict[int, float] = {}
            accuracy: dict[int, float] = {}
            wanted = list(START)
            while wanted:
                for exponent in wanted:
                    made = []
                    for seed in self._seeds:
                        made.append(self.row(side, form, CENTRE * 2.0**exponent, seed, CUT * best_s[seed], True))
                        if made[-1]["reached_s"] is None:
                            break  # one that misses the target rules the rate out
                        best_s[seed] = min(best_s[seed], made[-1]["reached_s"])
                    rows += made
                    mine[exponent] = mean_of([row["reached_s"] for row in made])
                    accuracy[exponent] = min(row["accuracy"] or 0.0 for row in made)
                wanted = beyond(mine, accuracy)
            scores |= {(form, exponent): score for exponent, score in mine.items()}
        (form, exponent), score = min(scores.items(), key=lambda each: each[1])
        return form, CENTRE * 2.0**exponent, score, rows


def beyond(scores: Mapping[int, float], accuracy: Mapping[int, float]) -> list[int]:
    """The exponent to be tried next while the best one lies on the edge; where all miss, the most accurate is best."""
    low, high = min(scores), max(scores)
    best = min(scores, key=lambda exponent: (scores[exponent], -accuracy[exponent]))
    if best == high and high < LARGEST:
        return [high + 1]
    return [low - 1] if best == low and low > SMALLEST else []


def mean_of(seconds: Sequence[float | None]) -> float:
    """Geometric mean; infinite if one is missing."""
    there = [each for each in seconds if each is not None]
    return statistics.geometric_mean(there) if len(there) == len(seconds) else math.inf


def race(job: str, sides: Sequence[str], kept: Kept, seeds: Sequence[int], fresh: Sequence[int],
         until: float) -> list[dict[str, Any]]:  # fmt: skip
    """Tune every side on one job's cluster, then run what was chosen on fresh seeds."""
    races, rows = Races(job, kept, seeds, until), []
    for side in sides:
        form, lr, score, tried = races.tune(side)
        rows += tried
        rows.append({"part": "choice", "job": job, "side": side, "strategy": form.spec, "momentum": form.momentum,
                     "lr": lr, "tuned_s": None if score == math.inf else score})  # fmt: skip
        if score < math.inf:
            rows += [races.row(side, form, lr, seed, math.inf, False) for seed in fresh]
    return rows


# -- verdicts --------------------------------------------------------------------------------------------------------


def judge_costs(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    """Bars over all job types and mixes."""
    of = {(r["job"], r["mix"], r["jitter"], r["side"]): r for r in rows if r["part"] == "cost"}
    jittered = [key for key in of if key[2]]
    clusters = list(dict.fromkeys((job, mix) for job, mix, *_ in of))

    def share(side: str, jitter: float) -> float:
        return min(row["share"] for key, row in of.items() if key[2:] == (jitter, side))

    def under(quantity: str, side: str, rivals: Sequence[str]) -> float:
        """In what share of the clusters the side has less of it than each rival."""
        less = [all(of[job, mix, SIGMA, side][quantity] < of[job, mix, SIGMA, rival][quantity] for rival in rivals)
                for job, mix in clusters]  # fmt: skip
        return statistics.fmean(less)

    told = f"of {len(clusters)} clusters"
    return [
        Bar("balanced_share", share("balanced", 0.0), 0.95, True,
            f"`balanced`: samples per second over the sum of all speeds, without jitter; the least {told}"),
        Bar("balanced_share_jitter", share("balanced", SIGMA), 0.9, True,
            f"`balanced`: the same with jitter; the least {told}"),
        Bar("dasp_waits_less", under("waiting", "dasp", ("bsp", "ssp", "dssp")), 1.0, True,
            f"`dasp`: share {told} on which nodes wait less than under each of bsp, ssp and dssp"),
        Bar("dasp_staleness", under("staleness", "dasp", ("asp",)), 1.0, True,
            f"`dasp`: share {told} on which the mean staleness is below asp's"),
        Bar("dasp_staleness_p95", under("staleness_p95", "dasp", ("asp",)), 1.0, True,
            f"`dasp`: share {told} on which the 95th percentile of staleness is below asp's"),
        Bar("adaptive_sync_waits_less", under("waiting", "adaptive_sync", ("bsp", "ssp")), 1.0, True,
            f"`adaptive_sync`: share {told} on which nodes wait less than under bsp and ssp"),
        Bar("adaptive_sync_staleness", max(of[job, mix, SIGMA, "adaptive_sync"]["staleness"]
                                           / of[job, mix, SIGMA, "asp"]["staleness"] for job, mix in clusters),
            1.0, False, f"`adaptive_sync`: mean staleness over asp's; the most {told}"),
    ] if jittered else []  # fmt: skip


def times_of(rows: Sequence[dict[str, Any]], job: str, side: str) -> dict[int, float | None]:
    """Seconds to the target by fresh seed."""
    return {row["seed"]: row["reached_s"] for row in rows
            if row["part"] == "race" and (row["job"], row["side"]) == (job, side) and not row["tuning"]}  # fmt: skip


def ratio_of(ours: Mapping[int, float | None], theirs: Mapping[int, float | None]) -> tuple[float, float, float] | None:
    """Their time over ours: the geometric mean over the seeds and its 90 % interval; None where a time is missing."""
    seeds = sorted(set(ours) & set(theirs))
    logs = []
    for seed in seeds:
        mine, other = ours[seed], theirs[seed]
        if mine is None or other is None:
            return None
        logs.append(math.log(other / mine))
    if not logs:
        return None
    middle = statistics.fmean(logs)
    half = T_90[len(logs)] * statistics.stdev(logs) / len(logs) ** 0.5 if len(logs) in T_90 else 0.0
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def picked(rows: Sequence[dict[str, Any]], job: str, among: Sequence[str]) -> str | None:
    """The rival: who was soonest on the tuning seeds; None if only some sides raced, and none of these."""
    tuned = {row["side"]: row["tuned_s"] or math.inf for row in rows if row["part"] == "choice" and row["job"] == job}
    return min((side for side in among if side in tuned), key=lambda side: tuned[side], default=None)


def judge_races(rows: Sequence[dict[str, Any]], jobs: Sequence[str]) -> list[Bar]:
    """Bars of one raced job type after the other."""
    found = []
    for job in jobs:
        name = short(job)
        for side, among, bound in (
            ("dasp", CALM, SOONER),
            ("adaptive_sync", ("bsp", "asp"), -0.05),
            ("balanced", CALM, 0.0),
            (WITH_STATES_ALONE, CALM, -0.1),
        ):
            ours = times_of(rows, job, side)
            if not ours:
                continue
            rival = picked(rows, job, among)
            if rival is None:
                continue
            ratio = ratio_of(ours, times_of(rows, job, rival))
            label = side.replace(":", "_").replace("=", "_")
            meaning = f"{job}: time that `{side}` saves of `{rival}`'s, the best of {', '.join(among)}"
            if ratio is None:
                why = "a run on a fresh seed missed the target"
                found.append(Bar(f"{label}_{name}", None, bound, True, meaning, why))
            else:
                middle, low, high = (1 - 1 / each for each in ratio)
                told = f"{meaning}; 90 % interval {low:.1%} to {high:.1%}"
                found.append(Bar(f"{label}_{name}", middle, bound, True, told))
    return found


def short(job: str) -> str:
    """The job type as part of a bar's name."""
    return re.sub(r"\W+", "_", job.lower().replace("batch size", "")).strip("_")


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    parser = bars.parser("every strategy on mixed GPU generations")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long; what was measured is kept")
    parser.add_argument("--only", nargs="+", metavar="SIDE", help="race these sides; writes only with --out")
    given = parser.parse_args(arguments)
    options = bars.asked(given, len(FRESH_SEEDS))
    if not gavel.TABLE.is_file():
        raise SystemExit(f"Gavel's throughputs are missing: {gavel.TABLE} is no file; see ../shared/data/README.md")
    table = gavel.job_types()
    raced = [gavel.nearest(table, spread) for spread in SPREADS]
    sides, until = given.only or race_sides(), time.monotonic() + 60 * given.minutes
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            kept = Kept("mixed_gpus", "unknown", Path(folder))
            rows = costs(raced[2:], MIXES[1:], kept, 10)
            rows += race(raced[2], given.only or ("bsp", "balanced"), kept, TUNING_SEEDS[:1], FRESH_SEEDS[:1], until)
    else:
        committed = results.FOLDER / "mixed_gpus.rows.jsonl.gz"
        of = options.of or sources.checked(given)  # a kept row says which commit it is of
        kept = Kept("mixed_gpus", of.commit if of.clean else f"{of.commit} (not clean)", committed=committed)
        try:
            rows = costs(list(table), MIXES, kept, ROUNDS)
            for job in raced:
                rows += race(job, sides, kept, TUNING_SEEDS, FRESH_SEEDS[: options.repeats], until)
        except TimeIsUpError:
            print("The minutes are over; what was measured is kept, and the next call goes on from there.")
            return
        if options.of is not None:
            kept.save((options.out or results.FOLDER) / committed.name)
    verdicts = [*judge_costs(rows), *judge_races(rows, raced)]
    code = codes_of([*cost_sides(sum(RACED.counts)), *race_sides()])
    bars.tell("mixed_gpus", options, verdicts, shown(rows), notes(rows, raced), code=code)


def shown(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Costs over the job types, and races on fresh seeds: what the result has; all rows lie beside it."""
    found: list[dict[str, Any]] = []
    costs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["part"] == "cost":
            costs.setdefault((row["mix"], row["jitter"], row["side"]), []).append(row)
    for (mix, jitter, side), made in costs.items():
        found.append({
            "part": "cost", "side": side, "cluster": mix, "jitter": jitter, "job types": len(made),
            "least share": min(row["share"] for row in made),
            "median share": statistics.median(row["share"] for row in made),
            "median waiting": statistics.median(row["waiting"] or 0.0 for row in made),
            "median staleness": statistics.median(row["staleness"] or 0.0 for row in made),
        })  # fmt: skip
    for row in rows:
        if row["part"] == "choice":
            found.append({**row, "cluster": RACED.name})
        elif row["part"] == "race" and not row["tuning"]:
            found.append({name: value for name, value in row.items() if name not in ("key", "tuning", "limit_s")})
    return found


def notes(rows: Sequence[dict[str, Any]], raced: Sequence[str]) -> str:
    """How it was measured, and a table of the races."""
    commits = sorted({row["commit"] for row in rows if "commit" in row})
    lines = ["| job type | side | momentum | lr | seconds to the target | bsp's time over its | waiting | staleness |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for job in raced:
        choices = [row for row in rows if row["part"] == "choice" and row["job"] == job]
        for choice in sorted(choices, key=lambda row: row["tuned_s"] or math.inf):
            fresh = [row for row in rows if row["part"] == "race" and not row["tuning"]
                     and (row["job"], row["side"]) == (job, choice["side"])]  # fmt: skip
            times = times_of(rows, job, choice["side"])
            ratio = ratio_of(times, times_of(rows, job, "bsp"))
            mean = mean_of(list(times.values())) if times else math.inf
            told = [job, f"`{choice['strategy']}`", f"{choice['momentum']:g}", f"{choice['lr']:g}",
                    "missed" if mean == math.inf else f"{mean:.2f}",
                    "" if ratio is None else f"{ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})",
                    *(f"{statistics.median(row[what] or 0 for row in fresh):.2f}" if fresh else ""
                      for what in ("waiting", "staleness"))]  # fmt: skip
            lines.append(f"| {' | '.join(told)} |")
    races = "\n".join(lines)
    return f"""
Speeds are Gavel's steps per second of {len(gavel.job_types())} job types on one GPU; the fastest of a job type takes
{SECONDS_PER_SAMPLE:g} s a sample, and computations have jitter lognormal:{SIGMA:g} where nothing else is said. There is
no network: what is compared is who waits for whom. Clusters: {"; ".join(mix.name for mix in MIXES)}. Without
gradients {ROUNDS} rounds of {WORK} samples a worker; `share` is samples used per second over the sum of all speeds.

Races: {RACED.name}, task {TASK} with batches of {BATCH} to {TARGET.replace(">=", " ")} (the mean of three evaluations
in a row), on the job types whose spread is nearest to {", ".join(f"{spread:g}" for spread in SPREADS)}. Each side:
momentum {" and ".join(f"{each:g}" for each in MOMENTA)}, asynchronous ones also with whole steps, learning rates a
factor 2 apart, extended while the best is on the edge; a run is given up at {CUT:g} times the side's best so far on
that seed. Chosen by the geometric mean over seeds {TUNING_SEEDS}, and so is the rival; times are of seeds
{FRESH_SEEDS}: geometric means, and the 90 % interval of the mean of per-seed ratios. Options of strategies are their
defaults but for those shown.

{races}

What publications claim, and which bars say the same of what was measured here (`*`: all that begin so, `!`: but these):

{publications.beside("mixed_gpus")}

Rows measured at commits {", ".join(commits)}: a row is measured anew when its strategy decides otherwise or training
ends elsewhere, and is kept otherwise (`kept_rows.py`). All of them, those of the tuning included, lie in
`mixed_gpus.rows.jsonl.gz`.
"""


if __name__ == "__main__":
    main()
