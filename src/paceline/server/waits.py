"""Say whom a run waits for, once it has waited for some seconds: nothing else is shown until training begins.

Only what a person may wonder about is named: workers and evaluator that have not come to the loop, a loop without a
push, and scripts that go on after the run. Who waits for whom while workers train is the strategy's business.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.server.run import ServerRun

PATIENCE_S = 10.0  # before it is said whom the run waits for; most scripts have started by then
SILENCE_S = 30.0  # without a push; a long step is not worth a line


class Waits:
    """What one run waits for."""

    def __init__(self, run: "ServerRun", tell: Callable[[str], None]) -> None:
        self._run = run
        self._tell = tell
        self._now: str | None = None  # what it waits for
        self._since = 0.0
        self._told: set[str] = set()

    def look(self, at: float) -> None:
        """Tell what has been waited for too long; `at` is any clock in seconds."""
        found = self._found()
        key = None if found is None else f"{found[0]} {self._run.coordinator.totals.pushes if found[2] else ''}"
        if key != self._now:
            self._now, self._since = key, at
        if found is None:
            return
        text, patience, _ = found
        if at - self._since >= patience and text not in self._told:
            self._told.add(text)
            self._tell(f"waiting for {text}")

    def _found(self) -> tuple[str, float, bool] | None:
        """Return what is waited for, how long that is usual, and whether a push would end it."""
        run = self._run
        if run.finished or run.cause in ("interrupted", "error"):
            return None
        if run.stage != "training":
            left = self._after_the_end()
            return None if left is None else (left, PATIENCE_S, False)
        if run.phases.running:
            computing = [n for n, record in sorted(run.workers.records.items()) if record.ticket]
            if not computing:
                return None
            return f"{_named(computing)} to push: no push came for {SILENCE_S:.0f} s", SILENCE_S, True
        before = self._before_a_phase()
        return None if before is None else (before, PATIENCE_S, False)

    def _before_a_phase(self) -> str | None:
        run, workers = self._run, self._run.workers
        absent = sorted(workers.alive - workers.waiting.keys())
        unstarted = [worker for worker in absent if worker not in workers.records]
        if unstarted:
            return f"{_named(unstarted)} to start"
        unprepared = [worker for worker in absent if workers.records[worker].script.hello is None]
        if not run.exchange.in_use and unprepared:
            return f"{_named(unprepared)} to call prepare(): the script imports, loads data or makes its model"
        if absent and workers.waiting:
            return f"{_named(absent)} to come to the next loop, where the others are"
        if run.evaluations.awaited:
            return "the evaluator to call prepare(): the script imports, loads data or makes its model"
        return None

    def _after_the_end(self) -> str | None:
        records = self._run.workers.records
        running = [n for n, record in sorted(records.items()) if not (record.script.ended or record.script.gone)]
        if self._run.evaluations.measuring:
            return "the evaluator to measure the final version"
        return f"{_named(running)}: the run is over, and its script still runs" if running else None


def _named(workers: Iterable[int]) -> str:
    numbers = list(workers)
    return f"worker{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
