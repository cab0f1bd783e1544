"""What does a node without a server cost: its steps against plain PyTorch's, its exchanges, and looking for change?

    python benchmarks/bench_gossip_speed.py                 # writes results/gossip_speed.md and .json
    python benchmarks/bench_gossip_speed.py --quick --json  # few steps, one JSON object, writes nothing

Contenders of a comparison run one right after the other in each repeat, in alternating order, with one thread each. A
ratio is that of one repeat; the median over the repeats counts.
"""

import statistics
import time
from typing import Any

import torch

from contenders import bars, peer_exchange, workloads
from contenders.bars import Bar
from contenders.isolation import ask
from contenders.questions import Train
from paceline.peers.messages import Border
from paceline.peers.models import is_finite
from paceline.peers.node import Node
from paceline.strategies import build_peer

REPEATS = 7
ALONE = "gossip:period=1000000"  # exchanges off
LOOKING = "adaptive_gossip:threshold=1000,warmup=0,max_interval=1000000"  # looks for change, and never finds enough
MODEL, BATCH = "cnn", 32
TINY, TINY_BATCH = "tiny", 16  # next to no arithmetic: what a step costs whatever the model
EXCHANGED_BYTES = 100_000_000


def measure_steps(repeat: int, model: str, batch: int, steps: int) -> dict[str, Any]:
    """One repeat: a node, a node that looks for change, and plain PyTorch."""
    sides = {
        "node": ("paceline_local", Train(model, batch, steps, strategy=ALONE)),
        "looking": ("paceline_local", Train(model, batch, steps, strategy=LOOKING)),
        "plain": ("plain", Train(model, batch, steps)),
    }
    order = list(sides) if repeat % 2 else list(reversed(sides))
    found = {name: ask(*sides[name]) for name in order}
    return {
        "what": f"{model} steps", "repeat": repeat,
        **{f"{name}_step_ms": 1e3 * statistics.median(answer.step_s) for name, answer in found.items()},
        **{f"{name}_per_s": answer.samples_per_s / batch for name, answer in found.items()},
    }  # fmt: skip


def measure_change(rounds: int) -> float:
    """Milliseconds of looking how far each tensor of the model has moved."""
    torch.set_num_threads(1)
    tensors = [parameter.data for parameter in workloads.build(MODEL).parameters()]
    node = Node(build_peer(LOOKING, 0, 0), 0, lambda: tensors, lambda _: None, lambda _: None)
    node.border(Border(0.0, 1, 0.0, 0.0, [], ()), 0, None)
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        node.changes()
        seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds)


def measure_finite(rounds: int) -> float:
    """Milliseconds of seeing that no value of the model is NaN or infinite, as before it is sent."""
    torch.set_num_threads(1)
    tensors = [parameter.data for parameter in workloads.build(MODEL).parameters()]
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        found = is_finite(tensors)
        seconds.append(time.perf_counter() - began)
        if not found:
            raise RuntimeError("the model of the measurement is not finite")
    return 1e3 * statistics.median(seconds)


def judge(rows: list[dict[str, Any]]) -> list[Bar]:
    """One bar for each thing promised."""
    steps = [row for row in rows if row["what"] == f"{MODEL} steps"]
    exchanges = [row for row in rows if row["what"] == "exchange"]
    (change,) = [row["change_ms"] for row in rows if row["what"] == "change"]
    (finite,) = [row["finite_ms"] for row in rows if row["what"] == "finite"]
    plain_ms = statistics.median(row["plain_step_ms"] for row in steps)
    return [
        Bar("steps_over_plain", statistics.median(row["node_per_s"] / row["plain_per_s"] for row in steps), 0.97, True,
            "steps per second of a node whose exchanges are off over plain PyTorch's, CNN"),
        Bar("change_share", change / plain_ms, 0.05, False,
            "seconds of looking how far each tensor has moved over those of plain PyTorch's step, CNN"),
        Bar("finite_share", finite / plain_ms, 0.02, False,
            "seconds of seeing that the model is finite, before it is sent, over those of plain PyTorch's step, CNN"),
        Bar("exchange_over_in_place",
            statistics.median(row["exchange_s"] / row["in_place_s"] for row in exchanges), 1.2, False,
            "seconds of a model's way through shared memory, mixed in, over those of a copy and a mix in place"),
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    given = bars.parser("nodes without a server against plain PyTorch").parse_args(arguments)
    options = bars.asked(given, REPEATS)
    quick = options.quick
    rows = [
        measure_steps(repeat, model, batch, 8 if quick else steps)
        for repeat in range(options.repeats)
        for model, batch, steps in ((MODEL, BATCH, 150), (TINY, TINY_BATCH, 1500))
    ]
    rows.append({"what": "change", "change_ms": measure_change(10 if quick else 300)})
    rows.append({"what": "finite", "finite_ms": measure_finite(10 if quick else 300)})
    for repeat in range(options.repeats):
        found = peer_exchange.measure(EXCHANGED_BYTES // (100 if quick else 1), 3 if quick else 15, 3)
        rows.append({"what": "exchange", "repeat": repeat, **found})
    costs = [row["node_step_ms"] - row["plain_step_ms"] for row in rows if row["what"] == f"{TINY} steps"]
    cost = 1e3 * statistics.median(costs)
    bars.tell("gossip_speed", options, judge(rows), rows, NOTES.format(cost=cost), facts={"fixed_cost_us": cost})


NOTES = f"""
**The fixed cost of a node's step is {{cost:.0f}} microseconds**: what it takes more than plain PyTorch's on a model
with next to no arithmetic (the grant, the decision, its line in the journal).

`node` is one worker of `paceline run --engine local --strategy {ALONE}`: it takes samples from the coordinator,
steps with the script's optimizer, decides, and tells the journal, but has nobody to exchange with. `looking` computes
besides, at every step, how far each tensor has moved. `plain` is a PyTorch loop over a DataLoader. All on the small
convolutional net of `bench_overhead.py`, batches of {BATCH}, one thread. That a node can be ahead of plain PyTorch is
due to the memory that paceline's processes keep instead of giving it back to the system after every step. The change is
measured alone, too, in the process of the benchmark, and so is the look whether the model is finite, which a node takes
before it sends its model.

An exchange of {EXCHANGED_BYTES / 1e6:g} MB is one snapshot and one mix, from the decision to send until the other
process says that it has mixed the model in; `in_place` is a copy and a mix of the same tensors in one process.
"""


if __name__ == "__main__":
    main()
