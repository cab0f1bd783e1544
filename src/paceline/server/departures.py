"""Workers that leave a run: their process ends, dies or falls silent, or the run goes on without them.

What a worker had not delivered is issued again. A process that ends in the middle of its loop has crashed, whatever its
exit code. With `--respawn` a crashed worker comes back, and the samples that it had are suspected of having killed it
(see `Suspects` in `core/ledger.py`).
"""

from typing import TYPE_CHECKING

from paceline.core.errors import ScriptError
from paceline.core.events import Cause as LeaveCause
from paceline.server.liveness import Liveness
from paceline.server.plan import as_error, how_it_ended
from paceline.server.workers import ScriptState, WorkerRecord
from paceline.transport.messages import Failed

if TYPE_CHECKING:
    from paceline.server.run import ServerRun

MOST_REFUSED = 32  # gradients in a row that are not finite; a loss scale of 2**16 that is too large takes 16
RESPAWNS = 3  # consecutive processes of a worker that die without a push; a fourth would hardly do better


class Departures:
    """The workers of one run as they leave it."""

    def __init__(self, run: "ServerRun") -> None:
        self._run = run
        self.liveness = Liveness(run, self)

    # -- processes that end ------------------------------------------------------------------------------------------

    def on_exit(self, worker: int, incarnation: int, code: int, at: float) -> None:
        """Handle the exit of a worker's process, after all its messages."""
        run = self._run
        record = run.workers.get(worker, incarnation)
        if record is None:
            return
        script, respawns = record.script, run.plan.config.respawn
        if script.ended and run.exchange.is_parting(worker):
            run.exchange.on_script_end(record, lambda: run.on_exit(worker, incarnation, code, at))
            return
        in_loop = run.active and worker in run.workers.in_phase and run.phases.running
        if not script.ended and code > 0 and run.active and not (in_loop and respawns):
            raise ScriptError(f"the script of worker {worker} exited with {code}")
        crashed = not script.ended and (code < 0 or in_loop)
        if crashed and not script.meant_to_die:
            self._say(record, code, at, in_loop=in_loop)
        suspects = crashed and respawns and not script.meant_to_die
        had_suspects = self.remove(record, "crash" if crashed else "done", at, suspects=suspects)
        if suspects:
            self._respawn(record, at, excused=had_suspects)

    def _say(self, record: WorkerRecord, code: int, at: float, *, in_loop: bool) -> None:
        run = self._run
        if code < 0:
            how = f"{how_it_ended(code)} at {at:.3g} s"
        else:
            how = f"ended in the middle of its loop (exit code {code}) at {at:.3g} s"
        advice = "" if run.plan.config.respawn else " (--respawn would bring it back)"
        goes_on = run.active or in_loop
        what = f"the others go on{advice}" if goes_on else "its script had not come to its end"
        run.remark(f"worker {record.worker} {how}; {what}", at)

    def on_unknown_exit(self, worker: int, incarnation: int, code: int, at: float) -> None:
        """Handle the exit of a worker's process that only the previous server knew."""
        run = self._run
        run.workers.script_gone(worker)
        script = run.workers.admit(worker, incarnation, ScriptState()).script
        script.gone, script.left = True, code == 0  # so that a newcomer may take its place
        if run.plan.config.respawn and code < 0:
            run.start(worker)
        run.exchange.look_at_waiting(at)
        run.collectives.left(worker)

    def _respawn(self, record: WorkerRecord, at: float, *, excused: bool) -> None:
        """Start the worker again, unless its last `RESPAWNS` processes all died without a push.

        `excused`: this one had samples that are suspected of killing processes, which is no fault of the script.
        """
        run = self._run
        vain = 0 if excused else run.workers.died(record)
        if vain < RESPAWNS:
            run.start(record.worker)
        else:
            text = (
                f"worker {record.worker} died {RESPAWNS} times in a row before its first push: it is not started again"
            )
            run.remark(text, at)

    def on_failure(self, record: WorkerRecord | None, message: Failed, at: float) -> None:
        """End the run for a script that failed; where workers join from outside, go on with the others, if any.

        There the machine may be to blame: a package or a data set that it does not have.
        """
        run = self._run
        if record is None or not self._others_go_on(record.worker):
            raise as_error(message)
        run.remark(f"worker {record.worker} failed and the others go on without it: {message.text}", at)
        self.remove(record, "crash", at)

    def _others_go_on(self, worker: int) -> bool:
        """Return whether the run can do without this worker: workers join from outside, and others are in it."""
        run = self._run
        others = [each for each in run.workers.running() if each.worker != worker and not each.script.ended]
        return run.engine.capabilities.open_to_joiners and run.active and bool(others)

    def can_spare(self, worker: int) -> bool:
        """Return whether the run goes on without a worker whose message does not fit it.

        Before a phase has begun, and for messages that the strategy decides on, an error ends the run: it may be all
        workers', or half of a decision may have been carried out.
        """
        return self._others_go_on(worker) and self._run.phases.running and not self._run.coordinator.undecided

    def on_nonsense(self, worker: int, incarnation: int, text: str, at: float) -> None:
        """Go on without a worker of another machine that sent something that is no message."""
        record = self._run.workers.get(worker, incarnation)
        if record is not None:
            self._run.remark(f"worker {worker} is taken out of the run: {text}", self._run.moment(at))
            self._run.engine.control(worker, "kill")
            self.remove(record, "crash", at)

    # -- out of the run ----------------------------------------------------------------------------------------------

    def send_away(self, worker: int, incarnation: int) -> None:
        """Let a worker leave cleanly, as the user of its machine asks."""
        run = self._run
        record = run.workers.get(worker, incarnation)
        if record is None:
            return

        def leave() -> None:
            if not record.script.gone:
                run.remark(f"worker {worker} leaves, as the user of its machine asks", run.moment())
                self.remove(record, "leave", run.moment())
                run.engine.control(worker, "hang_up")

        run.exchange.ask_to_leave(record, leave)

    def remove(self, record: WorkerRecord, cause: LeaveCause, at: float, *, suspects: bool = False) -> bool:
        """Take the worker out of the run for good; return whether it was trying samples suspected before.

        `suspects`: what it was computing may have killed it.
        """
        script = record.script
        script.gone, script.left = True, cause in ("leave", "done")
        return self._take_out(record, cause, at, suspects=suspects)

    def lose(self, record: WorkerRecord, at: float) -> None:
        """Go on without a silent worker, which may come back."""
        record.script.silent = True
        self._take_out(record, "timeout", at)

    def set_aside(self, record: WorkerRecord, why: str, at: float) -> None:
        """Send away a worker that only does harm."""
        run = self._run
        run.remark(f"worker {record.worker} is set aside: {why}", at)
        run.coordinator.observe(at, "set_aside", {"reason": why}, record.worker)
        self.remove(record, "leave", at)
        run.engine.control(record.worker, "hang_up")

    def judge_refusals(self, record: WorkerRecord) -> None:
        """Set aside a worker whose gradients are never finite, once the decision in progress is carried out.

        If those of all others are not finite either, it is the model: then the guard decides.
        """
        run, count = self._run, record.refusals
        others = [each for each in run.workers.present() if each is not record]
        if count < MOST_REFUSED or all(each.refusals for each in others):
            return

        def set_aside(_: object) -> None:
            if run.active and run.workers.get(record.worker, record.incarnation) is record and record.refusals >= count:
                self.set_aside(record, f"{count} gradients in a row were not finite", run.moment())

        run.engine.call_at(run.engine.now(), set_aside)

    def _must_be_replaced(self, worker: int) -> bool:
        """Return whether the first phase still waits for as many workers as were asked for, this one among them."""
        run = self._run
        waits = run.engine.capabilities.open_to_joiners and run.active and run.phases.current is None
        return waits and run.resumption is None and len(run.workers.alive - {worker}) < run.plan.workers

    def _take_out(self, record: WorkerRecord, cause: LeaveCause, at: float, *, suspects: bool = False) -> bool:
        run, worker = self._run, record.worker
        record.script.order = None
        run.workers.has_started(record)
        run.checkpoints.on_removed(worker)
        tried = False
        if run.active:
            tried = run.coordinator.leave(worker, cause, run.moment(at), suspects=suspects)
        run.workers.script_gone(worker)
        if self._must_be_replaced(worker):
            run.workers.alive.add(worker)
            run.start(worker)
        run.exchange.left(worker, cause, at)
        run.exchange.look_at_waiting(at)
        run.collectives.left(worker)
        run.notice_empty_phase()
        run.begin_phase_if_ready(at)
        return tried
