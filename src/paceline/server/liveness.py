"""Notice workers that have fallen silent, and let the run go on without them.

A worker owes something while it has a grant, while it was asked for its model, and outside of loops while the others
wait for it, or have ended. `silence.py` says how long it may take; outside of loops that is the ceiling. What is not
the worker's fault is no silence: waiting for a grant, for others' models or for rows of a table, loading before its
first loop, a debugger, and time in which this process itself was stopped. A worker is named some time before it is
taken out. Nobody is taken out as long as everybody is silent, which is said: then it is not the worker that hangs.

A worker that was taken out is told so as soon as it reads messages again. It then calls for work as it does after a
restart of the server: its late push is dropped, since its grant was taken back, and its samples are others' by then.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from paceline.server.silence import StepTimes, allowed_s, named_s
from paceline.server.workers import WorkerRecord
from paceline.transport.messages import Cancelled, ToServer

if TYPE_CHECKING:
    from paceline.server.departures import Departures
    from paceline.server.run import ServerRun

LOOK_S = 5.0  # at most, between two looks on a real clock, so that a stop of this process is noticed
LOOKS = 0.2  # of the floor, at most, so that a worker is named before it is taken out
STOPPED_S = 2.0  # by which a look may be late; a later one means that this process stood still
ALL_AWAY = 6  # times the ceiling, for scripts that are all busy outside of their loops: they may evaluate or save
SELDOM = 0.05  # of the virtual time so far, between two looks of the simulator
ASKED = 0.5  # of the time allowed, after which a node is asked whether it is still there


class Liveness:
    """Who is silent in one run, and since when."""

    def __init__(self, run: "ServerRun", departures: "Departures") -> None:
        self._run = run
        self._departures = departures
        self._steps: dict[int, StepTimes] = {}
        self._heard: dict[int, float] = {}  # when each worker last sent something, or had an excuse
        self._excused: dict[int, float] = {}  # when each worker last had an excuse
        self._asked: set[int] = set()  # nodes asked whether they are there, and not heard since
        self._named: set[int] = set()  # workers that were named as silent, and not heard since
        self._lost_at: dict[int, float] = {}  # since when workers that were taken out have been silent
        self._debugged: set[int] = set()
        self._next: float | None = None  # when the next look is due
        self._over_at: float | None = None  # when the run ended; scripts may go on for a while
        self.overdue: list[int] = []  # workers whose scripts did not end after the run

    # -- what the run tells ------------------------------------------------------------------------------------------

    def heard(self, record: WorkerRecord, message: ToServer, at: float) -> None:
        """Note that a worker has sent something."""
        worker = record.worker
        if isinstance(message, self._run.exchange.steps_by) and record.ticket:
            # A worker on tables sends several messages in a step, and its grant may come before or after.
            heard = 0.0 if self._run.exchange.can_rejoin else self._heard.get(worker, 0.0)
            began = min(at, max(record.granted_at, heard, self._excused.get(worker, 0.0)))
            samples = sum([allotment.samples for allotment in record.allotments])
            steps = self._steps.get(worker)
            if steps is None:
                steps = self._steps[worker] = StepTimes()
            steps.add(at - began, samples)
        self._heard[worker] = at
        if self._asked or self._named:
            self._asked.discard(worker)
            self._named.discard(worker)
        if record.script.silent:
            self._comes_back(record, at)

    def debugging(self, worker: int, waits: bool) -> None:
        """Note that a debugger holds a worker, or does so no longer."""
        if waits:
            self._debugged.add(worker)
        else:
            self._debugged.discard(worker)
            self._heard[worker] = self._run.engine.now()

    def run_over(self) -> None:
        """Note the end of the run: workers that are silent are not waited for."""
        run = self._run
        self._over_at = run.engine.now()
        for record in run.workers.running():
            if record.script.silent:
                record.script.gone = True
                run.engine.control(record.worker, "kill")

    def awaits_scripts(self, at: float) -> bool:
        """Return whether scripts still run after the run; give up those that do so for too long."""
        run, patience = self._run, self._run.plan.config.worker_timeout
        running = [record for record in run.workers.running() if not record.script.ended]
        if patience is None or self._over_at is None:
            return bool(running)
        for record in list(running):
            since = max(self._over_at, self._heard.get(record.worker, 0.0))
            if at - since >= patience.ceiling and record.worker not in self._debugged:
                running.remove(record)
                self._give_up(record, at - since)
        return bool(running)

    # -- looking -----------------------------------------------------------------------------------------------------

    def watch(self, at: float) -> None:
        """Look now and then from here on, if it is not planned already."""
        if self._run.plan.config.worker_timeout is not None and (self._next is None or self._next < at):
            self._plan(at)

    def _plan(self, at: float) -> None:
        run, patience = self._run, self._run.plan.config.worker_timeout
        if patience is None or run.finished or run.phases.current is None:
            self._next = None
            return
        due = [moment for record, since, allowed in self._owing(at) for moment in self._moments(record, since, allowed)]
        outside = self._end_of_patience(at)
        if outside is not None:
            due.append(outside)
        # A virtual clock may leap by ages, so looks come less often the longer the run takes.
        real = run.engine.capabilities.own_processes
        latest = at + (min(LOOKS * patience.floor, LOOK_S) if real else max(patience.floor, SELDOM * at))
        if not latest < math.inf:
            self._next = None
            return
        self._next = min([latest, *(moment for moment in due if moment > at)])
        run.engine.call_at(self._next, self._look, self._next, keeps_alive=False)

    def _moments(self, record: WorkerRecord, since: float, allowed: float) -> list[float]:
        asks = self._run.exchange.answers_pings and record.worker not in self._asked
        moments = [since + allowed, *([since + ASKED * allowed] if asks else [])]
        return moments if record.worker in self._named else [*moments, since + named_s(allowed)]

    def _look(self, planned: float) -> None:
        run, at = self._run, self._run.engine.now()
        if planned != self._next or run.finished:
            return
        late = at - planned
        if late > STOPPED_S and run.engine.capabilities.own_processes:
            self._excuse_all(late)
        overdue, quiet = [], []
        for record, since, allowed in list(self._owing(at)):
            if at >= since + named_s(allowed):
                quiet.append((record, since, since + allowed))
            if at >= since + allowed:
                overdue.append((since, record))
            elif at >= since + ASKED * allowed and run.exchange.answers_pings and record.worker not in self._asked:
                self._asked.add(record.worker)
                run.exchange.ping(record.worker)
        self._name(quiet, at)
        silent = {record.worker for _, record in overdue}
        for since, record in sorted(overdue, key=lambda each: each[0]):
            if self._somebody_else(silent):
                self._lose(record, since, at)
        self._plan(at)

    def _name(self, quiet: Sequence[tuple[WorkerRecord, float, float]], at: float) -> None:
        """Name workers that have been silent for long: since when each, and when it will be taken out."""
        new = [each for each in quiet if each[0].worker not in self._named]
        if not new:
            return
        self._named |= {record.worker for record, _, _ in new}
        if not self._somebody_else({record.worker for record, _, _ in quiet}):
            since = max(since for _, since, _ in quiet)
            who = ", ".join(str(record.worker) for record, _, _ in quiet)
            text = f"no worker ({who}) has sent anything for {at - since:.3g} s: while all are silent none is taken out"
            self._run.remark(text, self._run.moment(at))
            return
        for record, since, due in new:
            if at < due:
                text = f"{self._silence(record.worker, since, at)}: the others go on without it in {due - at:.3g} s"
                self._run.remark(text, self._run.moment(at))

    def _silence(self, worker: int, since: float, at: float) -> str:
        steps = self._steps.get(worker)
        known = "" if steps is None else f" (its longest step took {steps.longest:.3g} s)"
        return f"worker {worker} has sent nothing for {at - since:.3g} s{known}"

    def _excuse_all(self, seconds: float) -> None:
        """Do not count time in which this process stood still."""
        at = self._run.engine.now()
        for worker, heard in self._heard.items():
            self._heard[worker] = min(at, max(heard, self._granted_at(worker)) + seconds)

    def _granted_at(self, worker: int) -> float:
        record = self._run.workers.records.get(worker)
        return record.granted_at if record is not None and record.ticket else 0.0

    def _somebody_else(self, silent: set[int]) -> bool:
        """Whether a worker takes part that is not silent, or nobody trains any more."""
        workers = self._run.workers
        return not self._run.active or bool(workers.in_phase - silent)

    def _owing(self, at: float) -> Iterator[tuple[WorkerRecord, float, float]]:
        """Return the workers that owe something: since when, and how many seconds they have."""
        run, patience = self._run, self._run.plan.config.worker_timeout
        if patience is None:
            return
        for record in run.workers.running():
            worker = record.worker
            if record.script.silent or record.script.ended:
                continue
            if worker in self._debugged or run.exchange.excuses(worker):
                self._heard[worker] = self._excused[worker] = at
                continue
            since = record.granted_at if record.ticket else run.exchange.owes(worker)
            if since is not None:
                own = self._steps.get(worker) or StepTimes()
                others = [steps for other, steps in self._steps.items() if other != worker]
                samples = sum([allotment.samples for allotment in record.allotments]) if record.ticket else 0
                allowed = allowed_s(own, others, samples, patience)
                if allowed is not None:
                    yield record, max(since, self._heard.get(worker, 0.0)), allowed

    def _end_of_patience(self, at: float) -> float | None:
        """Return when those that keep the run waiting outside of a loop are overdue; take them out if that is now.

        Where others wait or have ended, they have the ceiling, counted from when the last of these came there. Where
        all scripts are busy with something of their own, or hang, they have `ALL_AWAY` times as long.
        """
        run, workers, patience = self._run, self._run.workers, self._run.plan.config.worker_timeout
        if patience is None or run.stage != "training" or run.phases.running or run.phases.current is None:
            return None
        there = workers.waiting.keys() | run.collectives.waiting
        ended = {worker for worker, record in workers.records.items() if record.script.ended}
        away = workers.alive - there - ended
        if not away or workers.starting or not away <= self._steps.keys() or away & self._debugged:
            return None  # a worker without a step is loading
        allowed = patience.ceiling * (1 if there | ended else ALL_AWAY)
        since = max(self._heard.get(worker, 0.0) for worker in away | there | ended)
        due = since + allowed
        if due > at:
            return self._name_away(away if there else set(), since + named_s(allowed), due, at)
        for worker in sorted(away):
            record = workers.records[worker]
            if there:
                self._lose(record, self._heard.get(worker, 0.0), at)
            else:
                self._give_up(record, at - self._heard.get(worker, 0.0))
                workers.script_gone(worker)
        if not workers.alive and run.active:
            run.end("done")  # what it was there for is done
        return None

    def _name_away(self, away: set[int], named_at: float, due: float, at: float) -> float:
        """Name those that others wait for outside of a loop, if it is time; return when to look again."""
        new = sorted(away - self._named)
        if new and at < named_at:
            return named_at
        self._named.update(new)
        for worker in new:
            since = self._heard.get(worker, 0.0)
            text = f"{self._silence(worker, since, at)}, and the others wait for it: they go on without it in "
            self._run.remark(f"{text}{due - at:.3g} s", self._run.moment(at))
        return due

    def _give_up(self, record: WorkerRecord, seconds: float) -> None:
        """Do not wait for a script that does not end after its loops."""
        record.script.gone = True
        self.overdue.append(record.worker)
        text = f"the script of worker {record.worker} had not ended {seconds:.3g} s after its last loop: it is ended"
        self._run.remark(text, self._run.moment())

    # -- out, and back -----------------------------------------------------------------------------------------------

    def _lose(self, record: WorkerRecord, since: float, at: float) -> None:
        """Go on without a silent worker."""
        run, worker, ticket = self._run, record.worker, record.ticket
        run.remark(f"{self._silence(worker, since, at)}: the others go on without it", run.moment(at))
        self._lost_at[worker] = since
        if not run.exchange.can_rejoin:
            run.engine.control(worker, "kill")
            self._departures.remove(record, "timeout", at)
            return
        until = run.exchange.busy_until(worker) if run.engine.capabilities.virtual_time else None
        in_loop = worker in run.workers.in_phase
        self._departures.lose(record, at)
        if not in_loop:
            return  # it says by itself that it is there
        if until is None:
            run.engine.send(worker, Cancelled(ticket, again=True))
        else:  # a virtual worker reads messages when its computation is over
            run.engine.recall(worker, ticket)
            run.engine.call_at(until, self._wakes, (record, ticket))

    def _wakes(self, going: tuple[WorkerRecord, int]) -> None:
        record, ticket = going
        if self._run.workers.get(record.worker, record.incarnation) is record and self._run.active:
            self._run.engine.send(record.worker, Cancelled(ticket, again=True))

    def _comes_back(self, record: WorkerRecord, at: float) -> None:
        run, worker = self._run, record.worker
        silent_s = at - self._lost_at.pop(worker, at)
        record.script.silent = False
        self._steps.setdefault(worker, StepTimes()).returned(silent_s)
        run.workers.alive.add(worker)
        text = f"worker {worker} is back after {silent_s:.3g} s without a word: what it computed meanwhile is not used"
        run.remark(text, run.moment(at))
