"""Journals for tests: a virtual cluster that writes one, as an engine would, and short ways to write lines by hand."""

from dataclasses import dataclass, field
from typing import Any

from virtual_cluster import VirtualCluster, VirtualWorker

from paceline.core.actions import Action, Apply, Grant
from paceline.core.events import Event, Joined, Pushed
from paceline.records.journal import Decision, Header, Line, Lines, Observation


def header(**fields: Any) -> Header:
    return Header(**{"engine": "sim", "strategy": "bsp", "seed": 0, "workers": 2, **fields})


def pushed(at: float, worker: int, push: int, **fields: Any) -> Pushed:
    defaults = {"clock": 1, "read_version": 0, "samples": 8, "compute_s": 0.0, "transfer_s": 0.0, "wait_s": 0.0}
    return Pushed(at=at, worker=worker, push=push, **{**defaults, "bytes_up": 100, "bytes_down": 50, **fields})


def decision(event: Event, *actions: Action) -> Decision:
    return Decision(event, list(actions))


def observed(at: float, what: str, worker: int | None = None, **data: Any) -> Observation:
    return Observation(at, what, data, worker)


def joined(at: float, worker: int, work: int = 8) -> Line:
    return decision(Joined(at, worker, work), Grant(worker, work, 1, "go"))


def two_workers() -> list[Line]:
    """A round of BSP: w0 takes 1 s, w1 takes 3 s and 1 s of transfer; then w1 alone is computing when the run ends."""
    return [
        header(options={"target": {"metric": "accuracy", "value": 0.9, "upwards": True}}),
        joined(0.0, 0),
        joined(0.0, 1),
        decision(pushed(1.0, 0, 1, compute_s=1.0, loss=2.0)),
        decision(
            pushed(4.0, 1, 2, compute_s=3.0, transfer_s=1.0, loss=4.0, samples=24),
            Apply((1, 2), (0.25, 0.75), "all"),
            Grant(0, 8, 2, "go"),
            Grant(1, 8, 2, "go"),
        ),
        decision(pushed(5.0, 0, 3, clock=2, read_version=1, compute_s=1.0, wait_s=3.0)),
        observed(6.0, "cancelled", 1, samples=8, seconds=2.0, cause="stop"),
        observed(6.0, "discarded", 0, push=3, samples=8, reason="stopped"),
        observed(6.0, "end", cause="limit", versions=1, samples_used=32, samples_lost=0),
    ]


@dataclass
class JournalledCluster(VirtualCluster):
    """Writes decisions and cancelled work to `lines`; `finish` takes back what still runs and writes the end."""

    lines: Lines = field(default_factory=Lines)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.after = lambda _, made: self.lines.write(Decision(made.event, made.actions))
        self._cause = "cancel"
        name = type(self.strategy).name
        self.lines.write(Header(engine="sim", strategy=name, seed=0, workers=len(self.seconds)))

    def finish(self) -> Lines:
        self._cause = "stop"
        for worker in self.workers.values():
            self._give_back(worker)
        for push in self.held.values():
            data = {"push": push.push, "samples": push.samples, "reason": "the run ended"}
            self.lines.write(Observation(self.now, "discarded", data, push.worker))
        self.lines.write(observed(self.now, "end", cause="limit"))
        return self.lines

    def _happen(self, what: Any, i: int, value: float) -> None:
        self._cause = what
        super()._happen(what, i, value)
        self._cause = "cancel"

    def _give_back(self, worker: VirtualWorker) -> None:
        if worker.attempt:
            number = next(i for i, other in self.workers.items() if other is worker)
            seconds = self.now - worker.attempt.started
            data = {"samples": worker.attempt.samples, "seconds": seconds, "cause": self._cause}
            self.lines.write(Observation(self.now, "cancelled", data, number))
        super()._give_back(worker)
