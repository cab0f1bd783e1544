"""Send grants of work on a model, each with the current version and a slot for its push."""

from typing import TYPE_CHECKING

import msgspec

from paceline.core.settings import rate_factor
from paceline.model.store import Store
from paceline.server.phases import standing
from paceline.server.workers import GrantOrder
from paceline.transport.messages import Work

if TYPE_CHECKING:
    from paceline.server.run import ServerRun


class Grants:
    """Sends granted work to workers and cancels it."""

    def __init__(self, run: "ServerRun", store: Store) -> None:
        self._run = run
        self._store = store
        self._slots: dict[int, int] = {}  # each worker's last slot in its region
        self._rate_factor = rate_factor(run.plan.config.scale_lr, run.plan.workers)

    def grant(self, order: GrantOrder) -> None:
        """Publish the current version to the worker and send it the work."""
        run, worker = self._run, order.worker
        script = run.workers.records[worker].script
        waits = not script.computing
        parameters = run.engine.publish(worker, self._store, waits=waits) if order.fresh else None
        script.order, script.computing = order, True
        script.bytes_down = run.coordinator.model_bytes if order.fresh else 0
        script.timing = timing = None
        if run.emulation is not None:
            timing = run.emulation.grant(worker, order.allotment.samples, script.bytes_down, order.at)
            script.timing = timing
        region, slot = run.engine.region(worker), 0
        if region is not None:
            slot = self._slots[worker] = self._store.free_slot(region, self._slots.get(worker, 0))
        save = run.checkpoints.number_for(worker) if run.checkpoints.possible else None
        own = order.own
        if own is not None:
            own = msgspec.structs.replace(own, rate_factor=self._rate_factor)
        work = Work(
            order.ticket, order.allotment, parameters, order.rounds_done, slot, save=save, phase=run.phases.number,
            standing=standing(run), own=own,
        )  # fmt: skip
        run.engine.dispatch(worker, work, timing)

    def cancel(self, worker: int, ticket: int) -> None:
        self._run.workers.records[worker].script.order = None
        self._run.engine.recall(worker, ticket)
