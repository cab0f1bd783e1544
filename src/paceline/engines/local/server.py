"""The server process: coordinator and store, driven by messages, alarms and the launcher's word.

One thread, one loop. Whatever becomes due is dealt with between two waits; when nothing can ever become due although
workers are present, that is an error and not a wait. The launcher's end of the control channel going away means that
nobody is left to clean up: the server then kills every worker's process group and itself.
"""

import contextlib
import gc
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from paceline.core.errors import DivergenceError, InternalError, JournalError, PacelineError
from paceline.engines.local import control
from paceline.engines.local.alarms import Alarms
from paceline.engines.local.end_conditions import notice_the_end, require_movement, say_what_overran
from paceline.engines.local.members import Member
from paceline.engines.local.process_cluster import LocalCluster
from paceline.engines.local.relay import Relay
from paceline.engines.local.result_handover import as_failure, behind_descriptor, save_nodes, save_result, trained_state
from paceline.engines.local.saving import Resumption, Saving
from paceline.engines.local.scenario_faults import ScenarioFaults
from paceline.engines.local.server_links import ServerLinks
from paceline.records.journal import Tee, Writer, read
from paceline.records.metrics import Metrics, to_json
from paceline.server.coordinator import Coordinator
from paceline.server.emulation import Emulation
from paceline.server.run_control import Conduct, Progress
from paceline.strategies import build_central, is_peer
from paceline.transport.base import Lost
from paceline.transport.frames import Channel
from paceline.transport.messages import ToServer

RESPAWNS = 3  # processes of one worker in a row that die without a push; a fourth would hardly do better
LAST_WORDS_S = 5.0  # for a launcher that is busy
IDLE_S = 0.2  # between two looks at what no message announces: relayed lines, the journal's failure


def main(channel: Channel) -> None:
    """Serve one run; returns when all is told."""
    frame = channel.receive()
    setup = control.for_server(frame.data) if frame is not None else None
    if not isinstance(setup, control.Setup):
        raise InternalError(f"the first message of a server must be its setup, not {setup!r}")
    torch.set_num_threads(setup.config.threads or 1)
    torch.set_grad_enabled(False)  # once, and not for every step
    try:
        server = Server(channel, setup)
    except PacelineError as error:  # a journal that cannot be written, a checkpoint that cannot be read
        channel.send(control.encode(control.Finished("error", b"", as_failure(error))))
        channel.finish(LAST_WORDS_S)
        return
    gc.collect()
    gc.freeze()  # what is there by now stays: looking through it again and again would hold workers up
    server.run()


class Server:
    """One run's server."""

    def __init__(self, channel: Channel, setup: control.Setup) -> None:
        self.setup = setup
        self.config = setup.config
        self._channel = channel
        self._alarms = Alarms()
        self._relay = Relay(self._tell, everything=setup.relay)
        self._metrics = Metrics()
        self._writer: Writer | None = None
        if setup.journal is not None:
            path = Path(setup.journal)
            if setup.append:
                for line in read(path):
                    self._metrics.write(line)
            self._writer = Writer(path, append=setup.append)
        self._resumption = Resumption(setup) if setup.restore is not None else None
        changed = self._resumption is not None and not is_peer(self.config.strategy)  # it may have gone over to bsp
        spelt = self._resumption.run.strategy if self._resumption is not None and changed else self.config.strategy
        strategy = build_central(spelt, self.config.seed)
        sink = Tee(self._writer, self._metrics, self._relay)
        self.conduct = Conduct(self.config, strategy, sink, setup.header, self._show)
        self.emulation = Emulation(setup.scenario) if setup.scenario is not None else None
        self.cluster = LocalCluster(self.conduct, self._alarms, self.emulation, set(range(setup.workers)))
        self.coordinator = Coordinator(strategy, self.cluster, sink, max_versions=self.config.max_versions)
        self.cluster.coordinator = self.coordinator
        self.saving = Saving(self.cluster, setup, self._flush_journal)
        self._incarnations = dict.fromkeys(range(setup.workers), 0)
        self._seen_until: float | None = None  # what the scenario let happen before this server began
        self._in_vain: dict[int, int] = {}  # processes in a row that died without a push
        self._interrupted = False
        self._wiring = ServerLinks(channel, self._on_control, self._hear, exact=self.emulation is not None)

    # -- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """From the first process to the last word."""
        failure: control.Failure | None = None
        if self.setup.transport == "zeromq":
            self._tell(control.Listening(self._wiring.listen()))
        try:
            try:
                self._begin()
                self._on_control()  # what came together with the setup was read together with it
                self._serve()
                self._settle()
            except DivergenceError:
                pass  # the guard's verdict is in the report, and the run comes back with it
            except Exception as error:  # noqa: BLE001 - whatever ended the run is the launcher's to show
                failure = self._fail(error)
            self._last_word(failure)
        finally:
            self._close()

    def _begin(self) -> None:
        conduct, resumption = self.conduct, self._resumption
        lost = resumption.rolled_back(self._metrics) if resumption is not None else {}
        if resumption is not None:
            self._seen_until = self._metrics.seconds if self.setup.append else resumption.run.at
        if resumption is not None:
            conduct.header = resumption.header(self.setup.header)
        conduct.take_charge(self.coordinator, _look_up)
        if resumption is not None:
            resumption.carry_out(self.cluster, self._last_moment())
            if any(lost.values()):
                self.coordinator.observe("rolled_back", lost)
        if self.setup.append:
            conduct.trust_options()  # living workers do not ask again for what they were told
        self.saving.attach()
        self.cluster.on_first_phase = self._on_clock

    def _last_moment(self) -> float | None:
        """How far the clock had come when the server before this one died; None if there was none."""
        return time.monotonic() - self.setup.began if self.setup.append and self.setup.began is not None else None

    def _on_clock(self) -> None:
        """The run's seconds count from here on: what is to happen at a certain second can be put on the clock."""
        clock = self.cluster.clock
        if clock.zero is not None:
            self._tell(control.Began(clock.zero))
        now = clock.now()
        if self.emulation is not None:
            ScenarioFaults(self.cluster, self.emulation, self._alarms, self).schedule(self._seen_until)
        every = self.config.evaluate_every
        if every is not None and every.unit == "s":
            self._every(every.amount, now, lambda: self.conduct.evaluate(clock.now()))
        self.saving.schedule(lambda seconds, call: self._every(seconds, now, call))
        if self.config.max_seconds is not None:
            self._alarms.at(self.config.max_seconds, lambda _: None, moves=False)

    def _every(self, seconds: float, now: float, call: Callable[[], None]) -> None:
        def tick(count: Any) -> None:
            if self.conduct.active:
                call()
                self._alarms.at((count + 1) * seconds, tick, count + 1, moves=False)

        first = int(now / seconds) + 1
        self._alarms.at(first * seconds, tick, first, moves=False)

    def _serve(self) -> None:
        """Until the run is over."""
        conduct = self.conduct
        while conduct.active:
            self._wait()
            self._look_after()
        self.coordinator.now = now = self.cluster.moment()
        conduct.check_options(self.cluster.asked)
        if conduct.cause not in (None, "done"):
            self.coordinator.stop(now, f"the run ended: {conduct.cause}")
        self._come_together()
        self.saving.conclude()

    def _settle(self) -> None:
        """Let scripts run to their end and the final version be measured; then the last line can be written."""
        conduct, cluster, ended_at = self.conduct, self.cluster, self.cluster.moment()
        if conduct.cause == "interrupted":
            self._end_interrupted(ended_at)
            return
        for worker in cluster.members:
            self.signal(worker, signal.SIGCONT)  # a pause that outlasts the run must not hold its end up
        cluster.finish()
        while not self._interrupted and (conduct.measuring or conduct.unmeasured):
            conduct.evaluate_last(ended_at)
            self._wait()
        evaluator = cluster.evaluator.member
        if evaluator is not None and not evaluator.gone:
            evaluator.gone = True
            self.hang_up(evaluator)
        while not self._interrupted and any(not (m.ended or m.gone) for m in cluster.members.values()):
            self._wait()
        if self._interrupted:
            self._end_interrupted(ended_at)
            return
        self.coordinator.now = ended_at
        effort = cluster.effort
        total = time.process_time() - effort.since
        data = {"cpu_s": total, "apply_s": effort.apply_s, "copy_s": effort.copy_s}
        self.coordinator.observe("server", data)
        say_what_overran(self.cluster, self.emulation)
        if self._resumption is not None and self.coordinator.version == self._resumption.run.version:
            conduct.remark(f"nothing was left to train: {self._resumption.found.path} is of a run that was done")
        conduct.end(ended_at)

    def _end_interrupted(self, at: float) -> None:
        self.conduct.cause, self.coordinator.now = "interrupted", at
        self.coordinator.observe_end("interrupted")

    def _come_together(self) -> None:
        """A run without a server ends with the average of its nodes' models."""
        until = math.inf
        for worker in self.cluster.members if self.cluster.peers.in_use else ():
            self.signal(worker, signal.SIGCONT)  # who is paused gives its model, too
        while not self.cluster.peers.is_together() and time.monotonic() < until:
            self._wait()
            if self._interrupted:
                until = min(until, time.monotonic() + LAST_WORDS_S)

    def _look_after(self) -> None:
        """Whatever the last messages made due."""
        conduct, coordinator, now = self.conduct, self.coordinator, self.cluster.clock.now()
        if self._interrupted:
            conduct.cause = "interrupted"
        if not conduct.active:
            return
        conduct.check_options(self.cluster.asked)
        limit = self.config.max_seconds
        if conduct.switch_to is not None:
            conduct.switch_strategy(now)
        elif coordinator.at_limit or (limit is not None and now >= limit and self.cluster.phases.running):
            conduct.cause = "limit"
        elif (coordinator.phase_over or conduct.phase_stopped is not None) and self.cluster.peers.is_together():
            conduct.phase_ends()
            self.cluster.end_phase()
        if self.saving.due:
            self.saving.take()
        notice_the_end(self.cluster, self.emulation)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """One wait, and all that came of it."""
        left = self._alarms.seconds_left(self.cluster.clock.now())
        patience = IDLE_S if left is None else min(left, IDLE_S)
        something = self._wiring.wait(patience)
        self._alarms.ring(self.cluster.clock.now())
        if not something:
            self._relay.flush()
            if not self._alarms.moving and self.conduct.active and not self.saving.busy:
                require_movement(self.cluster)

    def _hear(self, member: Member, message: ToServer) -> None:
        self.cluster.hear(member, message)
        if self.saving.due:
            self.saving.take()

    # -- the launcher ------------------------------------------------------------------------------------------------

    def _on_control(self) -> None:
        try:
            while (frame := self._channel.collect()) is not None:
                self._hear_launcher(control.for_server(frame.data), frame.descriptors)
        except Lost:
            self._wiring.orphaned()

    def _hear_launcher(self, message: control.ToServer, descriptors: list[int]) -> None:
        match message:
            case control.Linked():
                self._part_with_predecessor(message)
                member = self._wiring.link(message, descriptors)
                if not message.evaluator:
                    self._incarnations[message.worker] = message.incarnation
                self.cluster.link(member)
            case control.Exited():
                self._on_exited(message)
            case control.Interrupt():
                self._interrupted = True
            case _:
                raise InternalError(f"the launcher sent {message} to a server that runs")

    def _on_exited(self, message: control.Exited) -> None:
        member = self._wiring.unlink(message)
        if member is None:
            self._on_unknown_end(message)
            return
        self.cluster.exited(member, message.code)
        if self.config.respawn and message.code < 0 and not message.evaluator and not member.meant_to_die:
            self._respawn(member)

    def _part_with_predecessor(self, message: control.Linked) -> None:
        """A worker's next process may be announced before its last one's end is."""
        old = self.cluster.members.get(message.worker)
        if old is not None and not old.gone and not message.evaluator:
            self._wiring.hear_out(old)
            self.cluster.remove(old, "crash")

    def _on_unknown_end(self, message: control.Exited) -> None:
        """Of a process that only a server before this one was linked to."""
        if message.evaluator:
            self.cluster.no_evaluator()
            return
        self.cluster.phases.gone(message.worker)
        self._incarnations[message.worker] = message.incarnation
        if self.config.respawn and message.code < 0:
            self.start(message.worker)
        self.cluster.greet_waiting()

    def hang_up(self, member: Member) -> None:
        """Tell it that nothing more will come."""
        self._wiring.hang_up(member)

    def _respawn(self, member: Member) -> None:
        """Bring a worker back, unless its processes die one after the other without a push."""
        vain = 0 if member.pushed else self._in_vain.get(member.worker, 0) + 1
        self._in_vain[member.worker] = vain
        if vain < RESPAWNS:
            self.start(member.worker)
            return
        self.coordinator.now = self.cluster.clock.now()
        self.conduct.remark(
            f"worker {member.worker} died {RESPAWNS} times in a row before its first push: it is not started again"
        )

    def start(self, worker: int) -> None:
        """Start a process for this worker, as its next incarnation."""
        if not self.conduct.active:
            return
        incarnation = self._incarnations.get(worker, -1) + 1
        self._incarnations[worker] = incarnation
        self.cluster.starting[worker] = incarnation
        self._tell(control.Start(worker, incarnation))

    def signal(self, worker: int, number: int) -> None:
        """Send it a signal."""
        member = self.cluster.members.get(worker)
        if member is not None and not member.gone:
            self._tell(control.Signal(worker, number))

    def crash_server(self) -> None:
        """Die, as a scenario's `server_crash` asks."""
        self._flush_journal()
        os.kill(os.getpid(), signal.SIGKILL)

    def _flush_journal(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def _tell(self, message: control.ToLauncher, descriptors: tuple[int, ...] = ()) -> None:
        try:
            self._channel.send(control.encode(message), descriptors)
        except Lost:
            self._wiring.orphaned()

    def _show(self, progress: Progress) -> None:
        self._tell(control.Progressed(progress))

    # -- the end -----------------------------------------------------------------------------------------------------

    def _fail(self, error: Exception) -> control.Failure:
        failure = as_failure(error)
        self.coordinator.now = self.cluster.clock.now()
        self.conduct.cause = "error"
        with contextlib.suppress(JournalError):  # which may be the error
            self.coordinator.stop(self.coordinator.now, "the run failed")
            self.coordinator.observe("error", {"text": str(error)})
            self.coordinator.observe_end("error")
        return failure

    def _last_word(self, failure: control.Failure | None) -> None:
        tables = self.conduct.tables
        # Of nodes that were never asked for their models there is nothing but the first one.
        peers = self.cluster.peers
        known = failure is None or not peers.in_use or peers.gathering.averaged
        state = trained_state(self.conduct.store_or_none, tables) if known else None
        data = safetensors.torch.save(state) if state is not None else None
        try:
            self.saving.finish()
            if data is not None and self.setup.folder is not None:
                folder, name = Path(self.setup.folder), "model" if tables is None else "tables"
                complaint = save_result(data, folder, name) or save_nodes(self.conduct, folder)
                if complaint is not None:
                    self.coordinator.observe("warning", {"text": complaint})
            if self._writer is not None:
                self._writer.close()
        except PacelineError as error:  # a full disk costs neither the report nor the model
            failure = failure or as_failure(error)
        self._relay.flush()
        report = to_json(self._metrics.report(self.setup.journal)).encode()
        cause = "error" if failure is not None else self.conduct.cause or "done"
        finished = control.Finished(cause, report, failure, list(state or ()), tables is not None)
        with behind_descriptor(data) as descriptors:
            self._tell(finished, descriptors)
            self._channel.finish(LAST_WORDS_S)

    def _close(self) -> None:
        self.saving.close()
        self.cluster.lending.close()
        self._wiring.close()


def _look_up() -> None:
    """The loop looks after every wait anyway."""
