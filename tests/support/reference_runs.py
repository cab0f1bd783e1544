"""Small runs of the simulator whose decisions are kept in tests/reference/simulated.

Each is a script, a cluster and settings. They are to be as small as shows what they are there for. Everything goes
through `paceline.launch`; the two functions at the end know of anything else.
"""

import math
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from clusters import EVEN, UNEVEN, cluster, event, mean_square
from digests import Digest, digest, lines_of, with_report, with_values

import paceline

LINE = "latency_ms = 2\nbandwidth_mbps = 10"
SLOW_LINE = "latency_ms = 5\nbandwidth_mbps = 0.2"
UNEVEN_CLUSTER = cluster(*UNEVEN, jitter="lognormal:0.2", network=LINE)
FAULTS = {
    "slow": event("slow", 0.2, worker=0, for_=0.5, factor=6.0) + event("slow", 0.3, workers=[0, 1], for_=0.2, factor=2),
    "pause": event("pause", 0.15, worker=1, for_=0.6),
    "crash": event("crash", 0.12, worker=1) + event("rejoin", 0.5, worker=1),
    "join": event("join", 0.17, count=2, speed=0.7),
    "leave": event("leave", 0.22, worker=0),
    "partition": event("partition", 0.1, workers=[0, 2], for_=0.4),
    "duplicate": event("duplicate", 0.0, share=0.5),
    "reorder": event("reorder", 0.05, share=0.5, worker=0, for_=0.6),
}
CENTRAL = {
    "bsp": "bsp",
    "asp": "asp",
    "ssp": "ssp:staleness=1",
    "dssp": "dssp:lower=1,upper=3",
    "adaptive_sync": "adaptive_sync",
    "dasp": "dasp",
    "fastest_k": "fastest_k:k=3",
    "adaptive_k": "adaptive_k:burn_in=3,threshold=1",
    "adaptive_k_load": "adaptive_k_load:window=3,burn_in=3",
    "k_async": "k_async:k=2",
    "balanced": "balanced",
}
PEERS = {
    "gossip": "gossip:form=weighted",
    "elastic": "elastic:period=2",
    "local_sgd": "local_sgd:period=2",
    "adaptive_gossip": "adaptive_gossip:warmup=2,budget=0.3",
    "adaptive_elastic": "adaptive_elastic:warmup=2,max_interval=5",
}


def drawn(*shape: int, seed: int) -> torch.Tensor:
    """Numbers from -1 to 1 in float64, the same on every processor, which torch's own are not to the last bits."""
    chance = random.Random(seed)
    return torch.tensor([chance.uniform(-1, 1) for _ in range(math.prod(shape))], dtype=torch.float64).reshape(shape)


X = drawn(60, 6, seed=5) * 2
Y = X @ torch.arange(1.0, 7, dtype=torch.float64)[:, None] + 0.1
ROWS = torch.utils.data.TensorDataset(X, Y)


@dataclass(frozen=True)
class Train:
    """A regression in float64; whatever else a script may do is a field."""

    epochs: tuple[float, ...] = (2,)  # one loop each
    batch_size: int = 5
    lr: float = 0.02
    sampling: str = "epoch"
    batch_norm: bool = False
    scheduled: bool = False
    accumulate: int = 1  # passes per step
    leaves: dict[int, int] = field(default_factory=dict)  # worker: the batch after which it leaves its loop
    skips: int | None = None  # every so many batches there is no gradient
    stops: tuple[int, int] | None = None  # worker and the batch after which it ends the loop for all
    spoils: tuple[int, int] | None = None  # worker and the batch whose gradient is not finite
    fails: tuple[int, int] | None = None  # worker and the batch at which its script raises
    worsens: int | None = None  # from this batch on it reports losses as of a model that diverges

    def __call__(self) -> None:
        session = paceline.init()
        model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8) if self.scheduled else None
        session.prepare(model, optimizer, scheduler, evaluate=evaluate)
        for epochs in self.epochs:
            batches = session.batches(ROWS, batch_size=self.batch_size, epochs=epochs, sampling=self.sampling)
            for number, (x, y) in enumerate(batches, 1):
                if self.skips and number % self.skips == 0:
                    continue
                self.backward(session, model, x, y, number)
                if number % self.accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                if scheduler is not None:
                    scheduler.step()
                if self.stops == (session.worker, number):
                    session.stop("enough")
                if self.leaves.get(session.worker) == number:
                    break

    def model(self) -> torch.nn.Module:
        middle = torch.nn.BatchNorm1d(8) if self.batch_norm else torch.nn.Tanh()
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), middle, torch.nn.Linear(8, 1)).double()
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(drawn(*parameter.shape, seed=number) / 2)
        return model

    def backward(self, session: paceline.Session, model: torch.nn.Module, x: Any, y: Any, number: int) -> None:
        loss = mean_square(model, x, y) / self.accumulate
        if self.spoils == (session.worker, number):
            loss = loss * float("nan")
        if self.fails == (session.worker, number):
            raise ValueError("a mistake of the script")
        loss.backward()
        if number == 2:
            session.report(of_its_own=session.worker)
        session.report(loss=loss + (1e6 if self.worsens and number >= self.worsens else 0.0))


def evaluate(model: torch.nn.Module) -> dict[str, float]:
    with torch.no_grad():
        return {"loss": float(mean_square(model, X, Y))}


@dataclass(frozen=True)
class Count:
    """A script on a table: every worker adds to its share of the rows and counts its clocks in a row of its own."""

    clocks: int = 8
    table: dict[str, Any] = field(default_factory=dict)  # how the table is opened
    barrier: bool = True
    measured: bool = False
    reads: bool = True
    prefetches: bool = False
    unequal: bool = False  # each worker makes one clock more than the one before it
    stops: tuple[int, int] | None = None  # worker and the clock at which it ends the run for all

    def __call__(self) -> None:
        session = paceline.init()
        table = session.table("t", 20, 2, dtype="float64", **self.table)
        if self.measured:
            session.measure(lambda tables: {"loss": float(100 - tables["t"].sum())})
        while session.clocks < self.clocks + self.unequal * session.worker:
            mine = session.share(12)
            if self.reads:
                table.get([0, 5, (7 * session.clocks) % 12])
            table.inc(mine, np.full((len(mine), 2), 0.25))
            table.inc([12 + session.worker], np.array([[1.0, session.clocks]]))
            if self.prefetches:
                table.prefetch([0, 5, (7 * session.clocks + 7) % 12])
            self.at_clock(session)
            if not session.clock(work=3 + session.worker):
                return
        if self.barrier:
            session.barrier()
            table.get()

    def at_clock(self, session: paceline.Session) -> None:
        if self.stops == (session.worker, session.clocks):
            session.stop("enough")


@dataclass(frozen=True)
class ReferenceRun:
    strategy: str
    scenario: Any = UNEVEN_CLUSTER
    script: Callable[[], None] = Train()
    settings: dict[str, Any] = field(default_factory=dict)
    raises: bool = False  # the run ends in an error

    def digest(self) -> Digest:
        """Run it and tell what came of it."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "journal.jsonl"
            settings = {"evaluate_every": "6v", "seed": 4, **self.settings, "journal": path}
            try:
                run = paceline.launch(
                    self.script, engine="sim", scenario=self.scenario, strategy=self.strategy, **settings
                )
            except Exception as error:
                if not self.raises:
                    raise
                return {**digest(lines_of(path)), "ended": [type(error).__name__]}
            found = with_report(digest(lines_of(path)), run.summary)
        found["ended"] = [run.ended]
        found = with_values(found, "model", run.model_state or {})
        found = with_values(found, "tables", run.tables or {})
        for node, state in run.nodes.items():
            found = with_values(found, f"model of node {node}", state)
        return found


@dataclass(frozen=True)
class CostOnly:
    """Workers without a script."""

    strategy: str
    scenario: Any
    limits: dict[str, Any]

    def digest(self) -> Digest:
        lines, report = cost_only(self.strategy, self.scenario, **self.limits)
        return with_report(digest(lines), report)


def cost_only(spec: str, scenario: Any, **limits: Any) -> tuple[list[dict[str, Any]], Any]:
    """The lines and the report of a run without a script."""
    import msgspec

    from paceline import strategies
    from paceline.engines.sim.light import simulate
    from paceline.records.journal import Lines
    from paceline.records.metrics import fold

    lines = Lines()
    simulate(strategies.build(spec, 4), scenario, seed=4, sink=lines, **limits)
    return [msgspec.to_builtins(line) for line in lines], fold(lines).report(None)


def replayed(path: Path) -> tuple[int, str | None]:
    """How many decisions of a journal were fed to a fresh strategy, and the first that came out differently."""
    from paceline.records.replay import replay

    found = replay(path)
    return found.decisions, None if found.difference is None else str(found.difference)


def troubled(*kinds: str, speeds: tuple[float, ...] = UNEVEN, line: str = LINE) -> Any:
    return cluster(*speeds, jitter="lognormal:0.2", network=line, events="".join(FAULTS[kind] for kind in kinds))


def _runs() -> Iterator[tuple[str, ReferenceRun | CostOnly]]:
    yield from _central()
    yield from _scripts()
    yield from _tables()
    yield from _peers()
    yield from _costs()


def _central() -> Iterator[tuple[str, ReferenceRun]]:
    """Every strategy on a quiet cluster and on a troubled one; each fault alone under one of them."""
    for name, spec in CENTRAL.items():
        yield f"{name}", ReferenceRun(spec, script=Train((3,)))
        everything = troubled("slow", "crash", "join", "partition", "duplicate", "reorder")
        yield f"{name}-troubled", ReferenceRun(spec, everything, Train((4,)))
    alone = {
        "slow": "dasp", "pause": "ssp", "crash": "bsp", "join": "k_async", "leave": "balanced",
        "partition": "dssp", "duplicate": "asp", "reorder": "fastest_k",
    }  # fmt: skip
    for kind, name in alone.items():
        yield f"{name}-{kind}", ReferenceRun(CENTRAL[name], troubled(kind), Train((3,)))
    last = event("crash", 0.3, worker=0) + event("crash", 0.4, worker=1)
    late = cluster(1.0, 1.0, 0.1, events=event("crash", 0.45, worker=2))
    for name in ("asp", "bsp"):  # whoever has nothing left to do is given what was lost
        yield f"{name}-crash-near-the-end", ReferenceRun(name, late, Train((1,)))
    early = cluster(1.0, 1.0, 0.5, events=event("crash", 0.035, worker=0))
    yield "balanced-crash-of-an-extended-push", ReferenceRun("balanced", early, Train((1,)))
    yield "bsp-everybody-crashes", ReferenceRun("bsp", cluster(1.0, 1.0, events=last), raises=True)


def _scripts() -> Iterator[tuple[str, ReferenceRun]]:
    """What scripts do and how runs end."""
    yield "ssp-phases", ReferenceRun("ssp", script=Train((1, 0.5, 1)))
    yield "balanced-phases", ReferenceRun("balanced", troubled("crash", "join"), Train((1, 1, 1)))
    yield "bsp-accumulates", ReferenceRun("bsp", script=Train(accumulate=2))
    yield "dasp-accumulates", ReferenceRun("dasp", script=Train(accumulate=2))
    yield "asp-leaves-loop", ReferenceRun("asp", script=Train((2, 1), leaves={0: 3, 2: 1}))
    yield "bsp-leaves-loop", ReferenceRun("bsp", script=Train((2, 1), leaves={1: 2}))
    yield "ssp-stops", ReferenceRun("ssp", script=Train((3, 1), stops=(1, 4)))
    yield "bsp-batch-norm", ReferenceRun("bsp", script=Train(batch_norm=True))
    yield "balanced-batch-norm", ReferenceRun("balanced", script=Train(batch_norm=True))
    yield "asp-scheduler", ReferenceRun("asp", script=Train(scheduled=True))
    yield "bsp-scheduler-phases", ReferenceRun("bsp", script=Train((1, 1), scheduled=True))
    yield "dssp-skips", ReferenceRun(CENTRAL["dssp"], script=Train(skips=3))
    yield "ssp-shards", ReferenceRun("ssp:staleness=2", troubled("crash"), Train(sampling="shard"))
    yield "asp-replacement", ReferenceRun("asp", script=Train(sampling="replacement"))
    target = {"target": "loss=60", "evaluate_every": "2v"}
    yield "k_async-target", ReferenceRun("k_async:k=2", script=Train((50,)), settings=target)
    yield "dssp-max-seconds", ReferenceRun(CENTRAL["dssp"], script=Train((9,)), settings={"max_seconds": 0.777})
    limited = {"max_versions": 17}
    yield "adaptive_k-max-versions", ReferenceRun(CENTRAL["adaptive_k"], script=Train((9,)), settings=limited)
    for action in ("bsp", "stop"):
        diverging = {"on_divergence": action, "evaluate_every": "off"}
        yield f"asp-divergence-{action}", ReferenceRun("asp", cluster(1.0, 0.5), Train((12,), worsens=9), diverging)
    switched = {"on_divergence": "bsp", "evaluate_every": "off"}  # timers of the first strategy are void
    yield "dasp-divergence-bsp", ReferenceRun("dasp", cluster(1.0, 0.5), Train((16,), worsens=9), switched)
    spoilt = Train(spoils=(1, 3))
    yield "fastest_k-not-finite", ReferenceRun("fastest_k:k=3", script=spoilt)
    yield "balanced-not-finite", ReferenceRun("balanced", script=spoilt)
    yield "bsp-not-finite-stop", ReferenceRun("bsp", script=spoilt, settings={"on_nonfinite": "stop"})
    yield "ssp-script-fails", ReferenceRun("ssp", script=Train(fails=(1, 3)), raises=True)
    for name in ("bsp", "asp", "balanced"):  # evaluations and pushes of one moment
        every = {"evaluate_every": "0.05s"}
        yield f"{name}-ties", ReferenceRun(name, cluster(*EVEN), settings=every)
    yield "ssp-by-epochs", ReferenceRun("ssp", cluster(*UNEVEN), settings={"evaluate_every": "0.3e"})


def _tables() -> Iterator[tuple[str, ReferenceRun]]:
    off = {"evaluate_every": "off"}
    for name in ("bsp", "asp", "ssp", "dssp", "adaptive_sync"):
        yield f"tables-{name}", ReferenceRun(CENTRAL[name], script=Count(), settings=off)
        changing = troubled("crash", "join")
        yield f"tables-{name}-troubled", ReferenceRun(CENTRAL[name], changing, Count(), off)
    yield "tables-ssp-eager", ReferenceRun("ssp:staleness=3", script=Count(table={"eager": True}), settings=off)
    yield "tables-asp-own-bound", ReferenceRun("asp", script=Count(table={"staleness": 1}), settings=off)
    aside = Count(table={"staleness": 0})  # where a table holds up the fastest, whom this strategy waits for
    yield "tables-adaptive_sync-own-bound", ReferenceRun("adaptive_sync", script=aside, settings=off)
    clipped = Count(table={"update": "clip:limit=0.5", "cache_rows": 4}, barrier=False)
    yield "tables-ssp-clipped", ReferenceRun("ssp:staleness=2", troubled("leave"), clipped, off)
    small = Count(table={"eager": True, "cache_rows": 4, "update": "adagrad:rate=0.5"}, barrier=False, prefetches=True)
    yield "tables-ssp-prefetches", ReferenceRun("ssp:staleness=2", script=small, settings=off)
    for name in ("bsp", "ssp", "asp"):
        unequal = Count(table={"staleness": 0} if name == "asp" else {}, unequal=True)
        yield f"tables-{name}-unequal", ReferenceRun(CENTRAL[name], script=unequal, settings=off)
    writes = Count(20, reads=False, barrier=False)
    yield "tables-ssp-only-writes", ReferenceRun("ssp", troubled("crash"), writes, off)
    yield "tables-bsp-only-writes", ReferenceRun("bsp", troubled("leave"), writes, off)
    yield "tables-ssp-stops", ReferenceRun("ssp", script=Count(stops=(2, 4)), settings=off)
    yield "tables-bsp-limit", ReferenceRun("bsp", script=Count(50), settings={**off, "max_versions": 14})
    target = {"target": "loss=60", "evaluate_every": "4v"}
    yield "tables-ssp-target", ReferenceRun("ssp", script=Count(80, measured=True), settings=target)


def _peers() -> Iterator[tuple[str, ReferenceRun]]:
    slow = cluster(1.0, 0.7, 0.4, jitter="lognormal:0.2", network=SLOW_LINE)
    for name, spec in PEERS.items():
        yield f"{name}", ReferenceRun(spec, slow)
        changing = troubled("crash", "join", "slow", speeds=(1.0, 0.7, 0.4))
        yield f"{name}-troubled", ReferenceRun(spec, changing)
    yield "gossip-pull", ReferenceRun("gossip:form=pull,peers=ring", slow)
    parted = troubled("partition", "pause", "leave", speeds=(1.0, 0.7, 0.4))
    yield "gossip-parted", ReferenceRun("gossip:form=weighted", parted)
    leaving = cluster(1.0, 1.0, 1.0, network="latency_ms = 60", events=event("leave", 0.3, workers=[1, 2]))
    yield "gossip-leave", ReferenceRun("gossip:form=weighted", leaving)
    yield "elastic-phases", ReferenceRun("elastic:period=1", slow, Train((1, 1), stops=(0, 3)))
    yield "local_sgd-batch-norm", ReferenceRun("local_sgd:period=2", slow, Train(batch_norm=True))
    yield "gossip-leaves-loop", ReferenceRun("gossip", slow, Train((1, 1), leaves={1: 2}, spoils=(0, 2)))
    target = {"target": "loss=60", "evaluate_every": "4v"}
    yield "adaptive_gossip-target", ReferenceRun(PEERS["adaptive_gossip"], slow, Train((30,)), target)


def _costs() -> Iterator[tuple[str, CostOnly]]:
    free = cluster(*UNEVEN, jitter="exponential")
    yield "costs-ssp", CostOnly("ssp:staleness=2", free, {"max_versions": 60, "work": 4})
    yield "costs-fastest_k", CostOnly("fastest_k:k=2", free, {"max_versions": 40, "work": 2})
    yield "costs-balanced", CostOnly("balanced", free, {"samples": 150, "work": 5})
    events = troubled("crash", "join", "reorder")
    yield "costs-dasp-troubled", CostOnly("dasp", events, {"max_seconds": 1.5, "work": 4, "model_bytes": 1000})
    yield "costs-k_async-troubled", CostOnly("k_async:k=2", events, {"max_versions": 40, "model_bytes": 500})


RUNS: dict[str, ReferenceRun | CostOnly] = dict(_runs())
