"""A scenario on real processes: how long each computation and each transfer is to take.

The times are those of the simulator, drawn by the same keys, so that both engines see the same cluster. A worker sleeps
what its computation lacks; the model's way down is slept before it computes, and the push's way up is waited for by the
server before the push counts as arrived. All of these times count from moments, on the clock that the host's processes
have in common, and not from when a message was read: what messages really take is part of the modelled times.
"""

from paceline.core.scenario.costs import Times
from paceline.core.scenario.file import Scenario
from paceline.core.scenario.message_faults import MessageFaults
from paceline.core.scenario.network import Direction, Ways

OVERRUN_SHARE = 0.05  # of the computations; above that the emulated times are not those of the scenario


class Emulation:
    """The scenario's durations, asked for in the order in which things set out."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.times = Times(scenario)
        self.overruns = 0
        self.computations = 0
        self.ways = Ways(
            Direction(self.times, upward=True), Direction(self.times, upward=False), MessageFaults(scenario)
        )
        self._attempts: dict[int, int] = {}
        self._begins: dict[int, float] = {}  # when each worker's latest computation began, by the scenario

    def attempt(self, worker: int) -> int:
        """The number of the worker's next computation, counted over all its processes."""
        count = self._attempts.get(worker, 0)
        self._attempts[worker] = count + 1
        return count

    def order(self, worker: int, attempt: int, samples: int, bytes_down: int, now: float) -> tuple[float, float]:
        """Seconds that the model is under way, and seconds that the computation then takes."""
        begin = self._begins[worker] = self.ways.down.arrival(worker, attempt, bytes_down, now)
        return begin - now, self.times.compute_s(worker, attempt, samples, begin)

    def more(self, worker: int, samples: int, now: float) -> float:
        """Seconds of further samples on the same grant."""
        return self.times.compute_s(worker, self.attempt(worker), samples, now)

    def arrivals(self, worker: int, attempt: int, bytes_up: int, now: float, compute_s: float) -> list[float]:
        """When a push that was read at `now` arrives: once, unless a mishap strikes it.

        It set out when its computation was over. What its message really took is part of the modelled way, not added.
        """
        sent_at = min(now, self._begins.get(worker, now) + compute_s)
        at = self.ways.up.arrival(worker, attempt, bytes_up, sent_at)
        return self.ways.mishaps.deliveries(worker, attempt, sent_at, at)

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
