"""A server of light workers that crashes: a second coordinator goes on from the newest snapshot of the first.

Light workers have no script and no weights, so a snapshot is the coordinator's alone and is kept in memory.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from paceline.core.ledger import Tally
from paceline.engines.sim.kernel import Kernel
from paceline.records.journal import Header
from paceline.server.checkpoint.run_snapshot import RunSnapshot, restore, snapshot
from paceline.server.coordinator import Coordinator
from paceline.strategies import build
from paceline.strategies.base import Strategy

if TYPE_CHECKING:
    from paceline.engines.sim.light import LightCluster


class LightRestarts:
    """Takes snapshots every so many versions, and makes coordinators from the newest."""

    def __init__(
        self, cluster: "LightCluster", make: Callable[[Strategy], Coordinator], header: Header, samples: int, every: int
    ) -> None:
        self._cluster = cluster
        self._make = make
        self._header = header
        self._samples = samples
        self._every = every
        self._next_version = every
        self._taken: tuple[RunSnapshot, dict[int, int]] | None = None  # and the attempts of workers

    def on_version(self, version: int, at: float) -> None:
        """Take a snapshot once the decision in progress is carried out, if one is due."""
        if version >= self._next_version:
            self._next_version = version + self._every
            self._cluster.kernel.at(at, self.take)

    def take(self, _: object = None) -> None:
        """Take a snapshot."""
        coordinator, at = self._cluster.coordinator, self._cluster.kernel.now
        self._taken = snapshot(coordinator, at), self._cluster.emulation.attempts
        coordinator.observe(at, "checkpoint", {"version": coordinator.version, "seconds": 0.0})

    def go_on(self) -> Coordinator:
        """Let the time pass until the crashed server is back; return a coordinator that goes on from the snapshot."""
        cluster, before = self._cluster, self._cluster.coordinator
        if self._taken is None:
            raise AssertionError("a snapshot is taken before any worker joins")
        taken, attempts = self._taken
        died_at = cluster.kernel.now
        cluster.kernel = Kernel()
        at = cluster.kernel.now = died_at + (cluster.down_s or 0.0)
        coordinator = self._make(build(taken.strategy, self._header.seed))
        if coordinator.sink is not None:
            header = msgspec.structs.replace(
                self._header, strategy=taken.strategy, snapshot=taken.strategy_state, restored=taken.restored
            )
            coordinator.sink.write(header)
        cluster.coordinator = coordinator
        restore(coordinator, taken, at)
        held = sum(push.samples for push in before.held.values())
        lost = {
            "versions": before.version - taken.version, "samples": before.used - taken.used + held,
            "pushes": before.totals.pushes - taken.pushes,
        }  # fmt: skip
        if any(lost.values()):
            coordinator.observe(at, "rolled_back", lost)
        ledger = Tally(self._samples)
        if taken.ledger is not None:
            ledger.restore(taken.ledger)
        coordinator.open(ledger, taken.round_samples)
        cluster.emulation.resume(attempts)
        self._next_version = taken.version + self._every
        incarnations = {worker: record.incarnation for worker, record in before.records.items()}
        cluster.begin_again(incarnations, died_at)
        return coordinator
