"""Grants of work on a model: they go out with a version and come back as pushes, which wait at the store."""

from typing import TYPE_CHECKING

from paceline.core.updates import PushRef
from paceline.model.spec import Gradient
from paceline.server.model_exchange import ModelExchange
from paceline.server.workers import GrantOrder, WorkerRecord
from paceline.transport.messages import Extra, More, Push, Work

if TYPE_CHECKING:
    from paceline.server.run import ServerRun

JUST_SENT_S = 1e-6  # a push read so soon after its computation has only now set out


class GradientExchange(ModelExchange):
    """Which worker computes what, from the grant to the push."""

    def __init__(self, run: "ServerRun") -> None:
        super().__init__(run)
        self._slots: dict[int, int] = {}  # where each worker's last push lay, of its region

    def grant(self, order: GrantOrder) -> None:
        """Put the version where the worker finds it and let it compute."""
        run, worker = self.run, order.worker
        script = run.workers.records[worker].script
        waits = not script.computing
        parameters = run.engine.publish(worker, self.store, waits=waits) if order.fresh else None
        script.order, script.computing = order, True
        script.bytes_down = run.coordinator.model_bytes if order.fresh else 0
        script.timing = timing = None
        if run.emulation is not None:
            timing = run.emulation.grant(worker, order.allotment.samples, script.bytes_down, order.at)
            script.timing = timing
        region, slot = run.engine.region(worker), 0
        if region is not None:
            slot = self._slots[worker] = self.store.free_slot(region, self._slots.get(worker, 0))
        work = Work(
            order.ticket, order.allotment, parameters, order.rounds_done, slot,
            save=run.checkpoints.number_for(worker), phase=run.phases.number,
        )  # fmt: skip
        run.engine.dispatch(worker, work, timing)

    def cancel(self, worker: int, ticket: int) -> None:
        self.run.workers.records[worker].script.order = None
        self.run.engine.recall(worker, ticket)

    def on_push(self, record: WorkerRecord, message: Push, at: float) -> None:
        """A worker has computed; where a scenario is in force its push is under way for some time yet."""
        run, script = self.run, record.script
        script.pushed, script.computing = True, False
        order, timing = script.order, script.timing
        arrival = PushRef(
            record.worker, record.incarnation, message.ticket, message.samples, message.compute_s, 0.0,
            run.coordinator.model_bytes, script.bytes_down, kept=message.kept, nominal=message.nominal,
        )  # fmt: skip
        expected = order is not None and order.ticket == message.ticket
        if timing is None or run.emulation is None or not expected:
            # One that crossed a cancellation takes no part in the emulated traffic.
            if order is not None and expected:
                arrival.transfer_s = max(0.0, at - order.at - message.compute_s)
            self._arrive(arrival, message.gradient, at)
            return
        run.emulation.computed(message.overrun_s)
        # It set out when its computation was over: what its message really took is part of the modelled way.
        late_s = at - (timing.begin + message.compute_s)
        sent_at = at - late_s if late_s > JUST_SENT_S else at
        moments = run.emulation.arrivals(record.worker, timing.attempt, arrival.bytes_up, sent_at)
        arrival.transfer_s = timing.delay_s + (moments[0] - sent_at)
        for moment in moments:
            run.engine.call_at(moment, self._on_arrival, (arrival, message.gradient, moment))

    def _on_arrival(self, arrived: tuple[PushRef, Gradient | None, float]) -> None:
        arrival, gradient, moment = arrived
        at = self.run.engine.now()
        arrival.transfer_s += max(0.0, at - moment)
        self._arrive(arrival, gradient, at)

    def _arrive(self, arrival: PushRef, gradient: Gradient | None, at: float) -> None:
        """The push is there; one whose process died on the way is not, nor is one that comes after the end."""
        run = self.run
        record = run.workers.get(arrival.worker, arrival.incarnation)
        if record is None or not run.active:
            return
        order = record.script.order
        if order is not None and order.ticket == arrival.ticket:
            record.script.order = None
        if gradient is not None and run.coordinator.expects(arrival.worker, arrival.incarnation, arrival.ticket):
            arrival.norm, arrival.loss = self.store.hold(arrival.ticket, gradient), gradient.loss
        run.coordinator.arrive(run.moment(at), arrival)

    def on_more(self, record: WorkerRecord, message: More, at: float) -> None:
        run, order = self.run, record.script.order
        if order is None or order.ticket != message.ticket:
            return  # it crosses a cancellation or the phase's end, which is the answer
        work = run.phases.current.batch_size if run.phases.current is not None else 1
        extra = run.coordinator.more(record.worker, record.incarnation, message.ticket, work)
        timing = None
        if extra is not None and run.emulation is not None:
            timing = run.emulation.compute(record.worker, extra.samples, at)
        run.engine.dispatch(record.worker, Extra(extra), timing)
