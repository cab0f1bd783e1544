"""A scenario's durations: how long each computation and each transfer takes, drawn by the same keys in every engine.

In virtual time they pass on the kernel's clock. On real processes a worker sleeps for the model's way down before it
computes and for the rest of its computation's time after it; the server waits for the push's way up to pass before the
push counts as arrived. The time that messages really take is part of the modelled times, not added to them.
"""

import msgspec

from paceline.core.scenario.costs import Times
from paceline.core.scenario.file import Scenario
from paceline.core.scenario.network import Direction, MessageFaults, Ways

OVERRUN_SHARE = 0.05  # of the computations; above it the scenario's times were not kept


class Timing(msgspec.Struct, frozen=True, gc=False):
    """When a grant's model arrives and how long its computation takes, by the scenario."""

    attempt: int
    granted_at: float
    begin: float
    compute_s: float
    after_others: bool = False  # of all events at its end, the worker's comes last
    queued_s: float | None = None  # of the model's way, behind others on the server's line

    @property
    def end(self) -> float:
        return self.begin + self.compute_s

    @property
    def delay_s(self) -> float:
        """Seconds that the model takes to arrive."""
        return self.begin - self.granted_at


class Emulation:
    """The scenario's durations, drawn in the order in which messages and computations start."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.times = times = Times(scenario)
        self.ways = Ways(Direction(times, upward=True), Direction(times, upward=False), MessageFaults(scenario))
        self.overruns = 0
        self.computations = 0
        self._attempts: dict[int, int] = {}

    def attempt(self, worker: int) -> int:
        """Return the number of the worker's next computation, counted over all its processes."""
        count = self._attempts.get(worker, 0)
        self._attempts[worker] = count + 1
        return count

    def grant(self, worker: int, samples: int, bytes_down: int, at: float) -> Timing:
        """Time a grant: the model travels down, then the worker computes."""
        attempt = self.attempt(worker)
        begin = self.ways.down.arrival(worker, attempt, bytes_down, at)
        computed = self.times.compute_s(worker, attempt, samples, begin)
        return Timing(attempt, at, begin, computed, queued_s=self.ways.down.queued_s)

    def compute(self, worker: int, samples: int, at: float, *, after_others: bool = False) -> Timing:
        """Time a computation that starts at once, on what the worker has."""
        attempt = self.attempt(worker)
        return Timing(attempt, at, at, self.times.compute_s(worker, attempt, samples, at), after_others)

    def arrivals(self, worker: int, attempt: int, bytes_up: int, sent_at: float) -> list[float]:
        """Return when a push sent at that second arrives: once, unless a message fault hits it.

        `ways.up.queued_s` then says how long it waits behind others.
        """
        at = self.ways.up.arrival(worker, attempt, bytes_up, sent_at)
        return self.ways.faults.deliveries(worker, attempt, sent_at, at)

    def computed(self, overrun_s: float) -> None:
        """Count a computation, and whether it took longer than the scenario says."""
        self.computations += 1
        self.overruns += overrun_s > 0

    def resume(self, attempts: dict[int, int]) -> None:
        """Continue with these counts."""
        self._attempts = dict(attempts)

    @property
    def attempts(self) -> dict[int, int]:
        """How many computations each worker has begun."""
        return dict(self._attempts)

    def complaint(self) -> str | None:
        """Return a warning if the machine was too slow for the scenario."""
        if self.overruns <= OVERRUN_SHARE * self.computations:
            return None
        return (
            f"{self.overruns} of {self.computations} computations took longer than the scenario has them: its times "
            "were not kept; raise seconds_per_sample, use fewer workers or a machine with more cores"
        )
