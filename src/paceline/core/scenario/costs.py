"""Costs in a scenario: the seconds of a computation, the latency and bandwidth of each link.

All events of a scenario are known in advance, so the duration of a computation that runs into slow-downs and pauses is
integrated exactly when it starts, instead of stepwise.
"""

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable

import msgspec

from paceline.core.errors import InternalError
from paceline.core.scenario.file import Scenario, ScenarioEvent, WorkerSpec
from paceline.core.scenario.jitter import COMPUTE, DOWN, UP, Draw, draw_of, worker_key

BYTES_PER_S_OF_MBPS = 1e6 / 8


class RateCourse(msgspec.Struct, frozen=True):
    """A worker's rate of progress over time, in steps: `rates[i]` holds until `edges[i]`, and 1 after the last."""

    edges: tuple[float, ...]
    rates: tuple[float, ...]

    def rate_at(self, at: float) -> float:
        """Return the rate at that time."""
        index = bisect_right(self.edges, at)
        return self.rates[index] if index < len(self.rates) else 1.0

    def stretched(self, start: float, seconds: float) -> float:
        """Return how long work of `seconds` at full pace takes if started at `start`."""
        at, left = start, seconds
        for index in range(bisect_right(self.edges, start), len(self.edges)):
            rate, edge = self.rates[index], self.edges[index]
            possible = (edge - at) * rate
            if left <= possible:
                return at - start + (left / rate if left else 0.0)
            left -= possible
            at = edge
        return at - start + left


def pace_of(events: Iterable[ScenarioEvent]) -> RateCourse:
    """Return the pace under these slow-downs and pauses; factors of overlapping ones multiply."""
    spans = [(event.at, event.until, event.factor) for event in events]
    edges = sorted({edge for begin, end, _ in spans for edge in (begin, end)})
    rates = [1.0]
    for edge in edges[:-1]:
        # A pause has no factor: its rate is 0.
        rates.append(math.prod(1 / factor if factor else 0.0 for begin, end, factor in spans if begin <= edge < end))
    return RateCourse(tuple(edges), tuple(rates))


class _Price(msgspec.Struct, frozen=True):
    """The costs of work and messages for the workers of one group."""

    seconds_per_sample: float
    draw: Draw | None
    latency_s: float
    bandwidth: float


class Times:
    """All durations of a scenario as pure functions of their arguments; attempts of a worker count from 0."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        network = scenario.network
        self.server_bandwidth = _bytes_per_s(network.bandwidth_mbps)
        self._draw_up, self._draw_down = draw_of(network.jitter, UP), draw_of(network.jitter, DOWN)
        self._keys = array("Q")
        self._prices: list[_Price] = []
        previous: WorkerSpec | None = None
        for worker, spec in enumerate(scenario.workers):
            # Workers of a group share one spec and one price, so that each costs only its key in memory.
            if spec is not previous:
                previous, price = spec, self._price(spec)
            self._append(worker, price)
        self._paces = {worker: pace_of(events) for worker, events in _by_worker(scenario, "slow", "pause").items()}
        self._links = {worker: pace_of(events) for worker, events in _by_worker(scenario, "slow_link").items()}
        of_all = [event for event in scenario.events if event.kind == "slow_link" and not event.workers]
        self._line = pace_of(of_all) if of_all else None
        self._cut_off = {
            worker: sorted((event.at, event.until) for event in events)
            for worker, events in _by_worker(scenario, "partition").items()
        }

    def compute_s(self, worker: int, attempt: int, samples: int, start: float) -> float:
        """Return the seconds the worker takes for `samples` from `start` on, with jitter, slow-downs and pauses."""
        price = self._prices[worker]
        seconds, draw = samples * price.seconds_per_sample, price.draw
        if draw is not None:
            seconds *= draw(self._keys[worker], worker, attempt)
        if self._paces and worker in self._paces:
            return self._paces[worker].stretched(start, seconds)
        return seconds

    def latency_s(self, worker: int, attempt: int, upward: bool, at: float = math.inf) -> float:
        """Return the one-way latency between the worker and the server at that time, with the network's jitter."""
        draw = self._draw_up if upward else self._draw_down
        latency = self._prices[worker].latency_s
        if draw is not None:
            latency *= draw(self._keys[worker], worker, attempt)
        if self._line is not None:
            latency /= self._line.rate_at(at)
        return latency / self._links[worker].rate_at(at) if worker in self._links else latency

    def bandwidth(self, worker: int) -> float:
        """Return bytes per second of the worker's own link, each direction; infinite if the scenario sets no limit."""
        return self._prices[worker].bandwidth

    def line_s(self, size: float, start: float) -> float:
        """Return the seconds that `size` bytes occupy the server's line if sent at `start`."""
        seconds = size / self.server_bandwidth
        return seconds if self._line is None else self._line.stretched(start, seconds)

    def link_s(self, worker: int, size: float, start: float) -> float:
        """Return the seconds that `size` bytes take on the worker's own link if sent at `start`.

        A slowed link has `factor` times less than the worker would get alone, on its link and the server's line.
        """
        bandwidth = self._prices[worker].bandwidth
        if worker not in self._links:
            return size / bandwidth
        return self._links[worker].stretched(start, size / min(bandwidth, self.server_bandwidth))

    def way_s(self, worker: int, size: float, start: float) -> float:
        """Return the seconds that `size` bytes take between the worker and another place, where nobody else sends."""
        return max(self.line_s(size, start), self.link_s(worker, size, start))

    def reachable_at(self, worker: int, at: float) -> float:
        """Return `at`, or the end of the partition that cuts the worker off at that time."""
        for begin, end in self._cut_off.get(worker, ()):
            if begin <= at < end:
                at = end
        return at

    def add_worker(self, worker: int, speed: float) -> None:
        """Add a newcomer on the scenario's default network, with the next id."""
        if worker != len(self._keys):
            raise InternalError(f"a newcomer must have the next free id, {len(self._keys)}, not {worker}")
        self._append(worker, self._price(WorkerSpec(speed=speed, jitter=self._scenario.compute.jitter)))

    def _price(self, spec: WorkerSpec) -> _Price:
        compute, network = self._scenario.compute, self._scenario.network
        latency_ms = network.latency_ms if spec.latency_ms is None else spec.latency_ms
        draw = draw_of(spec.jitter, COMPUTE)
        return _Price(
            compute.seconds_per_sample / spec.speed, draw, latency_ms / 1000, _bytes_per_s(spec.bandwidth_mbps)
        )

    def _append(self, worker: int, price: _Price) -> None:
        self._keys.append(worker_key(self._scenario.seed, worker))
        self._prices.append(price)


def crossing_is_free(scenario: Scenario, size: int) -> bool:
    """Return whether `size` bytes cross the network in no time, for every worker."""
    network = scenario.network
    if size and network.bandwidth_mbps is not None:
        return False
    groups = {id(spec): spec for spec in scenario.workers}.values()  # workers of a group share one spec
    return not any(
        (network.latency_ms if spec.latency_ms is None else spec.latency_ms)
        or (size and spec.bandwidth_mbps is not None)
        for spec in groups
    )


def _by_worker(scenario: Scenario, *kinds: str) -> dict[int, list[ScenarioEvent]]:
    found: dict[int, list[ScenarioEvent]] = {}
    for event in scenario.events:
        if event.kind in kinds:
            for worker in event.workers:
                found.setdefault(worker, []).append(event)
    return found


def _bytes_per_s(mbps: float | None) -> float:
    return math.inf if mbps is None else mbps * BYTES_PER_S_OF_MBPS
