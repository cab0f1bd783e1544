"""Does the simulator tell the truth? The same scenario, strategy and seed in `sim` and on real processes.

    python benchmarks/bench_fidelity.py [--quick] [--json]

Real workers compute real gradients and sleep what the scenario's time exceeds them by; network times are emulated too.
Compared are seconds per version, the share of time spent waiting, the mean staleness and the time to a target loss.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch

import paceline
import results
import sources
from paceline import scenario, strategies
from paceline.records import journal
from paceline.records.replay import replay

COMMAND = "python benchmarks/bench_fidelity.py"
NOMINAL_S = (0.05, 0.2)  # of one batch at full speed
SEEDS = (0, 1, 2)
SPEEDS = {4: (1.0, 1.0, 0.5, 0.25), 8: (1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25)}
NEED_OPTIONS = {"fastest_k": "fastest_k:k=2", "k_async": "k_async:k=2"}
EIGHT = ("bsp", "ssp", "dasp", "balanced")  # on 8 workers; all strategies run on 4
BATCH, ROWS, FEATURES, HIDDEN = 32, 2048, 32, 256
TARGET = "loss<=0.1"
ALIKE = 0.10  # relative
NEGLIGIBLE = 0.01  # of a wait fraction or a staleness: below that a ratio says nothing
QUANTITIES = ("s_per_version", "wait", "staleness", "to_target_s")


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    """A direction among 32, to be found."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(ROWS + 512, FEATURES, generator=generator)
    direction = torch.randn(FEATURES, 1, generator=generator) / FEATURES**0.5
    return x, x @ direction


def train() -> None:
    """The script of every worker."""
    torch.manual_seed(0)
    session = paceline.init()
    x, y = problem()
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=session.option("lr", 0.01))

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        return {"loss": float(torch.nn.functional.mse_loss(model(x[ROWS:]), y[ROWS:]))}

    session.prepare(model, optimizer, evaluate=evaluate)
    data = torch.utils.data.TensorDataset(x[:ROWS], y[:ROWS])
    for inputs, wanted in session.batches(data, batch_size=BATCH, epochs=200):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), wanted)
        loss.backward()
        session.report(loss=loss)
        optimizer.step()


def cluster(workers: int, nominal_s: float, seed: int) -> scenario.Scenario:
    """Uneven workers with jitter and a network."""
    groups = "".join(f"[[workers]]\nspeed = {speed}\n" for speed in SPEEDS[workers])
    text = f"""
seed = {seed + 1}
[compute]
seconds_per_sample = {nominal_s / BATCH}
jitter = "lognormal:0.1"
[network]
latency_ms = 1.0
bandwidth_mbps = 200
{groups}"""
    return scenario.parse(text, f"uneven{workers}", Path())


def measure(engine: str, strategy: str, workers: int, nominal_s: float, seed: int, rounds: int) -> dict[str, float]:
    """One run's four quantities, its overruns, and whether its journal replays."""
    with tempfile.TemporaryDirectory(prefix="fidelity-") as folder:
        run = paceline.launch(
            train, engine=engine, scenario=cluster(workers, nominal_s, seed), strategy=strategy, seed=seed, threads=1,
            target=TARGET, max_seconds=rounds * nominal_s / min(SPEEDS[workers]),
            journal=Path(folder) / f"{engine}.jsonl",
        )  # fmt: skip
        lines = list(journal.read(run.journal))
        replays = replay(run.journal).difference is None
    report = run.summary
    overruns = [line.data for line in lines if getattr(line, "what", "") == "overruns"]
    share = overruns[-1]["overruns"] / max(1, overruns[-1]["computations"]) if overruns else 0.0
    reached = report.target.reached_at_seconds if report.target is not None else None
    return {
        "s_per_version": report.seconds / max(1, report.versions), "wait": report.wait_fraction or 0.0,
        "staleness": report.staleness.mean or 0.0, "to_target_s": reached, "overruns": share, "replays": replays,
    }  # fmt: skip


def compare(virtual: list[dict[str, float]], real: list[dict[str, float]]) -> dict[str, tuple[float | None, bool]]:
    """By quantity: real over virtual, of the medians over the seeds, and whether they are alike."""
    found = {}
    for quantity in QUANTITIES:
        pair = [[row[quantity] for row in rows] for rows in (virtual, real)]
        if any(value is None for values in pair for value in values):
            found[quantity] = (None, pair[0].count(None) == pair[1].count(None))
            continue
        v, r = (statistics.median(values) for values in pair)
        near = abs(r - v) <= NEGLIGIBLE and quantity in ("wait", "staleness")
        found[quantity] = (r / v if v else None, near or (v > 0 and abs(r / v - 1) <= ALIKE))
    return found


def _spelled(name: str) -> str:
    return NEED_OPTIONS.get(name, name)


def cases(quick: bool) -> list[tuple[str, int, float]]:
    """Strategy, workers, nominal seconds."""
    if quick:
        return [("bsp", 4, 0.05), ("asp", 4, 0.05)]
    found = [(name, 4, nominal) for nominal in NOMINAL_S for name in map(_spelled, strategies.names())]
    return found + [(name, 8, 0.2) for name in EIGHT]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two strategies, one seed; writes no result")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=60, help="a run's limit, in rounds of its slowest worker")
    sources.add_options(parser)
    given = parser.parse_args()
    of = None if given.quick else sources.checked(given)
    seeds = SEEDS[:1] if given.quick else SEEDS
    rows, verdicts = [], []
    for strategy, workers, nominal_s in cases(given.quick):
        sides = [
            [measure(engine, strategy, workers, nominal_s, seed, given.rounds) for seed in seeds]
            for engine in ("sim", "local")
        ]
        alike = compare(*sides)
        row = {"strategy": strategy, "workers": workers, "nominal ms": 1000 * nominal_s}
        for quantity, (ratio, _) in alike.items():
            values = [row[quantity] for row in sides[1] if row[quantity] is not None]
            row[quantity] = statistics.median(values) if values else None
            row[f"{quantity}: local/sim"] = ratio
        row["overruns"] = max(side["overruns"] for side in sides[1])
        row["replays"] = all(side["replays"] for side in sides[1])
        rows.append(row)
        name = f"{strategy} on {workers}, {1000 * nominal_s:g} ms"
        for quantity, (ratio, fine) in alike.items():
            value = "both or neither side has none" if ratio is None else f"{ratio:.3f} of the simulator's"
            verdicts.append(results.Verdict(f"{quantity}, {name}", value, "within 10 %", fine))
        verdicts.append(results.Verdict(f"overruns, {name}", f"{row['overruns']:.1%}", "< 5 %", row["overruns"] < 0.05))
        verdicts.append(results.Verdict(f"replay, {name}", str(row["replays"]), "exact", bool(row["replays"])))
        if not given.json:
            print({key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()}, flush=True)
    missed = [verdict.name for verdict in verdicts if not verdict.passed]
    if given.json:
        print(json.dumps({"rows": rows, "verdicts": {v.name: [v.value, v.passed] for v in verdicts}}))
    else:
        print(f"{len(verdicts) - len(missed)} of {len(verdicts)} within their bars; not: {missed}")
    if of is not None:
        notes = (
            f"Medians over seeds {list(seeds)}; batch {BATCH}, jitter lognormal:0.1, latency 1 ms, 200 Mbit/s; a run "
            f"ends at {TARGET} or after {given.rounds} rounds of its slowest worker. A wait fraction or staleness that "
            f"differs by less than {NEGLIGIBLE} counts as alike."
        )
        print(results.write("fidelity", COMMAND, verdicts, rows, notes, of))
    return 0


if __name__ == "__main__":
    sys.exit(main())
