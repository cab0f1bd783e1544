"""Messages that arrive twice or out of order, as a scenario's `duplicate` and `reorder` events ask for."""

from paceline.core.scenario.file import Scenario
from paceline.core.scenario.jitter import MISHAP, uniform, worker_key


class MessageFaults:
    """Decides, by a hash of worker and attempt, which pushes a mishap strikes."""

    def __init__(self, scenario: Scenario) -> None:
        self._seed = scenario.seed
        self._events = [event for event in scenario.events if event.kind in ("duplicate", "reorder")]

    def deliveries(self, worker: int, attempt: int, sent_at: float, arrives_at: float) -> list[float]:
        """When the push arrives: once, at its time, unless a mishap strikes it."""
        if not self._events:
            return [arrives_at]
        key = worker_key(self._seed, worker)
        moments = [arrives_at]
        for number, event in enumerate(self._events):
            struck = event.at <= sent_at < event.until and (not event.workers or worker in event.workers)
            chance = uniform(key, MISHAP, attempt * len(self._events) + number)
            if not struck or chance >= (event.share or 0.0):
                continue
            # Twice the time of its transfer lets pushes that set out later overtake it.
            late = arrives_at + 2 * (arrives_at - sent_at) + 1e-3
            moments = [late] if event.kind == "reorder" else [*moments, late]
        return moments
