"""The core of one benchmark, measured on one revision: what `compare_commits.py` starts in a process of its own.

    PYTHONPATH=TREE/benchmarks:TREE/src python -P benchmarks/commit_probe.py TREE datapath [--quick]

It imports the benchmark of the revision that TREE is a checkout of, and asks for paceline's part alone: no rival, no
verdict. Whatever the benchmark needs it takes from the benchmark's own module, so that files may have moved between two
revisions. Of the data path it asks for updates with ready-made gradients, whose span is the same in all revisions; the
training loops of `overhead` are `loop_probe.py`'s, which times their parts.
Prints one JSON object; a name that ends in `_per_s` is better when larger, others when smaller.
"""

import functools
import importlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

US = 1e6
LOOP = Path(__file__).with_name("loop_probe.py")
LONGER = 4  # times the benchmark's own steps: on a shared machine a second's speed says little


def datapath(bench: Any, quick: bool) -> dict[str, float]:
    """Push + apply + pull of a large model by one worker, of a tiny one by four."""
    large = bench.Update(parameters=200_000 if quick else 25_000_000, workers=1, updates=20 if quick else 40, warmup=4)
    small = bench.Update(parameters=1000, workers=4, updates=1000 if quick else 4000)
    return {
        "large_rounds_per_s": bench.ask("paceline_local", large).updates_per_s,
        "small_updates_per_s": bench.ask("paceline_local", small).updates_per_s,
    }


def overhead(case: str, bench: Any, quick: bool) -> dict[str, float]:
    """Samples per second of a training loop, and the milliseconds of its parts."""
    found = next(each for each in bench.CASES if each.name == case)
    steps = 20 if quick else LONGER * found.steps
    command = [sys.executable, "-P", str(LOOP), *map(str, (found.model, found.workers, found.batch_size, steps))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{case}: {done.stderr[-4000:]}")
    return {f"{case}_{what}": value for what, value in json.loads(done.stdout.splitlines()[-1]).items()}


def simulator(bench: Any, quick: bool) -> dict[str, float]:
    """CPU microseconds per push of 100 light workers, without and with a journal."""
    scenario, pushes = bench.make_scenario(100), 5_000 if quick else 100_000
    bench._cpu_us(bench.run_paceline, scenario, 1_000)  # what a first run loads is no push's
    return {
        "push_us": bench._cpu_us(bench.run_paceline, scenario, pushes),
        "journalled_push_us": bench._cpu_us(bench.run_with_journal, scenario, pushes),
    }


def tables(bench: Any, quick: bool) -> dict[str, float]:
    """Reads, increments and fetches of rows."""
    size = bench.QUICK if quick else bench.FULL
    gather = bench.Gather(size.table_rows, size.width, size.rows, size.rounds)
    found = bench.ask("rows_paceline", gather).seconds
    return {f"{what}_us": US * statistics.median(seconds) for what, seconds in found.items()}


def gossip_speed(bench: Any, quick: bool) -> dict[str, float]:
    """Steps of a node whose exchanges are off, looking for change, and a model's way to another process."""
    steps = 20 if quick else 1500
    alone = bench.ask("paceline_local", bench.Train(bench.TINY, bench.TINY_BATCH, steps, strategy=bench.ALONE))
    exchange = bench.peer_exchange if hasattr(bench, "peer_exchange") else bench.letters
    nbytes = bench.EXCHANGED_BYTES // (100 if quick else 1)
    return {
        "steps_per_s": alone.samples_per_s / bench.TINY_BATCH,
        "change_ms": bench.measure_change(10 if quick else 300),
        "exchange_us": US * exchange.measure(nbytes, 3 if quick else 15, 3)["exchange_s"],
    }


CASES = ("cnn", "mlp", "fixed_cost", "cnn_ddp", "wide_ddp")
PROBES: dict[str, Callable[[Any, bool], dict[str, float]]] = {
    "datapath": datapath,
    "gossip_speed": gossip_speed,
    **{f"overhead:{case}": functools.partial(overhead, case) for case in CASES},
    "simulator": simulator,
    "tables": tables,
}


def require_own_sources(tree: Path, bench: Any) -> None:
    """Neither this process nor one that the benchmark starts may import paceline from elsewhere."""
    code = "import paceline; print(paceline.__file__)"
    environments = [dict(os.environ)]
    if hasattr(bench, "ask"):
        isolation = importlib.import_module(bench.ask.__module__)
        environments.append(isolation._environment(1, Path("/tmp")))
    for environment in environments:
        done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
        found = Path(done.stdout.strip()).resolve()
        if not found.is_relative_to(tree.resolve()):
            raise SystemExit(f"paceline is imported from {found}, not from {tree}: {done.stderr.strip()}")


def main() -> None:
    """Measure once and print."""
    tree, name, quick = Path(sys.argv[1]), sys.argv[2], "--quick" in sys.argv[3:]
    bench = importlib.import_module(f"bench_{name.partition(':')[0]}")
    require_own_sources(tree, bench)
    print(json.dumps(PROBES[name](bench, quick)))


if __name__ == "__main__":
    main()
