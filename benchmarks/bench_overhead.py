"""What does it cost to train under paceline: one worker against plain PyTorch, two workers against DDP with Gloo?

    python benchmarks/bench_overhead.py                 # writes results/overhead.md and .json
    python benchmarks/bench_overhead.py --quick --json  # few steps, one JSON object, writes nothing

Both contenders of a comparison run the same loop over the same data, one right after the other in each repeat and in
alternating order, each in processes of its own with the same number of threads. A ratio is that of one repeat; the
median over the repeats counts.
"""

import statistics
from typing import Any

import msgspec

from contenders import bars
from contenders.bars import Bar
from contenders.isolation import ask
from contenders.questions import Train

MIN_STEP_MS = 10.0  # what a plain step must take for the comparison to mean anything


class Case(msgspec.Struct, frozen=True):
    """A model, and whom paceline is compared with on it."""

    name: str
    model: str
    rival: str
    workers: int
    batch_size: int
    steps: int


CASES = (
    Case("cnn", "cnn", "plain", 1, 32, 100),
    Case("mlp", "mlp", "plain", 1, 256, 100),
    Case("fixed_cost", "tiny", "plain", 1, 16, 2000),
    Case("cnn_ddp", "cnn", "ddp", 2, 32, 100),
    Case("wide_ddp", "wide", "ddp", 2, 16, 30),
)
REPEATS = 7
QUICK_STEPS = 8


def measure(case: Case, repeat: int, *, quick: bool) -> dict[str, Any]:
    """One repeat of one case: both sides."""
    steps = QUICK_STEPS if quick else case.steps
    question = Train(model=case.model, batch_size=case.batch_size, steps=steps, workers=case.workers)
    sides = ("paceline_local", case.rival)
    found = {side: ask(side, question) for side in (sides if repeat % 2 else reversed(sides))}
    ours, theirs = found["paceline_local"], found[case.rival]
    return {
        "case": case.name, "rival": case.rival, "repeat": repeat,
        "paceline_per_s": ours.samples_per_s, "rival_per_s": theirs.samples_per_s,
        "paceline_step_ms": 1e3 * statistics.median(ours.step_s),
        "rival_step_ms": 1e3 * statistics.median(theirs.step_s),
    }  # fmt: skip


def judge(rows: list[dict[str, Any]]) -> list[Bar]:
    """One bar for each thing promised."""

    def middle(case: str, above: str, below: str) -> float:
        return float(statistics.median(row[above] / row[below] for row in rows if row["case"] == case))

    def share(case: str) -> float:
        return middle(case, "paceline_per_s", "rival_per_s")

    def plain_ms(case: str) -> float:
        return float(statistics.median(row["rival_step_ms"] for row in rows if row["case"] == case))

    return [
        Bar("cnn_share", share("cnn"), 0.95, True, "samples per second of one worker over plain PyTorch's, CNN"),
        Bar("mlp_share", share("mlp"), 0.95, True, "samples per second of one worker over plain PyTorch's, MLP"),
        Bar("cnn_plain_step_ms", plain_ms("cnn"), MIN_STEP_MS, True, "milliseconds of plain PyTorch's step, CNN"),
        Bar("mlp_plain_step_ms", plain_ms("mlp"), MIN_STEP_MS, True, "milliseconds of plain PyTorch's step, MLP"),
        Bar("bsp_over_ddp_cnn", share("cnn_ddp"), 0.97, True, "samples per second of 2-worker BSP over DDP's, CNN"),
        Bar("bsp_over_ddp_wide", share("wide_ddp"), 1.0, True,
            "samples per second of 2-worker BSP over DDP's, 25 M parameters"),
    ]  # fmt: skip


def fixed_cost_us(rows: list[dict[str, Any]]) -> float:
    """Microseconds that a step costs more than a plain one, whatever the model."""
    costs: list[float] = [row["paceline_step_ms"] - row["rival_step_ms"] for row in rows if row["case"] == "fixed_cost"]
    return 1e3 * statistics.median(costs)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    given = bars.parser("training under paceline against plain PyTorch and DDP").parse_args(arguments)
    options = bars.asked(given, REPEATS)
    rows = [measure(case, repeat, quick=given.quick) for repeat in range(options.repeats) for case in CASES]
    cost = fixed_cost_us(rows)
    facts = {"fixed_cost_us": cost}
    bars.tell("overhead", options, judge(rows), rows, NOTES.format(cost=cost), facts=facts)


NOTES = """
**The fixed cost of a step is {cost:.0f} microseconds**: what one worker's step takes more than plain PyTorch's on a
model with next to no arithmetic (the push, the server's decision and step, the pull).

Samples per second from the end of the warm-up, batch fetching included, all processes with one thread. `plain` is a
PyTorch loop over a DataLoader; `ddp` is DistributedDataParallel over Gloo with `gradient_as_bucket_view` and
`static_graph` and a DistributedSampler; paceline runs `bsp` with its evaluator off. Steps are medians of worker 0's.
"""


if __name__ == "__main__":
    main()
