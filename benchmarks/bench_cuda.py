"""How near is push + apply + pull of a CUDA worker to what the hardware can do, with the store on the host?

    python benchmarks/bench_cuda.py                 # writes results/cuda.md and .json
    python benchmarks/bench_cuda.py --quick --json  # tiny sizes, one JSON object, writes nothing

The limit is one page-locked copy per direction and one fused step on the host with as many threads. Every repeat asks
both contenders in turn, each in processes of its own; a ratio is that of one repeat, and the median over repeats
counts.
"""

import statistics
from typing import Any

import msgspec
import torch

from contenders import bars
from contenders.bars import Bar
from contenders.isolation import ask
from contenders.questions import Exchange, Exchanged, Overlap

FLOAT_BYTES = 4


class Size(msgspec.Struct, frozen=True):
    """How much is measured."""

    parameters: int
    rounds: int
    layers: int  # of the model whose backward pass is overlapped with
    width: int
    rows: int
    repeats: int
    threads: tuple[int, ...] = (1, 8)  # of the server's process and of the limit's


FULL = Size(parameters=350_000_000, rounds=10, layers=21, width=4096, rows=8192, repeats=3)
QUICK = Size(parameters=3_000_000, rounds=4, layers=2, width=1024, rows=64, repeats=1, threads=(1,))


def measure(size: Size, repeat: int) -> list[dict[str, Any]]:
    """One repeat: every contender once."""
    rows: list[dict[str, Any]] = []
    for threads in size.threads:
        task = Exchange(parameters=size.parameters, rounds=size.rounds, threads=threads)
        for label, side in (("limit", "cuda_limit"), ("paceline", "paceline_cuda")):
            answer = ask(side, task)
            row = {"repeat": repeat, "side": label, "threads": threads}
            row |= {"round_ms": 1e3 * statistics.median(answer.round_s), "worst_error": answer.worst_error}
            rows.append(row | (_limit_parts(answer.facts, size) if label == "limit" else _server_parts(answer, task)))
    for early in (False, True):
        training = Overlap(early, size.layers, size.width, size.rows, size.rounds, threads=size.threads[-1])
        answer = ask("paceline_cuda", training)
        rows.append(
            {
                "repeat": repeat,
                "side": "sent during backward" if early else "sent in the end",
                "threads": training.threads,
                "backward_ms": 1e3 * statistics.median(answer.backward_s),
                "grant_to_push_ms": 1e3 * statistics.median(answer.compute_s),
            }
        )
    return rows


def _limit_parts(facts: dict[str, float], size: Size) -> dict[str, float]:
    nbytes = size.parameters * FLOAT_BYTES
    return {
        "apply_ms": 1e3 * facts["apply_s"],
        "down_gb_s": nbytes / facts["down_s"] / 1e9,
        "up_gb_s": nbytes / facts["up_s"] / 1e9,
    }


def _server_parts(answer: Exchanged, task: Exchange) -> dict[str, float]:
    """Processor time of the server per version, all threads together; a run has one step more than is timed."""
    versions = task.warmup + task.rounds + 1
    return {f"server_{part}_cpu_ms": 1e3 * answer.facts[f"{part}_s"] / versions for part in ("apply", "copy")}


def judge(rows: list[dict[str, Any]], size: Size) -> tuple[list[Bar], dict[str, float]]:
    """One bar for each number of threads; and what sending during backward saves."""

    def times(side: str, threads: int, column: str) -> list[float]:
        chosen = [row for row in rows if row["side"] == side and row["threads"] == threads]
        return [float(row[column]) for row in sorted(chosen, key=lambda row: int(row["repeat"]))]

    found = []
    for threads in size.threads:
        pairs = zip(times("paceline", threads, "round_ms"), times("limit", threads, "round_ms"), strict=True)
        found.append(
            Bar(f"over_limit_{threads}", statistics.median(ours / limit for ours, limit in pairs), 1.4, False,
                f"push + apply + pull over one copy down, one fused step and one copy up, {threads} host thread(s)")
        )  # fmt: skip
    errors = [row["worst_error"] for row in rows if row.get("worst_error") is not None]
    found.append(Bar("result_error", max(errors), 1e-6, False, "largest difference of any result from torch's SGD"))
    last = size.threads[-1]
    late, early = (times(f"sent {when}", last, "grant_to_push_ms") for when in ("in the end", "during backward"))
    return found, {"overlap_saves_ms": statistics.median(a - b for a, b in zip(late, early, strict=True))}


def notes(size: Size, saved_ms: float) -> str:
    """What the numbers mean."""
    return f"""
{torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"}; {size.parameters:,} float32
parameters, plain SGD, one worker, gradient values that differ in every round, {size.rounds} rounds after the warm-up.
A round runs from the gradient complete on the device to the device holding the next version: `backward` hands the
gradient over, `optimizer.step()` pushes and pulls. `limit` is one process with page-locked memory: a copy of the
gradient to the host, torch's fused SGD there, a copy of the parameters to the device. The processor times of paceline's
server are per version, all threads together; it copies the first and the last version only, the worker reads the others
from the server's own memory. The last two sides train {size.layers} linear layers of {size.width} x {size.width} on
{size.rows:,} rows under bfloat16 autocast, with gradients on their way to the host during backward or all in the end:
by the worker's times from grant to push, that saves {saved_ms:.1f} ms.
"""


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    given = bars.parser("push + apply + pull of a CUDA worker against its limit").parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench_cuda needs CUDA: no device was found, nothing was measured")
        return
    size = QUICK if given.quick else FULL
    options = bars.asked(given, size.repeats)
    rows = [row for repeat in range(options.repeats) for row in measure(size, repeat)]
    found, facts = judge(rows, size)
    bars.tell("cuda", options, found, rows, notes(size, facts["overlap_saves_ms"]), facts=facts)


if __name__ == "__main__":
    main()
