"""Tables on real processes: messages go over the workers' links, and the wall's clock stamps them.

Where a scenario is emulated, rows and increments take its network's time, and a clock the time of its work: the worker
is told how long, counted from when its computing began, and sleeps what is left of it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.core.errors import PeerError
from paceline.engines.local.members import Member
from paceline.server.checkpoint.files import Checkpoint
from paceline.server.workers import GrantOrder
from paceline.tables import messages as t
from paceline.tables.traffic import Traffic

if TYPE_CHECKING:
    from paceline.engines.local.process_cluster import LocalCluster


class LocalTables(Traffic):
    """Carries messages by the run's clock."""

    def __init__(self, cluster: "LocalCluster") -> None:
        emulation = cluster.emulation
        super().__init__(cluster.conduct, cluster.phases, None if emulation is None else emulation.ways)
        self.copies = emulation is not None  # otherwise the link copies them as they are handed to it
        self._cluster = cluster

    def hear_from(self, member: Member, message: t.TableToServer) -> None:
        """A process says something about tables."""
        if not member.evaluator:
            if isinstance(message, t.OpenTable):
                self._cluster.has_come(member)
            self.hear(member.worker, message)
        elif isinstance(message, t.Measures):
            self.conduct.evaluate_with(lambda number: self._ask(member, number))
            self._cluster.evaluator.awaited = False
            self._cluster.begin_phase_if_ready()

    def now(self) -> float:
        return self._cluster.clock.now()

    def at(self, moment: float, call: Callable[[Any], None], argument: Any) -> None:
        self._cluster.alarms.at(moment, call, argument)

    def incarnation(self, worker: int) -> int | None:
        member = self._cluster.members.get(worker)
        return None if member is None or member.gone else member.incarnation

    def tell(self, worker: int, message: t.TableToWorker) -> None:
        self._cluster.members[worker].link.deliver(message)

    def on_tick(self, worker: int, incarnation: int, tick: t.Tick) -> None:
        cluster, now = self._cluster, self.now()
        cluster.members[worker].pushed = True
        emulation = cluster.emulation
        if emulation is None:
            self.ship(worker, incarnation, 0, tick, now, tick.compute_s)
            return
        attempt, began = emulation.attempt(worker), now - tick.compute_s
        seconds = emulation.times.compute_s(worker, attempt, tick.work, began)
        emulation.computed(tick.compute_s - seconds)
        self.tell(worker, t.Clocked(seconds, cluster.clock.on_host(began)))
        seconds = max(seconds, tick.compute_s)
        self.at(began + seconds, self._computed, (worker, incarnation, attempt, tick, began + seconds, seconds))

    def _computed(self, going: tuple[int, int, int, t.Tick, float, float]) -> None:
        if self.is_here(going[0], going[1]):
            self.ship(*going)

    def on_measures(self, worker: int, message: t.Measures) -> None:
        """Workers measure nothing: the evaluator's process does."""

    def order(self, order: GrantOrder) -> None:
        member = self._cluster.members[order.worker]
        super().order(order)
        number = self._cluster.save_number(member)
        if number is not None:
            self.tell(order.worker, t.Save(number))

    def restore(self, found: Checkpoint, states: dict[int, bytes]) -> None:
        """Go on with a checkpoint's tables."""
        self.host.restore(found.head.tables, found.shards())
        self.host.states = states

    def _ask(self, member: Member, number: int) -> None:
        if member.gone:
            raise PeerError("the evaluator's process is gone: the tables cannot be evaluated")
        tables = self.host.snapshot()
        member.link.deliver(t.EvaluateTables(number, list(tables), list(tables.values())))
