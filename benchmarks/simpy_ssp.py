"""SSP on a virtual cluster, written directly in SimPy: one process per worker; the parked wait for an event.

What `bench_simulator` measures paceline against. It keeps clocks, versions and each push's staleness and nothing else:
no samples, no waiting times, no reasons, no journal, no joining and leaving.
"""

from collections.abc import Callable, Generator

import simpy


class Cluster:
    """What the workers' processes share."""

    def __init__(self, env: simpy.Environment, workers: int, staleness: int, max_versions: int) -> None:
        self.env = env
        self.staleness = staleness
        self.max_versions = max_versions
        self.full = env.event()  # the run's versions are used up
        self.version = 0
        self.total_staleness = 0
        self.clocks = [0] * workers
        self.counts = {0: workers}  # workers by clock
        self.slowest = 0
        self.gates: dict[int, simpy.Event] = {}  # by the slowest clock that opens each

    def push(self, worker: int, read_version: int) -> int:
        """Apply a push and advance its worker's clock, which is returned."""
        self.total_staleness += self.version - read_version
        self.version += 1
        if self.version == self.max_versions:
            self.full.succeed()
        clock = self.clocks[worker] = self.clocks[worker] + 1
        self.counts[clock] = self.counts.get(clock, 0) + 1
        self.counts[clock - 1] -= 1
        while not self.counts[self.slowest]:
            del self.counts[self.slowest]
            self.slowest += 1
            if self.slowest in self.gates:
                self.gates.pop(self.slowest).succeed()
        return clock


def work(
    env: simpy.Environment, cluster: Cluster, worker: int, seconds: Callable[[int, int], float]
) -> Generator[simpy.Event, None, None]:
    """One worker: compute, push, and wait where the bound says so."""
    while True:
        read_version = cluster.version
        yield env.timeout(seconds(worker, cluster.clocks[worker]))
        clock = cluster.push(worker, read_version)
        if clock - cluster.slowest > cluster.staleness:
            yield cluster.gates.setdefault(clock - cluster.staleness, env.event())
