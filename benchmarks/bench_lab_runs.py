"""Does a run by serve and join on three hosts learn what one machine learns, as fast as the simulator predicts?

    python benchmarks/bench_lab_runs.py                        # some 40 minutes on two free cores; needs root and data
    python benchmarks/bench_lab_runs.py --only bsp --only ssp  # these alone; writes nothing
    python benchmarks/bench_lab_runs.py --quick --json         # one strategy on made-up sizes, writes nothing

The MNIST task under six strategies, and a task on tables, each on a lab (tests/netlab) whose cables have 100 Mbit/s
and 1 Gbit/s: the first host serves, three workers join from each of the others. Workers compute for real and sleep what
a scenario's time exceeds that by; the network is the lab's and not emulated. The simulator has the same scenario with
the cable's rate. `local` is one machine with all times of the scenario divided by 4: it is asked what is
learned, not how fast. It has eight seeds: of three, a run that differs in nothing is too often further away than their
range (`by_chance`). The other strategies run on the lab and in the simulator alone: as fast as predicted, that is all.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

sys.path.append(str(Path(__file__).parents[1] / "tests"))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

import hosts
import warm_python
from hosts import Command, Site
from safetensors.torch import load_file

import netlab
import sources
from contenders import bars
from netlab import Lab

DATA = Path(__file__).parents[2] / "shared" / "data" / "mnist"
RATES = {"100mbit": 100, "1gbit": 1000}
SEEDS = tuple(range(8))
DRAWS = 20_000  # of made-up runs, for what chance alone does
WORKERS = 6
BATCH = 16
STEP_S = 0.1  # of a worker at full speed
FASTER = 4  # than the lab's scenario, for runs of one machine
LATENCY_MS = 0.2  # of a message through ZeroMQ, the kernel and the switch of the lab
ALIKE = 0.15  # relative, seconds per version
PATIENCE_S = 400.0
CLUSTER = """
[compute]
seconds_per_sample = {seconds}
jitter = "lognormal:0.1"
{network}
[[workers]]
count = 4
[[workers]]
count = 2
speed = 0.5
"""


class Case(msgspec.Struct, frozen=True):
    """One strategy on one task."""

    strategy: str
    task: str
    options: tuple[str, ...]
    step_samples: int

    @property
    def name(self) -> str:
        """As in results."""
        return f"{self.strategy} on tables" if self.task == "factorize" else self.strategy

    def scenario(self, *, faster: float = 1.0, mbps: int | None = None) -> str:
        """The cluster; without `mbps` its network is not modelled."""
        network = "" if mbps is None else f"[network]\nlatency_ms = {LATENCY_MS}\nbandwidth_mbps = {mbps}"
        return CLUSTER.format(seconds=STEP_S / self.step_samples / faster, network=network)


class Size(msgspec.Struct, frozen=True):
    """How much is measured."""

    cases: tuple[Case, ...]
    rates: tuple[str, ...]
    needs_data: bool
    seeds: tuple[int, ...]  # of runs of one machine; the lab has the first
    timed: tuple[Case, ...] = ()  # beside the simulator alone


def mnist(strategy: str) -> Case:
    """The MNIST task: 100 rounds of all workers."""
    return Case(
        strategy, "mnist", ("--set", "samples=4800", "--set", "hidden=16", "--batch-size", "16", "--epochs", "2"), 16
    )


def tables(strategy: str, clocks: int = 100) -> Case:
    """Matrix factorization on tables."""
    return Case(strategy, "factorize", ("--set", f"clocks={clocks}"), 200)


STRATEGIES = ("bsp", "ssp", "dasp", "balanced", "adaptive_k", "adaptive_gossip")
TIMED = (
    "asp", "dssp", "adaptive_sync", "fastest_k:k=4", "k_async:k=4", "adaptive_k_load", "gossip", "elastic",
    "adaptive_elastic", "local_sgd:period=5",
)  # fmt: skip
FULL = Size(
    (*map(mnist, STRATEGIES), tables("ssp:staleness=2")),
    tuple(RATES),
    needs_data=True,
    seeds=SEEDS,
    timed=tuple(map(mnist, TIMED)),
)
QUICK = Size(
    (Case("bsp", "digits", ("--epochs", "1"), 16), tables("ssp:staleness=2", 10)),
    ("1gbit",),
    needs_data=False,
    seeds=SEEDS[:2],
)


# -- runs ------------------------------------------------------------------------------------------------------------


class Found(msgspec.Struct, frozen=True):
    """What came out of a run."""

    s_per_version: float
    loss: float
    versions: int
    bytes_up: int
    model: Path  # its trained values


class Runs:
    """Runs of the cases, each in a folder of its own below one that outlives them."""

    def __init__(self, folder: Path, data: Path) -> None:
        self._folder = folder
        self._data = data
        self._count = 0

    def on_lab(self, case: Case, lab: Lab, seed: int) -> tuple[Found, int]:
        """By serve and join; also the bytes that the server's cable carried."""
        with self._site(case, lab, case.scenario()) as site:
            before = lab.hosts[0].bytes_sent() + lab.hosts[0].bytes_received()
            serve = site.serve("--workers", str(WORKERS), *self._options(case, seed), what=("--task", case.task))
            data = self._data_of(case)
            for number in range(WORKERS):
                site.join("--task", case.task, *data, host=lab.hosts[1 + number % 2], what=())
            require_success(serve, *site.commands[1:])
            crossed = lab.hosts[0].bytes_sent() + lab.hosts[0].bytes_received() - before
            return self._found(site.run), crossed

    def here(self, case: Case, seed: int) -> Found:
        """On processes of one machine."""
        return self._plain(case, seed, case.scenario(faster=FASTER))

    def simulated(self, case: Case, seed: int, mbps: int) -> Found:
        """In virtual time."""
        return self._plain(case, seed, case.scenario(mbps=mbps), "--engine", "sim")

    def _plain(self, case: Case, seed: int, scenario: str, *more: str) -> Found:
        with self._site(case, None, scenario) as site:
            options = ("--threads", "1", *more, *self._options(case, seed), "--task", case.task)
            require_success(site.command("run", "run", *options))
            return self._found(site.run)

    def _site(self, case: Case, lab: Lab | None, scenario: str) -> Site:
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        (folder / "cluster.toml").write_text(scenario)
        return Site(folder, lab=lab)

    def _options(self, case: Case, seed: int) -> list[str]:
        given = ["--strategy", case.strategy, "--scenario", "./cluster.toml", "--seed", str(seed)]
        return [*given, "--evaluate-every", "1e", *case.options, *self._data_of(case)]

    def _data_of(self, case: Case) -> list[str]:
        return ["--data-dir", os.fspath(self._data)] if case.task == "mnist" else []

    def _found(self, run: Path) -> Found:
        report = json.loads((run / "report.json").read_text())
        saved = next((run / name for name in ("model.safetensors", "tables.safetensors") if (run / name).exists()), run)
        kept = self._folder / f"{self._count}.safetensors"
        if saved.is_file():
            shutil.copy(saved, kept)
        return Found(
            report["seconds"] / report["versions"],
            report["metrics"]["loss"],
            report["versions"],
            report["bytes_up"],
            kept,
        )


def require_success(*commands: Command) -> None:
    """Wait until all have ended well."""
    for command in commands:
        if command.end():
            raise SystemExit(f"{command.log.name} ended with code {command.poll()}:\n{command.said}")


def same_bits(one: Path, other: Path) -> bool:
    """Whether two models are equal in every bit."""
    ours, theirs = load_file(one), load_file(other)
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def measure(size: Size, runs: Runs, show: bool) -> list[dict[str, Any]]:
    """All cases: one machine first, then each network."""
    rows: list[dict[str, Any]] = []
    local = {case: [runs.here(case, seed) for seed in size.seeds] for case in size.cases}
    for rate in size.rates:
        with Lab(hosts=3, rate=rate) as lab:
            for case in (*size.cases, *size.timed):
                real, crossed = runs.on_lab(case, lab, size.seeds[0])
                virtual = runs.simulated(case, size.seeds[0], RATES[rate])
                rows.append({
                    **(beside_local(case, real, local[case]) if case in local else alone(case, real)), "network": rate,
                    "s_per_version": real.s_per_version,
                    "simulated": virtual.s_per_version,
                    "real/simulated": real.s_per_version / virtual.s_per_version,
                    "MB of gradients": real.bytes_up / 1e6, "MB through the server's cable": crossed / 1e6,
                })  # fmt: skip
                if show:
                    print({key: round(v, 4) if isinstance(v, float) else v for key, v in rows[-1].items()}, flush=True)
    return rows


# -- verdicts --------------------------------------------------------------------------------------------------------


def judge(rows: list[dict[str, Any]]) -> list[bars.Bar]:
    """What must hold in every row; one without runs of one machine is judged by its pace."""
    found = []
    for row in rows:
        where = f"{row['run']}, {row['network']}"
        off = abs(row["real/simulated"] - 1)
        found.append(bars.Bar(f"simulator: {where}", off, ALIKE, False, "relative error of seconds per version"))
        if "local loss" in row:
            found.append(learned(row, where))
    return found


def learned(row: dict[str, Any], where: str) -> bars.Bar:
    """Whether a run has learned what one machine learns: the same bits under bsp, else a loss within its range."""
    if row["run"] == "bsp":
        return bars.Bar(f"bits: {where}", float(row["same bits"]), 1, True, "1: the model of one machine in every bit")
    distance, width = abs(row["loss"] - row["local loss"]), row["local range"]
    ratio = distance / width if width else 0.0 if not distance else float("inf")
    meaning = "distance from the loss of one machine with this seed, over the range of its seeds"
    return bars.Bar(f"loss: {where}", ratio, 1, False, meaning)


def beside_local(case: Case, real: "Found", local: list["Found"]) -> dict[str, Any]:
    """What a run has learned, beside runs of one machine, of which the first has its seed."""
    losses = [found.loss for found in local]
    return {
        "run": case.name, "versions": real.versions, "loss": real.loss, "local loss": losses[0],
        "local range": max(losses) - min(losses), "same bits": same_bits(real.model, local[0].model),
    }  # fmt: skip


def alone(case: Case, real: "Found") -> dict[str, Any]:
    """What a run has learned."""
    return {"run": case.name, "versions": real.versions, "loss": real.loss}


def by_chance(seeds: int) -> float:
    """How often a run is further from the first of so many runs than their range, all drawn from one bell curve."""
    draw = random.Random(0)
    runs = ([draw.gauss(0, 1) for _ in range(seeds + 1)] for _ in range(DRAWS))
    return sum(abs(one - local[0]) > max(local) - min(local) for one, *local in runs) / DRAWS


def of_chance() -> str:
    """What chance alone does to the losses that are compared."""
    often, of_three = by_chance(len(SEEDS)), by_chance(3)
    return f"""Asynchronous strategies do not repeat a run, whatever its seed. A run that
differs in nothing would be further from the first of {len(SEEDS)} than their range in {often:.0%} of all cases, and
from the first of three in {of_three:.0%} (all drawn from one bell curve)."""


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    parser = bars.parser("runs by serve and join on three hosts, beside one machine and the simulator")
    parser.add_argument("--only", action="append", metavar="STRATEGY", help="this one alone; may be repeated")
    parser.add_argument("--data-dir", type=Path, default=DATA, help="MNIST's four files")
    given = parser.parse_args(arguments)
    if given.repeats not in (None, 1):
        parser.error(f"--repeats must be 1, not {given.repeats}: one machine has eight seeds, the lab two networks")
    size = size_of(given)
    reason = why_not(size, given.data_dir)
    if reason is not None:
        print(f"not measured: {reason}", file=sys.stderr)
        return
    options = bars.asked(given, 1)
    if options.of is not None:  # the lab and the commands' helper are measured too
        sources.checked(given, measured=(*sources.MEASURED, "tests/netlab", "tests/support/hosts.py"))
    hosts.PATIENCE_S = PATIENCE_S
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="lab-") as folder, warm_python.kept():
        rows = measure(size, Runs(Path(folder), given.data_dir.resolve()), not options.json)
    load.append(os.getloadavg()[0])
    bars.tell("lab_runs", options, judge(rows), rows, notes(load), ("pyzmq",))


def why_not(size: Size, data: Path) -> str | None:
    """Why nothing can be measured here; None if it can."""
    if netlab.why_not() is None and size.needs_data and not data.is_dir():
        return f"there is no MNIST in {data}"
    return netlab.why_not()


def size_of(given: argparse.Namespace) -> Size:
    """What the options ask for."""
    if given.quick or not given.only:
        return QUICK if given.quick else FULL
    cases, timed = (
        tuple(case for case in every if case.strategy.partition(":")[0] in given.only)
        for every in (FULL.cases, FULL.timed)
    )
    if not cases + timed:
        names = ", ".join(name.partition(":")[0] for name in (*STRATEGIES, *TIMED))
        raise SystemExit(f"--only must be of {names}, not {' '.join(given.only)}")
    return msgspec.structs.replace(FULL, cases=cases, timed=timed)


def notes(load: list[float]) -> str:
    """What the numbers mean."""
    return f"""
{WORKERS} workers on two hosts of a lab and the server on a third, by `paceline serve` and `paceline join`, encrypted. A
step takes {1000 * STEP_S:g} ms at full speed, four workers have that and two half of it, with jitter lognormal:0.1. On
MNIST: 4,800 images, 12,730 parameters, batch {BATCH}, two epochs; on tables: matrix factorization, 100 clocks of each
worker. `local` is seed 0 on one machine, `local range` is over seeds {SEEDS[0]} to {SEEDS[-1]}; the lab has seed 0.
Strategies without a bar on the loss are compared with the simulator alone.
{of_chance()}
In the simulator a message takes {LATENCY_MS:g} ms more than its bytes. The machine's load was {load[0]:.1f} before and
{load[1]:.1f} after, of which this benchmark makes up to two.
"""


if __name__ == "__main__":
    main()
