"""Does a run whose weights are in shards go on while its processes and machines are killed, by join and on Ray?

    python benchmarks/bench_shard_chaos.py                        # 23 minutes, two cores; needs root, MNIST and Ray
    python benchmarks/bench_shard_chaos.py --only 'bsp, ray' --minutes 2 --keep /tmp/chaos  # short; writes nothing
    python benchmarks/bench_shard_chaos.py --only 'bsp, ray, remote shards'  # 11 minutes; writes nothing
    python benchmarks/bench_shard_chaos.py --quick --json         # one minute by join; writes nothing

The chaos of bench_lab_chaos.py, with `--servers 2`: also shards are killed. The second run is `paceline run --engine
ray` on a Ray cluster across the lab, with the server on the head: there no cable is cut, but at times all processes of
a machine other than the head are killed at once, Ray's own among them, and 20 s later it comes back. The third is made
on demand alone: on Ray with two of three shards on the machines of the workers, which have room for both each.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from hosts import Site
from ray_clusters import Node, RayCluster

import bench_lab_chaos as lab_chaos
from bench_lab_chaos import WORKERS, ByJoin, Case
from netlab import Host, Lab

CASES = (Case("bsp", servers=2), Case("bsp", servers=2, on_ray=True))
ON_DEMAND = (Case("bsp", servers=3, on_ray=True, remote_shards=2),)
HOW = f"""
As [lab_chaos](lab_chaos.md) with `--servers {CASES[0].servers}`: {WORKERS} workers on two hosts of a lab with cables of
1 Gbit/s, and on a third the coordinator and {CASES[0].servers} shards. `join` is by `paceline serve` and `paceline
join`; in every minute one of the joined hosts has no cable for {lab_chaos.CUT_S:g} s. `ray` is `paceline run --engine
ray` on a Ray cluster across the hosts, with its token authentication; there no cable is cut, but machines other than
the head are killed, too: all their processes at once, Ray's own among them, and {lab_chaos.AWAY_S:g} s later Ray is
started there again. Every {lab_chaos.KILL_EVERY_S:g} s one of the processes and machines that there are is drawn, each
as likely as any other; a machine only if the other had workers at this and the last kill, because some are to train.
What such a machine had in its temporary folder stays there, as after a power cut ("its folders left"), and is not
counted as left behind.
"""


class OnRay:
    """A run on a Ray cluster across the lab: the server on the head, three workers on each of the other machines."""

    def __init__(self, lab: Lab, site: Site, case: Case, data: Path, seed: int) -> None:
        self._lab, self._site, self._case, self._data, self._seed = lab, site, case, data, seed
        self._cluster = RayCluster(cpus=1, lab=lab)
        self._machines: dict[str, Node] = {}
        self._temporary = Path(os.environ["TMPDIR"])
        self.machines = self
        self.abandoned = 0
        self._gone: set[str] = set()  # processes that were killed with their machines

    def __enter__(self) -> "OnRay":
        with contextlib.ExitStack() as until:
            cluster = until.enter_context(self._cluster)
            for host in self._lab.hosts[1:]:
                self.on(host)
                self._machines[host.name].wait()  # two at once take longer than Ray gives them
            self._command = self._site.command(
                "run", "run", *cluster.options, "--spread", "--log-level", "info", *self._case.options,
                "--data-dir", os.fspath(self._data), "--seed", str(self._seed), "train.py",
                host=self._lab.hosts[0], environment=cluster.environment,
            )  # fmt: skip
            self._until = until.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._until.close()

    def _folder(self, host: Host) -> Path:
        return self._temporary / host.name

    def on(self, host: Host) -> None:
        """Start Ray on a host, with a temporary folder of its own."""
        self._folder(host).mkdir()
        variables = {"TMPDIR": os.fspath(self._folder(host))}
        self._machines[host.name] = self._cluster.add(WORKERS // 2 + self._case.remote_shards, host=host, **variables)

    def off(self, host: Host) -> None:
        """Kill Ray and everything else there, at once."""
        self._gone |= {str(pid) for pid in host.processes()}
        self._machines[host.name].kill()
        self.abandoned += len(list(self._folder(host).iterdir()))
        shutil.rmtree(self._folder(host))

    def started(self) -> int:
        """How many actors have run a worker, by their words, but for those that were killed with their machine: the
        worker of such an actor may not have had its name yet."""
        return len(set(re.findall(r"pid=(\d+).*: running worker", self._command.said)) - self._gone)

    def left(self) -> list[str]:
        """What is left of the run while the cluster is there: processes, actors, folders of machines."""
        until = time.monotonic() + lab_chaos.LEAVES_S
        while (found := self._complaints()) and time.monotonic() < until:
            time.sleep(0.1)
        for host in self._lab.hosts[1:]:
            shutil.rmtree(self._folder(host))
        return found

    def _complaints(self) -> list[str]:
        machines = [self._cluster.head, *self._machines.values()]
        titles = [title for machine in machines for title in machine.processes().values()]
        found = [f"process {title}" for title in titles if re.match(r"paceline: |ray::Paceline", title)]
        return found + [
            f"temporary file {path.name} of {host.name}"
            for host in self._lab.hosts[1:]
            for path in self._folder(host).iterdir()
        ]


def main(arguments: list[str] | None = None) -> None:
    """Make the runs, print, and write the result."""
    if importlib.util.find_spec("ray") is None:
        print("not measured: Ray is not installed: pip install 'paceline[ray]'", file=sys.stderr)
        return
    ways: dict[bool, Callable[..., Any]] = {False: ByJoin, True: OnRay}
    lab_chaos.measure(arguments, "shard_chaos", CASES, HOW, lambda case: ways[case.on_ray], ("pyzmq", "ray"), ON_DEMAND)


if __name__ == "__main__":
    main()
