"""The curves of the SSP publication: what a bound on staleness buys and costs, on three applications.

    python benchmarks/bench_staleness.py                 # writes results/staleness.md, .json and .png
    python benchmarks/bench_staleness.py --quick --json  # one application, few bounds, writes nothing

Eight virtual workers of equal speed whose clocks take exponential times, behind a modelled network, run a topic model,
matrix factorization and Lasso with every bound of a list, and without one. Each run makes the same number of clocks.
Matrix factorization gets, for every bound, the learning rate of one grid that is best on a seed of its own; the others
have none.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

import paceline
import results
from paceline import journal, scenario, tasks
from paceline.errors import UserError
from paceline.scenario import Scenario
from sides import bars
from sides.bars import Bar

WORKERS = 8
BOUNDS = (0, 1, 2, 4, 8, 16, 32)
FREE = "asp"
SECONDS_PER_UNIT = {"topics": 2e-4, "factorize": 1e-3, "lasso": 5e-3}
OPTIONS = {
    "topics": {"clocks": 80, "parts": 2, "documents": 400},
    "factorize": {"clocks": 200, "batch": 100},
    "lasso": {"clocks": 120, "features": 2000, "block": 20},
}
RATES = (0.05, 0.1, 0.2, 0.4)  # extended while the best lies on its edge
TUNING_SEED = 100
STALL_CLOCKS = 4


class Size(msgspec.Struct, frozen=True):
    """How much is measured."""

    applications: tuple[str, ...]
    bounds: tuple[int, ...]
    repeats: int
    share: float = 1.0  # of the clocks


FULL = Size(("topics", "factorize", "lasso"), BOUNDS, 3)
QUICK = Size(("lasso",), (0, 4), 1, 0.2)


class Curve(msgspec.Struct, frozen=True):
    """One run: its loss over virtual seconds and over clocks of all workers together, and what it took."""

    seconds: list[float]
    clocks: list[int]
    losses: list[float]
    total_s: float
    wait: float
    bytes_per_clock: float


def cluster(application: str, seed: int, stall: tuple[float, float] | None = None) -> Scenario:
    """Equal workers that are slowed down in turn; or, to see what one stall does, that are not."""
    events = "" if stall is None else f'[[events]]\nkind = "pause"\nworker = 0\nat = {stall[0]}\nfor = {stall[1]}\n'
    return scenario.parse(
        f"""
seed = {seed}
[compute]
seconds_per_sample = {SECONDS_PER_UNIT[application]}
jitter = "{"exponential" if stall is None else "none"}"
[network]
latency_ms = {2.0 if stall is None else 0.0}
{"bandwidth_mbps = 200" if stall is None else ""}
[[workers]]
count = {WORKERS}
speed = 1.0
{events}
""",
        "staleness",
        Path(),
    )


def run(application: str, strategy: str, seed: int, share: float, cluster_: Scenario, **changed: Any) -> Curve:
    """One run of an application."""
    options = {**OPTIONS[application], **changed}
    options["clocks"] = max(4, round(options["clocks"] * share))
    lines = journal.Lines()
    done = paceline.launch(
        tasks.get(application), engine="sim", scenario=cluster_, strategy=strategy, seed=seed, sink=lines,
        options={name: str(value) for name, value in options.items()}, evaluate_every=f"{WORKERS}v",
    )  # fmt: skip
    measured = [line for line in lines if isinstance(line, journal.Observation) and line.what == "evaluation"]
    report = done.summary
    return Curve(
        [line.at for line in measured], [line.data["version"] for line in measured],
        [float(line.data["metrics"]["loss"]) for line in measured], report.seconds, report.wait_fraction or 0.0,
        report.bytes_down / report.pushes,
    )  # fmt: skip


def settings_of(application: str, strategy: str, size: Size) -> dict[str, Any]:
    """The learning rate that is best at the end of a run, where there is one to be chosen."""
    if application != "factorize":
        return {}
    found: dict[float, float] = {}
    rates = list(RATES)
    while rates:
        for rate in rates:
            try:
                curve = run(application, strategy, TUNING_SEED, size.share, cluster(application, TUNING_SEED), lr=rate)
                found[rate] = curve.losses[-1]
            except UserError:  # what is not finite is refused
                found[rate] = math.inf
        best = min(found, key=lambda rate: found[rate])
        rates = [2 * best] if best == max(found) else [best / 2] if best == min(found) else []
    return {"lr": best}


def strategies(size: Size) -> list[str]:
    return [*(f"ssp:staleness={bound}" for bound in size.bounds), FREE]


def measure(size: Size) -> tuple[list[dict[str, Any]], dict[tuple[str, str], list[Curve]]]:
    """A row for every application and bound, and their curves."""
    rows, curves = [], {}
    for application in size.applications:
        for strategy in strategies(size):
            chosen = settings_of(application, strategy, size)
            found = [
                run(application, strategy, seed, size.share, cluster(application, seed), **chosen)
                for seed in range(size.repeats)
            ]
            curves[application, strategy] = found
            rows.append(
                {
                    "application": application, "strategy": strategy, **chosen,
                    "seconds": statistics.median(c.total_s for c in found),
                    "waiting": statistics.median(c.wait for c in found),
                    "bytes_per_clock": statistics.median(c.bytes_per_clock for c in found),
                    "last_loss": statistics.median(c.losses[-1] for c in found),
                }
            )  # fmt: skip
    return rows, curves


def loss_at(curve: Curve, axis: Sequence[float], where: float) -> float:
    """The last loss measured up to there."""
    reached = [loss for loss, x in zip(curve.losses, axis, strict=True) if x <= where]
    return reached[-1] if reached else curve.losses[0]


def judge(application: str, rows: Sequence[dict[str, Any]], curves: dict[str, list[Curve]], size: Size) -> list[Bar]:
    """What the publication says, of one application."""
    bounded = strategies(size)[:-1]
    by = {row["strategy"]: row for row in rows}
    waits = [by[s]["waiting"] for s in bounded]
    rises = max((later - earlier for earlier, later in itertools.pairwise(waits)), default=0.0)
    half = statistics.median(c.clocks[-1] for found in curves.values() for c in found) / 2
    per_clock = {s: statistics.median(loss_at(c, c.clocks, half) for c in found) for s, found in curves.items()}
    first = min(c.total_s for found in curves.values() for c in found)
    per_second = {s: statistics.median(loss_at(c, c.seconds, first / 2) for c in found) for s, found in curves.items()}
    best = min(per_second, key=lambda s: per_second[s])
    start = statistics.median(found[0].losses[0] for found in curves.values())
    gain = start - min(per_clock.values())
    inside = [s for s in bounded[1:-1] if s in by]
    chosen = min(inside, key=lambda s: per_second[s]) if inside else bounded[-1]
    traffic = [by[s]["bytes_per_clock"] * (bound + 1) / by[bounded[0]]["bytes_per_clock"]
               for s, bound in zip(bounded, size.bounds, strict=True) if bound <= 4]  # fmt: skip
    name = application
    return [
        Bar(f"{name}_waiting_rises", rises, 0.01, False, f"{name}: waiting falls as the bound grows; largest rise"),
        Bar(f"{name}_per_clock", (per_clock[bounded[0]] - min(per_clock.values())) / gain, 0.02, False,
            f"{name}: half way by clocks bound 0 is best; its distance from the best, of what was gained"),
        Bar(f"{name}_per_second", float(best in inside), 1.0, True,
            f"{name}: after half of the shortest run's seconds an inner bound is best (it is {best})"),
        Bar(f"{name}_over_asp", (by[chosen]["last_loss"] - by[FREE]["last_loss"]) / gain, 0.0, False,
            f"{name}: {chosen} ends better than {FREE}; the difference, of what was gained"),
        Bar(f"{name}_over_bsp", by[bounded[0]]["seconds"] / by[chosen]["seconds"], 1.0, True,
            f"{name}: {chosen} ends sooner than bound 0"),
        Bar(f"{name}_traffic", max(traffic), 1.6, False,
            f"{name}: rows fetched per clock fall about as 1 / (bound + 1), up to 4; the most above that"),
        stalled(application),
    ]  # fmt: skip


def stalled(application: str) -> Bar:
    """A stall of no more clocks than the bound delays nobody else."""
    changed = {"clocks": 24}
    free = run(application, "ssp:staleness=8", 0, 1.0, cluster(application, 0, (1e6, 1.0)), **changed)
    clock_s = free.total_s / 24
    stall = cluster(application, 0, (8.2 * clock_s, STALL_CLOCKS * clock_s))
    within = run(application, f"ssp:staleness={STALL_CLOCKS + 1}", 0, 1.0, stall, **changed)
    text = f"{application}: share of time waited when one stalls for {STALL_CLOCKS} clocks, under a bound one above"
    return Bar(f"{application}_stall", within.wait, 0.001, False, text)


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
    given = parser.parse_args(arguments)
    size = QUICK if given.quick else FULL
    if given.only is not None:
        size = msgspec.structs.replace(size, applications=tuple(given.only))
    options = bars.asked(given, size.repeats)
    size = msgspec.structs.replace(size, repeats=options.repeats)
    rows, curves = measure(size)
    verdicts = []
    for application in size.applications:
        mine = {strategy: found for (name, strategy), found in curves.items() if name == application}
        verdicts += judge(application, [row for row in rows if row["application"] == application], mine, size)
    if given.only is not None and options.out is None:
        options = msgspec.structs.replace(options, quick=True)
    if not options.quick:
        plot(curves, size, (options.out or results.FOLDER) / "staleness.png")
    bars.tell("staleness", options, verdicts, rows, NOTES, ("numba", "matplotlib"))


NOTES = """
Eight virtual workers of equal speed; the time of every clock is exponential, so that each of them is now and then a
straggler; 2 ms and 200 Mbit/s to the server. Medians over the seeds. The plot beside this page shows the first seed:
![curves](staleness.png)
"""

if __name__ == "__main__":
    main()
