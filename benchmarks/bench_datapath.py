"""How near is push + apply + pull to the speed of memory, and how far ahead of the usual ways to build it?

    python benchmarks/bench_datapath.py                 # writes results/datapath.md and .json
    python benchmarks/bench_datapath.py --quick --json  # tiny sizes, one JSON object, writes nothing

Every repeat asks all contenders in turn, each in processes of its own with the same number of threads, so that what
else the machine does strikes all of them. A contender's time is the median of its rounds; a ratio is that of one
repeat, and the median over the repeats counts.
"""

import dataclasses
import importlib.util
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from contenders import bars
from contenders.bars import Bar
from contenders.isolation import ask
from contenders.questions import Exchange, Exchanged, Update

FLOAT_BYTES = 4
NO_RAY = "Ray is not installed: pip install 'paceline[bench]'"
PEERS = ("ray_actor", "torch_rpc", "gloo")


class Size(msgspec.Struct, frozen=True):
    """How much is measured."""

    parameters: int
    rounds: int
    updates: int  # of each worker, of a small model
    repeats: int
    small: int = 1000
    workers: int = 4
    threads: int = 1


FULL = Size(parameters=25_000_000, rounds=30, updates=4_000, repeats=5)
QUICK = Size(parameters=200_000, rounds=4, updates=1_500, repeats=1)


def with_ray() -> bool:
    """Whether Ray is there to be compared with."""
    return importlib.util.find_spec("ray") is not None


def measure(size: Size, repeat: int) -> list[dict[str, Any]]:
    """One repeat: every contender once."""
    alone = Exchange(parameters=size.parameters, rounds=size.rounds, threads=size.threads)
    crowd = dataclasses.replace(alone, workers=size.workers)
    few = Update(parameters=size.small, workers=size.workers, updates=size.updates, threads=size.threads)
    peers = [peer for peer in PEERS if peer != "ray_actor" or with_ray()]
    sides: list[tuple[str, str, Exchange | Update]] = [
        ("limit", "limit", alone),
        ("paceline", "paceline_local", alone),
        *((peer, peer, alone) for peer in peers),
        ("bare_zeromq", "bare_zeromq", alone),
        ("paceline_tcp", "paceline_local", dataclasses.replace(alone, transport="zeromq")),
        ("paceline_crowd", "paceline_local", crowd),
        ("paceline_idle", "paceline_local", dataclasses.replace(crowd, parameters=size.small)),
        ("paceline_updates", "paceline_local", few),
        *((f"{peer}_updates", peer, few) for peer in peers if peer == "ray_actor"),
    ]
    return [{"repeat": repeat, "side": label, **_row(ask(side, question))} for label, side, question in sides]


def _row(answer: Any) -> dict[str, Any]:
    if not isinstance(answer, Exchanged):
        return {"updates_per_s": answer.updates_per_s}
    facts, cpu_s = answer.facts, answer.facts.get("cpu_s")
    alone = bool(facts) and cpu_s is None  # the limit: no server, so these are seconds of one round
    return {
        "round_ms": 1e3 * statistics.median(answer.round_s),
        "mean_ms": 1e3 * statistics.mean(answer.round_s),
        "apply_ms": 1e3 * facts["apply_s"] if alone else None,
        "copy_ms": 1e3 * facts["copy_s"] if alone else None,
        "copies of the gradient and the parameters": answer.copies,
        "worst_error": answer.worst_error,
        "busy": (facts["apply_s"] + facts["copy_s"]) / cpu_s if cpu_s else None,
        "server_mb": facts["server_bytes"] / 1e6 if "server_bytes" in facts else None,
    }


def judge(rows: list[dict[str, Any]], size: Size) -> list[Bar]:
    """One bar for each thing promised."""
    repeats = [_by_side(rows, number) for number in sorted({row["repeat"] for row in rows})]
    peers = [peer for peer in PEERS if peer in repeats[0]]
    no_ray = "" if "ray_actor" in peers else NO_RAY

    def middle(ratio: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(ratio(sides) for sides in repeats)

    def over(side: str, other: str) -> float:
        return middle(lambda sides: sides[side]["round_ms"] / sides[other]["round_ms"])

    def best_peer(sides: dict[str, Any]) -> float:
        return float(min(sides[peer]["round_ms"] for peer in peers) / sides["paceline"]["round_ms"])

    def memory(sides: dict[str, Any]) -> float:
        grown = sides["paceline_crowd"]["server_mb"] - sides["paceline_idle"]["server_mb"]
        return float(grown * 1e6 / promised_bytes(size.parameters, size.workers))

    errors = [s["worst_error"] for sides in repeats for s in sides.values() if s.get("worst_error") is not None]
    updates = middle(lambda sides: sides["paceline_updates"]["updates_per_s"])
    rays = None
    if not no_ray:
        rays = middle(lambda s: s["paceline_updates"]["updates_per_s"] / s["ray_actor_updates"]["updates_per_s"])
    busy = [sides["paceline_crowd"]["busy"] for sides in repeats]
    return [
        Bar("over_own_copies", middle(lambda s: s["paceline"]["round_ms"] / least_ms(s["limit"])), 1.4, False,
            "push + apply + pull over one apply and the two copies it makes, in one process"),
        Bar("over_best_peer", None if no_ray else middle(best_peer), 1.0, True,
            "the fastest of Ray, torch RPC and Gloo over push + apply + pull", no_ray),
        Bar("result_error", max(errors), 1e-6, False, "largest difference of any side's result from torch's SGD"),
        Bar("server_busy", None if None in busy else statistics.median(busy), 0.8, True,
            f"share of the server's processor time spent applying and copying, {size.workers} workers at once",
            "the journal has no `server` line" if None in busy else ""),
        Bar("tcp_over_bare", over("paceline_tcp", "bare_zeromq"), 1.3, False,
            "over TCP loopback: push + apply + pull over a bare chunked ZeroMQ round trip"),
        Bar("updates_per_s", updates, 5000, True,
            f"updates per second of {size.small:,} parameters, {size.workers} asynchronous workers in total"),
        Bar("updates_over_ray", rays, 4.0, True, "the same over a Ray actor parameter server's", no_ray),
        Bar("server_memory", middle(memory), 1.1, False, "the server's memory over what was promised"),
    ]  # fmt: skip


def least_ms(limit: dict[str, Any]) -> float:
    """What a push from ordinary memory through shared memory cannot go below: the limit and a copy of the gradient."""
    return float(limit["round_ms"] + limit["copy_ms"])


def promised_bytes(parameters: int, workers: int) -> int:
    """Weights, per worker two gradient slots and a copy, one gradient of scratch; plain SGD has no state."""
    return parameters * FLOAT_BYTES * (1 + 3 * workers + 1)


def _by_side(rows: Iterable[dict[str, Any]], repeat: int) -> dict[str, Any]:
    return {row["side"]: row for row in rows if row["repeat"] == repeat}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    given = bars.parser("push + apply + pull against memory and against other ways to do it").parse_args(arguments)
    size = QUICK if given.quick else FULL
    options = bars.asked(given, size.repeats)
    rows = [row for repeat in range(options.repeats) for row in measure(size, repeat)]
    packages = ("pyzmq", "ray") if with_ray() else ("pyzmq",)
    facts = bounds(rows)
    bars.tell("datapath", options, judge(rows, size), rows, notes(size, facts), packages, facts)


def bounds(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Numbers that no bar holds: how near the limit the round is, and what bounds each ratio."""
    repeats = [_by_side(rows, number) for number in sorted({row["repeat"] for row in rows})]

    def middle(ratio: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(ratio(found) for found in repeats)

    def best_ms(found: dict[str, Any]) -> float:
        return float(min(found[peer]["round_ms"] for peer in PEERS if peer in found))

    return {
        "over_limit": middle(lambda s: s["paceline"]["round_ms"] / s["limit"]["round_ms"]),
        "least_over_limit": middle(lambda s: least_ms(s["limit"]) / s["limit"]["round_ms"]),
        "most_over_best_peer": middle(lambda s: best_ms(s) / least_ms(s["limit"])),
        "limit_over_best_peer": middle(lambda s: best_ms(s) / s["limit"]["round_ms"]),
    }


def notes(size: Size, facts: dict[str, float]) -> str:
    """What the numbers mean."""
    return f"""
{size.parameters:,} float32 parameters, plain SGD, {size.threads} thread(s) in every process, gradient values that
differ in every round, {size.rounds} rounds after the warm-up. A round is the same span for every contender: from the
gradient complete in `p.grad`, in ordinary memory of the worker's own, to the worker's model holding the next version.
That is where a backward pass of plain PyTorch leaves it, so nobody begins with a copy already made: paceline's copy
into its shared slot, which a hook makes during backward in training, is timed here as Ray's copy into its object store
is. The span does not begin with backward, because how autograd allocates a gradient is the same for all and would
only dilute the ratios. `limit` is one fused SGD step and one copy of the parameters in one process.

**What bounds the ratios**, measured in this run: a push through shared memory copies the gradient too, so its round is
at least {facts["least_over_limit"]:.2f} times the limit; it is {facts["over_limit"]:.2f} times. The fastest peer takes
{facts["limit_over_best_peer"]:.2f} times as long as the limit, so nothing that applies once and copies twice can be
more than {facts["most_over_best_peer"]:.2f} times ahead of it on this machine; the bar asks to be ahead at all.

`ray_actor` is an actor parameter server fed with NumPy arrays,
`torch_rpc` a remote call with the gradient that returns the weights, `gloo` an all-reduce of two ranks and a step on
each; all apply with torch's fused SGD and end with the weights in the worker's own tensors. `paceline_crowd` has
{size.workers} workers pushing at once; `paceline_idle` is the same with {size.small:,} parameters, whose server memory
is taken off, since an interpreter with torch is nobody's model. `*_updates` is that small model with ready-made
gradients. Ray's mean is far above its median where its store has to take fresh memory; the median counts, for all.
"""


if __name__ == "__main__":
    main()
