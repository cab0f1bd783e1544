"""Does the simulator predict somebody else's stragglers? Logs of real training under BSP and ASP against `simulate`.

    python benchmarks/bench_syncswitch.py                 # writes results/syncswitch.md and .json; a minute
    python benchmarks/bench_syncswitch.py --quick --json  # one cluster, writes nothing

A scenario is fitted to undisturbed logs alone: seconds of a push, its jitter, and the server's line. Then stragglers
are put into it as the logs' names say, as latency of one or two workers, and the updates per second are compared with
what was logged. No log with a straggler is part of the fit; a second form, which has one parameter from the mildest
of them, is told apart and leaves that log out. Logs: ../shared/data/trace_syncswitch_ps.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from contenders import bars, syncswitch_logs
from contenders.bars import Bar
from contenders.syncswitch_logs import Log
from paceline import scenario, strategies
from paceline.engines.sim.light import simulate
from paceline.scenario import Scenario

MODEL_BYTES = 1_860_000  # of ResNet-32 in float32; only its ratio to the line's bandwidth counts
UPDATES = {"asp": 4000, "bsp": 400}  # of a simulated run
SEEDS = (0, 1, 2, 3, 4)  # of the jitter; medians count
TOLERANCE = 1e-3  # of a fitted rate
FITTED_WITHIN = 0.01
MEDIAN_WITHIN, ALL_WITHIN, SIZES_WITHIN = 0.10, 0.30, 0.10  # of the logged updates per second
EIGHT_ASP = tuple(f"cifar10_res32/baseline/asp_{run}" for run in (1, 2, 3, 4))
FIXED_BSP = tuple(f"straggler/{name}" for name in
                  ("fixed_sync_baseline", "fixed_sync_baseline_2", "fixed_batch_sync_baseline_cosine"))  # fmt: skip
LEARNT_FROM = "straggler/async_baseline_10lat_1strag"  # what the second form takes its parameter from


class Straggled(msgspec.Struct, frozen=True):
    """A log with stragglers, all through it: so many workers whose messages take so much longer."""

    log: str
    strategy: str
    workers: int
    latency_ms: float


class Set(msgspec.Struct, frozen=True):
    """A cluster and the undisturbed logs of it; medians over the logs of a kind count."""

    name: str
    workers: int
    asp: tuple[str, ...]
    bsp: tuple[str, ...]
    straggled: tuple[Straggled, ...] = ()
    sizes: tuple[tuple[str, str, int, float], ...] = ()  # logs of other sizes: log, strategy, workers, from which step


def _straggled(prefix: str, suffix: str, strategy: str, latencies: Sequence[int]) -> tuple[Straggled, ...]:
    return tuple(
        Straggled(f"straggler/{prefix}_{latency}lat_{count}strag{suffix}", strategy, count, latency)
        for latency in latencies
        for count in (1, 2)
    )


SETS = (
    Set("four", 4, ("straggler/async_baseline",), ("straggler/sync_baseline",),
        (*_straggled("async_baseline", "", "asp", (10, 30)), *_straggled("sync_baseline", "", "bsp", (10, 30)))),
    Set("four, fixed batch", 4, ("straggler/async_baseline",), FIXED_BSP,
        _straggled("fixed_batch_sync", "_cosine", "bsp", (10,))),
    Set("eight", 8, EIGHT_ASP, tuple(f"cifar10_res32/baseline/bsp_{run}" for run in (1, 2, 3, 4, 5, 6)), (),
        (*((f"cluster_16/bsp_run{run}", "bsp", 16, 0.0) for run in (1, 2, 3)),
         *((f"cluster_16/5050_run{run}", "asp", 16, 2300.0) for run in (1, 2, 3)))),  # it has switched to ASP by then
)  # fmt: skip


class Fit(msgspec.Struct, frozen=True):
    """What undisturbed logs say of a cluster. `joint`: one line serves both; else only BSP has it, ASP has none."""

    push_s: float
    sigma: float
    line_s: float  # of one model in one direction
    joint: bool

    def cluster(
        self, strategy: str, workers: int, seed: int = 0, slow: int = 0, latency_ms: float = 0.0
    ) -> Scenario:  # fmt: skip
        """The scenario, with latency for the first few workers."""
        line = self.line_s if self.joint or strategy == "bsp" else 0.0
        network = f"bandwidth_mbps = {MODEL_BYTES * 8 / 1e6 / line!r}" if line else ""
        text = f"""
seed = {seed}
[compute]
seconds_per_sample = {self.push_s!r}
jitter = "lognormal:{self.sigma!r}"
[network]
{network}
"""
        if slow:
            text += f"[[workers]]\ncount = {slow}\nlatency_ms = {latency_ms!r}\n"
        if workers > slow:
            text += f"[[workers]]\ncount = {workers - slow}\n"
        return scenario.parse(text, "syncswitch", Path())


def simulated(fit: Fit, strategy: str, workers: int, slow: int = 0, latency_ms: float = 0.0,
              seeds: Sequence[int] = SEEDS) -> float:  # fmt: skip
    """Updates per second; the median over the seeds of the jitter."""
    found = []
    for seed in seeds:
        cluster = fit.cluster(strategy, workers, seed, slow, latency_ms)
        made = simulate(
            strategies.build(strategy, 0), cluster, max_versions=UPDATES[strategy], model_bytes=MODEL_BYTES
        )  # fmt: skip
        found.append(made.version / made.at)
    return statistics.median(found)


def solve(value_at: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Where a rate that falls with its parameter is the one wanted, by bisection."""
    while True:
        middle = (low + high) / 2
        found = value_at(middle)
        if abs(found / wanted - 1) < TOLERANCE or high - low < 1e-9:
            return middle
        low, high = (middle, high) if found > wanted else (low, middle)


def fitted(sigma: float, workers: int, asp: float, bsp: float) -> Fit:
    """Seconds of a push and of the line such that the simulator has both rates.

    First with one line for both. Where pushes cannot pass a line that slow as often as they were logged under ASP, the
    two logs are of different systems: ASP then has no line, and BSP has its own.
    """

    def push_s_under(line_s: float) -> Fit:
        most = workers / asp  # of a push, its ways included

        def rate(push_s: float) -> float:
            return simulated(Fit(push_s, sigma, line_s, True), "asp", workers, seeds=SEEDS[:1])

        return Fit(solve(rate, asp, 1e-4 * most, most), sigma, line_s, True)

    widest = 0.9 / asp  # at a line as slow as that hardly anything but the line decides
    if simulated(push_s_under(widest), "bsp", workers, seeds=SEEDS[:1]) <= bsp:
        line_s = solve(
            lambda line: simulated(push_s_under(line), "bsp", workers, seeds=SEEDS[:1]), bsp, 1e-6, widest
        )  # fmt: skip
        return push_s_under(line_s)
    push_s = push_s_under(1e-9).push_s
    line_s = solve(
        lambda line: simulated(Fit(push_s, sigma, line, False), "bsp", workers, seeds=SEEDS[:1]), bsp, 1e-6, 1 / bsp
    )
    return Fit(push_s, sigma, line_s, False)


def round_trips(fit: Fit, workers: int, logged: float) -> float:
    """How often a step pays the straggler's latency each way, for the log that this is learnt from."""
    learnt = next(each for known in SETS for each in known.straggled if each.log == LEARNT_FROM)

    def rate(times: float) -> float:
        return simulated(fit, "asp", workers, learnt.workers, times * learnt.latency_ms, SEEDS[:1])

    return solve(rate, logged, 0.0, 100.0)


def middle_rate(logs: Mapping[str, Log], names: Sequence[str]) -> float:
    return statistics.median(logs[name].rate for name in names)


def measure(sets: Sequence[Set], archive: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A row for every log: fitted or predicted; and the parameters."""
    wanted = {name for each in sets for name in (*each.asp, *each.bsp)} | set(EIGHT_ASP)
    wanted |= {log.log for each in sets for log in each.straggled} | {log for each in sets for log, *_ in each.sizes}
    logs = syncswitch_logs.read(archive, sorted(wanted))
    sigma = syncswitch_logs.jitter_of([logs[name] for name in EIGHT_ASP])
    rows, facts, times = [], {"jitter": sigma}, math.nan
    for each in sets:
        asp, bsp = middle_rate(logs, each.asp), middle_rate(logs, each.bsp)
        fit = fitted(sigma, each.workers, asp, bsp)
        if LEARNT_FROM in {straggled.log for straggled in each.straggled}:
            times = facts["round_trips"] = round_trips(fit, each.workers, logs[LEARNT_FROM].rate)
        key = each.name.replace(", ", "_").replace(" ", "_")
        facts |= {f"{key}_push_s": fit.push_s, f"{key}_line_s": fit.line_s, f"{key}_one_line": float(fit.joint)}
        for strategy, names, logged in (("asp", each.asp, asp), ("bsp", each.bsp, bsp)):
            told = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more, median"
            rows.append(row(each, told, strategy, "fitted", each.workers, logged, simulated(fit, strategy,
                                                                                           each.workers)))  # fmt: skip
        for told in each.straggled:
            undisturbed = asp if told.strategy == "asp" else bsp
            made = row(each, told.log, told.strategy, "straggler", each.workers, logs[told.log].rate,
                       simulated(fit, told.strategy, each.workers, told.workers, told.latency_ms))  # fmt: skip
            learnt = simulated(fit, told.strategy, each.workers, told.workers, times * told.latency_ms)
            made |= {"logged share": made["logged per s"] / undisturbed,
                     "predicted share": made["predicted per s"] / undisturbed,
                     "predicted with round trips": learnt, "its error": learnt / made["logged per s"] - 1}  # fmt: skip
            rows.append(made)
        for log, strategy, workers, since in each.sizes:
            rows.append(row(each, log, strategy, "size", workers, logs[log].after(since).rate,
                            simulated(fit, strategy, workers)))  # fmt: skip
    return rows, facts


def row(each: Set, log: str, strategy: str, part: str, workers: int, logged: float, found: float) -> dict[str, Any]:
    return {"cluster": each.name, "log": log, "strategy": strategy, "part": part, "workers": workers,
            "logged per s": logged, "predicted per s": found, "error": found / logged - 1}  # fmt: skip


def judge(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    """How large the errors are."""
    of = {part: [each for each in rows if each["part"] == part] for part in ("fitted", "straggler", "size")}
    errors = {part: [abs(each["error"]) for each in found] for part, found in of.items()}
    fresh = [abs(each["its error"]) for each in of["straggler"] if each["log"] != LEARNT_FROM]
    logs = len(errors["straggler"])
    found = [
        Bar("fitted", max(errors["fitted"]), FITTED_WITHIN, False,
            "largest error of updates per second of the undisturbed logs that were fitted"),
        Bar("stragglers_median", statistics.median(errors["straggler"]), MEDIAN_WITHIN, False,
            f"median error of updates per second of {logs} logs with stragglers, none of them fitted"),
        Bar("stragglers_worst", max(errors["straggler"]), ALL_WITHIN, False,
            f"largest error of updates per second of {logs} logs with stragglers, none of them fitted"),
    ]  # fmt: skip
    if fresh:
        found += [
            Bar("round_trips_median", statistics.median(fresh), MEDIAN_WITHIN, False,
                f"median error with one parameter from the mildest of them, over the other {len(fresh)}"),
            Bar("round_trips_worst", max(fresh), ALL_WITHIN, False,
                f"largest error with one parameter from the mildest of them, over the other {len(fresh)}"),
        ]  # fmt: skip
    if errors["size"]:
        found.append(
            Bar("sizes_worst", max(errors["size"]), SIZES_WITHIN, False,
                f"largest error of updates per second of {len(errors['size'])} undisturbed logs of 16 workers, "
                "by what was fitted to 8")
        )  # fmt: skip
    return found


def main(arguments: list[str] | None = None) -> None:
    """Fit, predict, and write the result."""
    parser = bars.parser("does the simulator predict logged stragglers")
    parser.add_argument("--logs", type=Path, default=syncswitch_logs.ARCHIVE, help="the archive of logs")
    given = parser.parse_args(arguments)
    options = bars.asked(given, 1)
    if not given.logs.is_file():
        raise SystemExit(f"the logs are missing: {given.logs} is no file; give --logs")
    rows, facts = measure(SETS[:1] if options.quick else SETS, given.logs)
    bars.tell("syncswitch", options, judge(rows), rows, notes(facts), facts=facts)


def notes(facts: Mapping[str, float]) -> str:
    """How it was fitted, and what that leaves open."""
    told = "\n".join(f"- `{name}`: {number:.4g}" for name, number in facts.items())
    return f"""
Logs of Sync-Switch (Li et al., ICDCS 2021), of GPU workers and parameter servers in a cloud. An update is a push
under ASP and a round under BSP; rates are over whole logs, pauses for evaluations included. Fitted, to undisturbed
logs alone:

- the jitter, to the spread of the time between logged steps of {len(EIGHT_ASP)} ASP logs of eight workers;
- for each cluster the seconds of a push and those of the line for one model, so that the simulator makes as many
  updates per second as were logged under ASP and under BSP. `..._one_line` 1: one line serves both. 0: as many pushes
  as were logged under ASP could not pass the line that BSP needs, so that the two are different systems: BSP has the
  line, ASP none.

{told}

Then the stragglers of a log's name, `10lat_2strag` being two workers with 10 ms: `latency_ms` of these workers, each
way. A step that crosses the network more than once each way pays it more often: `round_trips` is how often, learnt
from `{LEARNT_FROM}`, and the last two columns use it. The files do not say how many workers made the logs of the
folder `straggler`: their rate is that of four of the eight, and four is what the authors' own example starts. Logs of
`baseline_freq*` and `policy*` are left out: when a straggler came and how long it stayed is not in the files.

The format of scenarios has what this needs. What it cannot say is why two stragglers of 30 ms under BSP cost so much
more than one: workers that wait for each other wait at the same time, here and wherever each has a link of its own.
An error of updates per second is also one of the time that as many updates take.
"""


if __name__ == "__main__":
    main()
