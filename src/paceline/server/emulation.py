"""A scenario's durations: how long each computation and each transfer takes, drawn by the same keys in every engine.

In virtual time they pass on the kernel's clock. On real processes a worker sleeps what its computation lacks; the
model's way down is slept before it computes, and the push's way up is waited for by the server before the push counts
as arrived. What messages really take is then part of the modelled times, not added to them.
"""

import msgspec

from paceline.core.scenario.costs import Times
from paceline.core.scenario.file import Scenario
from paceline.core.scenario.network import Direction, MessageFaults, Ways

OVERRUN_SHARE = 0.05  # of the computations; above that the emulated times are not those of the scenario


class Timing(msgspec.Struct, frozen=True, gc=False):
    """When a grant's model is there and how long its computation takes, by the scenario."""

    attempt: int
    granted_at: float
    begin: float
    compute_s: float
    after_others: bool = False  # of whatever happens at its end, the worker's part comes last

    @property
    def end(self) -> float:
        return self.begin + self.compute_s

    @property
    def delay_s(self) -> float:
        """Seconds that the model is under way."""
        return self.begin - self.granted_at


class Emulation:
    """The scenario's durations, asked for in the order in which things set out."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.times = times = Times(scenario)
        self.ways = Ways(Direction(times, upward=True), Direction(times, upward=False), MessageFaults(scenario))
        self.overruns = 0
        self.computations = 0
        self._attempts: dict[int, int] = {}

    def attempt(self, worker: int) -> int:
        """The number of the worker's next computation, counted over all its processes."""
        count = self._attempts.get(worker, 0)
        self._attempts[worker] = count + 1
        return count

    def grant(self, worker: int, samples: int, bytes_down: int, at: float) -> Timing:
        """The model travels down, then the worker computes."""
        attempt = self.attempt(worker)
        begin = self.ways.down.arrival(worker, attempt, bytes_down, at)
        return Timing(attempt, at, begin, self.times.compute_s(worker, attempt, samples, begin))

    def compute(self, worker: int, samples: int, at: float, *, after_others: bool = False) -> Timing:
        """The worker computes at once, on what it has."""
        attempt = self.attempt(worker)
        return Timing(attempt, at, at, self.times.compute_s(worker, attempt, samples, at), after_others)

    def arrivals(self, worker: int, attempt: int, bytes_up: int, sent_at: float) -> list[float]:
        """When a push that set out then arrives: once, unless a message fault strikes it."""
        at = self.ways.up.arrival(worker, attempt, bytes_up, sent_at)
        return self.ways.faults.deliveries(worker, attempt, sent_at, at)

    def computed(self, overrun_s: float) -> None:
        """Count a computation, and whether it took longer than the scenario has it."""
        self.computations += 1
        self.overruns += overrun_s > 0

    def resume(self, attempts: dict[int, int]) -> None:
        """Go on with these counts."""
        self._attempts = dict(attempts)

    @property
    def attempts(self) -> dict[int, int]:
        """How many computations each worker has begun."""
        return dict(self._attempts)

    def complaint(self) -> str | None:
        """What to say if the machine was too slow for the scenario."""
        if self.overruns <= OVERRUN_SHARE * self.computations:
            return None
        return (
            f"{self.overruns} of {self.computations} computations took longer than the scenario has them: its times "
            "were not kept; raise seconds_per_sample, use fewer workers or a machine with more cores"
        )
