"""Random clusters, and their runs through the real coordinator, on workers that compute noise.

A push's norm is at times NaN, so that it is refused; norms of steps, inner products and losses are noise, so that
strategies that depend on them are exercised.
"""

import math
import random
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from paceline.core.ledger import Tally, make_ledger
from paceline.core.updates import Contents, Merged, PushRef
from paceline.engines.sim.kernel import Kernel
from paceline.engines.sim.light import LightCluster
from paceline.records.journal import Header, Line, Lines
from paceline.scenario import Scenario, parse
from paceline.server.coordinator import Coordinator
from paceline.strategies import Strategy, canonical
from paceline.strategies.base import DEFAULTS

SECONDS_PER_SAMPLE = 0.125
MAX_LINES = 100_000  # no plan makes a correct strategy write so many


class ClusterPlan(msgspec.Struct, frozen=True):
    """A cluster, its events, and how long it runs."""

    scenario: str
    work: int
    seed: int
    size: int | None  # of an epoch; None: endless data
    epochs: float
    refused: float  # share of pushes that are refused
    max_versions: int
    model_bytes: int


class NoisyCluster(LightCluster):
    """Light workers whose pushes carry a norm and a random loss."""

    def __init__(self, kernel: Kernel, scenario: Scenario, plan: ClusterPlan) -> None:
        super().__init__(kernel, scenario, plan.work, plan.model_bytes)
        self._chance = random.Random(f"{plan.seed}:gradients")
        self._refused = plan.refused

    def bring(self, arrival: PushRef) -> None:
        arrival.norm = math.nan if self._chance.random() < self._refused else 1.0
        arrival.loss = self._chance.gauss(5, 1)


class NoisyStore:
    """A stand-in for the store that returns random statistics of each step."""

    of_clocks: ClassVar[bool] = False

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(f"{seed}:steps")

    def apply(self, *_: Any, **__: Any) -> Merged:
        return Merged(self._chance.random(), self._chance.gauss(0, 1))

    def extend(self, held: PushRef, piece: PushRef) -> PushRef:
        """Merge a piece into a held push: mean loss, summed samples."""
        samples = held.samples + piece.samples
        if held.loss is not None and piece.loss is not None and samples:
            piece.loss = (held.loss * held.samples + piece.loss * piece.samples) / samples
        piece.samples, piece.allotments = samples, held.allotments + piece.allotments
        return piece

    def discard(self, push: PushRef) -> None:
        """Do nothing: no push is kept."""

    def contents(self) -> Contents:
        """Return empty contents."""
        return Contents({}, {})


class Endless(Exception):  # noqa: N818 - named after the run
    """A run with more lines than any correct strategy writes: the strategy keeps itself busy."""


class _Counted(Lines):
    def write(self, line: Line) -> None:
        if len(self) >= MAX_LINES:
            raise Endless(f"the run does not end: {MAX_LINES:,} lines")
        super().write(line)


def play(
    strategy: Strategy, plan: ClusterPlan, coordinator_type: type[Coordinator] = Coordinator, spec: str | None = None
) -> Lines:
    """Run the plan until its data or its versions are used up, or no event is left.

    The journal's header has `spec`, or the strategy's canonical form.
    """
    scenario = parse(plan.scenario, "made", Path())
    lines, kernel = _Counted(), Kernel()
    cluster = NoisyCluster(kernel, scenario, plan)
    store = NoisyStore(plan.seed)
    coordinator = coordinator_type(strategy, cluster, lines, store, plan.max_versions, carrier=cluster)
    cluster.coordinator = coordinator
    lines.write(_header(spec or canonical(strategy), plan, scenario))
    if plan.size is None:
        coordinator.open(Tally(1 << 62), plan.work * scenario.count)
    else:
        ledger = make_ledger("epoch", plan.size, plan.epochs, plan.seed, scenario.count)
        coordinator.open(ledger, plan.work * scenario.count)
        about = {"phase": 0, "size": plan.size, "batch_size": plan.work, "epochs": plan.epochs, "sampling": "epoch"}
        coordinator.observe(0.0, "phase", {**about, "rounds": 0})
    cluster.begin()
    going_on = kernel.run()
    done = coordinator.phase_over and not coordinator.at_limit
    if done:
        coordinator.close(kernel.now)
    else:
        coordinator.stop(kernel.now, "the run's limit was reached")
    coordinator.observe_end(kernel.now, "done" if done else "limit" if going_on else "stopped")
    return lines


def _header(spec: str, plan: ClusterPlan, scenario: Scenario) -> Header:
    return Header(
        defaults=DEFAULTS,
        engine="sim",
        strategy=spec,
        seed=plan.seed,
        workers=scenario.count,
        options={"max_versions": plan.max_versions},
    )


# -- plans -------------------------------------------------------------------------------------------------------------

SPEEDS = (1.0, 1.0, 0.9, 0.5, 0.25, 0.05)
JITTERS = ("none", "none", "lognormal:0.1", "lognormal:0.6", "exponential")
NETWORKS = ("", "latency_ms = 40", 'latency_ms = 100\njitter = "exponential"', "bandwidth_mbps = 0.05")
KINDS = ("crash", "leave", "rejoin", "join", "slow", "pause", "partition", "duplicate", "reorder", "slow_link")
WORKS = (1, 4, 8, 32)
EPOCHS = (0.5, 1.0, 2.0, 3.5)
REFUSED = (0.0, 0.0, 0.1)
BYTES = (0, 1000)


def random_plan(chance: random.Random) -> ClusterPlan:
    """Make a random cluster of 1 to 9 workers with random events."""
    work = chance.choice(WORKS)
    size = chance.choice([None, chance.randint(1, 40 * work)])
    speeds = [chance.choice(SPEEDS) for _ in range(chance.randint(1, 9))]
    events = [
        (chance.randint(0, 12), chance.choice(KINDS), chance.randint(0, 11)) for _ in range(chance.randint(0, 10))
    ]
    return ClusterPlan(
        scenario=scenario_text(
            chance.randint(0, 99), chance.choice(JITTERS), chance.choice(NETWORKS), speeds, events, work
        ),
        work=work,
        seed=chance.randint(0, 99),
        size=size,
        epochs=chance.choice(EPOCHS) if size else 1.0,
        refused=chance.choice(REFUSED),
        max_versions=chance.randint(1, 60),
        model_bytes=chance.choice(BYTES),
    )


def scenario_text(
    seed: int, jitter: str, network: str, speeds: list[float], events: list[tuple[int, str, int]], work: int
) -> str:
    """Return a scenario file; each event is (gap in thirds of a push, kind, number that selects worker and size)."""
    if not network:  # where messages take no time there is no slow link
        events = [entry for entry in events if entry[1] != "slow_link"]
    text = [
        f"seed = {seed}",
        f'[compute]\nseconds_per_sample = {SECONDS_PER_SAMPLE}\njitter = "{jitter}"',
        f"[network]\n{network}",
        *(f"[[workers]]\nspeed = {speed}" for speed in speeds),
        *story(len(speeds), events, work * SECONDS_PER_SAMPLE),
    ]
    return "\n".join(text) + "\n"


def story(workers: int, events: list[tuple[int, str, int]], push_s: float) -> list[str]:
    """Make events consistent in order of time: workers that are gone may only rejoin, present ones may not."""
    text, at, known = [], 0.0, workers
    gone: list[int] = []
    for gap, kind, choice in events:
        at += gap * push_s / 3
        there = [worker for worker in range(known) if worker not in gone]
        chosen = gone if kind == "rejoin" else there
        worker = chosen[choice % len(chosen)] if chosen else None
        if worker is None and kind != "join":
            continue
        entry = [f'[[events]]\nkind = "{kind}"\nat = {at}']
        match kind:
            case "crash" | "leave":
                gone.append(worker or 0)
            case "rejoin":
                gone.remove(worker or 0)
            case "join":
                known += 1
            case "slow" | "slow_link":
                entry.append(f"factor = {2 + choice}")
        if kind in ("slow", "slow_link", "pause", "partition", "duplicate", "reorder"):
            entry.append(f"for = {push_s * (1 + choice)}")
        if kind in ("duplicate", "reorder"):
            entry.append("share = 0.5")
        elif kind != "join":
            entry.append(f"worker = {worker}")
        text.append("\n".join(entry))
    return text
