"""The cluster's state according to a journal: workers present, running grants, held pushes, settled samples.

Built from events, actions and observations alone. An impossible step, such as a grant to a worker that has gone, is
reported to `blame` with the law it breaks.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.core.actions import Action, Apply, Cancel, Discard, Grant, Mark, SetTimer, Track
from paceline.core.events import Applied, Event, Joined, Left, Pushed, TimerFired
from paceline.records.journal import Header, Observation

EXACT = 1e-9
Blame = Callable[[str, str], None]  # (law, what happened)


@dataclass
class Running:
    """A running grant; `read_*` are the version and the mass applied so far when the model was read.

    `kept` are those of the model that a cached grant lets the worker go on from; whether it pulls, its push says.
    """

    at: float
    work: int
    through: int
    extends: int | None
    read_version: int
    read_mass: float
    kept: "Read | None" = None


@dataclass
class Read:
    """The model that a worker read last: its version, the mass applied so far, and where the slowest stood."""

    version: int
    mass: float
    slowest: int


@dataclass
class Wait:
    """What happened since a worker was parked or a push was held: pushes by worker, and Applies."""

    pushes: Counter[int] = field(default_factory=Counter)
    applies: int = 0


@dataclass
class HeldPush:
    """A delivered push that is neither applied nor discarded."""

    worker: int
    process: int
    clock: int
    read_version: int
    read_mass: float
    samples: int
    wait: Wait = field(default_factory=Wait)


@dataclass
class Phase:
    """Samples of one phase; `total` is None where the sampling has no exact number."""

    total: int | None = None
    used: int = 0
    lost: int = 0
    in_hand: int = 0  # held or being computed when the run was stopped


@dataclass
class Presence:
    """The workers as one strategy knows them; under the next one they all join anew."""

    process: Counter[int] = field(default_factory=Counter)
    present: dict[int, int] = field(default_factory=dict)  # nominal work by worker
    idle: dict[int, int] = field(default_factory=dict)
    running: dict[int, Running] = field(default_factory=dict)
    taken_back: dict[int, list[Running]] = field(default_factory=dict)  # by a Cancel whose observation is still to come
    unkept: dict[int, int] = field(default_factory=dict)  # samples of the next push that were refused or skipped
    completed: dict[int, int] = field(default_factory=dict)
    min: int = 0
    free_at: dict[int, float] = field(default_factory=dict)
    waits: dict[int, Wait] = field(default_factory=dict)  # of the parked workers
    reads: dict[int, Read] = field(default_factory=dict)  # of present processes
    round_before: int = 0  # `round_samples` before the event

    @property
    def round_samples(self) -> int:
        """Nominal work of the workers present and idle."""
        return sum(self.present.values()) + sum(self.idle.values())

    def parked(self) -> list[int]:
        """Return the present workers without a grant."""
        return [worker for worker in self.present if worker not in self.running]

    def note_waits(self) -> None:
        """Start and end waits after a decision: a present worker without a grant waits."""
        for worker in self.present:
            if worker in self.running:
                self.waits.pop(worker, None)
            elif worker not in self.waits:
                self.waits[worker] = Wait()


class Account:
    """A cluster's state, updated line by line."""

    def __init__(self, blame: Blame, *, exact_work: bool) -> None:
        self.blame = blame
        self.exact_work = exact_work  # every grant yields exactly the samples it asks for
        self.now = 0.0
        self.version = 0
        self.mass = 0.0
        self.used = 0
        self.lost = 0
        self.max_versions: int | None = None
        self.phase = Phase()
        self.held: dict[int, HeldPush] = {}
        self.settled: set[int] = set()
        self.ended: str | None = None
        self._changing = False  # the strategy is being replaced
        self._begin_strategy()

    def _begin_strategy(self) -> None:
        """Drop all state of the previous strategy."""
        self.workers = Presence()
        self.timers: dict[str, float] = {}
        self.marks: dict[int, str] = {}
        self.tracks: dict[tuple[str, int | None], float] = {}
        self.answers: list[tuple[int, tuple[int, ...], float]] = []  # Applies that an Applied may answer

    def all_waits(self) -> list[Wait]:
        """Return the waits of parked workers and of held pushes."""
        return [*self.workers.waits.values(), *(held.wait for held in self.held.values())]

    def counting(self) -> dict[int, int]:
        """Return held pushes of present processes, with their workers: those that count at a barrier."""
        return {
            push: held.worker
            for push, held in self.held.items()
            if held.worker in self.workers.present and held.process == self.workers.process[held.worker]
        }

    # -- events ------------------------------------------------------------------------------------------------------

    def pass_time(self, at: float) -> None:
        """Advance the time; it must not run backwards."""
        if at < self.now:
            self.blame("time", f"time runs backwards: {at:.9g} s comes after {self.now:.9g} s")
        self.now = max(self.now, at)

    def _change_strategy(self) -> None:
        """Check that the previous strategy's grants were taken back and its pushes discarded."""
        self._changing = False
        for worker in self.workers.running:
            self.blame("samples", f"the grant of w{worker} was not taken back when the strategy changed")
        for push in self.held:
            self.blame("pushes", f"push {push} was not discarded when the strategy changed")
        self.held.clear()
        self.phase.in_hand = 0
        self._begin_strategy()

    def happen(self, event: Event) -> None:
        """Process an event."""
        if self._changing:
            self._change_strategy()
        self.pass_time(event.at)
        self.workers.round_before = self.workers.round_samples
        match event:
            case Joined():
                self._joined(event)
            case Left():
                self._left(event)
            case Pushed():
                self._pushed(event)
            case Applied():
                answer = (event.version, event.pushes, event.mass)
                if answer not in self.answers:
                    self.blame("versions", f"{event} answers no Apply")
                else:
                    del self.answers[: self.answers.index(answer) + 1]
            case TimerFired():
                due = self.timers.pop(event.name, math.inf)
                if event.at < due:
                    self.blame("timers", f"timer {event.name} rings at {event.at:.9g} s, set to {due:.9g} s")

    def _joined(self, event: Joined) -> None:
        worker, workers = event.worker, self.workers
        if worker not in workers.present:
            workers.idle.pop(worker, None)
            workers.completed[worker] = workers.min
            workers.free_at[worker] = event.at
            for wait in self.all_waits():
                del wait.pushes[worker]
        elif worker in workers.running:  # a script that accumulates gradients gets more on the same grant
            workers.running[worker].work = max(workers.running[worker].work, event.work)
        workers.present[worker] = event.work

    def _left(self, event: Left) -> None:
        worker, workers = event.worker, self.workers
        work = workers.present.pop(worker, workers.idle.pop(worker, None))
        if work is None:
            self.blame("presence", f"w{worker} leaves but was not present")
            return
        running = workers.running.pop(worker, None)
        if event.cause == "idle":
            workers.idle[worker] = work
        else:
            workers.process[worker] += 1
            if running is not None:
                self.blame("samples", f"w{worker} left and its grant of {running.work} samples was not taken back")
        workers.waits.pop(worker, None)
        workers.completed.pop(worker, None)
        workers.reads.pop(worker, None)
        self._raise_min()

    def _raise_min(self) -> None:
        workers = self.workers
        least = min(workers.completed.values(), default=workers.min)
        if least < workers.min:
            self.blame("clocks", f"the slowest clock falls from {workers.min} to {least}")
        workers.min = max(workers.min, least)

    def _pushed(self, event: Pushed) -> None:
        worker, workers = event.worker, self.workers
        running = workers.running.pop(worker, None)
        if running is None:
            self.blame("grants", f"w{worker} pushed without a grant: {event}")
            return
        before = self.held.get(event.push)
        if running.kept is not None and event.read_version == running.kept.version and not event.bytes_down:
            workers.reads[worker] = running.kept
            running.read_version, running.read_mass = running.kept.version, running.kept.mass
        self._check_push(event, running, before)
        piece = event.samples - (before.samples if before else 0) + workers.unkept.pop(worker, 0)
        if piece > running.work or (self.exact_work and piece != running.work):
            self.blame("samples", f"w{worker} was granted {running.work} samples, {piece} arrived")
        for wait in self.all_waits():
            wait.pushes[worker] += 1
        self.held[event.push] = HeldPush(
            worker, workers.process[worker], event.clock, event.read_version, running.read_mass, event.samples
        )
        workers.free_at[worker] = event.at
        workers.completed[worker] = max(event.clock, workers.completed.get(worker, 0))
        self._raise_min()

    def _check_push(self, event: Pushed, running: Running, before: HeldPush | None) -> None:
        seen = before is not None or event.push in self.settled
        if seen != (running.extends is not None) or (seen and event.push != running.extends):
            self.blame("pushes", f"push {event.push} is not the one of its grant {running}")
        if event.clock != running.through:
            self.blame("clocks", f"push {event.push} has clock {event.clock}, its grant is through {running.through}")
        if event.read_version != running.read_version:
            self.blame("versions", f"push {event.push} read {event.read_version}, granted at {running.read_version}")
        waited = running.at - self.workers.free_at[event.worker]
        if abs(event.wait_s - waited) > EXACT * max(1.0, self.now):
            self.blame("time", f"push {event.push} says w{event.worker} waited {event.wait_s}, it waited {waited}")

    # -- actions -----------------------------------------------------------------------------------------------------

    def act(self, action: Action) -> None:
        """Process an action."""
        match action:
            case Apply():
                self._apply(action)
            case Discard():
                self._settle(action.push, "discarded")
            case Cancel():
                running = self.workers.running.pop(action.worker, None)
                if running is None:
                    self.blame("grants", f"w{action.worker} is cancelled but computes nothing: {action.reason}")
                else:
                    self.workers.taken_back.setdefault(action.worker, []).append(running)
                    self.workers.free_at[action.worker] = self.now
            case Grant():
                self._grant(action)
            case SetTimer():
                self.timers.pop(action.name, None)
                if action.at is not None:
                    self.timers[action.name] = action.at
            case Mark():
                self.marks[action.worker] = action.state
            case Track():
                self.tracks[action.name, action.worker] = action.value

    def _settle(self, push: int, fate: str) -> HeldPush | None:
        held = self.held.pop(push, None)
        if held is None:
            known = "settled already" if push in self.settled else "unknown"
            self.blame("pushes", f"push {push} is {fate} but is {known}")
            return None
        self.settled.add(push)
        running = self.workers.running.get(held.worker)
        if running is not None and running.extends == push:
            self.blame("pushes", f"push {push} is {fate} while w{held.worker} extends it")
        return held

    def _apply(self, action: Apply) -> None:
        mass = math.fsum(action.weights)
        for push in action.pushes:
            held = self._settle(push, "applied")
            if held is not None:
                self.used += held.samples
                self.phase.used += held.samples
        phase = self.phase
        if phase.total is not None and phase.used + phase.lost > phase.total:
            self.blame("samples", f"{phase.used} samples used and {phase.lost} lost, but there are {phase.total}")
        self.mass += mass
        if mass > 0:
            self.version += 1
            self.answers.append((self.version, action.pushes, mass))
        for wait in self.all_waits():
            wait.applies += 1

    def _grant(self, action: Grant) -> None:
        worker, workers = action.worker, self.workers
        if worker not in workers.present:
            self.blame("presence", f"w{worker} is granted work but is not present: {action.reason}")
        if worker in workers.running:
            self.blame("grants", f"w{worker} is granted work while it computes: {action.reason}")
        if action.work < 1:
            self.blame("grants", f"w{worker} is granted {action.work} samples: {action.reason}")
        read_version, read_mass = self.version, self.mass
        if action.extends is not None:
            held = self.held.get(action.extends)
            if held is None or (held.worker, held.process) != (worker, workers.process[worker]):
                self.blame("grants", f"w{worker} extends push {action.extends}, which is no held push of its process")
                return
            read_version, read_mass = held.read_version, held.read_mass
            if held.clock != action.through:
                self.blame("clocks", f"w{worker} extends push {action.extends} of clock {held.clock}: {action}")
        kept = workers.reads.get(worker) if action.cached else None
        if action.cached and kept is None:
            self.blame("grants", f"w{worker} is to go on from a model that it does not have: {action.reason}")
        if action.extends is None:
            workers.reads[worker] = Read(read_version, read_mass, workers.min)
        workers.running[worker] = Running(
            self.now, action.work, action.through, action.extends, read_version, read_mass, kept
        )

    # -- observations ------------------------------------------------------------------------------------------------

    def start(self, header: Header) -> None:
        """Begin a run, or continue it under another strategy."""
        self.max_versions = header.options.get("max_versions")
        self._changing = bool(self.workers.present)

    def observe(self, line: Observation) -> None:
        """Process an observation."""
        self.pass_time(line.at)
        data = line.data
        match line.what:
            case "phase":
                exact = data["sampling"] == "epoch"
                self.phase = Phase(max(1, round(data["epochs"] * data["size"])) if exact else None)
            case "cancelled" if line.worker is not None:
                self._cancelled(line.worker, line.at, data["samples"], data["seconds"], data["cause"])
            case "discarded":
                held = self._settle(data["push"], "discarded")
                self.phase.in_hand += held.samples if held is not None else 0
            case "refused" | "skipped" if line.worker is not None:
                self.lost += data["samples"]
                self.phase.lost += data["samples"]
                self.workers.unkept[line.worker] = self.workers.unkept.get(line.worker, 0) + data["samples"]
            case "lost":
                self.lost += data["samples"]
                self.phase.lost += data["samples"]
            case "end":
                self._end(data["cause"], data["versions"], data["samples_used"], data["samples_lost"])

    def _cancelled(self, worker: int, at: float, samples: int, seconds: float, cause: str) -> None:
        workers = self.workers
        earlier = workers.taken_back.get(worker)
        running = earlier.pop(0) if earlier else workers.running.pop(worker, None)
        if running is None:
            self.blame("grants", f"a grant of w{worker} is taken back ({cause}) but it had none")
            return
        if abs(seconds - (at - running.at)) > EXACT * max(1.0, at):
            self.blame("time", f"w{worker} lost {seconds} s on a grant of {running.at} taken back at {at}")
        if samples > running.work or (self.exact_work and samples != running.work):
            self.blame("samples", f"w{worker} was granted {running.work} samples, {samples} came back")
        if cause == "stop":
            self.phase.in_hand += samples
        if not earlier and worker not in workers.running:
            workers.free_at[worker] = at

    def _end(self, cause: str, versions: int, used: int, lost: int) -> None:
        self.ended = cause
        if (versions, used, lost) != (self.version, self.used, self.lost):
            counted = f"{self.version} versions, {self.used} samples used, {self.lost} lost"
            self.blame("samples", f"the last line says {versions}, {used} and {lost}; the journal adds up to {counted}")
        for push, held in self.held.items():
            self.blame("pushes", f"push {push} of w{held.worker} is neither applied nor discarded")
        for worker in self.workers.running:
            self.blame("samples", f"the grant of w{worker} was not taken back at the end")
        self._end_phase(cause)

    def _end_phase(self, cause: str) -> None:
        phase, idle = self.phase, self.workers.idle
        if phase.total is None:
            return
        settled = phase.used + phase.lost
        if cause == "done" and settled != phase.total:
            self.blame("samples", f"{settled} of {phase.total} samples are settled at the end of the phase")
        at_limit = self.max_versions is not None and self.version >= self.max_versions
        # A worker is idle only while every sample is allotted or settled.
        if idle and not at_limit and settled + phase.in_hand != phase.total:
            missing = phase.total - settled - phase.in_hand
            self.blame("samples", f"{missing} of {phase.total} samples are unaccounted for while w{min(idle)} is idle")
