"""The server process: coordinator and store, driven by messages, alarms and the launcher's word.

One thread, one loop. Whatever becomes due is dealt with between two waits; when nothing can ever become due although
workers are present, that is an error and not a wait. The launcher's end of the control channel going away means that
nobody is left to clean up: the server then kills every worker's process group and itself.
"""

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.coordinator import Coordinator
from paceline.engines.local import control, scratch
from paceline.engines.local.alarms import Alarms
from paceline.engines.local.cluster import LocalCluster
from paceline.engines.local.crew import Member
from paceline.engines.local.emulation import Emulation
from paceline.engines.local.happenings import Happenings
from paceline.engines.local.parting import as_failure, model_behind_descriptor
from paceline.engines.local.relay import Relay
from paceline.engines.local.saving import Resumption, Saving
from paceline.errors import DivergenceError, InternalError, PeerError, ScenarioError
from paceline.journal import Line, Sink, Writer, read
from paceline.metrics import Metrics, to_json
from paceline.running import Conduct, Progress
from paceline.strategies import build
from paceline.transport.base import Lost
from paceline.transport.frames import Channel
from paceline.transport.shm import ShmServerEnd
from paceline.transport.zeromq import ZeromqHub

WRITE_S = 0.001  # between two attempts to write to a link that was full
IDLE_S = 0.2  # between two looks at what no message announces: relayed lines, the journal's failure


class _Tee:
    """Every line goes to all of them."""

    def __init__(self, *sinks: Sink | None) -> None:
        self._sinks = [sink for sink in sinks if sink is not None]

    def write(self, line: Line) -> None:
        for sink in self._sinks:
            sink.write(line)


def main(channel: Channel) -> None:
    """Serve one run; returns when all is told."""
    frame = channel.receive()
    setup = control.for_server(frame.data) if frame is not None else None
    if not isinstance(setup, control.Setup):
        raise InternalError(f"the first message of a server must be its setup, not {setup!r}")
    torch.set_num_threads(setup.config.threads or 1)
    Server(channel, setup).run()


class Server:
    """One run's server."""

    def __init__(self, channel: Channel, setup: control.Setup) -> None:
        self.setup = setup
        self.config = setup.config
        self._channel = channel
        self._selector = selectors.DefaultSelector()
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
        spelt = self._resumption.strategy if self._resumption is not None else self.config.strategy
        strategy = build(spelt, self.config.seed)
        sink = _Tee(self._writer, self._metrics, self._relay)
        self.conduct = Conduct(self.config, strategy, sink, setup.header, self._show)
        self.emulation = Emulation(setup.scenario) if setup.scenario is not None else None
        self.cluster = LocalCluster(self.conduct, self._alarms, self.emulation, set(range(setup.workers)))
        self.coordinator = Coordinator(strategy, self.cluster, sink, max_versions=self.config.max_versions)
        self.cluster.coordinator = self.coordinator
        self.saving = Saving(self.cluster, setup, self._flush_journal)
        self._incarnations = dict.fromkeys(range(setup.workers), 0)
        self._processes: dict[tuple[int, int, bool], Member] = {}
        self._interrupted = False
        self._hub: ZeromqHub | None = None

    # -- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """From the first process to the last word."""
        failure: control.Failure | None = None
        self._selector.register(self._channel, selectors.EVENT_READ, self._on_control)
        if self.setup.transport == "zeromq":
            self._hub = hub = ZeromqHub()
            self._selector.register(hub, selectors.EVENT_READ, lambda: self._pump(hub.pump()))
            self._tell(control.Listening(hub.address))
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
            conduct.header = resumption.header(self.setup.header)
        conduct.take_charge(self.coordinator, _look_up)
        if resumption is not None:
            resumption.carry_out(self.cluster, self._last_moment())
            if any(lost.values()):
                self.coordinator.observe("rolled_back", lost)
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
            Happenings(self.cluster, self.emulation, self._alarms, self).schedule(now if now > 1e-3 else 0.0)
        every = self.config.evaluate_every
        if every is not None and every.unit == "s":
            self._every(every.amount, now, lambda: self.conduct.evaluate(clock.now()))
        self.saving.schedule(lambda seconds, call: self._every(seconds, now, call))
        if self.config.max_seconds is not None:
            self._alarms.at(self.config.max_seconds, lambda _: None)

    def _every(self, seconds: float, now: float, call: Callable[[], None]) -> None:
        def tick(count: Any) -> None:
            if self.conduct.active:
                call()
                self._alarms.at((count + 1) * seconds, tick, count + 1)

        first = int(now / seconds) + 1
        self._alarms.at(first * seconds, tick, first)

    def _serve(self) -> None:
        """Until the run is over."""
        conduct = self.conduct
        while conduct.active:
            self._wait()
            self._look_after()
        self.coordinator.now = now = self.cluster.clock.now()
        conduct.check_options(self.cluster.asked)
        if conduct.cause not in (None, "done"):
            self.coordinator.stop(now, f"the run ended: {conduct.cause}")

    def _settle(self) -> None:
        """Let scripts run to their end and the final version be measured; then the last line can be written."""
        conduct, cluster, ended_at = self.conduct, self.cluster, self.cluster.clock.now()
        if conduct.cause == "interrupted":
            self.coordinator.observe_end("interrupted")
            return
        cluster.finish()
        while not self._interrupted and (conduct.measuring or conduct.unmeasured):
            conduct.evaluate_last(ended_at)
            self._wait()
        if cluster.evaluator is not None and not cluster.evaluator.gone:
            cluster.evaluator.link.close()
        while not self._interrupted and any(not (m.ended or m.gone) for m in cluster.members.values()):
            self._wait()
        if self._interrupted:
            conduct.cause = "interrupted"
            self.coordinator.observe_end("interrupted")
            return
        self.coordinator.now = ended_at
        effort = cluster.effort
        total = time.process_time() - effort.since
        data = {"cpu_s": total, "apply_s": effort.apply_s, "copy_s": effort.copy_s}
        self.coordinator.observe("server", data)
        self._say_what_overran()
        conduct.end(ended_at)

    def _say_what_overran(self) -> None:
        if self.emulation is None:
            return
        data = {"overruns": self.emulation.overruns, "computations": self.emulation.computations}
        self.coordinator.observe("overruns", data)
        complaint = self.emulation.complaint()
        if complaint is not None:
            self.conduct.remark(complaint)

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
        elif coordinator.at_limit or (limit is not None and now >= limit and self.cluster.clock.zero is not None):
            conduct.cause = "limit"
        elif coordinator.phase_over or conduct.phase_stopped is not None:
            conduct.phase_ends()
            self.saving.phase_ends()
            self.cluster.end_phase()
        if self.saving.due:
            self.saving.take()
        self._notice_the_end()

    def _notice_the_end(self) -> None:
        """Nobody is left whose script runs: the run is done, or it has lost all its workers."""
        cluster, conduct = self.cluster, self.conduct
        if not conduct.active or cluster.phases.alive or cluster.starting or self._rejoin_ahead:
            return
        if not cluster.phases.running:
            conduct.cause = "done"
            return
        left_at = self.coordinator.now
        if all(m.ended for m in cluster.members.values()):
            conduct.cause = "done"
        elif self.emulation is not None:
            raise ScenarioError(
                f"every worker has left at {left_at:.6g} s and data remains: let one rejoin in the scenario's events"
            )
        else:
            raise PeerError(
                f"every worker's process has died by {left_at:.6g} s and data remains: --respawn brings them back"
            )

    @property
    def _rejoin_ahead(self) -> bool:
        events = self.emulation.scenario.events if self.emulation is not None else ()
        now = self.cluster.clock.now()
        return any(event.kind in ("rejoin", "join") and event.at >= now for event in events)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """One wait, and all that came of it."""
        left = self._alarms.seconds_left(self.cluster.clock.now())
        patience = IDLE_S if left is None else min(left, IDLE_S)
        if self._writes_wait():
            patience = min(patience, WRITE_S)
        events = self._selector.select(patience)
        for key, _ in events:
            key.data()
        self._alarms.ring(self.cluster.clock.now())
        if not events:
            self._relay.flush()
            if left is None and self.conduct.active:
                self._require_movement()

    def _writes_wait(self) -> bool:
        """Send on what a link could not take at once: a grant that names very many samples."""
        waiting = [m.link for m in self._processes.values() if m.link.wants_write]
        for link in waiting:
            with contextlib.suppress(Lost):
                link.flush()
        return bool(waiting)

    def _require_movement(self) -> None:
        cluster = self.cluster
        seats = self.coordinator.seats.values()
        present = [seat.worker for seat in seats if seat.present]
        stuck = cluster.phases.running and present and not any(seat.ticket for seat in seats)
        if stuck and not cluster.starting and not self.saving.busy:
            raise InternalError(
                f"{self.coordinator.strategy.name} lets workers {present} wait for ever at {cluster.clock.now():.6g} s"
            )

    def _pump(self, links: list[Any]) -> None:
        for link in links:
            self._drain(self._member_of(link))

    def _member_of(self, link: Any) -> Member:
        return next(member for member in self._processes.values() if member.link is link)

    def _drain(self, member: Member) -> None:
        """Hear everything that has come over a link."""
        try:
            while (message := member.link.collect()) is not None:
                if not member.gone:
                    self.cluster.hear(member, message)
                    if self.saving.due:
                        self.saving.take()
        except Lost:
            self._forget_link(member)  # its process's end is the launcher's to report

    def _forget_link(self, member: Member) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(member.link)  # type: ignore[arg-type]

    # -- the launcher ------------------------------------------------------------------------------------------------

    def _on_control(self) -> None:
        try:
            while (frame := self._channel.collect()) is not None:
                self._hear_launcher(control.for_server(frame[0]), frame[1])
        except Lost:
            self._orphaned()

    def _hear_launcher(self, message: control.ToServer, descriptors: list[int]) -> None:
        match message:
            case control.Linked():
                self._on_linked(message, descriptors)
            case control.Exited():
                self._on_exited(message)
            case control.Interrupt():
                self._interrupted = True
            case _:
                raise InternalError(f"the launcher sent {message} to a server that runs")

    def _on_linked(self, message: control.Linked, descriptors: list[int]) -> None:
        if self._hub is not None:
            link: Any = self._hub.expect(message.token)
        else:
            link = ShmServerEnd(Channel(socket.socket(fileno=descriptors[0])))
        member = Member(message.worker, message.incarnation, message.pid, link, evaluator=message.evaluator)
        self._processes[message.worker, message.incarnation, message.evaluator] = member
        if not message.evaluator:
            self._incarnations[message.worker] = message.incarnation
        self.cluster.link(member)
        if self._hub is None:
            self._selector.register(link, selectors.EVENT_READ, lambda: self._drain(member))

    def _on_exited(self, message: control.Exited) -> None:
        member = self._processes.pop((message.worker, message.incarnation, message.evaluator), None)
        if member is None:
            self.cluster.phases.gone(message.worker)
            return
        if self._hub is not None:
            self._pump(self._hub.pump())
        self._drain(member)
        self.cluster.exited(member, message.code)
        self._forget_link(member)
        member.link.close()
        if self.config.respawn and message.code < 0 and not message.evaluator and not member.meant_to_die:
            self.start(message.worker)

    def start(self, worker: int) -> None:
        """Start a process for this worker, as its next incarnation."""
        if not self.conduct.active:
            return
        incarnation = self._incarnations.get(worker, -1) + 1
        self._incarnations[worker] = incarnation
        self.cluster.starting.add(worker)
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
            self._orphaned()

    def _show(self, progress: Progress) -> None:
        self._tell(control.Progressed(progress))

    def _orphaned(self) -> None:
        """The launcher is gone: nobody else ends these processes, stopped ones included."""
        for member in self._processes.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(member.pid, signal.SIGKILL)
            scratch.clear(member.pid)
        os._exit(1)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _fail(self, error: Exception) -> control.Failure:
        self.coordinator.now = self.cluster.clock.now()
        self.coordinator.stop(self.coordinator.now, "the run failed")
        self.conduct.cause = "error"
        self.coordinator.observe("error", {"text": str(error)})
        self.coordinator.observe_end("error")
        return as_failure(error)

    def _last_word(self, failure: control.Failure | None) -> None:
        if self._writer is not None:
            self._writer.close()
        self._relay.flush()
        report = to_json(self._metrics.report(self.setup.journal)).encode()
        finished = control.Finished(self.conduct.cause or "done", report, failure)
        with model_behind_descriptor(self.conduct.store_or_none, self.setup.folder) as descriptors:
            self._tell(finished, descriptors)
            while self._channel.wants_write:
                self._channel.flush()

    def _close(self) -> None:
        self.saving.close()
        for member in self._processes.values():
            member.link.close()
        if self._hub is not None:
            self._hub.close()
        self._selector.close()


def _look_up() -> None:
    """The loop looks after every wait anyway."""
