"""SSP on a virtual cluster, written directly in SimPy: one process per worker; the parked wait for an event.

What `bench_simulator` measures paceline against. It keeps what an SSP push is about (clock, version, staleness,
samples, seconds computed and waited) and leaves out what paceline does besides: reasons, journal, joining and leaving.
"""

from collections.abc import Callable, Generator

import simpy


class Cluster:
    """What the workers' processes share."""

    def __init__(self, env: simpy.Environment, workers: int, staleness: int, samples: int, max_versions: int) -> None:
        self.env = env
        self.staleness = staleness
        self.samples, self.max_versions = samples, max_versions
        self.full = env.event()  # the run's versions are used up
        self.version = 0
        self.total_staleness = 0
        self.samples_used = 0
        self.clocks = [0] * workers
        self.computed = [0.0] * workers
        self.waited = [0.0] * workers
        self.counts = {0: workers}  # workers by clock
        self.slowest = 0
        self.gates: dict[int, simpy.Event] = {}  # by the slowest clock that opens each

    def push(self, worker: int, read_version: int) -> int:
        """Apply a push and advance its worker's clock, which is returned."""
        self.total_staleness += self.version - read_version
        self.samples_used += self.samples
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
        read_version, started = cluster.version, env.now
        yield env.timeout(seconds(worker, cluster.clocks[worker]))
        cluster.computed[worker] += env.now - started
        clock = cluster.push(worker, read_version)
        if clock - cluster.slowest > cluster.staleness:
            parked = env.now
            yield cluster.gates.setdefault(clock - cluster.staleness, env.event())
            cluster.waited[worker] += env.now - parked
