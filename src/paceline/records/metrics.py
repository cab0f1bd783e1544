"""The report of a run as a pure fold over its journal: fed live or from a file, the same lines give the same numbers.

Law of time: a worker's compute, transfer, wait and lost seconds add up to its time present. Pushes report their own
compute, transfer and wait; lost seconds come with the observation of cancelled work. The fold derives the rest from the
times of grants: the wait before a grant that was taken back, and the wait from the last push of a stay until the worker
left or the run ended. A grant may be held back after its decision, as while a checkpoint is saved: that is waiting.

Where a run resumes from a checkpoint, versions, pushes and samples used return to the checkpoint's; samples used since
then count as discarded. Times, bytes and the workers' own counts are those that really happened. Every worker is absent
from the last line before the restored header until it joins again.
"""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from paceline.core.actions import Action, Apply, Cancel, Discard, Grant, Mark, Track
from paceline.core.events import Event, Joined, Left, Pushed
from paceline.core.peer_actions import Ask, Average, Exchange, Send
from paceline.core.peer_events import Sent, Stepped
from paceline.core.settings import rate_factor
from paceline.records.journal import Decision, Header, Line, Observation, PeerDecision, Restored
from paceline.records.report import (
    BatchReport,
    FaultReport,
    NodesNumber,
    PeerPoint,
    PeerReport,
    Report,
    ReportedNumber,
    Staleness,
    TableReads,
    TargetReport,
    WorkerReport,
    to_json,
)
from paceline.strategies.monitor import Monitor

ROUNDING = 1e-12  # seconds: what is left of a difference that is 0

__all__ = ["Metrics", "Report", "Staleness", "TargetReport", "WorkerReport", "fold", "to_json"]


class PeerMetrics:
    """Totals of the exchanges of nodes without a server, over the run and between two measurements of the models."""

    def __init__(self) -> None:
        self.exchanges: int | None = None  # None: a run with a server
        self._steps = 0  # of all nodes
        self._begun = 0  # exchanges begun after a step: neither answers nor the last messages of a leaving node
        self._sending_s = 0.0
        self._gathered_bytes = 0
        self._thresholds: dict[int, float] = {}  # latest of each node that has one
        self._stepped: set[int] = set()  # nodes that have stepped since the models were last measured
        self._before = (0, 0)  # steps and exchanges begun by the last measurement
        self._course: list[PeerPoint] = []
        self._nodes: dict[str, NodesNumber] = {}

    def decided(self, line: PeerDecision) -> int:
        """Count a node's decision; return the bytes it sent, counted once a message has left the node."""
        self.exchanges = self.exchanges or 0
        for action in line.actions:
            if isinstance(action, Track) and action.name == "threshold":
                self._thresholds[line.node] = action.value
        if isinstance(line.event, Stepped):
            self._steps += 1
            self._stepped.add(line.node)
            self._begun += sum(isinstance(action, Send | Ask | Exchange | Average) for action in line.actions)
        elif isinstance(line.event, Sent):
            self.exchanges += 1
            self._sending_s += line.event.seconds
            return line.event.bytes
        return 0

    def exchanged(self) -> None:
        """Count an exchange with the centre or in an average."""
        self.exchanges = (self.exchanges or 0) + 1

    def measured(self, line: Observation) -> None:
        """Add a point to the course: all models were collected and measured."""
        steps, begun = self._before
        self._before = self._steps, self._begun
        thresholds = [self._thresholds[node] for node in sorted(self._stepped & set(self._thresholds))]
        self._course.append(PeerPoint(
            line.at,
            _mean_interval(self._steps - steps, self._begun - begun),
            statistics.fmean(thresholds) if thresholds else None,
            float(line.data["distance"]),
        ))  # fmt: skip
        self._stepped.clear()
        self._gathered_bytes += line.data.get("bytes", 0)

    def measured_own(self, metrics: Sequence[Mapping[str, float]]) -> None:
        """Take in what was measured of each node's own model; numbers that some node lacks are left out."""
        names = [name for name in metrics[0] if all(name in each for each in metrics)] if metrics else []
        # A journal read back has non-finite numbers as strings.
        numbers = {name: [float(each[name]) for each in metrics] for name in names}
        self._nodes = {n: NodesNumber(sum(each) / len(each), min(each), max(each)) for n, each in numbers.items()}

    def report(self) -> PeerReport | None:
        """Return the totals; None for a run with a server."""
        if self.exchanges is None:
            return None
        last = self._course[-1].consensus if self._course else None
        interval = _mean_interval(self._steps, self._begun)
        return PeerReport(interval, self._sending_s, last, self._gathered_bytes, list(self._course), dict(self._nodes))


def _mean_interval(steps: int, begun: int) -> float | None:
    return steps / begun if begun else None


class UpdateSizes:
    """How large updates were, how many pushes they merged, and the mass they stood for."""

    def __init__(self) -> None:
        self._batch_size: int | None = None
        self._updates: dict[tuple[int, int], int] = {}  # how many had so many pushes and samples
        self._pushes = 0  # in all updates, as are the other two
        self._samples = 0
        self._mass = 0.0

    def phase(self, data: Mapping[str, Any]) -> None:
        """Note the batch size of a loop; one on tables has none."""
        if data.get("sampling") != "clocks":
            self._batch_size = data.get("batch_size")

    def updated(self, pushes: int, samples: int, mass: float) -> None:
        """Count an update."""
        size = (pushes, samples)
        self._updates[size] = self._updates.get(size, 0) + 1
        self._pushes += pushes
        self._samples += samples
        self._mass += mass

    def report(self, header: Header) -> BatchReport | None:
        """Return what most updates were like; None before the first phase."""
        if self._batch_size is None:
            return None
        scale, count = str(header.options.get("scale_lr", "none")), sum(self._updates.values())
        most, often = max(self._updates.items(), key=lambda each: each[1], default=((0, 0), 0))
        pushes, samples = most if 2 * often >= count else (self._pushes / count, self._samples / count)
        return BatchReport(
            self._batch_size, samples, pushes, self._mass / count if count else None,
            header.options.get("global_batch"), scale, rate_factor(scale, header.workers),
        )  # fmt: skip


class ScriptMetrics:
    """Counts what a script's loops, `report` and tables came to."""

    def __init__(self) -> None:
        self.updates = UpdateSizes()
        self.reported: dict[str, ReportedNumber] = {}
        self.streams = False  # whether a loop read streams
        self._reads: dict[str, list[int]] = {}  # by table: rows read, by their age in clocks

    def phase(self, data: Mapping[str, Any]) -> None:
        """Note the beginning of a loop."""
        self.updates.phase(data)
        self.streams |= data["sampling"] == "stream"

    def report(self, data: Mapping[str, Any]) -> None:
        """Count a number that the script reported."""
        before, value = self.reported.get(data["name"]), float(data["value"])
        count, mean = (before.count, before.mean) if before is not None else (0, 0.0)
        mean += (value - mean) / (count + 1)
        self.reported[data["name"]] = ReportedNumber(value, mean, count + 1)

    def read(self, data: Mapping[str, Any]) -> None:
        """Count reads of a table by their age."""
        ages = [0] * data["first"] + data["ages"]
        known = self._reads.get(data["table"], [])
        self._reads[data["table"]] = [a + b for a, b in zip_longest(known, ages, fillvalue=0)]

    def table_reads(self) -> dict[str, TableReads] | None:
        """Return the reads by table; None if there were none."""
        found = {name: TableReads(sum(ages), len(ages) - 1, ages) for name, ages in self._reads.items()}
        return found or None


class FaultCounts:
    """A fold over the lines of a journal that tell of faults."""

    def __init__(self) -> None:
        self._warnings: dict[str, int] = {}
        self._timeouts = 0
        self._killers: set[int] = set()
        self._set_aside: set[int] = set()
        self._broken = 0

    def left(self, event: Left) -> None:
        """Count a worker that was taken out for its silence."""
        self._timeouts += event.cause == "timeout"

    def observed(self, line: Observation) -> None:
        """Count an observation, if it tells of a fault."""
        if line.what in ("warning", "error"):
            self._warnings[line.data["text"]] = self._warnings.get(line.data["text"], 0) + 1
        elif line.what == "lost":
            self._killers.update(line.data["indices"])
        elif line.what == "set_aside" and line.worker is not None:
            self._set_aside.add(line.worker)
        elif line.what == "not_finite":
            self._broken += 1

    def warnings(self) -> list[str]:
        """Return each warning once, with how often it came."""
        return [text if count == 1 else f"{text} ({count} times)" for text, count in self._warnings.items()]

    def report(self) -> FaultReport:
        """Return the counts."""
        return FaultReport(self._timeouts, sorted(self._killers), sorted(self._set_aside), self._broken)


class _Worker(msgspec.Struct, gc=False):
    """Numbers of one worker: sums over finished grants and stays, and the start times of open ones."""

    nominal: int = 0
    clock: int = 0
    samples: int = 0
    compute_s: float = 0.0
    transfer_s: float = 0.0
    wait_s: float = 0.0
    lost_s: float = 0.0
    present_s: float = 0.0  # of finished stays
    joined_at: float | None = None  # start of the stay, while present
    granted_at: float | None = None  # start of the grant, while one runs
    closed: int = 0  # grants ended by a Cancel or Left whose observation is still to come
    free_at: float = 0.0  # when it last became free for a grant
    state: str | None = None

    def take_back(self, at: float) -> None:
        """End the running grant without a push; count all of its time as waiting until `lose` says what was lost."""
        if self.granted_at is not None:
            self.wait_s += at - self.free_at
            self.granted_at = None
            self.free_at = at

    def lose(self, seconds: float) -> None:
        """Count computing of a grant that was taken back, instead of waiting."""
        self.lost_s += seconds
        self.wait_s -= seconds
        if abs(self.wait_s) < ROUNDING:
            self.wait_s = 0.0

    def leave(self, at: float) -> None:
        """End the stay, and with it the wait since the last push."""
        if self.joined_at is not None:
            self.take_back(at)
            self.wait_s += at - self.free_at
            self.present_s += at - self.joined_at
            self.joined_at = None

    def break_off(self, at: float) -> None:
        """End the stay because the server died: the running computation is lost."""
        seconds = at - self.granted_at if self.joined_at is not None and self.granted_at is not None else None
        self.leave(at)
        if seconds is not None:
            self.lose(seconds)
        self.granted_at, self.closed = None, 0

    def until(self, at: float, ended: bool) -> tuple[float, float]:
        """Return seconds present and seconds waited up to `at`; an open grant counts only once the run has ended."""
        if self.joined_at is None:
            return self.present_s, self.wait_s
        granted = self.granted_at
        seen = at if ended or granted is None else granted
        return self.present_s + seen - self.joined_at, self.wait_s + (at if granted is None else granted) - self.free_at


class _Workers(dict[int, _Worker]):
    """Workers by number; a journal that starts from a snapshot may name a worker before it joins."""

    def __missing__(self, number: int) -> _Worker:
        worker = self[number] = _Worker()
        return worker


class Metrics:
    """A journal sink that can report on the run at any time."""

    def __init__(self) -> None:
        self.header: Header | None = None  # the first one: how the run was started
        self.seconds = 0.0
        self.ended: str | None = None  # the cause given by the journal's last line
        self.versions = 0
        self.pushes = 0
        self.samples_used = 0
        self.samples_discarded = 0
        self.bytes_up = 0
        self.bytes_down = 0
        self.evaluation: dict[str, float] = {}
        self._workers = _Workers()
        self._held: dict[int, Pushed] = {}  # pushes neither applied nor discarded yet
        self._staleness: dict[int, int] = {}  # how many applied pushes had each value
        self._losses: deque[tuple[int, float]] = deque(maxlen=1)  # (samples, loss) of the last nominal round
        self._monitor = Monitor()
        self._target: TargetReport | None = None
        self._peers = PeerMetrics()
        self._script = ScriptMetrics()
        self._faults = FaultCounts()
        self._resuming = False  # Left events of the checkpoint's workers are still coming in

    def write(self, line: Line) -> None:
        """Count one line of the journal."""
        if isinstance(line, Decision):
            event = line.event
            self.seconds = event.at
            if self._resuming:
                if isinstance(event, Left):
                    return  # its actions concern grants and pushes that no longer exist
                self._resuming = False
            if isinstance(event, Pushed):
                self._pushed(event)
            else:
                self._came_or_went(event)
            for action in line.actions:
                if isinstance(action, Grant):
                    self._workers[action.worker].granted_at = event.at
                elif isinstance(action, Apply):
                    self._applied(action)
                else:
                    self._acted(action, event.at)
        elif isinstance(line, Observation):
            self.seconds = line.at
            self._observed(line)
        elif isinstance(line, PeerDecision):
            self.seconds = line.event.at
            self.bytes_up += self._peers.decided(line)
        else:
            if self.header is None:
                self._started(line)
            if line.restored is not None:
                self._went_back(line.restored)

    def _started(self, header: Header) -> None:
        self.header = header
        self._losses = deque(maxlen=max(header.workers, 1))
        target = header.options.get("target")
        if target is not None:
            self._target = TargetReport(target["metric"], float(target["value"]), None)

    def _went_back(self, to: Restored) -> None:
        for worker in self._workers.values():
            worker.break_off(self.seconds)
        self._held.clear()
        self._resuming = True
        self.seconds = max(self.seconds, to.at)
        self.versions, self.pushes, self.samples_used = to.version, to.pushes, to.samples_used

    def _pushed(self, event: Pushed) -> None:
        worker = self._workers[event.worker]
        samples = event.samples
        earlier = self._held.get(event.push)
        if earlier is None:
            self.pushes += 1
        else:  # an extension: the push repeats its id with the new total
            samples -= earlier.samples
        self._held[event.push] = event
        worker.clock = event.clock
        worker.compute_s += event.compute_s
        worker.transfer_s += event.transfer_s
        worker.wait_s += event.wait_s
        worker.granted_at = None
        worker.free_at = event.at
        self.bytes_up += event.bytes_up
        self.bytes_down += event.bytes_down
        if samples > 0:
            self._monitor.record(event.worker, samples, worker.nominal or samples, event.compute_s, event.transfer_s)

    def _came_or_went(self, event: Event) -> None:
        if isinstance(event, Joined):
            worker = self._workers[event.worker]
            worker.nominal = event.work
            if worker.joined_at is None:
                worker.joined_at = worker.free_at = event.at
                worker.closed = 0
        elif isinstance(event, Left):
            worker = self._workers[event.worker]
            worker.closed += worker.granted_at is not None
            worker.leave(event.at)
            self._faults.left(event)

    def _acted(self, action: Action, at: float) -> None:
        if isinstance(action, Cancel):
            worker = self._workers[action.worker]
            worker.closed += worker.granted_at is not None
            worker.take_back(at)
        elif isinstance(action, Discard):
            dropped = self._held.pop(action.push, None)
            self.samples_discarded += dropped.samples if dropped is not None else 0
        elif isinstance(action, Mark):
            self._workers[action.worker].state = action.state

    def _applied(self, action: Apply) -> None:
        mass = sum(action.weights)
        counts = mass > 0  # an Apply of mass 0 makes no version
        version, staleness, before = self.versions, self._staleness, self.samples_used
        for push, weight in zip(action.pushes, action.weights, strict=True):
            event = self._held.pop(push, None)
            if event is None:
                continue
            self.samples_used += event.samples
            self._workers[event.worker].samples += event.samples
            if not counts:
                continue
            if weight > 0:
                age = version - event.read_version
                staleness[age] = staleness.get(age, 0) + 1
            if event.loss is not None and event.samples:
                self._losses.append((event.samples, event.loss))
        self.versions = version + counts
        if counts:
            self._script.updates.updated(len(action.pushes), self.samples_used - before, mass)

    def _observed(self, line: Observation) -> None:
        data = line.data
        self._faults.observed(line)
        match line.what:
            case "cancelled" if line.worker is not None:
                worker = self._workers[line.worker]
                self.samples_discarded += data["samples"]
                self.bytes_down += data.get("bytes_down", 0)
                if worker.closed:  # ended by a Cancel or Left; the running grant may be a later one
                    worker.closed -= 1
                else:
                    worker.take_back(line.at)
                worker.lose(data["seconds"])
            case "rolled_back":
                self.samples_discarded += data["samples"]
            case "dropped":
                self.bytes_up += data.get("bytes_up", 0)
            case "discarded":
                self.samples_discarded += data["samples"]
                self._held.pop(data["push"], None)
            case "evaluation":
                # A journal read back has non-finite numbers as strings.
                self.evaluation = {name: float(value) for name, value in data["metrics"].items()}
            case "target":
                self._target = TargetReport(data["metric"], float(data["value"]), data["reached_at"])
            case "phase":
                self._script.phase(data)
            case "report":
                self._script.report(data)
            case "reads":
                self._script.read(data)
            case "consensus":
                self._peers.measured(line)
            case "evaluation_nodes":
                self._peers.measured_own(data["metrics"])
            case "exchange":  # with the centre, or of an average
                self._peers.exchanged()
                self.bytes_up += data["bytes"]
            case "end":
                self.ended = data["cause"]

    def beyond(self, restored: Restored) -> dict[str, int]:
        """Return what a rollback to the checkpoint undoes: the data of a `rolled_back` observation.

        Never negative: a killed server's last lines may be missing, so that the journal ends before the checkpoint.
        """
        held = sum(event.samples for event in self._held.values())
        return {
            "versions": max(0, self.versions - restored.version),
            "samples": max(0, self.samples_used - restored.samples_used + held),
            "pushes": max(0, self.pushes - restored.pushes),
        }

    def time_law(self) -> dict[int, tuple[float, float]]:
        """Return by worker: seconds present, and the sum of its compute, transfer, wait and lost seconds."""
        law = {}
        for number, worker in sorted(self._workers.items()):
            present, wait = worker.until(self.seconds, self.ended is not None)
            law[number] = present, worker.compute_s + worker.transfer_s + worker.lost_s + wait
        return law

    def loss(self) -> float | None:
        """Return the last evaluation's loss; without one, the mean over the samples of the last n pushes applied."""
        if "loss" in self.evaluation:
            return self.evaluation["loss"]
        if not self._losses:
            return None
        return sum(samples * loss for samples, loss in self._losses) / sum(samples for samples, _ in self._losses)

    def report(self, journal: str | None, folder: str | None = None, model: str | None = None) -> Report:
        """Report on the run so far; `journal`, `folder` and `model` are the paths to name in it."""
        header = self.header or Header(engine="", strategy="", seed=0, workers=0)
        fastest = self._monitor.fastest()
        per_worker = [self._worker_report(number, fastest) for number in sorted(self._workers)]
        present = sum(seconds for seconds, _ in self.time_law().values())
        return Report(
            strategy=header.strategy,
            engine=header.engine,
            workers=header.workers,
            seed=header.seed,
            seconds=self.seconds,
            versions=self.versions,
            pushes=self.pushes,
            samples_used=self.samples_used,
            samples_discarded=self.samples_discarded,
            samples_per_second=self.samples_used / self.seconds if self.seconds > 0 else None,
            wait_fraction=sum(worker.wait_s for worker in per_worker) / present if present > 0 else None,
            staleness=_summary(self._staleness if self._peers.exchanges is None else {}),
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            exchanges=self._peers.exchanges,
            loss=self.loss(),
            accuracy=self.evaluation.get("accuracy"),
            metrics=self.evaluation,
            target=self._target,
            per_worker=per_worker,
            warnings=self._faults.warnings(),
            table_reads=self._script.table_reads(),
            peers=self._peers.report(),
            faults=self._faults.report(),
            streams=self._script.streams,
            journal=journal,
            batch=self._script.updates.report(header),
            reported=dict(self._script.reported),
            folder=folder,
            model=model,
        )

    def _worker_report(self, number: int, fastest: float | None) -> WorkerReport:
        worker, time = self._workers[number], self._monitor.time(number)
        _, wait = worker.until(self.seconds, self.ended is not None)
        return WorkerReport(
            worker=number,
            clock=worker.clock,
            samples=worker.samples,
            compute_s=worker.compute_s,
            transfer_s=worker.transfer_s,
            wait_s=wait,
            lost_s=worker.lost_s,
            # The monitor's own score searches the fastest on every call, too slow for a report on every worker.
            score=None if fastest is None or time is None else fastest / time if time > 0 else 1.0,
            state=worker.state,
        )


def fold(lines: Iterable[Line]) -> Metrics:
    """Compute the metrics of a whole journal."""
    metrics = Metrics()
    for line in lines:
        metrics.write(line)
    return metrics


def _summary(counts: dict[int, int]) -> Staleness:
    total = sum(counts.values())
    if not total:
        return Staleness(None, None, None)
    mean = sum(value * count for value, count in counts.items()) / total
    seen = 0
    for value in sorted(counts):
        seen += counts[value]
        if 100 * seen >= 95 * total:
            break
    return Staleness(mean, value, max(counts))
