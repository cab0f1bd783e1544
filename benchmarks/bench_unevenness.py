"""Who is at the target first on clusters of unequal workers?

python benchmarks/bench_unevenness.py --try dasp --cell w8_4x --lr 0.2 --momentum 0.9 --seed 0 1   # single runs
"""

import argparse
import json

import msgspec

from contenders import uneven_cells
from contenders.uneven_cells import BATCH, CELLS, Trial


def attempt(given: argparse.Namespace) -> None:
    """Single runs, told one per line as JSON."""
    for name in given.cell:
        for lr in given.lr:
            for seed in given.seed:
                trial = Trial(name, given.attempt, lr, given.momentum, seed, given.batch, given.limit)
                found = msgspec.to_builtins(uneven_cells.run(trial))
                short = {
                    key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in found.items()
                }
                print(json.dumps({"cell": name, "strategy": given.attempt, "lr": lr, "momentum": given.momentum,
                                  "seed": seed, **short}), flush=True)  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--try", dest="attempt", metavar="STRATEGY", help="make single runs and print them")
    parser.add_argument("--cell", nargs="+", choices=list(CELLS), default=["w8_4x"])
    parser.add_argument("--lr", type=float, nargs="+", default=[0.2])
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--limit", type=float, default=300.0, help="virtual seconds")
    given = parser.parse_args(arguments)
    attempt(given)


if __name__ == "__main__":
    main()
