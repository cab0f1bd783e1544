"""Runs of the fastest-k publications' regression: clusters, what is kept of a run, and runs of earlier calls."""

import hashlib
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

import paceline
from paceline import scenario, tasks
from paceline.core.actions import Apply, Track
from paceline.core.errors import UserError
from paceline.core.events import Pushed
from paceline.records.journal import Decision, Line, Observation
from paceline.scenario import Scenario

ROWS = 2000
SHARD = 40  # rows of each of 50 workers
SLOW_WORKERS, SLOWNESS = 3, 8.0  # of ten, in the planted case
EVALUATED = "20v"


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
    """A journal sink that keeps errors and refreshed frontiers, not the millions of grants."""

    def __init__(self, change_at: float) -> None:
        self.errors: list[float] = []
        self.refreshed: list[tuple[int, int, int, float]] = []
        self.weights: Counter[int] = Counter()
        self._pushed: dict[int, int] = {}  # held pushes, with their workers
        self._change_at = change_at
        self._rounds = 0  # since the change
        self._again = False

    def write(self, line: Line) -> None:
        if isinstance(line, Observation):
            if line.what == "evaluation":
                self.errors.append(float(line.data["metrics"]["error"]))
            return
        if not isinstance(line, Decision):
            return
        if isinstance(line.event, Pushed):
            self._pushed[line.event.push] = line.event.worker
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


def run(job: Job) -> Ran:
    """One run; one that diverges reaches nothing."""
    watched = Watched(job.change_at)
    options = {"data_seed": str(job.seed), "lr": str(job.lr), "momentum": str(job.momentum), "epochs": "1e6"}
    try:
        summary = paceline.launch(
            tasks.get("linreg"), engine="sim", scenario=cluster(job), strategy=job.strategy, seed=job.seed,
            evaluate_every=EVALUATED, options=options, sink=watched, max_seconds=job.until, on_divergence="stop",
            target=None if job.target is None else f"error<={job.target!r}",
        ).summary  # fmt: skip
    except UserError:
        return Ran(None, math.inf, 0, 0, 0, math.inf, [])
    fair = watched.weights.total() / job.workers or 1.0
    last = watched.errors[-max(1, len(watched.errors) // 10) :]
    return Ran(
        summary.target.reached_at_seconds if summary.target else None, summary.seconds, summary.versions,
        summary.pushes, summary.samples_used + summary.samples_discarded, statistics.fmean(last),
        [watched.weights[worker] / fair for worker in range(job.workers)], watched.refreshed,
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
