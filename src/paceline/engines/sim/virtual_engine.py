"""Script workers in virtual time: the user's code computes real gradients, each at its virtual moment.

A worker keeps the parameters of its grant until its virtual computing time is over and only then computes, so cancelled
work costs nothing. Evaluation runs between two events and takes no virtual time.

A server that crashes takes with it all that is scheduled: pushes and models on their way, timers, what workers compute.
A second `ServerRun` goes on from the newest checkpoint, read from disk as on real processes, and workers introduce
themselves to it as they do there.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from paceline import engines
from paceline.core.errors import InternalError, ScenarioError, ScriptError, StorageError, UserError
from paceline.core.scenario.jitter import worker_key
from paceline.engines.sim.interrupts import deferred
from paceline.engines.sim.kernel import Call, Kernel
from paceline.engines.sim.light import RESTART_S, finds_server_at
from paceline.engines.sim.threads import ScriptThread, Streams, Turns
from paceline.gradients.server import GradientExchange
from paceline.peers.virtual import VirtualPeerExchange
from paceline.records.journal import Sink, Tee, Writer
from paceline.records.logs import Log
from paceline.records.metrics import Metrics
from paceline.records.replay import started
from paceline.records.report import Report, save_report
from paceline.server.checkpoint import files as checkpoint
from paceline.server.checkpoint.schedule import Resumption
from paceline.server.emulation import Timing
from paceline.server.engine import Control, TensorsByReference
from paceline.server.exchange import Launched, RunExchange
from paceline.server.plan import Plan
from paceline.server.progress import Progress
from paceline.server.run import ServerRun
from paceline.strategies import build_central, is_peer
from paceline.strategies.base import Strategy
from paceline.tables.messages import Tick
from paceline.tables.server import TableExchange
from paceline.transport.messages import Ended, Push, ToServer
from paceline.worker import context
from paceline.worker.context import Shared, WorkerContext

NEXT_PROCESS = 1_000_003  # added to the seed per incarnation, so that each draws other random numbers


class SimEngine(TensorsByReference):
    """The engine of a run in virtual time, whose workers are threads of this process."""

    name = "sim"
    capabilities = engines.capabilities(name)
    run: ServerRun

    def __init__(self, plan: Plan, train: Callable[[], None]) -> None:
        if plan.scenario is None:
            raise ScenarioError("the simulator needs a scenario")
        self._plan = plan
        self._scenario = plan.scenario
        self._train = train
        self._kernel = Kernel()
        self._threads: dict[int, ScriptThread] = {}
        self._turns = Turns()
        self._shared = Shared()
        self._listening: dict[int, ScriptThread] = {}  # whose messages `_listen` is handling
        self._dispatched: dict[int, tuple[int, Timing]] = {}  # each worker's grant: ticket and times
        self._evaluations = Streams(worker_key(plan.config.seed, -1) >> 1)
        self._woken = False
        self._gone: dict[int, int] = {}  # the last incarnation of each worker whose script has ended or was killed
        self._restart_s: float | None = None  # set once the server has crashed, until it is back

    # -- time --------------------------------------------------------------------------------------------------------

    def now(self) -> float:
        return self._kernel.now

    def start_clock(self, at: float) -> None:
        """Do nothing: virtual time begins with the run."""

    def call_at(self, at: float, call: Call, argument: Any = None, *, keeps_alive: bool = True) -> None:
        if keeps_alive or self._kernel.pending:  # if nothing else is scheduled, such a call would change nothing
            self._kernel.at(at, call, argument)

    def wake(self) -> None:
        self._woken = True
        self._kernel.stop()

    def drive(self, run: ServerRun) -> None:
        """Drive the run until it is finished, or its server crashes."""
        self.run = run
        with deferred(lambda: self._kernel.stop()) as interrupts:
            if run.resumption is None:
                for worker in range(self._plan.workers):
                    run.start(worker)
            else:
                self._relink()
            while not run.finished and self._restart_s is None:
                if interrupts.pending and run.active:
                    self.abandon()  # first: its warnings must precede the journal's last line
                    run.interrupt(self.now())
                self._woken = False
                run.attend(self.now())
                if run.stage == "finishing":
                    self.abandon()  # a script that called `batches` again has already had its answer
                elif not self._woken and not run.finished:
                    self._go_on()

    def _go_on(self) -> None:
        """Let virtual time pass until the run needs attention, is at its limit, or nothing is left to happen."""
        run, limit = self.run, self._plan.config.max_seconds
        until = limit if limit is None else max(limit, self.now())  # the server may have come back after the limit
        if self._kernel.run(until):
            if until is not None and self.now() == until and run.active and self._restart_s is None:
                run.end("limit")
            return
        run.attend(self.now())
        if run.active and not self._woken:
            run.on_quiet(self.now())
            if run.phases.running:
                raise run.all_left(self.now())
            if run.resumption is not None and run.resumption.unfinished_phase is not None:
                missing = sorted(run.workers.alive - run.workers.waiting.keys())
                raise InternalError(f"the restored server waits for workers {missing} for ever at {self.now():.6g} s")
            run.end("done")

    def close(self) -> None:
        """End all scripts and restore the caller's random generators."""
        self.abandon()
        self._turns.give_back()

    # -- workers -----------------------------------------------------------------------------------------------------

    def start(self, worker: int, incarnation: int) -> None:
        config, run = self._plan.config, self.run
        run.on_start(worker, incarnation)
        seed = worker_key(config.seed + incarnation * NEXT_PROCESS, worker) >> 1
        thread = self._threads[worker] = ScriptThread(self._train, self._turns, seed, incarnation)
        nodes = run.exchange if isinstance(run.exchange, VirtualPeerExchange) else None
        given = WorkerContext(
            worker=worker,
            workers=self._plan.workers,
            endpoint=thread.link,
            shared=self._shared,
            options=config.options,
            batch_size=config.batch_size,
            epochs=config.epochs,
            data_dir=config.data_dir,
            device="cpu",
            evaluates=config.evaluate_every is not None and not run.evaluations.possible,
            make_replica=nodes.replica_maker(worker, thread.link) if nodes is not None else None,
        )
        run.workers.alive.add(worker)
        run.workers.has_started(run.workers.records[worker])
        thread.start(given)
        self._listen(worker)

    def control(self, worker: int, what: Control) -> None:
        """Kill the worker or hang up on it; pauses are already part of the times."""
        thread = self._threads.get(worker)
        if thread is None or what in ("pause", "resume"):
            return
        incarnation = self.run.workers.records[worker].incarnation
        if what == "kill":
            self.run.on_exit(worker, incarnation, -9, self.now())
        self._abandon(worker)

    def crash_server(self, for_s: float | None) -> None:
        """Let the server die after all other events of this second, to be back `for_s` later."""
        self._kernel.at(self.now(), self._die, RESTART_S if for_s is None else for_s)

    def _die(self, restart_s: float) -> None:
        self._restart_s = restart_s
        self._kernel.stop()

    @property
    def crashed(self) -> bool:
        """Whether the run has no server at the moment."""
        return self._restart_s is not None

    def outlive_server(self) -> float:
        """Cut every worker off the crashed server, let time pass until there is another, and return when it crashed."""
        died_at, restart_s = self.now(), self._restart_s or 0.0
        for worker, thread in sorted(self._threads.items()):
            thread.lose_server()
            if thread.ended:
                self._forget(worker, thread)
        self._dispatched.clear()
        self._kernel = Kernel()
        self._kernel.now = died_at + restart_s
        self._restart_s = None
        return died_at

    def _relink(self) -> None:
        """Introduce the workers to a restarted server: the living find it by themselves, of the others it is told."""
        for worker, thread in sorted(self._threads.items()):
            self.run.on_start(worker, thread.incarnation)
        for worker, incarnation in sorted(self._gone.items()):
            if worker not in self._threads:
                self.run.on_unknown_exit(worker, incarnation, 0, self.now())
        for worker, thread in sorted(self._threads.items()):
            at = finds_server_at(self._scenario, worker, self.now())
            self._kernel.at(at, self._find_server, (worker, thread))

    def _find_server(self, going: tuple[int, ScriptThread]) -> None:
        worker, thread = going
        if self._threads.get(worker) is thread:
            thread.find_server()
            self._listen(worker)

    def abandon(self) -> None:
        """End every script at the point where it waits."""
        while self._threads:
            worker = min(self._threads)
            self._abandon(worker)
            if self.run.workers.incarnation(worker) is not None:
                record = self.run.workers.records[worker]
                record.script.ended = True

    def _abandon(self, worker: int) -> None:
        thread = self._threads.pop(worker)
        self._gone[worker] = thread.incarnation
        self._dispatched.pop(worker, None)
        thread.abandon()
        if not thread.ended:
            ends = "swallows its own end (a bare `except:`?)"
            why = "was computing at the second interrupt" if thread.interrupted else ends
            text = f"the script of worker {worker} {why}: its thread was left behind"
            self.run.coordinator.observe(self.run.moment(), "warning", {"text": text})

    # -- messages ----------------------------------------------------------------------------------------------------

    def send(self, worker: int, message: Any) -> None:
        """Deliver a message and handle what the script sends in response."""
        thread = self._threads.get(worker)
        if thread is None:
            return
        thread.resume(message)
        if self._listening.get(worker) is not thread:
            self._listen(worker)

    def _listen(self, worker: int) -> None:
        """Handle all messages that a script sent before it began to wait."""
        thread = self._threads[worker]
        incarnation = self.run.workers.records[worker].incarnation
        self._listening[worker] = thread
        try:
            while (message := thread.collect()) is not None:
                self.run.on_message(worker, incarnation, self._timed(worker, message), self.now())
                if self._threads.get(worker) is not thread:
                    return
        finally:
            if self._listening.get(worker) is thread:
                del self._listening[worker]
        if thread.ended:
            self._script_ended(worker, thread)

    def _timed(self, worker: int, message: ToServer) -> ToServer:
        """Replace the script's wall-clock times by virtual ones, and drop what goes on on this machine."""
        if isinstance(message, Push):
            timed = self._dispatched.get(worker)
            times = {} if timed is None else {"compute_s": self.now() - timed[1].begin, "overrun_s": 0.0}
            message = msgspec.structs.replace(message, host=None, **times)
        elif isinstance(message, Tick):
            message = msgspec.structs.replace(message, compute_s=0.0, host=None)
        return message

    def _script_ended(self, worker: int, thread: ScriptThread) -> None:
        self._forget(worker, thread)
        incarnation = self.run.workers.records[worker].incarnation
        if not thread.said_end:
            self.run.on_message(worker, incarnation, Ended(), self.now())
        self.run.on_exit(worker, incarnation, 0, self.now())

    def _forget(self, worker: int, thread: ScriptThread) -> None:
        """Remove the thread of a script that has ended; raise if it failed."""
        del self._threads[worker]
        self._gone[worker] = thread.incarnation
        self._dispatched.pop(worker, None)
        if thread.error is not None:
            raise self._blame(worker, thread.error)

    def _blame(self, worker: int, error: BaseException) -> BaseException:
        if isinstance(error, UserError):
            return error
        if isinstance(error, SystemExit):
            return ScriptError(f"the script of worker {worker} exited with {error.code}")
        batch = self._shared.batches.get(worker, 0)
        where = f"worker {worker}, batch {batch}, {self.now():.6g} s into the run"
        failure = ScriptError(f"the script raised {type(error).__name__} in {where}: {error}")
        failure.__cause__ = error
        return failure

    # -- grants ------------------------------------------------------------------------------------------------------

    def dispatch(self, worker: int, message: Any, timing: Timing | None) -> None:
        if timing is None:
            self.send(worker, message)
            return
        ticket = getattr(message, "ticket", 0)
        before = self._dispatched.get(worker)
        begun = timing if ticket or before is None else before[1]  # further samples belong to the grant under way
        entry = self._dispatched[worker] = (ticket or (before[0] if before is not None else 0), begun)
        going = (worker, self._threads.get(worker), entry, message)
        self._kernel.at(timing.end, self._wait_for_others if timing.after_others else self._deliver, going)

    def _wait_for_others(self, going: tuple[int, ScriptThread | None, Any, Any]) -> None:
        self._kernel.at(self.now(), self._deliver, going)

    def _deliver(self, going: tuple[int, ScriptThread | None, Any, Any]) -> None:
        worker, thread, entry, message = going
        same = thread is not None and self._threads.get(worker) is thread and self._dispatched.get(worker) is entry
        if same and self.run.active:
            self.send(worker, message)

    def recall(self, worker: int, ticket: int) -> None:
        entry = self._dispatched.get(worker)
        if entry is not None and entry[0] == ticket:
            del self._dispatched[worker]

    # -- the model ---------------------------------------------------------------------------------------------------

    def measure(self, call: Callable[[], dict[str, float]]) -> dict[str, float]:
        self._turns.take(self._evaluations)
        return call()

    def effort(self) -> None:
        """Return None: there is no server process to measure."""


class Servers:
    """Makes a run's server, and its successors: each goes on from the newest checkpoint of the one before."""

    def __init__(
        self, engine: SimEngine, plan: Plan, sink: Sink, metrics: Metrics, progress: Callable[[Progress], None] | None
    ) -> None:
        """`metrics` folds all that goes to `sink`."""
        self._engine = engine
        self._plan = plan
        self._sink = sink
        self._metrics = metrics
        self._progress = progress
        self._peer = is_peer(plan.config.strategy)

    def first(self) -> ServerRun:
        """Return the run at its beginning."""
        run = self._made(started(self._plan.header))
        run.begin()
        return run

    def next(self) -> ServerRun:
        """Return the run as its newest checkpoint has it; its workers are still to introduce themselves."""
        engine, plan = self._engine, self._plan
        died_at = engine.outlive_server()
        path = None if plan.folder is None else checkpoint.newest_whole(plan.folder)
        if path is None:
            raise ScenarioError(
                f"the server crashes at {died_at:.6g} s, before its first checkpoint is complete: let it crash later"
            )
        resumption = Resumption(path)
        # The checkpoint's strategy, because the run may have switched to bsp.
        spelt = plan.config.strategy if self._peer else resumption.run.strategy
        run = self._made(build_central(spelt, plan.config.seed))
        run.begin(resumption, engine.now(), died_at, self._metrics.beyond(resumption.run.restored))
        return run

    def _made(self, strategy: Strategy) -> ServerRun:
        exchanges: list[type[RunExchange]] = [VirtualPeerExchange if self._peer else GradientExchange, TableExchange]
        return ServerRun(self._engine, self._plan, strategy, self._sink, exchanges, progress=self._progress)


def run(
    train: Callable[[], None], plan: Plan, metrics: Metrics, sink: Sink,
    progress: Callable[[Progress], None] | None = None,
) -> ServerRun:  # fmt: skip
    """Train on the scenario's virtual cluster until the run ends; `metrics` folds all that goes to `sink`."""
    engine = SimEngine(plan, train)
    servers = Servers(engine, plan, sink, metrics, progress)
    going = servers.first()
    threads = torch.get_num_threads()
    torch.set_num_threads(plan.config.threads or 1)
    try:
        with context.running():
            engine.drive(going)
            while engine.crashed:
                going = servers.next()
                engine.drive(going)
    except KeyboardInterrupt:  # the second interrupt: do not wait for scripts
        engine.abandon()
        going.break_off()
    except Exception as error:
        engine.abandon()
        going.fail(error)
        raise
    finally:
        engine.close()
        torch.set_num_threads(threads)
    return going


def launch(
    train: Callable[[], None], plan: Plan, sink: Sink | None, progress: Callable[[Progress], None] | None
) -> Launched:
    """Simulate a run, and write its journal and its report."""
    writer = Writer(plan.journal) if plan.journal is not None else None
    metrics = Metrics()
    try:
        try:
            done = run(train, plan, metrics, Tee(metrics, writer, Log(), sink), progress)
        finally:
            if writer is not None:
                writer.close()
    except StorageError as error:  # a journal that cannot be written does not cost the report
        error.report = _saved_report(metrics, plan)
        raise
    except BaseException:
        _saved_report(metrics, plan)
        raise
    return Launched(_saved_report(metrics, plan), done.cause or "done", done.result())


def _saved_report(metrics: Metrics, plan: Plan) -> Report:
    journal, folder = (str(path) if path is not None else None for path in (plan.journal, plan.folder))
    report = metrics.report(journal, folder)
    save_report(report, plan.folder)
    return report
