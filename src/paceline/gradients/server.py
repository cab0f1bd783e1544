"""The server's side of gradient exchange: receive pushes and hold them in the store until the strategy decides."""

from typing import Any

from paceline.core.errors import UserError
from paceline.core.updates import PushRef
from paceline.gradients.grants import Grants
from paceline.model.store import Gradient, Store
from paceline.server.model_exchange import ModelExchange
from paceline.server.workers import WorkerRecord
from paceline.transport.messages import Extra, ModelLoaded, More, OptimizerAsked, OptimizerHeld, OptimizerLoaded, Push

JUST_SENT_S = 1e-6  # a push read so soon after its computation counts as just sent


class GradientExchange(ModelExchange):
    """Passes pushes of workers on to the coordinator, delayed where a scenario is emulated."""

    messages = (OptimizerAsked, OptimizerLoaded, ModelLoaded)

    def adopt(self, store: Store, at: float) -> None:
        super().adopt(store, at)
        self.run.coordinator.use(store, store.nbytes, Grants(self.run, store))

    def on_push(self, record: WorkerRecord, message: Push, at: float) -> None:
        """Take a worker's push; under an emulated scenario, schedule its arrival."""
        run, script = self.run, record.script
        script.pushed, script.computing = True, False
        order, timing = script.order, script.timing
        arrival = PushRef(
            record.worker, record.incarnation, message.ticket, message.samples, message.compute_s, 0.0,
            run.coordinator.model_bytes, script.bytes_down, kept=message.kept, nominal=message.nominal,
            host=message.host,
        )  # fmt: skip
        expected = order is not None and order.ticket == message.ticket
        if timing is None or run.emulation is None or not expected:
            # A push that crossed a cancellation takes no part in the emulated traffic.
            if order is not None and expected:
                arrival.transfer_s = max(0.0, at - order.at - message.compute_s)
            self._arrive(record, arrival, message.gradient, at)
            return
        run.emulation.computed(message.overrun_s)
        # Sent when its computation ended: the message's real transfer time is part of the emulated one.
        late_s = at - (timing.begin + message.compute_s)
        sent_at = at - late_s if late_s > JUST_SENT_S else at
        moments = run.emulation.arrivals(record.worker, timing.attempt, arrival.bytes_up, sent_at)
        arrival.transfer_s = timing.delay_s + (moments[0] - sent_at)
        arrival.queued_down_s, arrival.queued_up_s = timing.queued_s, run.emulation.ways.up.queued_s
        for moment in moments:
            run.engine.call_at(moment, self._on_arrival, (arrival, message.gradient, moment))

    def _on_arrival(self, arrived: tuple[PushRef, Gradient | None, float]) -> None:
        """End the emulated transfer; drop the push if its process has died meanwhile."""
        arrival, gradient, moment = arrived
        at = self.run.engine.now()
        arrival.transfer_s += max(0.0, at - moment)
        record = self.run.workers.get(arrival.worker, arrival.incarnation)
        if record is not None:
            self._arrive(record, arrival, gradient, at)

    def _arrive(self, record: WorkerRecord, arrival: PushRef, gradient: Gradient | None, at: float) -> None:
        """Hold the push in the store and tell the coordinator; ignore it after the run's end."""
        run, store = self.run, self.store_or_none
        if run.cause is not None:
            return
        order = record.script.order
        if order is not None and order.ticket == arrival.ticket:
            record.script.order = None
        if gradient is not None and store is not None and record.ticket == arrival.ticket:
            arrival.norm, arrival.loss = store.hold(arrival.ticket, gradient), gradient.loss
        run.coordinator.arrive(at if run.stood_at is None else run.stood_at, arrival)

    def on_more(self, record: WorkerRecord, message: More, at: float) -> None:
        run, order = self.run, record.script.order
        if order is None or order.ticket != message.ticket:
            return  # crossed by a cancellation or the phase's end, which answers it
        work = run.phases.current.batch_size if run.phases.current is not None else 1
        extra = run.coordinator.more(record.worker, record.incarnation, message.ticket, work)
        timing = None
        if extra is not None and run.emulation is not None:
            timing = run.emulation.compute(record.worker, extra.samples, at)
        run.engine.dispatch(record.worker, Extra(extra), timing)

    # -- the script's own model and optimizer ------------------------------------------------------------------------

    def on_message(self, record: WorkerRecord | None, message: Any, at: float) -> None:
        del at
        if record is None:
            return
        if isinstance(message, OptimizerAsked):
            self.run.engine.send(record.worker, OptimizerHeld(*self.store.optimizer.state()))
        elif message.phase > self._last_phase():  # else a respawned or resumed script repeats what it did before
            self._take_over(record, message)

    def _last_phase(self) -> int:
        """Return the number of the last phase that has begun, before a checkpoint too."""
        resumption = self.run.resumption
        unfinished = None if resumption is None else resumption.unfinished_phase
        return self.run.phases.number if unfinished is None else unfinished

    def _take_over(self, record: WorkerRecord, message: OptimizerLoaded | ModelLoaded) -> None:
        """Continue from what a script has loaded before a loop."""
        if self.run.phases.running:
            what = "its model" if isinstance(message, ModelLoaded) else "its optimizer's state"
            raise UserError(
                f"worker {record.worker} loads {what} while others train: load it before the loop that it is for, in "
                "every worker"
            )
        if isinstance(message, ModelLoaded):
            self.store.overwrite(message.values, message.buffers)
        else:
            self.store.optimizer.load(message.tensors, message.numbers)
