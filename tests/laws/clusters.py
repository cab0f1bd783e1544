"""Clusters made by hypothesis, and their runs through the real coordinator, on workers that compute noise.

A worker's gradient is one number, at times not a finite one, so that pushes are refused; norms, inner products and
losses are noise too, so that the strategies that decide by them get to decide.
"""

import random
from pathlib import Path
from typing import Any

import msgspec
import torch
from hypothesis import strategies as st

from paceline.core.ledger import Tally, make_ledger
from paceline.engines.sim.kernel import Kernel
from paceline.engines.sim.light import LightCluster
from paceline.engines.sim.virtual_cluster import Flight
from paceline.model.store import Gradient, Merged
from paceline.records.journal import Header, Lines
from paceline.scenario import Scenario, parse
from paceline.server.coordinator import Coordinator
from paceline.server.workers import PushArrival
from paceline.strategies import Strategy, canonical

SECONDS_PER_SAMPLE = 0.125
FINITE, NAN = torch.ones(1), torch.tensor([float("nan")])


class Plan(msgspec.Struct, frozen=True):
    """A cluster, what befalls it, and how long it runs."""

    scenario: str
    work: int
    seed: int
    size: int | None  # of an epoch; None: data without end
    epochs: float
    refused: float  # share of pushes
    max_versions: int
    model_bytes: int


class NoisyCluster(LightCluster):
    """Light workers whose pushes carry a gradient of one number."""

    def __init__(self, kernel: Kernel, scenario: Scenario, plan: Plan) -> None:
        super().__init__(kernel, scenario, plan.work, plan.model_bytes)
        self._direct = False
        self._chance = random.Random(f"{plan.seed}:gradients")
        self._refused = plan.refused

    def computed(self, flight: Flight) -> None:
        order = flight.order
        flat = NAN if self._chance.random() < self._refused else FINITE
        arrival = PushArrival(order.worker, order.incarnation, order.ticket, order.allotment.samples, 0.0, 0.0)
        arrival.gradient = Gradient([flat], frozenset(), (), [], self._chance.gauss(5, 1))
        self.send_up(flight, arrival)


class NoisyStore:
    """Stands in for the store: counts nothing, and says of each step what chance has it say."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(f"{seed}:steps")

    def apply(self, *_: Any, **__: Any) -> Merged:
        return Merged(self._chance.random(), self._chance.gauss(0, 1))


def play(strategy: Strategy, plan: Plan, coordinator_type: type[Coordinator] = Coordinator) -> Lines:
    """Run the plan until its data or its versions are used up, or nothing happens any more."""
    scenario = parse(plan.scenario, "made", Path())
    lines, kernel = Lines(), Kernel()
    cluster = NoisyCluster(kernel, scenario, plan)
    store: Any = NoisyStore(plan.seed)
    coordinator = coordinator_type(strategy, cluster, lines, store, max_versions=plan.max_versions)
    cluster.coordinator = coordinator
    coordinator.on_over = kernel.stop
    lines.write(_header(strategy, plan, scenario))
    if plan.size is None:
        coordinator.open(Tally(1 << 62), plan.work * scenario.count)
    else:
        ledger = make_ledger("epoch", plan.size, plan.epochs, plan.seed, scenario.count)
        coordinator.open(ledger, plan.work * scenario.count)
        about = {"phase": 0, "size": plan.size, "batch_size": plan.work, "epochs": plan.epochs, "sampling": "epoch"}
        coordinator.observe("phase", {**about, "rounds": 0})
    cluster.begin()
    going_on = kernel.run()
    coordinator.now = kernel.now
    done = coordinator.phase_over and not coordinator.at_limit
    if done:
        coordinator.close(kernel.now)
    else:
        coordinator.stop(kernel.now, "the run's limit was reached")
    coordinator.observe_end("done" if done else "limit" if going_on else "stopped")
    return lines


def _header(strategy: Strategy, plan: Plan, scenario: Scenario) -> Header:
    return Header(
        engine="sim",
        strategy=canonical(strategy),
        seed=plan.seed,
        workers=scenario.count,
        options={"max_versions": plan.max_versions},
    )


# -- plans by hypothesis -----------------------------------------------------------------------------------------------

SPEEDS = st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.25, 0.05])
JITTERS = st.sampled_from(["none", "none", "lognormal:0.1", "lognormal:0.6", "exponential"])
NETWORKS = st.sampled_from(["", "latency_ms = 40", 'latency_ms = 100\njitter = "exponential"', "bandwidth_mbps = 0.05"])
KINDS = ("crash", "leave", "rejoin", "join", "slow", "pause", "partition", "duplicate", "reorder")


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any cluster of 1 to 9 workers with anything that may befall it."""
    speeds = draw(st.lists(SPEEDS, min_size=1, max_size=9))
    work = draw(st.sampled_from([1, 4, 8, 32]))
    happenings = draw(st.lists(st.tuples(st.integers(0, 12), st.sampled_from(KINDS), st.integers(0, 11)), max_size=10))
    size = draw(st.none() | st.integers(1, 40 * work))
    text = [
        f"seed = {draw(st.integers(0, 99))}",
        f'[compute]\nseconds_per_sample = {SECONDS_PER_SAMPLE}\njitter = "{draw(JITTERS)}"',
        f"[network]\n{draw(NETWORKS)}",
        *(f"[[workers]]\nspeed = {speed}" for speed in speeds),
        *story(len(speeds), happenings, work * SECONDS_PER_SAMPLE),
    ]
    return Plan(
        scenario="\n".join(text) + "\n",
        work=work,
        seed=draw(st.integers(0, 99)),
        size=size,
        epochs=draw(st.sampled_from([0.5, 1.0, 2.0, 3.5])) if size else 1.0,
        refused=draw(st.sampled_from([0.0, 0.0, 0.1])),
        max_versions=draw(st.integers(1, 60)),
        model_bytes=draw(st.sampled_from([0, 1000])),
    )


def story(workers: int, happenings: list[tuple[int, str, int]], push_s: float) -> list[str]:
    """Events that make sense one after the other: who is gone may only rejoin, who is there may not."""
    text, at, known = [], 0.0, workers
    gone: list[int] = []
    for gap, kind, choice in happenings:
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
            case "slow":
                entry.append(f"factor = {2 + choice}")
        if kind in ("slow", "pause", "partition", "duplicate", "reorder"):
            entry.append(f"for = {push_s * (1 + choice)}")
        if kind in ("duplicate", "reorder"):
            entry.append("share = 0.5")
        elif kind != "join":
            entry.append(f"worker = {worker}")
        text.append("\n".join(entry))
    return text
