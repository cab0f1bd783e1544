"""What does a push, its update and the pull cost between two hosts, beside a bare exchange of the same bytes?

    python benchmarks/bench_hosts.py                 # writes results/hosts.md and .json; needs root
    python benchmarks/bench_hosts.py --quick --json  # tiny sizes, one JSON object, writes nothing

Two hosts of a lab (tests/netlab) on this machine, each with processors of its own, as two machines have them.
`paceline` is a run by `paceline serve` on one and `paceline join` on the other; `bare` is a ZeroMQ socket on each and
nothing else. Every repeat asks both for each network with and without encryption in turn, so that what else the
machine does strikes all of them. A contender's time is the median of its rounds; a ratio is that of one repeat, and
the median over the repeats counts. A round without a rate and encryption is over in less time than the scheduler
takes to move a thread, and a process often keeps the pace that it began with for all of its rounds; so there each
repeat starts both contenders several times, in turn, and has as many ratios. The same is measured with hosts that
share all processors, where threads of both stand in each other's way.

Then one small update is timed while 10, 100 and 1,000 members of a third host are connected that send nothing.
"""

import dataclasses
import itertools
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import msgspec

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import netlab
import sources
from contenders import bars
from contenders.isolation import ask
from contenders.questions import HostExchange

CONTENDERS = {
    "bare": "bare_zeromq_hosts",
    "paceline": "paceline_hosts",
}  # the name in results, and the module that answers
UNSHAPED = "unshaped"
SHARED = "unshaped, hosts share processors"


class Size(msgspec.Struct, frozen=True):
    """How much is measured."""

    parameters: int
    rounds: int  # on the network with a rate
    fast_rounds: int  # without one
    repeats: int
    turns: int  # of each contender in one repeat, on the network without a rate and without encryption
    rate: str  # of the shaped network
    idle: tuple[int, ...]  # members that are connected while an update is timed
    updates: int


FULL = Size(
    parameters=25_000_000,
    rounds=5,
    fast_rounds=15,
    repeats=3,
    turns=3,
    rate="1gbit",
    idle=(10, 100, 1_000),
    updates=500,
)
QUICK = Size(parameters=300_000, rounds=2, fast_rounds=2, repeats=1, turns=2, rate="200mbit", idle=(2, 20), updates=20)
SMALL = 10_000  # parameters of the model whose update is timed beside idle members


def measure(size: Size, repeat: int) -> list[dict[str, Any]]:
    """One repeat: every contender on each network, with encryption and without."""
    rows = []
    fast = HostExchange(size.parameters, size.fast_rounds, rate=None, curve=False, apart=True)
    shaped = dataclasses.replace(fast, rounds=size.rounds, rate=size.rate)
    for network, question, turns in (
        (size.rate, shaped, 1), (size.rate, dataclasses.replace(shaped, curve=True), 1),
        (UNSHAPED, fast, size.turns), (UNSHAPED, dataclasses.replace(fast, curve=True), 1),
        (SHARED, dataclasses.replace(fast, apart=False), size.turns),
    ):  # fmt: skip
        for turn, side in itertools.product(range(turns), CONTENDERS):
            answer = ask(CONTENDERS[side], question)
            rows.append({
                "repeat": repeat, "turn": turn, "side": side, "network": network,
                "curve": "yes" if question.curve else "no",
                "round_ms": 1e3 * statistics.median(answer.round_s),
                "up_ms": 1e3 * answer.facts["up_s"] if "up_s" in answer.facts else None,
                "worker_cpu_ms": 1e3 * answer.facts["worker_cpu_s"],
                "server_cpu_ms": 1e3 * answer.facts["server_cpu_s"],
                "sent_mb": answer.facts["sent_bytes"] / 1e6,
                "received_mb": answer.facts["received_bytes"] / 1e6,
                "worst_error": answer.worst_error,
            })  # fmt: skip
    return rows + [measure_beside(size, repeat, idle) for idle in size.idle]


def measure_beside(size: Size, repeat: int, idle: int) -> dict[str, Any]:
    """One repeat: small updates while so many members are connected that send nothing."""
    question = HostExchange(SMALL, size.updates, rate=None, curve=True, idle=idle, warmup=5)
    answer = ask(CONTENDERS["paceline"], question)
    return {
        "repeat": repeat, "side": "paceline", "network": UNSHAPED, "curve": "yes", "idle": idle,
        "round_ms": 1e3 * statistics.median(answer.round_s),
        "worker_cpu_ms": 1e3 * answer.facts["worker_cpu_s"],
        "server_cpu_ms": 1e3 * answer.facts["server_cpu_s"],
        "worst_error": answer.worst_error,
    }  # fmt: skip


def ratios(rows: list[dict[str, Any]], network: str, curve: str) -> list[float]:
    """The times of paceline over those of the bare exchange beside it."""
    found: dict[str, dict[tuple[int, int], float]] = {side: {} for side in CONTENDERS}
    for row in rows:
        if "idle" not in row and (row["network"], row["curve"]) == (network, curve):
            found[row["side"]][row["repeat"], row["turn"]] = row["round_ms"]
    return [found["paceline"][place] / ms for place, ms in found["bare"].items()]


def judge(rows: list[dict[str, Any]], size: Size) -> list[bars.Bar]:
    """What must hold: the exchange beside the bare one, and the update beside idle members."""
    beside: dict[tuple[int, int], float] = {
        (row["repeat"], row["idle"]): row["round_ms"] for row in rows if "idle" in row
    }
    repeats = sorted({row["repeat"] for row in rows})

    least, most = size.idle[0], size.idle[-1]
    growth = statistics.median(beside[n, most] / beside[n, least] for n in repeats)
    megabytes = f"{4 * size.parameters / 1e6:,.0f} MB"
    return [
        bars.Bar(
            "shaped_with_curve", statistics.median(ratios(rows, size.rate, "yes")), 1.3, False,
            f"push, apply and pull of {megabytes} over {size.rate} with CURVE, over the bare exchange with CURVE",
        ),
        bars.Bar(
            "unshaped_without", statistics.median(ratios(rows, UNSHAPED, "no")), 1.3, False,
            f"the same of {megabytes} on a network without a rate and without encryption",
        ),
        bars.Bar(
            "unshaped_shared", statistics.median(ratios(rows, SHARED, "no")), 1.3, False,
            "the same where both hosts share all processors",
        ),
        bars.Bar(
            "idle_members", growth, 2.0, False,
            f"an update's latency with {most:,} idle members connected, over that with {least:,}",
        ),
    ]  # fmt: skip


def facts_of(rows: list[dict[str, Any]], size: Size) -> dict[str, float]:
    """What encryption adds to a bare exchange on each network, and how near the shaped one comes to its rate."""
    found: dict[tuple[int, str, str], dict[str, Any]] = {
        (row["repeat"], row["network"], row["curve"]): row for row in rows if row["side"] == "bare" and row["turn"] == 0
    }
    repeats = sorted({repeat for repeat, _, _ in found})

    def encrypted_over_plain(network: str, column: str) -> float:
        pairs = [(found[repeat, network, "yes"], found[repeat, network, "no"]) for repeat in repeats]
        return statistics.median(float(encrypted[column] / plain[column]) for encrypted, plain in pairs)

    least_ms = 1e3 * 2 * size.parameters * 4 * 8 / netlab.bits_of(size.rate)
    return {
        "curve_over_plain_shaped": encrypted_over_plain(size.rate, "round_ms"),
        "curve_over_plain_unshaped": encrypted_over_plain(UNSHAPED, "round_ms"),
        "curve_cpu_over_plain": encrypted_over_plain(UNSHAPED, "worker_cpu_ms"),
        "shaped_over_its_rate": statistics.median(found[n, size.rate, "yes"]["round_ms"] for n in repeats) / least_ms,
    }


def processors_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What exchanges of hosts that share processors were like: the bare one at its best, and how the ratios differ."""
    plain = [row for row in rows if row["network"] == SHARED and row["side"] == "bare"]
    best = min(plain, key=lambda row: float(row["round_ms"]))
    found = ratios(rows, SHARED, "no")
    return {
        "least_ratio": min(found),
        "greatest_ratio": max(found),
        "bare_best_ms": best["round_ms"],
        "bare_processors": (best["worker_cpu_ms"] + best["server_cpu_ms"]) / best["round_ms"],
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    given = bars.parser("an exchange between two hosts, with encryption and without").parse_args(arguments)
    reason = netlab.why_not()
    if reason is not None:
        print(f"not measured: {reason}", file=sys.stderr)
        return
    size = QUICK if given.quick else FULL
    options = bars.asked(given, size.repeats)
    if options.of is not None:  # the lab is measured too
        sources.checked(given, measured=(*sources.MEASURED, "tests/netlab"))
    before = os.getloadavg()[0]
    rows = [row for repeat in range(options.repeats) for row in measure(size, repeat)]
    facts = facts_of(rows, size) | processors_of(rows) | {"load_before": before, "load_after": os.getloadavg()[0]}
    bars.tell("hosts", options, judge(rows, size), rows, notes(size, facts), ("pyzmq",), facts)


def notes(size: Size, facts: dict[str, float]) -> str:
    """What the numbers mean."""
    return f"""
{size.parameters:,} float32 parameters there and as many back between two hosts of a lab on this machine, in chunks of
1 MiB; {size.rounds} rounds after the warm-up, {size.fast_rounds} without a rate. `bare` is a ZeroMQ socket that
receives into memory that is there already, and nothing else; `paceline` also copies the gradient, applies it and loads
the parameters. Each host has a half of the machine's processors, but for the rows that say otherwise, and those with
`idle`. `up_ms` is the way there, the processor times are of one round, and the bytes are those that the switch or the
worker's interface counted. Rows with `idle` are updates of {SMALL:,} parameters with CURVE while so many members of a
third host are connected.

On the network of {size.rate} a bare round with CURVE takes {facts["shaped_over_its_rate"]:.3f} times what the bytes
alone need at that rate, and {facts["curve_over_plain_shaped"]:.2f} times the round without. On a network without a rate
CURVE takes {facts["curve_over_plain_unshaped"]:.2f} times as long, and {facts["curve_cpu_over_plain"]:.2f} times the
worker's processor time.

Where hosts share processors single ratios lie between {facts["least_ratio"]:.2f} and {facts["greatest_ratio"]:.2f}:
both contenders have fast and slow processes, by where the scheduler leaves their threads. The fastest of the bare
exchanges took {facts["bare_best_ms"]:.0f} ms a round and {facts["bare_processors"]:.1f} processor seconds per second:
what paceline does besides sending, a copy each of gradient and parameters, the norm and the step, has little left to
overlap with where there are two processors. Processor times of paceline's server are over the whole run.

The machine's load was {facts["load_before"]:.1f} before and {facts["load_after"]:.1f} after, of which this benchmark
makes up to two.
"""


if __name__ == "__main__":
    main()
