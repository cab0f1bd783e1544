"""One run from its first process to the last line of its journal, the same for every engine.

The engine delivers messages, exits and the time; the coordinator carries out the strategy's decisions; the exchange in
use moves what workers share. The rest is here: workers that come and go, the start and end of phases, and the end of
the run. A run trains, gathers its models, lets scripts end while the final version is measured, and is finished.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec

from paceline.core.errors import (
    CheckpointError,
    InternalError,
    JournalError,
    OptionError,
    PacelineError,
    PeerError,
    ScenarioError,
)
from paceline.core.ledger import ENDLESS
from paceline.core.settings import is_elastic
from paceline.core.updates import Contents
from paceline.records.journal import Sink, Tee
from paceline.server.checkpoint.schedule import Checkpoints, Resumption
from paceline.server.collectives import Collectives
from paceline.server.coordinator import Coordinator, OnVersion
from paceline.server.departures import Departures
from paceline.server.emulation import Emulation
from paceline.server.engine import EVALUATOR, Engine
from paceline.server.evaluation_schedule import Evaluations
from paceline.server.exchange import Result, RunExchange
from paceline.server.phases import Phases, as_data, epochs_done, standing_after
from paceline.server.plan import Cause, Plan, how_it_ended
from paceline.server.progress import Progress, ProgressReports
from paceline.server.scenario_faults import ScenarioFaults
from paceline.server.workers import ScriptState, WorkerRecord, Workers
from paceline.strategies import build, canonical
from paceline.strategies.base import Strategy
from paceline.transport import messages as m

LAST_CHECKPOINT_S = 10.0  # allowed for the checkpoint of an interrupted run: an update, and each worker's next grant
REMARK_LETTERS = 500  # of a warning; a worker of another machine may send longer ones
MOST_REMARKS = 100  # of a run
MOST_ASKED = 1_000  # options that scripts ask for and nobody has given, kept for an error's text
GATHERING_S = 5.0  # allowed for gathering models after an interrupt

Stage = Literal["training", "gathering", "finishing", "finished"]


class ScriptWords:
    """What scripts have asked for and said: each remark is made once, and an option that nobody asks for is a typo."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = set(options)
        self.asked: set[str] = set()
        self.checked = not options
        self.remarks: set[str] = set()
        self.said_what_is_over = False

    def ask(self, name: str) -> None:
        """Note that a script has asked for an option."""
        if name in self._options or len(self.asked) < MOST_ASKED:
            self.asked.add(name[:REMARK_LETTERS])

    def check(self) -> None:
        """Refuse a `--set` name that no script has asked for: it is a typo."""
        self.checked = True
        unknown = sorted(self._options - self.asked)
        if unknown:
            known = ", ".join(sorted(self.asked)) or "none"
            raise OptionError(f"--set {unknown[0]}: the script asks for no such option; it asks for: {known}")


class ServerRun:
    """One run on the server: its workers, phases and stages."""

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        strategy: Strategy,
        sink: Sink,
        exchanges: Sequence[type[RunExchange]],
        *,
        progress: Callable[[Progress], None] | None = None,
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        """Use the first exchange until a message of another one arrives. `flush` writes the journal to disk."""
        config = plan.config
        self.engine = engine
        self.plan = plan
        self.workers = Workers()
        self.workers.alive |= set(range(plan.workers))  # the first phase waits for all of them
        self.phases = Phases(self.workers)
        self.collectives = Collectives(self)
        self.emulation = Emulation(plan.scenario) if plan.scenario is not None else None
        self.on_version: list[OnVersion] = [self._check_after_first_round] if config.options else []
        if progress is not None:
            reports = ProgressReports(self, progress)
            self.on_version.append(reports.on_version)
            sink = Tee(sink, reports)
        self.coordinator = Coordinator(
            strategy, self, sink, max_versions=config.max_versions, workers=self.workers, on_version=self.on_version
        )
        awaited = engine.capabilities.own_processes and config.evaluate_every is not None
        self.evaluations = Evaluations(self, awaited=awaited)
        self.checkpoints = Checkpoints(self, flush)
        self.faults = None if self.emulation is None else ScenarioFaults(self, self.emulation)
        self.exchange: RunExchange = exchanges[0](self)
        self.departures = Departures(self)
        self.words = ScriptWords(config.options)
        self.resumption: Resumption | None = None
        self.cause: Cause | None = None
        self.stage: Stage = "training"
        self._others = exchanges[1:]
        self._diverged = False  # and --on-divergence asks to continue under bsp
        self.stood_at: float | None = 0.0  # the run's time while no phase is running, else None
        if self.checkpoints.by_versions:
            self.on_version.append(self.checkpoints.on_version)

    # -- beginning ---------------------------------------------------------------------------------------------------

    def begin(
        self, resumption: Resumption | None = None, at: float | None = None, seen_until: float | None = None,
        rolled_back: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        """Write the header; continue from a checkpoint if one is given, at time `at` or else the checkpoint's.

        `at` means that only the server was restarted. `rolled_back` is what an earlier one did after the checkpoint.
        """
        header = self.plan.header if resumption is None else resumption.header(self.plan.header)
        self.sink.write(header)
        self.resumption = resumption
        if resumption is not None:
            moment = resumption.run.at if at is None else at
            self.stood_at, resumption.seen_until = moment, seen_until
            if at is not None:
                self.engine.start_clock(at)  # time passed while there was no server
                resumption.workers_live = True
            resumption.carry_out(self, moment)
            if rolled_back is not None and any(rolled_back.values()):
                self.coordinator.observe(moment, "rolled_back", dict(rolled_back))
            if at is not None:
                self.words.checked = True  # workers that live on do not ask for their options again
        self.checkpoints.count_from(self.coordinator.version)

    @property
    def sink(self) -> Sink:
        """The journal."""
        return cast(Sink, self.coordinator.sink)

    @property
    def active(self) -> bool:
        return self.cause is None

    @property
    def finished(self) -> bool:
        return self.stage == "finished"

    def moment(self, at: float | None = None) -> float:
        """Return the run's time, which stands still between phases and after the run."""
        if self.stood_at is not None:
            return self.stood_at
        return self.engine.now() if at is None else at

    # -- processes come and go ---------------------------------------------------------------------------------------

    def start(self, worker: int) -> None:
        """Start a process for this worker, as its next incarnation."""
        if self.active:
            incarnation = self.workers.next_incarnation(worker)
            self.workers.starting[worker] = incarnation
            self.engine.start(worker, incarnation)

    def invite(self, most: int | None) -> str | None:
        """Start one worker more for somebody who wants to be one; return why not, or None.

        A newcomer takes the place of a worker that was lost, if there is one. `most`: workers at a time.
        """
        if not self.active:
            return "the run is over"
        workers = self.workers
        count = len(workers.alive | workers.starting.keys())
        if most is not None and count >= most:
            return f"the run has {count} workers, and --most-workers is {most}"
        gone = (worker for worker, record in workers.records.items() if record.script.gone and not record.script.left)
        lost = [w for w in gone if w not in workers.starting and not workers.records[w].script.meant_to_die]
        known = {*range(self.plan.workers), *workers.records, *workers.incarnations}
        worker = min(lost, default=max(known) + 1)
        if self.emulation is not None and worker not in known:
            self.emulation.times.add_worker(worker, 1.0)
        self.start(worker)
        return None

    def on_never_started(self, worker: int, incarnation: int) -> None:
        """Go on without a process that was asked for: nobody is there to run it."""
        if self.workers.starting.get(worker) == incarnation:
            del self.workers.starting[worker]
        self.notice_empty_phase()
        self.engine.wake()

    def on_start(self, worker: int, incarnation: int, *, loads: bool = False) -> None:
        """Register a new process of this worker.

        `loads`: an earlier server has started it, and its script has not come to its model or tables. That may take
        long, and nobody waited for it before the server died either.
        """
        old = self.workers.records.get(worker)
        if old is not None and not old.script.gone:  # its exit may be reported after its successor's start
            self.departures.remove(old, "crash", self.moment())
        self.workers.admit(worker, incarnation, ScriptState())
        if loads:
            self.workers.alive.discard(worker)
            self.workers.starting[worker] = incarnation
            self.begin_phase_if_ready(self.moment())

    def on_exit(self, worker: int, incarnation: int, code: int, at: float) -> None:
        """Handle the exit of a process, after all its messages."""
        at = self.moment(at)
        if worker == EVALUATOR:
            self.evaluations.process_gone(code, how_it_ended(code), at)
            self.begin_phase_if_ready(at)
        else:
            self.departures.on_exit(worker, incarnation, code, at)

    def on_unknown_exit(self, worker: int, incarnation: int, code: int, at: float) -> None:
        """Handle the exit of a process that only the previous server knew."""
        if worker == EVALUATOR:
            self.evaluations.give_up()
            self.begin_phase_if_ready(at)
        else:
            self.departures.on_unknown_exit(worker, incarnation, code, at)

    # -- what scripts say --------------------------------------------------------------------------------------------

    def on_message(self, worker: int, incarnation: int, message: m.ToServer, at: float) -> None:
        """Handle one message; the most frequent kinds come first."""
        record = None if worker == EVALUATOR else self.workers.get(worker, incarnation)
        if record is None and worker != EVALUATOR:
            return  # from a process that has ended
        if record is not None:
            self.departures.liveness.heard(record, message, at)
        if record is not None and isinstance(message, m.Push):
            self.exchange.on_push(record, message, at)
        elif record is not None and isinstance(message, m.More):
            self.exchange.on_more(record, message, at)
        else:
            self._on_rare_message(worker, record, message, at)
        if self.checkpoints.due:
            self.checkpoints.take()

    def _on_rare_message(self, worker: int, record: WorkerRecord | None, message: m.ToServer, at: float) -> None:
        match message:
            case m.Note():
                data = {"name": message.name, "value": message.value}
                self.coordinator.observe(self.moment(at), "report", data, worker)
            case m.Evaluated():
                self.evaluations.measured(message.number, message.metrics, self.moment(at))
            case m.SavedState():
                self.checkpoints.on_state(worker, message)
            case m.Ready() if record is not None:
                self._on_ready(record, message, at)
            case m.Hello():
                self.has_come(record)
                self.exchange.on_hello(worker, message, at)
            case m.OptionAsked():
                self.words.ask(message.name)
            case m.Remark():
                self.remark(message.text, self.moment(at))
            case m.Done() if record is not None:
                self._on_done(record, message, at)
            case m.Fewer() if record is not None:
                self.coordinator.fewer(record.worker, record.incarnation, message.ticket, message.samples)
            case m.EpochAsked() if record is not None:
                self.engine.send(record.worker, self.phases.epoch(message.loop))
            case m.SchedulerStepped():
                self.phases.records.stepped(message.phase, message.name)
            case m.EvaluationsAsked():
                values = self.evaluations.values(message.start, message.metric)
                self.engine.send(worker, m.EvaluationsHeld(values))
            case m.Stop():
                self.stop_phase(message.reason, at)
            case m.Ended():
                self._on_ended(record, message, at)
            case m.Failed():
                self.departures.on_failure(record, message, self.moment(at))
            case m.CollectiveCall():
                self.collectives.on_call(worker, record, message)
                self.begin_phase_if_ready(at)
            case m.CollectiveKept():
                self.collectives.on_kept(message)
            case _:
                self._exchange_of(message).on_message(record, message, at)
        if self.collectives.waiting:
            self.collectives.look()

    def _exchange_of(self, message: Any) -> RunExchange:
        """Return the exchange that the message belongs to; the first message of another exchange switches to it."""
        if isinstance(message, self.exchange.messages):
            return self.exchange
        for kind in self._others:
            if isinstance(message, kind.messages):
                if self.exchange.in_use and self.resumption is not None:
                    path = self.resumption.found.path
                    raise CheckpointError(f"{path} is of a run that shares something else: resume that run's script")
                if self.exchange.in_use:
                    raise PeerError(f"{type(message).__name__} belongs to another exchange than the one in use")
                self.exchange.make_way()
                self.exchange = kind(self)
                return self.exchange
        raise PeerError(f"a worker sent {type(message).__name__}, which no exchange handles")

    def has_come(self, record: WorkerRecord | None) -> None:
        """Mark a worker's script as started: it has said what it works on."""
        if record is not None:
            record.script.came = True
            self.workers.has_started(record)
            self.workers.alive.add(record.worker)

    def _on_ended(self, record: WorkerRecord | None, message: m.Ended, at: float) -> None:
        if record is None:
            self.evaluations.awaited = False
            self.begin_phase_if_ready(at)
            return
        if message.in_loop and self.active and self.phases.running:
            text = (
                f"the script of worker {record.worker} ended by sys.exit() in the middle of its loop; the others go on"
            )
            self.remark(text, self.moment(at))
        record.script.ended = True
        self.exchange.on_script_end(record, lambda: self._depart(record))

    def _depart(self, record: WorkerRecord) -> None:
        """Take out of the phase a worker whose script has ended, after all its messages."""
        at = self.engine.now()
        self.workers.script_gone(record.worker)
        self.exchange.look_at_waiting(at)
        self._out_of_loop(record, at)
        self.collectives.left(record.worker)
        self.begin_phase_if_ready(at)

    def remark(self, text: str, at: float) -> None:
        """Record a warning for the user, each text once, and no more than anybody would read."""
        text, known = text[:REMARK_LETTERS], self.words.remarks
        if text not in known and len(known) <= MOST_REMARKS:
            known.add(text)
            last = len(known) > MOST_REMARKS
            self.coordinator.observe(at, "warning", {"text": "further warnings are left out" if last else text})

    # -- phases ------------------------------------------------------------------------------------------------------

    def _on_ready(self, record: WorkerRecord, message: m.Ready, at: float) -> None:
        record.script.computing = False
        answer = "over" if not self.active else self.phases.ready(record.worker, message)
        if answer == "over":
            self._send_over(record, message.phase, late=True)
            if self.active and message.mark is None and message.sampling != "clocks":
                self._say_what_is_over()
        elif answer == "join":
            self.coordinator.join(record.worker, message.batch_size, at)
            self.exchange.settle(at)
        else:
            self.exchange.look_at_waiting(at)
            self.begin_phase_if_ready(at)

    def _say_what_is_over(self) -> None:
        if not self.words.said_what_is_over:
            self.words.said_what_is_over = True
            last = self.phases.last_over
            which = "phase 0 is" if last == 0 else f"phases 0-{last} are"
            text = (
                f"{which} over: a script that comes to them is shown one batch of each, without effect; "
                "`for epoch in session.epochs(n)` skips them"
            )
            self.remark(text, self.moment())

    def _on_done(self, record: WorkerRecord, message: m.Done, at: float) -> None:
        if message.state is not None and self.phases.running:
            self.workers.done[record.worker] = message.state
            self.checkpoints.on_done(record.worker, message.state)
        self._out_of_loop(record, at)

    def begin_phase_if_ready(self, at: float) -> None:
        """Start the next phase once every worker waits for it."""
        if not self.active or self.evaluations.awaited or not self.phases.can_begin(self.collectives.left_the_phase()):
            return
        config, first, restored = self.plan.config, self.phases.current is None, self.resumption
        current, ledger = self.phases.begin(config.seed, self.plan.header.workers)
        if first:
            self.engine.start_clock(restored.run.at if restored is not None else 0.0)
            if self.faults is not None:
                self.faults.schedule(None if restored is None else restored.seen_until)
        self.stood_at = None
        at = self.engine.now()
        members = sorted(self.workers.in_phase)
        round_samples = current.batch_size * len(members)
        if restored is not None:
            before = restored.take_up(self.phases.number, ledger)
            self.workers.late = set(members) if before is not None else set()
            round_samples = round_samples if before is None or self.exchange.counts_rounds else before
        self.coordinator.observe(at, "phase", as_data(current, math.ceil(ledger.total / round_samples)))
        self.phases.stopped = None
        self.coordinator.open(ledger, round_samples)
        self.phases.records.begin(self.phases.number, self.coordinator.totals.rounds_done, current.between)
        self.phases.size = current.size
        self.evaluations.phase_begins(at)
        if current.sampling == "stream" and current.size == ENDLESS:
            self._check_evaluations_of_streams(at)
        self.checkpoints.ask()
        self.exchange.begin_phase(members, at)
        for worker in members:
            self.coordinator.join(worker, current.batch_size, self.engine.now())
        self.exchange.settle(self.engine.now())
        if first:
            self._put_on_clock(at)

    def _check_evaluations_of_streams(self, at: float) -> None:
        every = self.plan.config.evaluate_every
        if self.evaluations.possible and every is not None and every.unit == "e":
            text = "streams that are read to their ends have no epochs to evaluate by: only the first and the final "
            self.remark(f"{text}version are evaluated; --evaluate-every 50v, or 10s, evaluates others", at)

    def _put_on_clock(self, at: float) -> None:
        """Schedule evaluations and checkpoints that are due every so many seconds."""
        every, saves = self.plan.config.evaluate_every, self.checkpoints.every
        if every is not None and every.unit == "s":
            self._every(every.amount, at, lambda now: self.evaluations.evaluate(self.moment(now)))
        if saves is not None and saves.unit == "s":
            self._every(saves.amount, at, lambda _: self.checkpoints.ask())

    def _every(self, seconds: float, at: float, call: Callable[[float], None]) -> None:
        def tick(count: int) -> None:
            if self.active:
                call(self.engine.now())
                self.engine.call_at((count + 1) * seconds, tick, count + 1, keeps_alive=False)

        first = int(at / seconds) + 1
        self.engine.call_at(first * seconds, tick, first, keeps_alive=False)

    def stop_phase(self, reason: str, at: float) -> None:
        """End this phase for all workers, as a script asks."""
        self.coordinator.observe(self.moment(at), "warning", {"text": f"the script ended the phase: {reason}"})
        self.phases.stopped = reason
        self.engine.wake()

    def _end_phase(self, at: float) -> None:
        """Release all workers from the loop; their scripts may go on to another phase."""
        self.phases.epochs_before, self.phases.size = epochs_done(self), 0
        self.phases.stopped = None
        self.stood_at = at
        ledger, current = self.coordinator.ledger, self.phases.current
        ended_early = ledger is not None and not ledger.finished and bool(self.workers.done)
        self.coordinator.close(at)
        c = self.coordinator
        self.phases.records.end(self.phases.number, c.totals.rounds_done, c.used, epochs_done(self))
        if ended_early and ledger is not None and current is not None and current.size != ENDLESS:
            made, steps = ((count // current.batch_size) for count in (ledger.used + ledger.lost, ledger.total))
            self.remark(f"the data streams of all workers ended after {made} of {steps} steps", at)
        inside = self._close_phase(at)
        self.checkpoints.on_phase_end()  # before any worker leaves: see `Checkpoints`
        for worker in inside:
            self._send_over(self.workers.records[worker])
        self.begin_phase_if_ready(at)

    def _close_phase(self, at: float) -> list[int]:
        for record in self.workers.records.values():
            record.script.order = None
        self.exchange.phase_over(at)
        return self.phases.end()

    def _send_over(self, record: WorkerRecord, asked: int | None = None, *, late: bool = False) -> None:
        """Send a worker out of its loop; `asked` is the phase that it came to, if not the last one."""
        record.script.order = None
        if record.script.gone or record.script.ended:
            return
        worker = record.worker
        final, save = self.exchange.final(worker), self.checkpoints.number_for(worker)
        rounds_done, stood = standing_after(self, self.phases.number if asked is None else asked)
        late = late or worker in self.workers.late
        over = m.Over(self.phases.number, final, rounds_done, not self.active, save, stood, late)
        if self.coordinator.totals.killers:
            over = msgspec.structs.replace(over, killers=tuple(sorted(self.coordinator.totals.killers)))
        self.engine.send(worker, over)

    def _out_of_loop(self, record: WorkerRecord, at: float) -> None:
        """Take out of the phase a worker whose script left the loop; what it was computing is not delivered."""
        at = self.moment(at)
        self.workers.in_phase.discard(record.worker)
        record.script.order = None
        if self.active:
            self.coordinator.leave(record.worker, "done", at)
        self.exchange.left(record.worker, "done", at)
        self.notice_empty_phase(by_choice=True)

    def notice_empty_phase(self, *, by_choice: bool = False) -> None:
        """End the phase if every script has left the loop, whatever data remains.

        `by_choice`: the last worker left by itself. Otherwise it was lost, and a worker that comes back continues.
        """
        workers = self.workers
        empty = self.phases.running and not workers.in_phase and not workers.starting
        if not workers.alive:
            self.engine.wake()  # the run may be over
        elif empty and (by_choice or not self._somebody_comes_back()):
            self.phases.stopped = "every worker has left the loop"
            self.engine.wake()

    def _somebody_comes_back(self) -> bool:
        can, config = self.engine.capabilities, self.plan.config
        if can.open_to_joiners and (not can.asks_a_cluster or config.respawn or is_elastic(config)):
            return True
        return self.faults is not None and self.faults.brings_somebody_back()

    # -- what the coordinator decides --------------------------------------------------------------------------------

    def set_timer(self, name: str, at: float | None, generation: int) -> None:
        if at is not None and at < math.inf:
            self.engine.call_at(at, self._on_timer, (name, generation))

    def _on_timer(self, timer: tuple[str, int]) -> None:
        if self.active:
            at = self.engine.now()  # `moment` stands still between phases: a repeating timer would be due at once
            self.coordinator.fire(*timer, at)
            self.exchange.settle(at)

    def _check_after_first_round(self, version: int, at: float) -> None:
        del version, at
        if not self.words.checked and self.coordinator.totals.rounds_done >= 1:
            self.engine.wake()

    def on_work_used_up(self) -> None:
        self.engine.wake()

    def on_divergence(self, text: str) -> None:
        del text  # the guard has warned of it
        action = self.plan.config.on_divergence
        if not self.active:
            return
        if action == "stop":
            self.end("divergence")
        elif action == "bsp" and self.coordinator.strategy.name != "bsp":
            self._diverged = True
            self.engine.wake()

    def on_nonfinite(self, worker: int) -> None:
        if self.plan.config.on_nonfinite == "stop" and self.active:
            self.end("divergence")
        elif self.active:
            self.departures.judge_refusals(self.workers.records[worker])

    def _switch_to_bsp(self, at: float) -> None:
        self._diverged = False
        strategy = build("bsp", self.plan.config.seed)
        self.coordinator.observe(at, "warning", {"text": "going on under bsp, as --on-divergence asks"})
        spelled = canonical(strategy)
        self.sink.write(msgspec.structs.replace(self.plan.header, strategy=spelled, snapshot=None, restored=None))
        self.coordinator.switch(strategy, at)

    # -- what the engine's loop calls --------------------------------------------------------------------------------

    def attend(self, at: float) -> None:
        """Do what the last messages made due."""
        if self.stage == "training":
            self._attend_training(at)
            if not self.active:
                self._stop_training(self.moment(at))
        if self.stage == "gathering" and (not self.phases.running or self.exchange.can_end_phase(at)):
            self._release()
        if self.stage == "finishing":
            self._attend_finishing(at)
        self.departures.liveness.watch(at)

    def _attend_training(self, at: float) -> None:
        if not self.active:
            return
        c, limit = self.coordinator, self.plan.config.max_seconds
        if not self.words.checked and (c.totals.rounds_done >= 1 or c.phase_over):
            self.words.check()
        if self._diverged:
            self._switch_to_bsp(at)
        elif c.at_limit or (limit is not None and at >= limit and self.phases.running):
            self.end("limit")
        elif (c.phase_over or self.phases.stopped is not None) and self.exchange.can_end_phase(at):
            self._end_phase(at)
        if self.checkpoints.due:
            self.checkpoints.take()
        self._notice_the_end(at)

    def _notice_the_end(self, at: float) -> None:
        """End the run if no script is running any more: it is done, or it has lost all its workers."""
        workers, phases = self.workers, self.phases
        if not self.active or workers.alive or workers.starting:
            return
        scripts = [record.script for record in workers.records.values()]
        unfinished = self.resumption is not None and self.resumption.unfinished_phase is not None
        over = phases.running and all(script.ended for script in scripts)
        # Where scripts have ended between phases, a worker that joins later would find nothing to do.
        came_to_end = over or (not phases.running and not unfinished and any(script.ended for script in scripts))
        if not came_to_end and self._somebody_comes_back():
            if self.faults is not None and phases.current is None and self.resumption is not None:
                self.faults.schedule(self.resumption.seen_until)  # no phase begins before somebody is back
            return
        # Scripts on tables decide themselves when they are done.
        no_data = self.exchange.counts_rounds or not (phases.running or unfinished)
        if over or (no_data and any(script.at_its_end for script in scripts)):
            self.end("done")
        elif unfinished:
            raise PeerError(
                "the server was restored and every worker has ended meanwhile: start it again with --resume"
            )
        else:
            raise self.all_left(at)

    def all_left(self, at: float) -> PacelineError:
        """Return the error of a run that has lost all workers while data remains."""
        if self.emulation is not None:
            return ScenarioError(
                f"every worker has left at {self.coordinator.at:.6g} s and data remains: let one rejoin in the "
                "scenario's events"
            )
        return PeerError(f"every worker's process has died by {at:.6g} s: --respawn would bring them back")

    def on_quiet(self, at: float) -> None:
        """Raise if the run is stuck: nothing is scheduled, and no present worker has a grant."""
        records = self.workers.records.values()
        present = [record.worker for record in records if record.present]
        stuck = self.phases.running and present and not any(record.ticket for record in records)
        if self.active and stuck and not self.workers.starting and not self.checkpoints.busy:
            name = self.coordinator.strategy.name
            raise InternalError(f"{name} lets workers {present} wait for ever at {at:.6g} s")

    # -- the end -----------------------------------------------------------------------------------------------------

    def end(self, cause: Cause) -> None:
        """Stop training; `attend` does the rest."""
        self.cause = cause
        self.engine.wake()

    def interrupt(self, at: float) -> None:
        """End the run cleanly, with a checkpoint where one is possible and its report, at the user's request."""
        if self.stage == "training" and self.active and self.checkpoints.take_last(self._interrupt):
            self.engine.call_at(at + LAST_CHECKPOINT_S, lambda _: self.checkpoints.give_up_last())
        else:
            self._interrupt()

    def _interrupt(self) -> None:
        at = self.engine.now()
        if self.stage in ("training", "gathering"):
            self.engine.call_at(at + GATHERING_S, self._give_up_gathering)
        if self.stage != "finished":
            self.end("interrupted")

    def _give_up_gathering(self, _: Any) -> None:
        if self.stage == "gathering":
            self._release()

    def _stop_training(self, at: float) -> None:
        if not self.words.checked and self.cause not in ("error", "interrupted"):
            self.words.check()
        if self.cause != "done":
            self.coordinator.stop(at, f"the run ended: {self.cause}")
        self.stage = "gathering"
        for record in self.workers.running():
            self.engine.control(record.worker, "resume")  # a paused worker must not delay the end of the run

    def _release(self) -> None:
        """Tell workers that the run is over; their scripts run to their end without further work."""
        self.stage = "finishing"
        at = self.stood_at = self.moment()
        if self.checkpoints.due:
            self.checkpoints.take()
        leaving = sorted({*self._close_phase(at), *self.workers.waiting})
        self.workers.waiting = {}
        self.departures.liveness.run_over()
        if self.cause != "interrupted":
            for worker in leaving:
                self._send_over(self.workers.records[worker])

    def _attend_finishing(self, now: float) -> None:
        at = self.moment()
        if self.cause != "interrupted":
            if not self.evaluations.measure_last(at) or not self.evaluations.measure_nodes(at):
                return
            self.engine.control(EVALUATOR, "hang_up")
            if self.departures.liveness.awaits_scripts(now):
                return
        self.stage = "finished"
        self.checkpoints.finish()
        if self.cause != "interrupted":
            self._say_how_it_went(at)
        self.coordinator.observe_end(at, self.cause or "done")

    def _say_how_it_went(self, at: float) -> None:
        effort, resumption = self.engine.effort(), self.resumption
        if effort is not None:
            self.coordinator.observe(at, "server", effort)
            if self.emulation is not None:
                data = {"overruns": self.emulation.overruns, "computations": self.emulation.computations}
                self.coordinator.observe(at, "overruns", data)
                complaint = self.emulation.complaint()
                if complaint is not None:
                    self.remark(complaint, at)
        if resumption is not None and self.coordinator.version == resumption.run.version:
            self.remark(f"nothing was left to train: {resumption.found.path} is of a run that was done", at)
        asked, made = self.plan.config.epochs, self.phases.spent
        if self.cause == "done" and asked is not None and 0 < made < asked * (1 - 1e-9):
            text = f"--epochs {asked:g}: the script's own loop ended after {made:g}; "
            self.remark(f"{text}`for epoch in session.epochs(n)` has as many as asked for", at)
        nothing = self.exchange.came_to_nothing() if self.cause == "done" else None
        if nothing is not None:
            self.remark(nothing, at)
        watch = self.evaluations.watch
        if watch.reached_at is not None and watch.target is not None:
            reached = {"metric": watch.target.metric, "value": watch.target.value, "reached_at": watch.reached_at}
            self.coordinator.observe(at, "target", reached)

    def fail(self, error: BaseException) -> None:
        """End the run and record the error in the journal, unless writing the journal is what failed."""
        at = self.moment()
        self.cause, self.stage = "error", "finished"
        with contextlib.suppress(JournalError):
            self.coordinator.stop(at, "the run failed")
            with contextlib.suppress(CheckpointError):  # the first error is the one to show
                self.checkpoints.finish()
            self.coordinator.observe(at, "error", {"text": str(error)})
            self.coordinator.observe_end(at, "error")

    def break_off(self) -> None:
        """End at once; record it in the journal and tell nobody else."""
        at = self.moment()
        self.cause, self.stage = "interrupted", "finished"
        self.coordinator.stop(at, "the run was interrupted")
        self.coordinator.observe_end(at, "interrupted")

    def result(self) -> Result:
        """Return the trained model or the tables."""
        return self.exchange.result()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Return what a resumed run must know beside the coordinator's state."""
        return {
            **self.evaluations.snapshot(), **self.phases.snapshot(), "options_checked": self.words.checked,
            "phase_records": self.phases.records.snapshot(),
        }  # fmt: skip

    def restore(self, data: Mapping[str, Any]) -> None:
        """Continue from a snapshot."""
        self.evaluations.restore(data)
        self.phases.restore(data)
        self.words.checked = data["options_checked"]
        self.phases.records.restore(data.get("phase_records", ()))  # not in older checkpoints

    def restore_exchange(
        self, contents: Contents, version: int, states: dict[int, bytes], extra: dict[str, Any]
    ) -> None:  # fmt: skip
        """Restore a checkpoint's weights, into the exchange that they belong to."""
        for kind in self._others:
            if kind.restores(contents):
                self.exchange = kind(self)
        self.exchange.restore(contents, version, states, extra)
