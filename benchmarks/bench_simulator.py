"""How fast is the simulator with light workers, against the same model written directly in SimPy?

    python benchmarks/bench_simulator.py            # all sizes: writes results/simulator.md and .json
    python benchmarks/bench_simulator.py --quick    # a small run that writes nowhere, unless --out names a folder

Cost-only SSP. Each repeat runs paceline, paceline with a journal, and SimPy one after the other, so that what else the
machine does strikes all three; times are CPU seconds of the whole call, building the cluster included. Per size the
median over the repeats counts, of a ratio the median of the repeats' own ratios.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import simpy

import results
import simpy_ssp
import sources
from paceline import scenario as scenarios
from paceline.core.scenario.costs import Times
from paceline.engines.sim.light import simulate
from paceline.records.journal import Sink, Writer
from paceline.scenario import Scenario
from paceline.strategies import build

STALENESS = 3
WORK = 16  # samples per push
SEED = 7
SCENARIO = """
seed = {seed}
[compute]
seconds_per_sample = 0.01
jitter = "lognormal:0.1"
[[workers]]
count = {workers}
"""
COMMAND = "python benchmarks/bench_simulator.py"


class Size(msgspec.Struct, frozen=True):
    """One size of cluster."""

    workers: int
    pushes: int
    repeats: int


FULL = (Size(100, 100_000, 9), Size(10_000, 200_000, 5), Size(100_000, 1_000_000, 5))
QUICK = (Size(20, 1_000, 1), Size(200, 1_000, 1))

MIN_PUSHES_PER_S = 80_000
MAX_TIMES_SIMPY = 2.0
MAX_TIMES_WITH_JOURNAL = 2.0
MAX_BYTES_PER_WORKER = 2048


class Row(msgspec.Struct, frozen=True):
    """One repeat; CPU microseconds per push."""

    workers: int
    pushes: int
    repeat: int
    paceline_us: float
    journal_us: float
    simpy_us: float


def make_scenario(workers: int) -> Scenario:
    """Equal workers with jitter, no network: all that happens is SSP."""
    return scenarios.parse(SCENARIO.format(seed=SEED, workers=workers), "bench", Path())


def run_paceline(scenario: Scenario, pushes: int, sink: Sink | None = None) -> None:
    """The strategy, coordinator and kernel that every simulated run goes through."""
    simulate(build(f"ssp:staleness={STALENESS}", 0), scenario, work=WORK, max_versions=pushes, sink=sink)


def run_with_journal(scenario: Scenario, pushes: int) -> None:
    """The same, every decision written to a file."""
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(Path(folder) / "journal.jsonl")
        run_paceline(scenario, pushes, writer)
        writer.close()


def run_simpy(scenario: Scenario, pushes: int, make: type[simpy_ssp.Cluster] = simpy_ssp.Cluster) -> simpy_ssp.Cluster:
    """The model in SimPy, with the same draws."""
    times, env = Times(scenario), simpy.Environment()
    cluster = make(env, scenario.count, STALENESS, pushes)

    def seconds(worker: int, attempt: int) -> float:
        return times.compute_s(worker, attempt, WORK, 0.0)

    for worker in range(scenario.count):
        env.process(simpy_ssp.work(env, cluster, worker, seconds))
    env.run(until=cluster.full)
    return cluster


def measure(size: Size) -> list[Row]:
    """All repeats of one size."""
    scenario, rows = make_scenario(size.workers), []
    for repeat in range(size.repeats):
        took = [_cpu_us(run, scenario, size.pushes) for run in (run_paceline, run_with_journal, run_simpy)]
        rows.append(Row(size.workers, size.pushes, repeat, *took))
    return rows


def _cpu_us(run: Callable[[Scenario, int], object], scenario: Scenario, pushes: int) -> float:
    gc.collect()
    began = time.process_time()
    run(scenario, pushes)
    return (time.process_time() - began) / pushes * 1e6


def bytes_per_worker(workers: int) -> float:
    """Peak of all that is allocated for a run: scenario, times, cluster, coordinator, strategy, pending calls."""
    run_paceline(make_scenario(1), 10)  # what a first run loads and keeps is nobody's worker
    gc.collect()
    tracemalloc.start()
    try:
        run_paceline(make_scenario(workers), 2 * workers)
        return tracemalloc.get_traced_memory()[1] / workers
    finally:
        tracemalloc.stop()


def judge(rows: list[Row], memory: dict[int, float]) -> list[results.Verdict]:
    """One verdict per bar and size."""
    by_size: dict[int, list[Row]] = {}
    for row in rows:
        by_size.setdefault(row.workers, []).append(row)
    verdicts, smallest = [], min(by_size)
    first_us = _medians(by_size[smallest])
    for workers, found in by_size.items():
        us = _medians(found)
        at = f"at {workers:,} workers"
        rate = 1e6 / us[0]
        ratio = statistics.median(row.paceline_us / row.simpy_us for row in found)
        journal = statistics.median(row.journal_us / row.paceline_us for row in found)
        verdicts += [
            _at_least(f"pushes per second {at}", rate, MIN_PUSHES_PER_S),
            _at_most(f"time per push over SimPy's {at}", ratio, MAX_TIMES_SIMPY),
            _at_most(f"time with journal over time without {at}", journal, MAX_TIMES_WITH_JOURNAL),
        ]
        if workers != smallest:
            growth, simpys = us[0] / first_us[0], us[1] / first_us[1]
            bar = f"<= SimPy's, {simpys:.2f}"
            name = f"growth of the time per push from {smallest:,} to {workers:,} workers"
            verdicts.append(results.Verdict(name, f"{growth:.2f}", bar, growth <= simpys))
    for workers, size in memory.items():
        name = f"bytes per worker at {workers:,} workers"
        verdicts.append(
            results.Verdict(name, f"{size:,.0f}", f"< {MAX_BYTES_PER_WORKER:,}", size < MAX_BYTES_PER_WORKER)
        )
    return verdicts


def _medians(found: list[Row]) -> tuple[float, float]:
    return statistics.median(row.paceline_us for row in found), statistics.median(row.simpy_us for row in found)


def _at_least(name: str, value: float, bar: float) -> results.Verdict:
    return results.Verdict(name, f"{value:,.0f}", f">= {bar:,.0f}", value >= bar)


def _at_most(name: str, value: float, bar: float) -> results.Verdict:
    return results.Verdict(name, f"{value:.2f}", f"<= {bar:.2f}", value <= bar)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description="speed and memory of the simulator with light workers")
    parser.add_argument("--quick", action="store_true", help="small sizes, one repeat; written only if --out is given")
    parser.add_argument("--out", type=Path, help="folder of the result, instead of benchmarks/results")
    parser.add_argument("--json", action="store_true", help="print rows and verdicts as JSON")
    sources.add_options(parser)
    given = parser.parse_args(arguments)
    of = sources.checked(given) if given.out is not None or not given.quick else None
    sizes = QUICK if given.quick else FULL
    memory = {size.workers: bytes_per_worker(size.workers) for size in sizes}
    rows = [row for size in sizes for row in measure(size)]
    verdicts = judge(rows, memory)
    plain = [msgspec.to_builtins(row) for row in rows]
    if given.json:
        print(json.dumps({"rows": plain, "verdicts": msgspec.to_builtins(verdicts)}, indent=1))
    else:
        print("\n".join(f"{v.name}: {v.value} ({v.bar}): {'met' if v.passed else 'MISSED'}" for v in verdicts))
    if of is not None:
        command = COMMAND + " --quick" * given.quick
        page = results.write("simulator", command, verdicts, plain, NOTES, of, given.out or results.FOLDER)
        if not given.json:
            print(f"written to {page}")


NOTES = f"""
Cost-only SSP (staleness {STALENESS}, {WORK} samples per push, equal workers, lognormal jitter of sigma 0.1, scenario
seed {SEED}, no network) on virtual workers, in CPU microseconds per push on one core, building the cluster included.
`paceline` is the coordinator, strategy and kernel of every simulated run, decisions with their reasons included;
`journal` also writes each decision to a file; `simpy` is `benchmarks/simpy_ssp.py`, one process per worker and the same
draws, which keeps clocks, versions and staleness alone: no samples, no waiting times, no reasons. The three take turns
in each repeat; verdicts are medians over the repeats, of ratios the medians of the repeats' own ratios. Memory is
tracemalloc's peak over a run of two pushes per worker.
"""


if __name__ == "__main__":
    main()
