"""The curves of the SSP publication: what a bound on staleness buys and costs, on three applications.

    python benchmarks/bench_staleness.py                 # writes results/staleness.md, .json and .png
    python benchmarks/bench_staleness.py --quick --json  # one application, few bounds, writes nothing

Eight virtual workers, one after the other a straggler for a while, run a topic model, matrix factorization and Lasso
behind a modelled network with every bound of a list, and without one. Each run makes the same number of clocks. Matrix
factorization gets, for every bound, the learning rate of one grid that is best on seeds of its own; the others have
none.
"""

import itertools
import math
import multiprocessing
import os
import random
import statistics
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

import paceline
import results
from contenders import bars
from contenders.bars import Bar
from paceline import scenario, tasks
from paceline.core.errors import UserError
from paceline.records import journal
from paceline.scenario import Scenario

CORPUS = Path(__file__).parents[2] / "shared" / "data" / "lda_ap"
WORKERS = 8
BOUNDS = (0, 1, 2, 4, 8, 16, 32)
FREE = "asp"
CLOCK_S = 0.1  # of computing, where nothing holds a worker up


class Application(msgspec.Struct, frozen=True):
    """What is run, and a cluster whose network needs about as long for what all workers read as they compute."""

    options: dict[str, int]
    work: int  # of a clock, as the application states it
    mbps: float
    folder: Path | None = None  # of its data; None: they are made up
    equal: "Application | None" = None  # where its clocks are not equally long: one of which they are
    length: str = "clocks"  # the option that says how long it runs


APPLICATIONS = {
    "topics": Application(
        {"clocks": 240, "parts": 4, "topics": 20},
        13_600,
        200.0,
        CORPUS,
        Application({"clocks": 80, "parts": 1, "documents": 400}, 5000, 0.0),
    ),
    "factorize": Application({"clocks": 160, "batch": 400}, 400, 6.0),
    "lasso": Application({"clocks": 150, "samples": 1000, "features": 1000, "block": 5}, 5, 6.0),
}
RATES = (0.0125, 0.025, 0.05, 0.1)  # extended while the best lies on its edge
TUNING_SEEDS = (100, 101)
SLOWER, SLOW_CLOCKS, EVERY_CLOCKS = 4.0, 3, 3  # a straggler's factor, for how long, and how often there is one
STALL_CLOCKS = 4
LEVEL = 0.9  # of what bound 0 gains in its run


class Size(msgspec.Struct, frozen=True):
    """How much is measured."""

    applications: tuple[str, ...]
    bounds: tuple[int, ...]
    repeats: int
    share: float = 1.0  # of the clocks
    corpus: Path = CORPUS

    def job(self, application: str, strategy: str, seed: int, kind: str = "stragglers", **changed: Any) -> "Job":
        return Job(application, strategy, seed, self.share, kind, changed, self.corpus)


FULL = Size(("topics", "factorize", "lasso"), BOUNDS, 3)
QUICK = Size(("lasso",), (0, 1, 4), 1, 0.2)


class Curve(msgspec.Struct, frozen=True):
    """One run: its loss over virtual seconds and over clocks of all workers together, and what it took."""

    seconds: list[float]
    clocks: list[int]
    losses: list[float]
    total_s: float
    wait: float  # of the workers' time
    waited_s: float  # by all together
    bytes_per_clock: float
    age: float  # of rows when they were read, in clocks of the slowest worker; mean
    staleness: float = 0.0  # of pushes on a model, in versions; mean


class Job(msgspec.Struct, frozen=True):
    """One run to be made."""

    application: str
    strategy: str
    seed: int
    share: float = 1.0  # of the clocks
    kind: str = "stragglers"  # of the cluster
    changed: dict[str, Any] = {}
    corpus: Path | None = None  # of topics, if elsewhere

    @property
    def what(self) -> Application:
        """The application, in its form for such a cluster."""
        found = APPLICATIONS[self.application]
        return found if self.kind in ("stragglers", "lasting") or found.equal is None else found.equal


def cluster(app: Application, seed: int, kind: str) -> Scenario:
    """`stragglers`: now one, now another worker is slow for a while. `lasting`: a quarter of them is half as fast.
    `even`: nothing happens; `jitter`: clocks are never quite equally long; `stall`: one thing."""
    events, network, jitter, slower = "", "", "none", 0
    if kind == "stragglers":
        chance = random.Random(f"stragglers {seed}")
        jitter, network = "lognormal:0.1", f"latency_ms = 1.0\nbandwidth_mbps = {app.mbps}"
        for number in range(1000):
            at = CLOCK_S * EVERY_CLOCKS * (number + chance.random())
            events += event("slow", at, chance.randrange(WORKERS), SLOW_CLOCKS * CLOCK_S, f"factor = {SLOWER}")
    elif kind == "lasting":
        jitter, network, slower = "lognormal:0.1", f"latency_ms = 1.0\nbandwidth_mbps = {app.mbps}", WORKERS // 4
    elif kind == "jitter":
        jitter = "lognormal:0.1"
    elif kind == "stall":
        events = event("pause", (8 + 0.2) * CLOCK_S, 0, STALL_CLOCKS * CLOCK_S)
    return scenario.parse(
        f"""
seed = {seed}
[compute]
seconds_per_sample = {CLOCK_S / app.work}
jitter = "{jitter}"
[network]
{network}
[[workers]]
count = {WORKERS - slower}
{f"[[workers]]{chr(10)}speed = 0.5{chr(10)}count = {slower}" if slower else ""}
{events}
""",
        "staleness",
        Path(),
    )


def event(kind: str, at: float, worker: int, seconds: float, more: str = "") -> str:
    return f'[[events]]\nkind = "{kind}"\nworker = {worker}\nat = {at:.4f}\nfor = {seconds:.4f}\n{more}\n'


def run(job: Job) -> Curve:
    """One run of an application."""
    return run_of(job.what, job)


def run_of(app: Application, job: Job) -> Curve:
    """One run of this application, whatever the job's is."""
    options = {**app.options, **job.changed}
    options[app.length] = max(4, round(options[app.length] * job.share))
    lines = journal.Lines()
    done = paceline.launch(
        tasks.get(job.application), engine="sim", scenario=cluster(app, job.seed, job.kind),
        strategy=job.strategy, seed=job.seed, sink=lines, data_dir=app.folder and (job.corpus or app.folder),
        evaluate_every=f"{WORKERS}v",
        options={name: str(value) for name, value in options.items()},
    )  # fmt: skip
    measured = [line for line in lines if isinstance(line, journal.Observation) and line.what == "evaluation"]
    report = done.summary
    return Curve(
        [line.at for line in measured], [line.data["version"] for line in measured],
        [float(line.data["metrics"]["loss"]) for line in measured], report.seconds, report.wait_fraction or 0.0,
        sum(worker.wait_s for worker in report.per_worker), report.bytes_down / report.pushes, mean_age(lines),
        report.staleness.mean if report.staleness is not None else 0.0,
    )  # fmt: skip


def mean_age(lines: journal.Lines) -> float:
    """Of all rows read."""
    counted = [(age, count) for line in lines if isinstance(line, journal.Observation) and line.what == "reads"
               for age, count in enumerate(line.data["ages"], line.data["first"])]  # fmt: skip
    return sum(age * count for age, count in counted) / max(1, sum(count for _, count in counted))


def tried(job: Job) -> float:
    """The last loss of a run whose learning rate may be too high for it."""
    try:
        return run(job).losses[-1]
    except UserError:  # what is not finite is refused
        return math.inf


def settings_of(application: str, strategy: str, size: Size, pool: Executor) -> dict[str, Any]:
    """The learning rate that is best at the end of a run, where there is one to be chosen."""
    if application != "factorize":
        return {}
    found: dict[float, float] = {}
    rates = list(RATES)
    while rates:
        jobs = [size.job(application, strategy, seed, lr=rate)
                for rate in rates for seed in TUNING_SEEDS]  # fmt: skip
        losses = list(pool.map(tried, jobs))
        for rate in rates:
            found[rate] = max(loss for job, loss in zip(jobs, losses, strict=True) if job.changed["lr"] == rate)
        best = min(found, key=lambda rate: found[rate])
        rates = [2 * best] if best == max(found) else [best / 2] if best == min(found) else []
    return {"lr": best}


def strategies(size: Size) -> list[str]:
    return [*(f"ssp:staleness={bound}" for bound in size.bounds), FREE]


def measure(size: Size, pool: Executor) -> tuple[list[dict[str, Any]], dict[tuple[str, str], list[Curve]]]:
    """A row for every application and bound, and their curves."""
    rows, curves = [], {}
    for application in size.applications:
        chosen = {strategy: settings_of(application, strategy, size, pool) for strategy in strategies(size)}
        jobs = [size.job(application, strategy, seed, **changed)
                for strategy, changed in chosen.items() for seed in range(size.repeats)]  # fmt: skip
        evenly = [size.job(application, strategy, 0, "even", **changed) for strategy, changed in chosen.items()]
        made = list(pool.map(run, [*jobs, *evenly]))
        for job, curve in zip(jobs, made, strict=False):
            curves.setdefault((application, job.strategy), []).append(curve)
        even = {job.strategy: curve for job, curve in zip(evenly, made[len(jobs) :], strict=True)}
        level = level_of(curves[application, strategies(size)[0]])
        for strategy, changed in chosen.items():
            found = curves[application, strategy]
            rows.append(
                {
                    "application": application, "strategy": strategy, **changed,
                    "seconds": statistics.median(c.total_s for c in found),
                    "waiting": statistics.median(c.wait for c in found),
                    "bytes_per_clock": statistics.median(c.bytes_per_clock for c in found),
                    "bytes_per_clock_even": even[strategy].bytes_per_clock,
                    "mean_age": statistics.median(c.age for c in found),
                    "last_loss": statistics.median(c.losses[-1] for c in found),
                    "seconds_to_level": middle(reached(c, c.seconds, level) for c in found),
                    "clocks_to_level": middle(reached(c, c.clocks, level) for c in found),
                }
            )  # fmt: skip
    return rows, curves


def middle(places: Iterable[float]) -> float | None:
    """The median; None if most runs do not get there."""
    found = statistics.median(places)
    return None if found == math.inf else found


def level_of(found: Sequence[Curve]) -> float:
    """The loss at which bound 0 has made most of its way."""
    start, end = (statistics.median(c.losses[place] for c in found) for place in (0, -1))
    return start - LEVEL * (start - end)


def reached(curve: Curve, axis: Sequence[float], level: float) -> float:
    """Where the loss first is that low; infinity if nowhere."""
    return next((x for loss, x in zip(curve.losses, axis, strict=True) if loss <= level), math.inf)


def loss_at(curve: Curve, second: float) -> float:
    """The last loss measured up to there."""
    return [loss for loss, x in zip(curve.losses, curve.seconds, strict=True) if x <= second][-1]


def judge(application: str, rows: Sequence[dict[str, Any]], curves: dict[str, list[Curve]], size: Size) -> list[Bar]:
    """What the publication says, of one application."""
    name, by = application, {row["strategy"]: row for row in rows}
    bounded = strategies(size)[:-1]
    waits = [by[s]["waiting"] for s in bounded]
    rises = max((later - earlier for earlier, later in itertools.pairwise(waits)), default=0.0)
    clocks, seconds = (
        {s: math.inf if (x := row[f"{what}_to_level"]) is None else x for s, row in by.items()}
        for what in ("clocks", "seconds")
    )
    inside, first = bounded[1:-1], by[bounded[0]]
    best, chosen = (min(among, key=lambda s: seconds[s]) for among in (bounded, inside))
    end = min(statistics.median(c.total_s for c in curves[s]) for s in (chosen, FREE))
    at_end = {s: statistics.median(loss_at(c, end) for c in curves[s]) for s in (chosen, FREE)}
    traffic = [by[s]["bytes_per_clock_even"] * (bound + 1) / first["bytes_per_clock_even"]
               for s, bound in zip(bounded, size.bounds, strict=True) if bound <= 8]  # fmt: skip
    return [
        Bar(f"{name}_waiting_rises", rises, 0.01, False, f"{name}: waiting falls as the bound grows; largest rise"),
        Bar(f"{name}_per_clock", clocks[bounded[0]] / min(clocks.values()), 1.05, False,
            f"{name}: bound 0 needs the fewest clocks to the level; its clocks over the fewest"),
        Bar(f"{name}_per_second", float(best in inside), 1.0, True,
            f"{name}: of the bounds an inner one is at the level first (it is {best})"),
        Bar(f"{name}_over_asp", by[FREE]["last_loss"] / by[chosen]["last_loss"], 1.0, True,
            f"{name}: after the same clocks {chosen} ends better than {FREE}; the loss of {FREE} over its loss"),
        Bar(f"{name}_over_asp_in_time", at_end[FREE] / at_end[chosen], 1.0, True,
            f"{name}: after the same seconds {chosen} ends better than {FREE}; the loss of {FREE} over its loss"),
        Bar(f"{name}_sooner_than_asp", seconds[FREE] / seconds[chosen], 1.0, True,
            f"{name}: {chosen} is at the level sooner than {FREE}; times sooner"),
        Bar(f"{name}_sooner_than_bsp", seconds[bounded[0]] / seconds[chosen], 1.0, True,
            f"{name}: {chosen} is at the level sooner than bound 0; times sooner"),
        Bar(f"{name}_traffic", max(traffic), 1.25, False,
            f"{name}: on equal workers the rows fetched per clock fall as 1 / (bound + 1), up to 8; most above that"),
    ]  # fmt: skip


def judge_stalls(application: str, pool: Executor) -> list[Bar]:
    """A stall of no more clocks than the bound delays nobody else, and a longer one by what it is longer."""
    beyond = 2
    jobs = [Job(application, f"ssp:staleness={bound}", 0, 1.0, "stall", {"clocks": 24})
            for bound in (STALL_CLOCKS, STALL_CLOCKS - beyond)]  # fmt: skip
    within, longer = (c.waited_s / (WORKERS - 1) / CLOCK_S for c in pool.map(run, jobs))
    return [
        Bar(f"{application}_stall", within, 0.01, False,
            f"{application}: one stalls for {STALL_CLOCKS} clocks; what the others wait each under that bound, clocks"),
        Bar(f"{application}_longer_stall", abs(longer - beyond), 0.1, False,
            f"{application}: under a bound that is {beyond} less they wait that much; the difference, clocks"),
    ]  # fmt: skip


def plot(curves: dict[tuple[str, str], list[Curve]], size: Size, path: Path) -> None:
    """Loss by clocks and by seconds, of each application."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(size.applications), 2, figsize=(11, 3.4 * len(size.applications)), squeeze=False)
    colors = pyplot.get_cmap("viridis")
    for line, application in enumerate(size.applications):
        for number, strategy in enumerate(strategies(size)):
            curve = curves[application, strategy][0]
            look = {"color": "crimson" if strategy == FREE else colors(number / len(size.bounds)), "lw": 1.2}
            label = strategy.replace("ssp:staleness=", "bound ")
            axes[line][0].plot(curve.clocks, curve.losses, label=label, **look)
            axes[line][1].plot(curve.seconds, curve.losses, label=label, **look)
        axes[line][0].set(title=f"{application}: loss by clocks of all workers", xlabel="clocks", ylabel="loss")
        axes[line][1].set(title=f"{application}: loss by virtual seconds", xlabel="seconds")
        axes[line][1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    parser = bars.parser("what a bound on staleness buys and costs")
    parser.add_argument("--only", nargs="+", choices=FULL.applications, help="applications; writes only with --out")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="folder of the AP corpus")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; their seconds are virtual")
    given = parser.parse_args(arguments)
    size = QUICK if given.quick else FULL
    if given.only is not None:
        size = msgspec.structs.replace(size, applications=tuple(given.only))
    options = bars.asked(given, size.repeats)
    size = msgspec.structs.replace(size, repeats=options.repeats, corpus=given.corpus.absolute())
    if "topics" in size.applications and not size.corpus.is_dir():
        raise SystemExit(f"topics needs the AP corpus, and {size.corpus} is missing: give --corpus, or --only others")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        rows, curves = measure(size, pool)
        verdicts = []
        for application in size.applications:
            mine = {strategy: found for (name, strategy), found in curves.items() if name == application}
            verdicts += judge(application, [row for row in rows if row["application"] == application], mine, size)
            verdicts += judge_stalls(application, pool)
    if options.of is not None and not options.quick:
        plot(curves, size, (options.out or results.FOLDER) / "staleness.png")
    bars.tell("staleness", options, verdicts, rows, NOTES, ("numba", "matplotlib"))


NOTES = f"""
Eight virtual workers of equal speed, {CLOCK_S:g} s of computing a clock with some jitter; every {EVERY_CLOCKS} clocks
another one, drawn by chance, is {SLOWER:g} times slower for {SLOW_CLOCKS} clocks. The server's line needs about as long
for what all workers read in a clock as they compute. Medians over the seeds; `lr` is tuned for each line on seeds of
its own. The level is the loss at which bound 0 has made {LEVEL:.0%} of its way. `topics` is the AP corpus, the others
are made up. `bytes_per_clock_even`, and stalls, are of workers whose clocks are equally long and of a network that
costs nothing (`topics`: made-up documents of equal length; AP's are not, so that its workers' clocks differ lastingly).

What to expect beside the publication: `asp` asks for fresh rows in every clock, since nothing tells it that older ones
would do. It waits for nobody, so only what its traffic takes can put it behind a bound, and what it reads is fresh
where a bound of 8 reads rows that are 6 clocks old on average; where it is not behind at the same clocks, that is why.
With stragglers traffic falls more slowly than 1 / (bound + 1): a worker that leads by as much as the bound has rows
that are too old again at its next clock, and fetches in every clock until the straggler has caught up.

The plot shows the first seed:
![curves](staleness.png)
"""

if __name__ == "__main__":
    main()
