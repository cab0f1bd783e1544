"""One training loop on one revision, part by part: what `commit_probe.py` starts for each case of `bench_overhead`.

    PYTHONPATH=TREE/benchmarks:TREE/src python -P benchmarks/loop_probe.py MODEL WORKERS BATCH_SIZE STEPS

The loop is written here, against the public interface alone, so that it is the same on every revision. Fetching the
batch and stepping are paceline's; passing forward and backward is the model's, but for a copy of each gradient. Prints
one JSON object: samples per second of all workers, and the medians of worker 0's two parts in milliseconds.
"""

import contextlib
import importlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import paceline

WARMUP = 20
ENOUGH = 1_000_000  # epochs: every worker leaves the loop when it has made its own steps


def workloads() -> Any:
    """The revision's models and data."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("contenders.workloads")
    return importlib.import_module("sides.workloads")  # its older name


def train() -> None:
    """What each worker runs."""
    session = paceline.init()
    answer = Path(session.option("answers", "")) / f"{session.worker}.json"
    name, batch_size, steps = (session.option(key, "") for key in ("model", "size", "steps"))
    found = workloads()
    model = found.build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    batches = iter(session.batches(found.dataset(name, found.SAMPLES), batch_size=int(batch_size), epochs=ENOUGH))
    ours, models = [], []
    for number in range(WARMUP + int(steps)):
        if number == WARMUP:
            began = time.monotonic()
        start = time.perf_counter()
        x, y = next(batches)
        fetched = time.perf_counter()
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        computed = time.perf_counter()
        optimizer.step()
        ours.append(fetched - start + time.perf_counter() - computed)
        models.append(computed - fetched)
    rate = int(batch_size) * int(steps) / (time.monotonic() - began)
    milliseconds = [1e3 * statistics.median(seconds[WARMUP:]) for seconds in (ours, models)]
    answer.write_text(json.dumps([rate, *milliseconds]))


def main() -> None:
    """Train once and print."""
    model, workers, size, steps = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        options = {"answers": folder, "model": model, "size": size, "steps": steps}
        paceline.launch(
            train, engine="local", strategy="bsp", workers=int(workers), threads=1, evaluate_every="off",
            journal=Path(folder, "journal.jsonl"), options=options,
        )  # fmt: skip
        found = [json.loads(Path(folder, f"{worker}.json").read_text()) for worker in range(int(workers))]
    _, ours, model_ms = found[0]
    print(json.dumps({"samples_per_s": sum(rate for rate, _, _ in found), "ours_ms": ours, "model_ms": model_ms}))


if __name__ == "__main__":
    main()
