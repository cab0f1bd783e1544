"""What do two processes that share the weights gain over one, and how many workers can one coordinator serve?

    python benchmarks/bench_shards.py                 # writes results/shards.md and .json; needs root
    python benchmarks/bench_shards.py --quick --json  # tiny sizes, one JSON object, writes nothing

A round is a push, the update and the pull, of four workers under bsp on one host, and of one worker under asp between
two hosts of a lab (tests/netlab) without a rate. Every repeat asks for one server and for two in turn. The ideal halves
what the server's process did in a round, and nothing else: the share of the ideal is that time over the measured one.
On a table of as many numbers as `Size.numbers` a round reads half of the rows, adds to them and ends its clock.

The coordinator's cost has two parts. What a push costs beside its tensors, messages included, comes from real workers
that push a small model as fast as they are answered: the server's processor time over the pushes. What a decision costs
with many workers comes from light workers, which compute nothing (`paceline.engines.sim.light`).
"""

import dataclasses
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import netlab
import results
import sources
from contenders import bars
from contenders.isolation import ask
from contenders.questions import Exchange, HostExchange
from paceline import scenario, strategies
from paceline.engines.sim.light import simulate

LOCAL, HOSTS, TABLES = "one host", "two hosts", "tables"
STEP_S = 1.0  # between two pushes of a worker, in what the model says about many


class Size(msgspec.Struct, frozen=True):
    """How much is measured."""

    parameters: int
    rounds: int
    repeats: int
    workers: int
    small: int  # parameters of the model whose pushes are counted
    pushes: int
    clusters: tuple[int, ...]  # light workers
    decisions: int  # pushes of each cluster, at least
    numbers: int  # in a table


FULL = Size(
    parameters=25_000_000, rounds=12, repeats=3, workers=4, small=1_000, pushes=4_000,
    clusters=(10, 100, 1_000, 10_000), decisions=100_000, numbers=6_400_000,
)  # fmt: skip
QUICK = Size(
    parameters=200_000, rounds=3, repeats=1, workers=2, small=1_000, pushes=50, clusters=(10, 100), decisions=1_000,
    numbers=64_000,
)  # fmt: skip
LIGHT = ("bsp", "asp", "ssp", "dasp")


def measure(size: Size, repeat: int, *, hosts: bool) -> list[dict[str, Any]]:
    """One repeat: one server and two, on one host and, if a lab can be built, between two."""
    local = Exchange(size.parameters, size.rounds, workers=size.workers, strategy="bsp")
    far = HostExchange(size.parameters, size.rounds, rate=None, curve=False)
    rows = []
    for servers in (1, 2):
        answer = ask("paceline_local", dataclasses.replace(local, servers=servers))
        rounds = size.rounds + local.warmup
        busy_s = (answer.facts["apply_s"] + answer.facts["copy_s"]) / rounds
        rows.append(_row(repeat, LOCAL, servers, answer, busy_s, answer.facts["cpu_s"] / rounds))
    for servers in (1, 2) if hosts else ():
        answer = ask("paceline_hosts", dataclasses.replace(far, servers=servers))
        spent = answer.facts["server_cpu_s"]
        rows.append(_row(repeat, HOSTS, servers, answer, spent, spent))
    return rows


def _row(repeat: int, where: str, servers: int, answer: Any, busy_s: float, cpu_s: float) -> dict[str, Any]:
    return {
        "repeat": repeat, "where": where, "servers": servers, "round_ms": 1e3 * statistics.median(answer.round_s),
        "server_busy_ms": 1e3 * busy_s, "server_cpu_ms": 1e3 * cpu_s, "worst_error": answer.worst_error,
    }  # fmt: skip


def measure_tables(size: Size, repeat: int) -> list[dict[str, Any]]:
    """One repeat: the rows of a table in one process and in two."""
    task = Exchange(size.numbers, size.rounds, workers=size.workers, strategy="bsp")
    rows = []
    for servers in (1, 2):
        answer = ask("rows_paceline", dataclasses.replace(task, servers=servers))
        cpu_s = answer.facts["cpu_s"] / (size.rounds + task.warmup)
        rows.append(_row(repeat, TABLES, servers, answer, cpu_s, cpu_s))
    return rows


def measure_pushes(size: Size, repeat: int) -> list[dict[str, Any]]:
    """One repeat: the processor time of a push of a small model, by the number of servers."""
    rows = []
    for servers in (1, 2):
        task = Exchange(size.small, size.pushes, workers=size.workers, servers=servers)
        answer = ask("paceline_local", task)
        pushes = (size.pushes + task.warmup) * size.workers
        rows.append({
            "repeat": repeat, "where": "pushes", "servers": servers,
            "round_ms": 1e3 * statistics.median(answer.round_s),
            "push_us": 1e6 * answer.facts["cpu_s"] / pushes,
        })  # fmt: skip
    return rows


def measure_decisions(size: Size, repeat: int) -> list[dict[str, Any]]:
    """One repeat: the time of a decision with so many light workers, each as fast as it likes to be."""
    rows = []
    for workers in size.clusters:
        cluster = scenario.parse(
            f"""
seed = 1
[compute]
seconds_per_sample = {STEP_S}
jitter = "lognormal:0.1"
[[workers]]
count = {workers}
""", "many", Path(),
        )  # fmt: skip
        for name in LIGHT:
            samples = max(size.decisions, 10 * workers)
            began = time.process_time()
            done = simulate(strategies.build(name, 0), cluster, samples=samples)
            seconds = time.process_time() - began
            rows.append({
                "repeat": repeat, "where": "decisions", "strategy": name, "workers": workers,
                "versions": done.version, "decision_us": 1e6 * seconds / samples,
            })  # fmt: skip
    return rows


def _median(rows: list[dict[str, Any]], column: str, **where: Any) -> float:
    return statistics.median(row[column] for row in rows if all(row.get(key) == value for key, value in where.items()))


def _shares(rows: list[dict[str, Any]], where: str) -> list[tuple[float, float]]:
    """Speed-up by the second server, and share of the ideal, of each repeat."""
    found = []
    by_repeat: dict[int, dict[int, dict[str, Any]]] = {}
    for row in rows:
        if row["where"] == where:
            by_repeat.setdefault(row["repeat"], {})[row["servers"]] = row
    for pair in by_repeat.values():
        one, two = pair[1]["round_ms"], pair[2]["round_ms"]
        found.append((one / two, (one - pair[1]["server_busy_ms"] / 2) / two))
    return found


def judge(rows: list[dict[str, Any]], size: Size) -> list[bars.Bar]:
    """Whether the second process pays, and whether splitting costs pushes of a small model too much."""
    bars_ = []
    megabytes = f"{4 * size.parameters / 1e6:,.0f} MB"
    for name, where, what in (
        ("local", LOCAL, f"{size.workers} workers under bsp"), ("hosts", HOSTS, "one worker over TCP"),
    ):  # fmt: skip
        found = _shares(rows, where)
        why = "" if found else "no lab can be built here"
        gain = statistics.median(each[0] for each in found) if found else None
        share = statistics.median(each[1] for each in found) if found else None
        bars_ += [
            bars.Bar(
                f"{name}_gain", gain, 1.0, True,
                f"a round of {megabytes} with one server over that with two, {where}, {what}", why,
            ),
            bars.Bar(f"{name}_share", share, 0.7, True, f"share of the ideal, {where}", why),
        ]  # fmt: skip
    found = _shares(rows, TABLES)
    gain = statistics.median(each[0] for each in found) if found else None
    what = f"get, inc and clock of half of a table of {4 * size.numbers / 1e6:,.0f} MB with one server over two"
    bars_.append(bars.Bar("tables_gain", gain, 1.0, True, what, "" if found else "not measured"))
    return bars_


def facts_of(rows: list[dict[str, Any]], size: Size) -> dict[str, float]:
    """The model of a push's cost: its tensors, its messages, and what a decision adds by the number of workers."""
    found = {f"push_us_{n}": _median(rows, "push_us", where="pushes", servers=n) for n in (1, 2)}
    found["data_ms"] = _median(rows, "server_busy_ms", where=LOCAL, servers=1) / size.workers
    for name in LIGHT:
        for workers in size.clusters:
            found[f"decision_us_{name}_{workers}"] = _median(rows, "decision_us", strategy=name, workers=workers)
    return found


def model_table(facts: dict[str, float], size: Size) -> str:
    """What one coordinator has to do for many workers, each of which pushes every `STEP_S` seconds."""
    rows = []
    for name in LIGHT:
        row: dict[str, Any] = {"strategy": f"`{name}`"}
        for workers in size.clusters[-2:]:
            added = facts[f"decision_us_{name}_{workers}"] - facts[f"decision_us_{name}_{size.clusters[0]}"]
            row[f"µs per decision, {workers:,} workers"] = facts[f"decision_us_{name}_{workers}"]
            busy = workers * (facts["push_us_1"] + max(0.0, added)) * 1e-6 / STEP_S
            row[f"share of the coordinator's core, {workers:,} workers"] = f"{busy:.0%}"
        rows.append(row)
    return results.table(rows)


def notes(size: Size, facts: dict[str, float]) -> str:
    """What the numbers mean."""
    return f"""
{size.parameters:,} float32 parameters, plain SGD; {size.rounds} rounds after the warm-up. `server_busy_ms` is what the
servers' processes spent in a round on steps and copies, or over TCP in all; both sides share this machine's processors.
A round of many workers is timed at each of them, so it holds the waits for the slowest.

A push of {size.small:,} parameters costs the server {facts["push_us_1"]:.0f} µs of processor time with one process, and
{facts["push_us_2"]:.0f} µs with two shards and their coordinator together. Its share of a round's steps and copies
costs {facts["data_ms"]:.1f} ms with {size.parameters:,} parameters. For workers that push every {STEP_S:g} s, with
what light workers show of decisions:

{model_table(facts, size)}
"""


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    given = bars.parser("one process that holds the weights, against two").parse_args(arguments)
    reason = netlab.why_not()
    if reason is not None:
        print(f"between hosts not measured: {reason}", file=sys.stderr)
    size = QUICK if given.quick else FULL
    options = bars.asked(given, size.repeats)
    if options.of is not None:  # the lab is measured too
        sources.checked(given, measured=(*sources.MEASURED, "tests/netlab"))
    rows: list[dict[str, Any]] = []
    for repeat in range(options.repeats):
        rows += measure(size, repeat, hosts=reason is None)
        rows += measure_tables(size, repeat)
        rows += measure_pushes(size, repeat)
        rows += measure_decisions(size, repeat)
    facts = facts_of(rows, size)
    bars.tell("shards", options, judge(rows, size), rows, notes(size, facts), ("pyzmq",), facts)


if __name__ == "__main__":
    main()
