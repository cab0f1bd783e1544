"""Laws of single strategies beyond those of all: bounds, barriers and weights.

A strategy that is not listed here only has to keep the laws of all.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, isclose
from typing import Any

from paceline import strategies
from paceline.core.actions import Apply, Cancel, Grant
from paceline.core.events import Event, Joined, Left, Pushed
from paceline.laws.account import Account, Blame
from paceline.records.journal import Decision
from paceline.strategies.model_cache import TIMER

RETRY_ROUNDS = 20  # after so many rounds `balanced` retries a worker that it left out


@dataclass
class Bound:
    """Laws of one strategy; `before` runs after a decision's event is processed, `after` after its actions."""

    account: Account
    blame: Blame

    def before(self, decision: Decision) -> None:
        """Check once the event is processed and the actions are not."""

    def after(self, decision: Decision) -> None:  # noqa: ARG002
        """Check once the whole decision is processed."""
        self.require_progress()

    def require_progress(self) -> None:
        """Check that no wait lasts for ever: for each, some computing worker has pushed less than `patience` since."""
        running, patience = self.account.workers.running, self.patience()
        for worker, wait in self.account.workers.waits.items():
            if all(wait.pushes[other] >= patience for other in running) and not self.awaits_timer(worker):
                pushes = dict(wait.pushes)
                self.blame("progress", f"w{worker} is parked although all who compute have pushed since: {pushes}")
        for push, held in self.account.held.items():
            if all(held.wait.pushes[other] >= patience for other in running):
                pushes = dict(held.wait.pushes)
                self.blame("progress", f"push {push} is held although all who compute have pushed since: {pushes}")

    def patience(self) -> int:
        """Return how many pushes of each computing worker a parked one may have to wait for."""
        return 1

    def awaits_timer(self, worker: int) -> bool:  # noqa: ARG002
        """Return whether a timer is set that lets this worker go on."""
        return False


@dataclass
class Lead(Bound):
    """No worker computes more than `upper` clocks ahead of the slowest; none at most `lower` ahead is parked."""

    lower: float
    upper: float

    def patience(self) -> int:
        return int(self.upper - self.lower) + 1 if self.upper < inf else 1

    def after(self, decision: Decision) -> None:
        super().after(decision)
        workers = self.account.workers
        for worker, running in workers.running.items():
            lead = running.through - 1 - workers.min
            if lead > self.upper:
                self.blame("bound", f"w{worker} computes {lead} clocks ahead of the slowest, bound {self.upper:g}")
        for worker in workers.parked():
            lead = workers.completed[worker] - workers.min
            if lead <= self.lower and not self.awaits_timer(worker):
                self.blame("bound", f"w{worker} is parked {lead} clocks ahead of the slowest, bound {self.lower:g}")


@dataclass
class CachedLead(Lead):
    """ssp with a cache: what a worker goes on from is recent enough, and who is to pull waits until a timer at most."""

    def before(self, decision: Decision) -> None:
        reads = self.account.workers.reads
        for action in decision.actions:
            if not isinstance(action, Grant) or not action.cached or action.worker not in reads:
                continue
            clock, slowest = action.through - 1, reads[action.worker].slowest
            if clock - slowest > self.upper:
                what = f"what all had done when the slowest was at {slowest}"
                self.blame("bound", f"w{action.worker} reads at clock {clock} {what}, bound {self.upper:g}")

    def awaits_timer(self, worker: int) -> bool:
        return f"{TIMER}{worker}" in self.account.timers


@dataclass
class Barrier(Bound):
    """The strategy applies as soon as `k` present workers have pushed, and not before."""

    k: float
    tracked: bool = False  # k is the strategy's latest Track of it

    def needed(self) -> float:
        account = self.account
        k = account.tracks.get(("k", None), self.k) if self.tracked else self.k
        return min(k, len(account.workers.present))

    def before(self, decision: Decision) -> None:
        counting, needed = self.account.counting(), self.needed()
        for action in decision.actions:
            if isinstance(action, Apply) and self.account.workers.present:
                merged = len({counting[push] for push in action.pushes if push in counting})
                if merged < needed or (merged > needed and isinstance(decision.event, Pushed)):
                    self.blame("bound", f"pushes of {merged} workers are merged, k is {needed}")

    def after(self, decision: Decision) -> None:
        super().after(decision)
        waiting = len(set(self.account.counting().values()))
        if self.account.workers.present and waiting >= self.needed():
            self.blame("bound", f"{waiting} workers have pushed and nothing is applied, k is {self.needed()}")


@dataclass
class RoundsBound(Barrier):
    """A barrier after which all present workers start the next round on the new version."""

    def after(self, decision: Decision) -> None:
        super().after(decision)
        account, workers = self.account, self.account.workers
        if not workers.present or not any(isinstance(action, Apply) for action in decision.actions):
            return
        throughs = {running.through for running in workers.running.values()}
        stale = [w for w, running in workers.running.items() if running.read_version != account.version]
        if workers.parked() or len(throughs) > 1 or stale:
            self.blame("bound", f"a round ends but not all workers start the next one: parked {workers.parked()}")


@dataclass
class CoveredRounds(Barrier):
    """A barrier of rounds in which some workers go on with work of earlier rounds, whose pushes do not count."""

    def counting(self) -> tuple[int, int]:
        """Return how many workers have pushed in this round, and how many present ones can."""
        account = self.account
        running = {worker: run.through for worker, run in account.workers.running.items()}
        pushed = {worker: account.held[push].clock for push, worker in account.counting().items()}
        clocks = {**running, **pushed}
        current = max(clocks.values(), default=0)
        return sum(clock == current for clock in pushed.values()), sum(clock == current for clock in clocks.values())

    def before(self, decision: Decision) -> None:
        pushed, able = self.counting()
        needed = min(self.needed(), able)
        applies = any(isinstance(action, Apply) for action in decision.actions)
        if self.account.workers.present and applies and pushed < needed:
            self.blame("bound", f"a round ends with {pushed} pushes in time, k is {needed}")

    def after(self, decision: Decision) -> None:
        self.require_progress()
        account, workers = self.account, self.account.workers
        if not workers.present or not any(isinstance(action, Apply) for action in decision.actions):
            return
        current = max((run.through for run in workers.running.values()), default=0)
        stale = [
            w for w, run in workers.running.items() if run.through == current and run.read_version < account.version
        ]
        if workers.parked() or stale:
            self.blame("bound", f"a round ends, parked {workers.parked()}, started on an old version {stale}")


@dataclass
class Allowance(Bound):
    """adaptive_sync: while a node has not pushed, `cap` limits the rounds that end and the starts of other nodes."""

    cap: int
    starts: dict[int, Counter[int]] = field(default_factory=dict)  # starts of others since each node's last push

    def patience(self) -> int:
        """A late node pushes once more before the round that it delayed ends."""
        return 2

    def before(self, decision: Decision) -> None:
        match decision.event:
            case Joined(worker=worker) if worker not in self.starts:
                self._forget(worker)
                for starts in self.starts.values():
                    del starts[worker]  # of an earlier process
            case Pushed(worker=worker):
                self._forget(worker)
            case Left(worker=worker):
                self.starts.pop(worker, None)

    def _forget(self, worker: int) -> None:
        self.starts[worker] = Counter()

    def after(self, decision: Decision) -> None:
        super().after(decision)
        for action in decision.actions:
            if isinstance(action, Grant):
                self._count(action.worker)

    def _count(self, worker: int) -> None:
        for missing, starts in self.starts.items():
            if missing == worker:
                continue
            starts[worker] += 1
            # The rest of the round of its last push, the rounds that may end without it, and the one that waits for it.
            if starts[worker] > (2 + self.cap) * (1 + self.cap):
                self.blame("bound", f"w{worker} starts {starts[worker]} times while w{missing} does not push")


@dataclass
class Merging(Bound):
    """dasp: no node starts more than `theta` clocks ahead of the slowest."""

    theta: float

    def after(self, decision: Decision) -> None:
        super().after(decision)
        for action in decision.actions:
            if isinstance(action, Grant) and action.through - 1 - self.account.workers.min > self.theta:
                self.blame("bound", f"w{action.worker} starts {action.through - 1}, slowest {self.account.workers.min}")


@dataclass
class GlobalBatch(Bound):
    """balanced: a round covers the nominal work of all workers; a worker left out is retried."""

    guided: bool
    batch: int = 0
    undisturbed: bool = False  # no worker joined, left or was refused in this round
    called_back: bool = False  # idle workers return at once for the samples of a Cancel

    def before(self, decision: Decision) -> None:
        event, account = decision.event, self.account
        self.called_back = any(isinstance(a, Cancel) for a in decision.actions) and bool(account.workers.idle)
        if isinstance(event, Joined):
            self.batch += event.work
        if not isinstance(event, Pushed) or not event.samples:
            self.undisturbed = False
        for action in decision.actions:
            if isinstance(action, Apply):
                samples = sum(account.held[push].samples for push in action.pushes if push in account.held)
                exactly = self.guided and self.undisturbed and not account.lost
                if samples > self.batch or (exactly and samples != self.batch):
                    self.blame("bound", f"a round of {samples} samples, the global batch is {self.batch}")

    def after(self, decision: Decision) -> None:
        super().after(decision)
        if any(isinstance(action, Apply) for action in decision.actions):
            self.batch, self.undisturbed = self.account.workers.round_samples, not self.account.workers.idle

    def require_progress(self) -> None:
        stands_still = not self.account.workers.running and not self.called_back
        for worker, wait in self.account.workers.waits.items():
            if stands_still:
                self.blame("progress", f"w{worker} is parked and nobody computes")
            if wait.applies > RETRY_ROUNDS + 1:
                self.blame("progress", f"w{worker} is left out for {wait.applies} rounds")
        for push, held in self.account.held.items():
            if held.wait.applies or stands_still:
                self.blame("progress", f"push {push} is held and {held.wait.applies} rounds have ended since")


BOUNDS: dict[str, Callable[[Account, Blame, Any], Bound]] = {  # by strategy; `given` are its options
    "asp": lambda account, blame, _: Lead(account, blame, inf, inf),
    "ssp": lambda account, blame, given: (CachedLead if given.cache else Lead)(
        account, blame, given.staleness, given.staleness
    ),
    "dssp": lambda account, blame, given: Lead(account, blame, given.lower, given.upper),
    "bsp": lambda account, blame, _: RoundsBound(account, blame, inf),
    "fastest_k": lambda account, blame, given: _rounds(given)(account, blame, given.k),
    "adaptive_k": lambda account, blame, given: _rounds(given)(account, blame, given.start, tracked=True),
    "adaptive_k_load": lambda account, blame, given: _rounds(given)(account, blame, inf, tracked=True),
    "k_async": lambda account, blame, given: Barrier(account, blame, given.k),
    "adaptive_sync": lambda account, blame, given: Allowance(account, blame, given.cap),
    "dasp": lambda account, blame, given: Merging(account, blame, inf if given.theta is None else given.theta),
    "balanced": lambda account, blame, given: GlobalBatch(account, blame, given.pieces == "guided"),
}


def _rounds(given: Any) -> type[RoundsBound | CoveredRounds]:
    return CoveredRounds if given.cover else RoundsBound


def bound_of(spec: str, account: Account, blame: Blame) -> Bound:
    """Return the laws of the strategy that this spec names."""
    cls, options = strategies.parse(spec)
    return BOUNDS[cls.name](account, blame, options) if cls.name in BOUNDS else Bound(account, blame)


# -- weights -----------------------------------------------------------------------------------------------------------

Weights = Callable[[Account, Event, Apply], list[set[float]]]  # the allowed weights of each push


def whole_step(account: Account, event: Event, action: Apply) -> list[set[float]]:  # noqa: ARG001
    """Allow a step of mass 1, each push weighted by its share of the samples."""
    samples = [account.held[push].samples for push in action.pushes]
    total = sum(samples)
    return [{count / total if total else 0.0} for count in samples]


def covered_step(account: Account, event: Event, action: Apply) -> list[set[float]]:  # noqa: ARG001
    """Allow late pushes any weights; the others share the rest of a step of mass 1 by their samples."""
    counting = account.counting()
    current = max((account.held[push].clock for push in action.pushes if push in counting), default=0)
    late = [push in counting and account.held[push].clock < current for push in action.pushes]
    samples = [0 if is_late else account.held[push].samples for push, is_late in zip(action.pushes, late, strict=True)]
    total = sum(samples)
    theirs = sum(weight for weight, is_late in zip(action.weights, late, strict=True) if is_late)
    return [
        set() if is_late else {count / total * (1 - theirs) if total else 0.0}
        for count, is_late in zip(samples, late, strict=True)
    ]


def share_of_round(account: Account, event: Event, action: Apply) -> list[set[float]]:
    """Allow samples over the nominal round; when the last worker leaves, also over the round before it left."""
    nominal = {account.workers.round_samples}
    if isinstance(event, Left) and not account.workers.present:
        nominal.add(account.workers.round_before)
    return [{account.held[push].samples / each for each in nominal if each} for push in action.pushes]


def damped_share(account: Account, event: Event, action: Apply) -> list[set[float]]:
    """Allow the share of a round, or that share damped by the mass applied since the push's read."""
    allowed = share_of_round(account, event, action)
    ages = [account.mass - account.held[push].read_mass for push in action.pushes]
    return [shares | {share * (1 + age) ** -2 for share in shares} for shares, age in zip(allowed, ages, strict=True)]


def step_of_shares(account: Account, event: Event, action: Apply) -> list[set[float]]:
    """Allow the share of a round damped by the mass applied since the push's read, scaled to one step at most."""
    ages = [account.mass - account.held[push].read_mass for push in action.pushes]
    allowed: list[set[float]] = [set() for _ in action.pushes]
    shares = share_of_round(account, event, action)
    for nominal in zip(*map(sorted, shares), strict=True) if shares else ():
        damped = [share * (1 + age) ** -4 for share, age in zip(nominal, ages, strict=True)]
        whole = max(1.0, sum(damped))
        for choices, weight in zip(allowed, damped, strict=True):
            choices.add(weight / whole)
    return allowed


WEIGHTS: dict[str, Weights] = {
    **dict.fromkeys(("bsp", "balanced", "fastest_k", "adaptive_k", "adaptive_k_load"), whole_step),
    **dict.fromkeys(("asp", "ssp", "dssp", "k_async"), share_of_round),
    "adaptive_sync": step_of_shares,
    "dasp": damped_share,
}


def weights_of(spec: str) -> Weights | None:
    """Return the weights that the strategy of this spec may give."""
    cls, options = strategies.parse(spec)
    return covered_step if getattr(options, "cover", False) else WEIGHTS.get(cls.name)


def check_weights(rule: Weights | None, account: Account, event: Event, action: Apply, blame: Blame) -> None:
    """Check that the rule allows each weight; a push without samples must have weight 0."""
    if len(action.weights) != len(action.pushes):
        blame("weights", f"{len(action.pushes)} pushes and {len(action.weights)} weights: {action.reason}")
        return
    if any(push not in account.held for push in action.pushes):
        return  # reported by the account itself
    allowed = rule(account, event, action) if rule is not None else [set() for _ in action.pushes]
    for push, weight, choices in zip(action.pushes, action.weights, allowed, strict=True):
        samples = account.held[push].samples
        if not 0 <= weight < inf or (not samples and weight):
            blame("weights", f"push {push} of {samples} samples weighs {weight}")
        elif choices and not any(isclose(weight, choice, rel_tol=1e-9, abs_tol=1e-12) for choice in choices):
            blame("weights", f"push {push} of {samples} samples weighs {weight}, the rule says {sorted(choices)}")
