"""The launcher: starts a run's processes, serves them all in one loop, and returns when none is left.

It decides nothing about training. The server asks it to start or signal workers and says when the run is over; the
launcher reports which processes have exited, which process handles tell at once. Whatever ends a run early ends every
process group, by SIGTERM and then SIGKILL. A script that still runs after training may be saving its model, so the
launcher waits for it.
"""

import contextlib
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_never

import msgspec

from paceline.core.errors import InternalError, UserError
from paceline.engines.local import addresses, control, scratch
from paceline.engines.local import nursery as nurseries
from paceline.engines.local.children import Children, ProcessPlace
from paceline.engines.local.interruption import Interruption
from paceline.engines.local.loop import Loop, interrupts
from paceline.engines.local.output import Console
from paceline.engines.local.processes import Process, RunProcess
from paceline.engines.local.result_handover import Outcome, as_overdue, interrupted_without_server
from paceline.engines.local.workload import Workload, packed
from paceline.records.journal import Line, Sink
from paceline.records.logs import Log, notice
from paceline.records.report import save_report
from paceline.server.checkpoint import files as checkpoint
from paceline.server.exchange import Launched, Result
from paceline.server.plan import Cause, Plan, how_it_ended
from paceline.server.progress import Progress
from paceline.server.waits import PATIENCE_S
from paceline.transport.shm import Frame
from paceline.worker import context

GRACE_S = 2.0  # between asking a process to end and killing it
LAST_STEPS_S = 10.0  # for a server to exit after its last message
RESTARTS = 3  # of the server, in a row and in vain, from one checkpoint

logger = logging.getLogger("paceline")


class Restarts:
    """How often the server was started again in a row, each time from the same place.

    A server that served while nobody was there to train, or while all scripts were still loading, could not come
    further, and its death says nothing about the checkpoint: such restarts are not in vain. One that dies before it
    serves may die of its checkpoint.
    """

    def __init__(self, restore: Path | None) -> None:
        self._place = restore
        self.in_a_row = 0
        self.in_vain = 0  # of these
        self.serves = False  # the server has taken up its checkpoint

    def count(self, place: Path | None, *, trained: bool) -> None:
        """Count a restart from this checkpoint; None: from the beginning. `trained`: workers were there."""
        if place != self._place:
            self.in_a_row = self.in_vain = 0
        self.in_a_row += 1
        self.in_vain += trained or not self.serves
        self._place, self.serves = place, False


class Launcher:
    """One run's processes."""

    def __init__(
        self, plan: Plan, workload: Workload, log: Sink, sink: Sink | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:  # fmt: skip
        self._plan = plan
        self._log = log
        self._sink = sink  # gets every line
        self._progress = progress
        self._began: float | None = None  # the zero of the run's clock, by time.monotonic
        self._loop = Loop()
        self._stage = Console()
        self._children = Children(plan, workload, self._stage, self._send_to_server)
        self._server: Process | None = None
        self._shards: list[RunProcess] = []  # of the server
        self._lost_shard: str | None = None  # how one of them ended, which ends the server, too
        self._finished: control.Finished | None = None
        self._failure: control.Failure | None = None  # one that the server did not report
        self._script_failure: control.Failure | None = None
        self._model: int | None = None
        self._kill_at: dict[RunProcess | None, float] = {}  # None: all workers that outlive the run
        self._debugging = False  # a worker's debugger has the terminal
        self._shown = Progress(0.0, 0, 0, None, {}, None)
        self._interruption = Interruption()
        self._restarts = Restarts(plan.restore)

    def run(self) -> Outcome:
        """Run to the end. Raises KeyboardInterrupt at a second interrupt."""
        with self._interrupts() as descriptor:
            try:
                self._loop.watch_descriptor(descriptor, lambda: self._on_interrupt(descriptor))
                self._take_nursery()
                self._await_nursery(descriptor)
                self._begin(self._plan.restore, append=False, then=self._start_children)
                if self._interruption.count:  # it came before there was a server
                    self._interrupt_server()
                while self._goes_on():
                    self._loop.turn(self._seconds_left())
                    self._kill_the_late()
                    own = [process for process in self._processes() if process.pid]
                    self._interruption.look(own, self._children.nursery)
                return self._outcome()
            finally:
                self._leave_nothing()

    def _interrupts(self) -> contextlib.AbstractContextManager[int]:
        """Return where interrupts come from: a descriptor with one byte for each."""
        return interrupts()

    def _goes_on(self) -> bool:
        """Whether there is something to wait for."""
        return bool(self._processes())

    # -- births ------------------------------------------------------------------------------------------------------

    def _take_nursery(self) -> None:
        """Get a nursery, which begins to import torch, unless there is one."""
        if self._children.nursery is None and self._plan.config.start != "fresh" and nurseries.possible():
            self._children.nursery = nurseries.take()

    def _await_nursery(self, interrupts: int) -> None:
        """Wait until the nursery is ready, or known to be useless; interrupts are handled meanwhile.

        Raises KeyboardInterrupt if it stays stopped after an interrupt: nothing has begun that could be reported.
        """
        nursery = self._children.nursery
        if nursery is None:
            return
        with contextlib.closing(Loop()) as waiting:
            waiting.watch_descriptor(interrupts, lambda: self._on_interrupt(interrupts))
            waiting.watch_descriptor(nursery.fileno(), nursery.listen)
            patient_until = time.monotonic() + PATIENCE_S
            while nursery.starting and (left := patient_until - time.monotonic()) > 0 and not self._interruption.count:
                waiting.turn(left)
            if nursery.starting and not self._interruption.count:
                notice("waiting for an interpreter to import torch, from which all processes are started")
            while nursery.starting:
                waiting.turn(self._interruption.seconds_left())
                self._interruption.look((), nursery)
                if nursery.starting and self._interruption.over and scratch.state_of(nursery.pid) == "T":
                    raise KeyboardInterrupt

    def _begin(self, restore: Path | None, *, append: bool, then: Callable[[], None]) -> None:
        """Start a server with its shards, and `then` the others, or introduce them to it."""
        self._start_server(restore, append=append)
        then()

    def _start_server(self, restore: Path | None, *, append: bool) -> None:
        plan = self._plan
        server = self._server = self._children.make("server")
        if self._children.folder is None:  # as late as possible: from now on the server removes it if this process dies
            self._children.folder = server.folder = scratch.make()
        self._loop.watch(server, self._on_server_word, lambda: self._on_server_exit(server))
        setup = control.Setup(
            plan=plan,
            began=self._began,
            relay=self._sink is not None or logger.isEnabledFor(logging.DEBUG),
            progress=self._progress is not None,
            restore=None if restore is None else os.fspath(restore),
            append=append,
            folder=os.fspath(self._children.folder),
            over_tcp=addresses.over_tcp,
            shards_listen=self._address_for_shards(),
            **self._listening(),
        )
        self._send_to_server(setup)
        self._start_shards()

    def _start_shards(self) -> None:
        """Start the processes of this machine that hold ranges of the weights, each with a link to the server."""
        self._end_shards()
        count = self._plan.config.servers
        for number in range(count - self._plan.remote_shards if count > 1 else 0):
            shard = self._children.make(f"{control.SHARD}{number}")
            self._shards.append(shard)
            self._loop.watch(shard, lambda _: None, lambda shard=shard: self._on_shard_exit(shard))  # type: ignore[misc]
            theirs, servers = socket.socketpair()
            with theirs, servers:
                self._send_to_server(control.ShardLinked(number), (servers.fileno(),))
                shard.send(control.encode(self._shard_role(number)), (theirs.fileno(),))

    def _shard_role(self, number: int) -> control.ShardRole:
        config, listening = self._plan.config, self._listening(number + 1)
        return control.ShardRole(
            number, config.servers, config.threads or 1, os.fspath(self._children.folder or ""),
            listens=bool(listening) or config.transport == "zeromq", over_tcp=addresses.over_tcp, **listening,
        )  # fmt: skip

    def _end_shards(self) -> None:
        """End the shards of a server that is gone: what they hold is of no use to its successor."""
        for shard in self._shards:
            if isinstance(shard, Process):
                self._loop.forget(shard)
            self._kill_at.pop(shard, None)
            shard.reap()
        self._shards.clear()
        self._lost_shard = None

    def _on_shard_exit(self, shard: RunProcess) -> None:
        """End the server of a shard that died: its range of the weights is lost, so all go back to a checkpoint."""
        code = shard.reap()
        self._shards.remove(shard)
        self._kill_at.pop(shard, None)
        if self._server is not None:
            self._loop.catch_up(self._server)  # shards exit after the server's last message
        if self._server is not None and self._finished is None and self._failure is None:
            self._lost_shard = f"{shard.name} of the server {how_it_ended(code)}"
            self._server.signal(signal.SIGKILL)

    def _listening(self, shard: int = 0) -> dict[str, Any]:
        """Return where the server, or one of its shards, counted from 1, listens for workers of other machines."""
        del shard
        return {}

    def _address_for_shards(self) -> str:
        """Return where the server listens for shards of other machines; empty: there are none."""
        return ""

    def _on_shards_expected(self, address: str) -> None:
        raise InternalError(f"the server waits for shards at {address}, and all of them are on this machine")

    def _on_shard_lost(self, shard: int) -> None:
        """Do nothing: only its end cuts the link of a shard of this machine, and that is noticed."""

    def _start_children(self) -> None:
        for worker in range(self._plan.workers):
            self._start(ProcessPlace(worker, 0))
        if self._plan.config.evaluate_every is not None:
            self._start(ProcessPlace(self._plan.workers, 0, evaluator=True))

    def _start(self, place: ProcessPlace) -> None:
        process = self._children.start(place)
        self._loop.watch(process, lambda frame: self._on_child_word(place, frame.data), lambda: self._on_exit(place))

    # -- words -------------------------------------------------------------------------------------------------------

    def _send_to_server(self, message: control.ToServer, descriptors: tuple[int, ...] = ()) -> None:
        if self._server is not None and self._server.alive:
            self._server.send(control.encode(message), descriptors)

    def _on_server_word(self, frame: Frame) -> None:
        message = control.for_launcher(frame.data)
        match message:
            case control.JournalLines():
                for line in message.lines():
                    self._write(line)
            case control.Progressed():
                self._shown = message.progress
                if self._progress is not None:
                    self._progress(message.progress)
            case control.StartWorker():
                if self._finished is None and not self._interruption.count:
                    self._start(ProcessPlace(message.worker, message.incarnation))
            case control.Came():
                self._children.came(ProcessPlace(message.worker, message.incarnation))
            case control.Signal():
                self._signal(message.worker, message.number)
            case control.Listening():
                self._children.listening(message.address)
            case control.ShardsExpected():
                self._on_shards_expected(message.address)
            case control.ShardLost():
                self._on_shard_lost(message.shard)
            case control.Serving():
                self._restarts.serves = True
            case control.Began():
                self._began = message.zero
            case control.Finished():
                self._on_finished(message, frame.descriptors)
            case control.Failure():
                self._fail(message)
            case control.Noticed():
                if not self._debugging:
                    notice(message.text)
            case control.NoPlace():
                self._on_no_place(message.reason)
            case control.Warned() | control.Debugging() | control.LinkLost():
                raise InternalError(f"the server sent {message}, which only workers do")
            case _:
                assert_never(message)

    def _write(self, line: Line) -> None:
        self._log.write(line)
        if self._sink is not None:
            self._sink.write(line)

    def _on_no_place(self, reason: str) -> None:
        raise InternalError(f"the server turned away a newcomer whom nobody had announced: {reason}")

    def _on_link_lost(self, place: ProcessPlace, links: int) -> None:
        """Do nothing: only the server's death cuts the links of one machine, and its successor makes others."""

    def _on_child_word(self, place: ProcessPlace, data: bytes | bytearray) -> None:
        """Note a script's failure; act on it only after the run is over, since before that the server does."""
        message = control.for_launcher(data)
        if isinstance(message, control.Warned):
            self._children.alive[place].warn(message.text, show=self._stage.is_new(message.text))
        elif isinstance(message, control.Debugging):
            self._send_to_server(control.Debugged(place.worker, message.waits))
            self._debugging = message.waits and message.on_terminal
            if self._progress is not None and message.on_terminal:
                self._progress(msgspec.structs.replace(self._shown, paused=message.waits))
        elif isinstance(message, control.LinkLost):
            self._on_link_lost(place, message.links)
        elif isinstance(message, control.Failure):
            self._script_failure = self._script_failure or message
            if self._finished is not None and self._outcome_is_good:
                self._fail(message)

    def _signal(self, worker: int, number: int) -> None:
        for place, process in self._children.alive.items():
            if place.worker == worker and not place.evaluator:
                process.signal(number)
                if number == signal.SIGKILL:
                    self._kill_at[process] = math.inf  # it is no surprise

    def _on_interrupt(self, descriptor: int) -> None:
        self._interruption.read(descriptor)
        if self._finished is not None:
            self._end_all()
        else:
            how = "ending the run" if self._plan.folder is None else "ending the run, with a checkpoint if it trains"
            notice(f"interrupted: {how}; once more ends it at once")
            self._interrupt_server()

    def _interrupt_server(self) -> None:
        self._send_to_server(control.Interrupt())

    # -- ends --------------------------------------------------------------------------------------------------------

    @property
    def _outcome_is_good(self) -> bool:
        finished = self._finished
        broken = finished is not None and (finished.error is not None or finished.cause in ("error", "interrupted"))
        return self._failure is None and not broken

    def _on_finished(self, message: control.Finished, descriptors: list[int]) -> None:
        self._finished = message
        self._model = descriptors[0] if descriptors else None
        self._children.unlink()
        if self._server is not None:
            self._kill_at[self._server] = time.monotonic() + LAST_STEPS_S
        if not self._outcome_is_good:
            self._end_all()
            return
        for place, process in self._children.alive.items():
            process.signal(signal.SIGCONT)  # the server can no longer resume a worker that the scenario paused
            if place.evaluator:
                self._ask_to_end(process)
        patience = self._plan.config.worker_timeout
        if patience is not None:
            self._kill_at[None] = time.monotonic() + max(patience.ceiling, PATIENCE_S)

    def _on_server_exit(self, server: Process) -> None:
        code = server.reap()
        self._kill_at.pop(server, None)
        self._server = None
        if self._finished is None and self._failure is None and not self._restart(code):
            self._end_all()

    def _restart(self, code: int) -> bool:
        """Start a successor of a server that died, if possible; return whether there is one."""
        how = self._lost_shard or f"the server process {how_it_ended(code)}"
        newest, begins_again = self._where_to_go_on()
        there = any(not place.evaluator for place in self._children.alive)
        self._restarts.count(newest, trained=there if self._began is None else self._children.some_have_come)
        if self._script_failure is not None:
            self._failure = self._script_failure  # the server died before it could report it
        elif self._interruption.count:
            logger.warning("%s while the run was being interrupted", how)
            self._finished = interrupted_without_server(self._plan, how)
            self._children.unlink()
        elif newest is None and not begins_again:
            self._failure = control.Failure(
                "peer", f"{how}, and there is no checkpoint to go on from: {_CHECKPOINT_HINT}"
            )
        elif self._restarts.in_vain > RESTARTS:
            start = newest or "the beginning"
            self._failure = control.Failure("peer", f"{how}, {RESTARTS} restarts from {start} came no further")
        elif begins_again:
            self._start_over(how)
            return True
        else:
            logger.warning("%s: going on from %s (restart %d)", how, newest, self._restarts.in_a_row)
            self._begin(newest, append=True, then=self._relink)
            return True
        return False

    def _relink(self) -> None:
        self._children.relink()
        self._on_relinked()

    def _on_relinked(self) -> None:
        """Do nothing: no process is about to be ended for having lost its link."""

    def _where_to_go_on(self) -> tuple[Path | None, bool]:
        """Return the checkpoint for a successor of the server, and whether the run begins again, at no loss.

        Nothing is lost before training has begun, nor, with --checkpoint-every, before the first checkpoint.
        """
        folder, restore = self._plan.folder, self._plan.restore
        if self._began is None:
            return restore, True
        if folder is None or checkpoint.newest(folder) is None:
            return restore, restore is None and self._plan.config.checkpoint_every is not None
        return checkpoint.newest_whole(folder) or restore, False

    def _start_over(self, how: str) -> None:
        """Start all processes again, with an empty journal: scripts have said things to a server that is gone."""
        logger.warning(
            "%s before there was anything to go on from: the run starts again (%d)", how, self._restarts.in_a_row
        )
        for process in self._children.alive.values():
            if isinstance(process, Process):
                self._loop.forget(process)
            self._kill_at.pop(process, None)
        self._children.end_all()
        self._began = None
        self._begin(self._plan.restore, append=False, then=self._start_children)

    def _on_exit(self, place: ProcessPlace) -> None:
        process = self._children.alive[place]
        asked = self._kill_at.pop(process, None) is not None
        code = self._children.reap(place)
        if self._finished is not None and self._outcome_is_good and code < 0 and not asked:
            logger.warning("%s %s after the run was over", place.name, how_it_ended(code))

    def _fail(self, failure: control.Failure) -> None:
        self._failure = failure
        self._end_all()

    def _end_all(self) -> None:
        for process in self._processes():
            for voice in process.voices:
                voice.drain()
            self._ask_to_end(process)
        # What processes print while they are ended would hide the cause; it is in the logs.
        self._stage.muted = self._why() is not None

    def _ask_to_end(self, process: RunProcess) -> None:
        process.signal(signal.SIGTERM)
        process.signal(signal.SIGCONT)  # a stopped process handles SIGTERM only after this
        self._kill_at[process] = time.monotonic() + GRACE_S

    def _processes(self) -> list[RunProcess]:
        servers = [self._server] if self._server is not None else []
        return [*servers, *self._shards, *self._children.alive.values()]

    def _seconds_left(self) -> float | None:
        waits = [max(0.0, at - time.monotonic()) for at in self._kill_at.values() if at != math.inf]
        look = self._interruption.seconds_left()
        return min([*waits, *([] if look is None else [look])], default=None)

    def _kill_the_late(self) -> None:
        for process in [process for process, at in self._kill_at.items() if at <= time.monotonic()]:
            del self._kill_at[process]
            if process is not None:
                process.signal(signal.SIGKILL)
            else:
                self._end_overdue()

    def _end_overdue(self) -> None:
        """End workers' processes that have outlived the run for too long, unless a debugger is in one."""
        overdue = as_overdue(sorted(place.worker for place in self._children.alive if not place.evaluator))
        if self._debugging:
            self._kill_at[None] = time.monotonic() + PATIENCE_S
        elif overdue is not None and self._outcome_is_good:
            self._fail(overdue)

    def _why(self) -> control.Failure | None:
        """Return what went wrong. If the server saw only a script's exit code, prefer the script's own report."""
        reported = self._finished.error if self._finished is not None else None
        own = self._script_failure
        if reported is not None and reported.blame == "script" and not reported.traceback and own is not None:
            reported = own if own.blame != "peer" else reported
        return self._failure or reported

    def _outcome(self) -> Outcome:
        finished, failure = self._finished, self._why()
        cause: Cause = "error" if failure is not None or finished is None else finished.cause
        report = finished.report if finished is not None else b""
        model, self._model = self._model, None
        keys, tables = (finished.keys, finished.tables) if finished is not None else ([], False)
        return Outcome(cause=cause, encoded_report=report, failure=failure, model=model, keys=keys, tables=tables)

    def _leave_nothing(self) -> None:
        """Leave no process and no descriptor behind, whatever happened."""
        self._stage.muted = True  # if a process still prints, an exception is being raised, and that matters more
        with contextlib.ExitStack() as last_steps:  # runs all of them, whichever fails
            if self._children.folder is not None:
                last_steps.callback(scratch.remove, self._children.folder)
            if self._model is not None:
                last_steps.callback(os.close, self._model)
            last_steps.callback(self._loop.close)
            if self._children.nursery is not None:
                last_steps.callback(nurseries.give_back, self._children.nursery)
            for process in self._processes():
                last_steps.callback(process.reap)


_CHECKPOINT_HINT = "--checkpoint-every 100v would make some (in the run's folder, see --runs-dir)"


def launch(
    train: Callable[[], None], plan: Plan, sink: Sink | None, progress: Callable[[Progress], None] | None
) -> Launched:
    """Run on processes of this machine, save the report in the run's folder, and return the result."""
    if context.current() is not None:
        raise UserError(
            "launch() was called inside a worker of another run: run the file that calls it with `python`, not with "
            "`paceline run`, or leave the call out"
        )
    with contextlib.closing(Launcher(plan, packed(train), Log(), sink, progress).run()) as outcome:
        return finished_run(outcome, plan)


def finished_run(outcome: Outcome, plan: Plan) -> Launched:
    """Save the report in the run's folder and return the result; raise what the run failed with."""
    report = outcome.report
    if report is not None:
        save_report(report, plan.folder)
    outcome.raise_failure()
    if report is None:
        raise InternalError(f"the run ended ({outcome.cause}) without a report")
    state = outcome.state()
    if not outcome.tables or state is None:
        return Launched(report, outcome.cause, Result(state))
    tables = {name: tensor.numpy() for name, tensor in state.items()}
    return Launched(report, outcome.cause, Result(tables=tables))
