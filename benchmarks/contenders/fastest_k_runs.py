"""Runs of the fastest-k publications' regression: clusters, what is kept of a run, and runs of earlier calls."""

import hashlib
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

import paceline
from paceline import scenario, strategies
from paceline.core.actions import Apply, Track
from paceline.core.events import Pushed
from paceline.core.ledger import make_ledger
from paceline.core.updates import Contents, Merged, PushRef
from paceline.engines.sim.kernel import Kernel
from paceline.engines.sim.light import LightCluster
from paceline.records.journal import Decision, Line, Observation
from paceline.scenario import Scenario
from paceline.server.coordinator import Coordinator
from paceline.server.workers import GrantOrder
from paceline.tasks.linreg import best_weights, make_data

ROWS = 2000
SHARD = 40  # rows of each of 50 workers
SLOW_WORKERS, SLOWNESS = 3, 8.0  # of ten, in the planted case
EVALUATED = 20  # versions
DIVERGED = 1e12  # of an error that begins at 4e8


class Job(msgspec.Struct, frozen=True):
    """One run; `until` is the virtual time that it may take."""

    strategy: str
    seed: int
    until: float
    target: float | None = None  # of the error
    communication: float = 0.0  # mean seconds of both ways together
    kind: str = "even"  # even, slower, faster or planted
    change_at: float = 0.0
    lr: float = 5e-4
    momentum: float = 0.0
    workers: int = 50

    @property
    def key(self) -> str:
        """Its name in the file of runs that are kept."""
        return msgspec.json.encode(self).decode()


class Ran(msgspec.Struct, frozen=True):
    """What is kept of a run."""

    reached_s: float | None
    seconds: float
    versions: int
    sent: int  # gradients
    computed: int  # samples, cancelled grants included, as the publications count them
    level: float  # mean error over the last tenth of the run
    shares: list[float]  # of each worker in the weights of all steps, over the fair share
    refreshed: list[tuple[int, int, int, float]] = []  # rounds after the change, k, load, expected seconds of a step


def cluster(job: Job) -> Scenario:
    """The publication's response times: exponential with mean 1 for all of a worker's 40 rows, and communication."""
    network, events, groups, jitter = "", "", f"[[workers]]\ncount = {job.workers}\n", "exponential"
    if job.communication:
        network = f'[network]\nlatency_ms = {500 * job.communication}\njitter = "exponential"\n'
    if job.kind == "planted":
        jitter = "lognormal:0.1"
        even = job.workers - SLOW_WORKERS
        groups = f"[[workers]]\ncount = {even}\n[[workers]]\ncount = {SLOW_WORKERS}\nspeed = {1 / SLOWNESS}\n"
    elif job.kind != "even":
        begin, length = (job.change_at, 1e7) if job.kind == "slower" else (0.0, job.change_at)
        for worker in range(job.workers):
            events += f'[[events]]\nkind = "slow"\nworker = {worker}\nat = {begin}\nfor = {length}\nfactor = 4.0\n'
    seconds = 1 / (ROWS // job.workers if job.kind == "planted" else SHARD)
    return scenario.parse(
        f'seed = {job.seed}\n[compute]\nseconds_per_sample = {seconds}\njitter = "{jitter}"\n{network}{groups}{events}',
        "fastest_k",
        Path(),
    )


class Watched:
    """A journal sink that counts what there is to know of a run, without keeping its millions of grants."""

    def __init__(self, change_at: float) -> None:
        self.computed = 0  # samples
        self.refreshed: list[tuple[int, int, int, float]] = []
        self.weights: Counter[int] = Counter()
        self._pushed: dict[int, int] = {}  # held pushes, with their workers
        self._change_at = change_at
        self._rounds = 0  # since the change
        self._again = False

    def write(self, line: Line) -> None:
        if isinstance(line, Observation):
            if line.what == "cancelled":
                self.computed += line.data["samples"]
            return
        if not isinstance(line, Decision):
            return
        if isinstance(line.event, Pushed):
            self._pushed[line.event.push] = line.event.worker
            self.computed += line.event.samples
        for action in line.actions:
            if isinstance(action, Apply):
                for push, weight in zip(action.pushes, action.weights, strict=True):
                    self.weights[self._pushed.pop(push)] += weight
                self._rounds += line.event.at >= self._change_at
        if line.event.at >= self._change_at:
            tracks = {action.name: action for action in line.actions if isinstance(action, Track)}
            if "k" in tracks and "load" in tracks:
                self._tracked(tracks["k"], tracks["load"])

    def _tracked(self, k: Track, load: Track) -> None:
        if "measure the cluster again" in k.reason:
            self._again = True
        elif self._again and (said := re.search(r"([0-9.e+-]+) s a step expected", k.reason)):
            self._again = False
            self.refreshed.append((self._rounds, int(k.value), int(load.value), float(said[1])))


class Regression(LightCluster):
    """Light workers that compute the task's gradients: the simulator's times, coordinator and ledger without a script.

    A script on 50 virtual workers changes threads at every push, which takes ten times as long; the numbers are the
    same (tests/unit/test_bench_fastest_k.py compares them). It also holds the weights, as `Updates`.
    """

    of_clocks: ClassVar[bool] = False

    def __init__(self, kernel: Kernel, job: Job) -> None:
        super().__init__(kernel, cluster(job), ROWS // job.workers, 0)
        features, targets = (tensor.numpy() for tensor in make_data(ROWS, 100, 1.0, job.seed).tensors)
        self._x, self._y, self._job = features, targets, job
        self._best = best_weights(*make_data(ROWS, 100, 1.0, job.seed).tensors).numpy()
        self._weights = np.zeros(features.shape[1])
        self._velocity = np.zeros_like(self._weights)
        self._last = np.zeros_like(self._weights)
        self._read: dict[int, np.ndarray] = {}
        self._gradients: dict[int, np.ndarray] = {}  # by ticket
        self._recent: list[tuple[float, float]] = []  # the last three evaluations: time and error
        self.errors: list[float] = []
        self.reached_s: float | None = None
        self.diverged = False

    def grant(self, order: GrantOrder) -> None:
        self._read[order.worker] = self._weights  # replaced by every step, never written to
        super().grant(order)

    def bring(self, arrival: PushRef) -> None:
        rows = self.coordinator.records[arrival.worker].allotments[0].indices
        x = self._x[rows]
        residual = x @ self._read[arrival.worker] - self._y[rows]
        gradient = self._gradients[arrival.ticket] = residual @ x / len(rows)
        arrival.loss, arrival.norm = float(residual @ residual) / (2 * len(rows)), float(np.linalg.norm(gradient))

    def cancel(self, worker: int, ticket: int) -> None:
        self._gradients.pop(ticket, None)
        super().cancel(worker, ticket)

    def apply(self, pushes: Sequence[PushRef], weights: Sequence[float], *, stock: bool) -> Merged:
        """One step of SGD: these strategies' steps have mass 1."""
        gradient = sum(weight * self._gradients.pop(push.ticket) for push, weight in zip(pushes, weights, strict=True))
        self._velocity = self._job.momentum * self._velocity + gradient
        self._weights = self._weights - self._job.lr * self._velocity
        inner, self._last = float(gradient @ self._last), gradient
        return Merged(float(np.linalg.norm(gradient)), inner)

    def extend(self, held: PushRef, piece: PushRef) -> PushRef:
        raise NotImplementedError("no strategy here extends a push")

    def discard(self, push: PushRef) -> None:
        self._gradients.pop(push.ticket, None)

    def contents(self) -> Contents:
        raise NotImplementedError("these runs have no checkpoints")

    def evaluate(self, version: int, at: float) -> None:
        """Measure the error of every 20th version; the target is reached as in a run: the mean of three, the middle."""
        if version % EVALUATED:
            return
        residual = self._x @ (self._weights - self._best)
        error = float(residual @ residual) / (2 * ROWS)
        self.errors.append(error)
        self._recent = [*self._recent[-2:], (at, error)]
        target = self._job.target
        if target is not None and len(self._recent) == 3 and statistics.fmean(e for _, e in self._recent) <= target:
            self.reached_s = self._recent[1][0]
            self.kernel.stop()
        if not error < DIVERGED:
            self.diverged = True
            self.kernel.stop()


def run(job: Job) -> Ran:
    """One run; one that diverges reaches nothing."""
    watched = Watched(job.change_at)
    regression = Regression(Kernel(), job)
    strategy = strategies.build(job.strategy, job.seed)
    strategy.check(job.workers)
    coordinator = Coordinator(
        strategy, regression, watched, regression, carrier=regression, on_version=[regression.evaluate]
    )
    regression.coordinator = coordinator
    coordinator.open(make_ledger("shard", ROWS, 1e6, job.seed, job.workers), ROWS)
    regression.begin()
    regression.kernel.run(job.until)
    now = regression.kernel.now
    coordinator.stop(now, "the run is over")
    if regression.diverged:
        return Ran(None, math.inf, 0, 0, 0, math.inf, [])
    fair = watched.weights.total() / job.workers or 1.0
    errors = regression.errors or [math.inf]
    last = errors[-max(1, len(errors) // 10) :]
    return Ran(
        regression.reached_s, now, coordinator.version, coordinator.totals.pushes, watched.computed,
        statistics.fmean(last), [watched.weights[worker] / fair for worker in range(job.workers)], watched.refreshed,
    )  # fmt: skip


def digest() -> str:
    """What a run depends on: the package and this file."""
    found = hashlib.sha256()
    for file in [*sorted(Path(paceline.__file__).parent.rglob("*.py")), Path(__file__)]:
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


class Kept:
    """Runs of earlier calls on the same sources, so that a long measurement may be made in pieces."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._sources = path, digest()
        self._known: dict[str, Ran] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                found = json.loads(line)
                if found["sources"] == self._sources:
                    self._known[found["job"]] = msgspec.convert(found["ran"], Ran, strict=False)

    def get(self, job: Job) -> Ran | None:
        """A run that was made already."""
        return self._known.get(job.key)

    def add(self, job: Job, ran: Ran) -> Ran:
        """Keep a run."""
        self._known[job.key] = ran
        if self._path is not None:
            plain = msgspec.to_builtins(ran)
            plain = {name: str(value) if value == math.inf else value for name, value in plain.items()}
            with self._path.open("a") as file:
                file.write(json.dumps({"sources": self._sources, "job": job.key, "ran": plain}) + "\n")
        return ran


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """The geometric mean of the ratios of paired runs, and its 90 % interval."""
    logs = [math.log(one / other) for one, other in zip(ours, theirs, strict=True)]
    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(middle), 0.0, math.inf
    t = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132, 6: 2.015, 7: 1.943, 8: 1.895, 9: 1.860, 10: 1.833}
    half = t.get(len(logs), 1.8) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)
