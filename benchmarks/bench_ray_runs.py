"""Does a run on a Ray cluster of three hosts learn what one machine learns?

    python benchmarks/bench_ray_runs.py                        # some 15 minutes on two free cores; needs root and data
    python benchmarks/bench_ray_runs.py --only bsp --only ssp  # these alone; writes nothing
    python benchmarks/bench_ray_runs.py --servers 1            # the weights in one process; writes nothing
    python benchmarks/bench_ray_runs.py --quick --json         # two small cases, writes nothing

The cases of bench_lab_runs.py, on a lab (tests/netlab) with a real Ray cluster across it: `paceline run --engine ray`
on the head, whose one processor is the server's, and three workers on each of the two others. The weights are in two
shards, except where there is no server. Ray's token authentication is on. `local`
is one machine with as many shards and with all times of the scenario divided by 4.
"""

import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

import hosts
import warm_python
from ray_clusters import RayCluster

import bench_lab_runs as lab_runs
import sources
from bench_lab_runs import SEEDS, WORKERS, Case, Found, Runs, Size
from contenders import bars
from netlab import Lab
from paceline.strategies import is_peer

RATE = "1gbit"
SERVERS = 2
HELPERS = ("tests/netlab", "tests/support/hosts.py", "tests/support/ray_clusters.py")


class RayRuns(Runs):
    """Runs of the cases with so many servers, also on a Ray cluster."""

    def __init__(self, folder: Path, data: Path, servers: int) -> None:
        super().__init__(folder, data)
        self._servers = servers

    def servers_of(self, case: Case) -> int:
        """How many there are: none without a server."""
        return 0 if is_peer(case.strategy) else self._servers

    def _options(self, case: Case, seed: int) -> list[str]:
        count = self.servers_of(case)
        return [*super()._options(case, seed), *(("--servers", str(count)) if count > 1 else ())]

    def on_ray(self, case: Case, lab: Lab, cluster: RayCluster, seed: int) -> tuple[Found, float, float]:
        """By Ray's placement; also the bytes that the server's cable carried, and the seconds of the whole command."""
        with self._site(case, lab, case.scenario()) as site:
            before, began = lab.hosts[0].bytes_sent() + lab.hosts[0].bytes_received(), time.monotonic()
            options = (*cluster.options, "--spread", *self._options(case, seed))
            how = {"host": lab.hosts[0], "environment": cluster.environment}
            lab_runs.require_success(site.command("run", "run", *options, "--task", case.task, **how))
            crossed = lab.hosts[0].bytes_sent() + lab.hosts[0].bytes_received() - before
            return self._found(site.run), crossed, time.monotonic() - began


def measure(size: Size, runs: RayRuns, show: bool) -> list[dict[str, Any]]:
    """All cases: one machine first, then the cluster."""
    rows: list[dict[str, Any]] = []
    local = {case: [runs.here(case, seed) for seed in size.seeds] for case in size.cases}
    with Lab(hosts=3, rate=RATE) as lab, RayCluster(cpus=1, lab=lab) as cluster:
        for _ in lab.hosts[1:]:
            cluster.add(cpus=WORKERS // 2).wait()
        for case in size.cases:
            real, crossed, seconds = runs.on_ray(case, lab, cluster, size.seeds[0])
            rows.append({
                **lab_runs.beside_local(case, real, local[case]), "servers": runs.servers_of(case),
                "s_per_version": real.s_per_version, "MB of gradients": real.bytes_up / 1e6,
                "MB through the server's cable": crossed / 1e6, "seconds with start and end": seconds,
            })  # fmt: skip
            if show:
                print({key: round(v, 4) if isinstance(v, float) else v for key, v in rows[-1].items()}, flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    parser = bars.parser("runs on a Ray cluster of three hosts, beside one machine")
    parser.add_argument("--only", action="append", metavar="STRATEGY", help="this one alone; may be repeated")
    parser.add_argument("--data-dir", type=Path, default=lab_runs.DATA, help="MNIST's four files")
    parser.add_argument(
        "--servers", type=int, default=SERVERS, help="processes with the weights; another number writes nothing"
    )
    given = parser.parse_args(arguments)
    size = lab_runs.size_of(given)
    reason = lab_runs.why_not(size, given.data_dir)
    if importlib.util.find_spec("ray") is None:
        reason = "Ray is not installed: pip install 'paceline[ray]'"
    if reason is not None:
        print(f"not measured: {reason}", file=sys.stderr)
        return
    given.only = given.only or given.servers != SERVERS  # a part of the benchmark
    options = bars.asked(given, 1)
    if options.of is not None:  # the lab, the cluster and the commands' helper are measured too
        sources.checked(given, measured=(*sources.MEASURED, *HELPERS))
    hosts.PATIENCE_S = lab_runs.PATIENCE_S
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="lab-") as folder, warm_python.kept():
        rows = measure(size, RayRuns(Path(folder), given.data_dir.resolve(), given.servers), not options.json)
    load.append(os.getloadavg()[0])
    judged = [lab_runs.learned(row, row["run"]) for row in rows]
    bars.tell("ray_runs", options, judged, rows, notes(load), ("pyzmq", "ray"))


def notes(load: list[float]) -> str:
    """What the numbers mean."""
    return f"""
{WORKERS} workers on two machines of a Ray cluster and the servers on its head, each a host of a lab with a cable of
{RATE}, by `paceline run --engine ray`, encrypted, with Ray's token authentication. Tasks, scenario and what is compared
are those of [lab_runs](lab_runs.md): `local` is seed 0 on one machine with as many servers, `local range` is over seeds
{SEEDS[0]} to {SEEDS[-1]}; the cluster has seed 0. {lab_runs.of_chance()} The machine's load was {load[0]:.1f} before
and {load[1]:.1f} after.
"""


if __name__ == "__main__":
    main()
