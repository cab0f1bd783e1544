"""What does an exchange of a gradient and parameters between two hosts cost at least, and what does encryption add?

    python benchmarks/bench_hosts.py                 # writes results/hosts.md and .json; needs root
    python benchmarks/bench_hosts.py --quick --json  # tiny sizes, one JSON object, writes nothing

Two hosts of a lab (tests/netlab) on this machine, each with one process. Every repeat asks for each network with and
without encryption in turn, so that what else the machine does strikes all of them. A contender's time is the median of
its rounds; a ratio is that of one repeat, and the median over the repeats counts.
"""

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

CONTENDERS = {"bare": "bare_zeromq_hosts"}  # the name in results, and the module that answers
UNSHAPED = "unshaped"


class Size(msgspec.Struct, frozen=True):
    """How much is measured."""

    parameters: int
    rounds: int
    repeats: int
    rate: str  # of the shaped network


FULL = Size(parameters=25_000_000, rounds=8, repeats=5, rate="1gbit")
QUICK = Size(parameters=300_000, rounds=2, repeats=1, rate="200mbit")


def measure(size: Size, repeat: int) -> list[dict[str, Any]]:
    """One repeat: every contender on each network, with encryption and without."""
    rows = []
    for rate in (size.rate, None):
        for curve in (False, True):
            question = HostExchange(size.parameters, size.rounds, rate=rate, curve=curve)
            for side, module in CONTENDERS.items():
                answer = ask(module, question)
                rows.append({
                    "repeat": repeat, "side": side, "network": rate or UNSHAPED, "curve": "yes" if curve else "no",
                    "round_ms": 1e3 * statistics.median(answer.round_s),
                    "up_ms": 1e3 * answer.facts["up_s"],
                    "worker_cpu_ms": 1e3 * answer.facts["worker_cpu_s"],
                    "server_cpu_ms": 1e3 * answer.facts["server_cpu_s"],
                    "sent_mb": answer.facts["sent_bytes"] / 1e6,
                    "received_mb": answer.facts["received_bytes"] / 1e6,
                    "worst_error": answer.worst_error,
                })  # fmt: skip
    return rows


def facts_of(rows: list[dict[str, Any]], size: Size) -> dict[str, float]:
    """What encryption adds on each network, and how near the shaped one comes to its rate."""
    found: dict[tuple[int, str, str], dict[str, Any]] = {
        (row["repeat"], row["network"], row["curve"]): row for row in rows if row["side"] == "bare"
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


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    given = bars.parser("a bare exchange between two hosts, with encryption and without").parse_args(arguments)
    reason = netlab.why_not()
    if reason is not None:
        print(f"not measured: {reason}", file=sys.stderr)
        return
    size = QUICK if given.quick else FULL
    options = bars.asked(given, size.repeats)
    if options.of is not None:  # the lab is measured too
        sources.checked(given, measured=(*sources.MEASURED, "tests/netlab"))
    rows = [row for repeat in range(options.repeats) for row in measure(size, repeat)]
    facts = facts_of(rows, size)
    bars.tell("hosts", options, [], rows, notes(size, facts), ("pyzmq",), facts)


def notes(size: Size, facts: dict[str, float]) -> str:
    """What the numbers mean."""
    return f"""
{size.parameters:,} float32 parameters there and as many back between two hosts of a lab on this machine, in chunks of
1 MiB, received into memory that is there already; {size.rounds} rounds after the warm-up. `bare` is a ZeroMQ socket and
nothing else. Both hosts share the machine's processors. `up_ms` is the way there, the processor times are of one round,
and the bytes are those that the switch counted.

On the network of {size.rate} a round with CURVE takes {facts["shaped_over_its_rate"]:.3f} times what the bytes alone
need at that rate, and {facts["curve_over_plain_shaped"]:.2f} times the round without. On a network without a rate CURVE
takes {facts["curve_over_plain_unshaped"]:.2f} times as long, and {facts["curve_cpu_over_plain"]:.2f} times the worker's
processor time.
"""


if __name__ == "__main__":
    main()
