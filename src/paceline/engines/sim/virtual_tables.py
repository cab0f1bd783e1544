"""Tables in virtual time: a clock reads the tables as they are at its start, and its writes arrive at its end.

A script runs through a clock at once and says what it cost; the scenario's time for that passes before the next one
begins. Rows and increments take the network's time. A worker that reads from its cache goes on while its increments
are still under way.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.core.scenario.network import Ways
from paceline.tables import messages as t
from paceline.tables.traffic import Traffic

if TYPE_CHECKING:
    from paceline.engines.sim.engine import ScriptCluster


class VirtualTables(Traffic):
    """Carries messages by the kernel's time."""

    def __init__(self, cluster: "ScriptCluster") -> None:
        super().__init__(cluster.conduct, cluster.phases, Ways(cluster.up, cluster.down, cluster.mishaps))
        self._cluster = cluster

    def now(self) -> float:
        return self._cluster.kernel.now

    def at(self, moment: float, call: Callable[[Any], None], argument: Any) -> None:
        self._cluster.kernel.at(moment, call, argument)

    def incarnation(self, worker: int) -> int | None:
        return self._cluster.incarnations[worker] if worker in self._cluster.threads else None

    def tell(self, worker: int, message: t.TableToWorker) -> None:
        self._cluster.tell(worker, message)

    def on_tick(self, worker: int, incarnation: int, tick: t.Tick) -> None:
        cluster, now = self._cluster, self.now()
        attempt = cluster.attempts.get(worker, 0)
        cluster.attempts[worker] = attempt + 1
        seconds = cluster.times.compute_s(worker, attempt, tick.work, now)
        self.at(now + seconds, self._computed, (worker, incarnation, attempt, tick, seconds))

    def _computed(self, going: tuple[int, int, int, t.Tick, float]) -> None:
        worker, incarnation, attempt, tick, seconds = going
        if self.is_here(worker, incarnation):
            self.ship(worker, incarnation, attempt, tick, self.now(), seconds)
            # Whatever else arrives at this moment does so before the next clock begins.
            self.at(self.now(), self._tell, (worker, incarnation, t.Clocked()))

    def on_measures(self, worker: int, message: t.Measures) -> None:  # noqa: ARG002 - whoever can, measures for all
        evaluate = message.evaluate
        if evaluate is not None and not self.conduct.can_evaluate:
            self.conduct.evaluate_with(lambda _: self.host.measured(evaluate))
