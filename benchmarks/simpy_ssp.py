"""SSP on a virtual cluster, written directly in SimPy as its documentation teaches: one process per worker.

What `bench_simulator` measures paceline's simulator against. It keeps the clocks, the versions and each push's staleness,
and nothing else: no samples, no journal, no joining or leaving, no reasons.
"""

from collections import Counter
from collections.abc import Callable, Generator

import simpy


class Cluster:
    """The state that the worker processes share."""

    def __init__(self, env: simpy.Environment, workers: int, staleness: int, max_versions: int) -> None:
        self.env = env
        self.staleness = staleness
        self.max_versions = max_versions
        self.full = env.event()  # the run's versions are used up
        self.version = 0
        self.total_staleness = 0
        self.clocks = [0] * workers
        self.counts = Counter({0: workers})
        self.slowest = 0
        self.gates: dict[int, simpy.Event] = {}  # by the slowest clock that opens each

    def push(self, worker: int, read_version: int) -> int:
        """Apply a push and advance its worker's clock, which is returned."""
        self.total_staleness += self.version - read_version
        self.version += 1
        if self.version == self.max_versions:
            self.full.succeed()
        clock = self.clocks[worker] + 1
        self.clocks[worker] = clock
        self.counts[clock] += 1
        self.counts[clock - 1] -= 1
        while not self.counts[self.slowest]:
            del self.counts[self.slowest]
            self.slowest += 1
            if self.slowest in self.gates:
                self.gates.pop(self.slowest).succeed()
        return clock

    def gate(self, slowest: int) -> simpy.Event:
        """The event that the slowest worker has completed so many clocks."""
        return self.gates.setdefault(slowest, self.env.event())


def work(env: simpy.Environment, cluster: Cluster, worker: int, seconds: Callable[[int, int], float]) -> Generator:
    """One worker: compute, push, and wait where the bound says so."""
    attempt = 0
    while True:
        read_version = cluster.version
        yield env.timeout(seconds(worker, attempt))
        clock = cluster.push(worker, read_version)
        attempt += 1
        if clock - cluster.slowest > cluster.staleness:
            yield cluster.gate(clock - cluster.staleness)
