"""Randomly timed runs with joins, leaves and crashes, the same for every strategy that is given the same seed."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
from virtual_cluster import Decision, VirtualCluster

from paceline import strategies
from paceline.core.actions import Grant
from paceline.core.events import Joined, Left, Pushed
from paceline.strategies.base import Strategy

SPECS = [
    "bsp",
    "asp",
    "asp:whole_steps=true",
    "ssp:staleness=0",
    "ssp",
    "ssp:staleness=2,cache=true",
    "ssp:staleness=3,cache=true,refresh=3,patience=0.4",
    "dssp:lower=1,upper=6",
    "fastest_k:k=3",
    "fastest_k:k=3,cover=true",
    "k_async:k=3",
    "adaptive_k:start=1,burn_in=20,threshold=2",
    "adaptive_k:start=2,stop=4,test=trend,window=8,burn_in=5",
    "adaptive_k:test=bound,eta=0.01,L=2,c=1,sigma2=10,s=10,error=100",
    "adaptive_k_load:loads=2/4/8,window=5,burn_in=5",
    "adaptive_k_load:loads=2/4/8,test=bound,eta=0.01,L=2,c=1,sigma2=10,error=100,cover=true",
]


def cluster_of(strategy: Strategy | str, seed: int, faults: bool = True, **options: Any) -> VirtualCluster:
    """Six workers of uneven speed, one of them late, with noise as gradient statistics."""
    chance = random.Random(f"{seed}:history")
    noise = random.Random(f"{seed}:statistics")
    if isinstance(strategy, str):
        strategy = strategies.build(strategy, seed)
    cluster = VirtualCluster(
        strategy,
        seconds=[chance.choice([1.0, 1.0, 2.0, 5.0]) for _ in range(6)],
        transfer=0.2,
        jitter=0.3,
        seed=seed,
        statistics=lambda apply, pushes: (noise.gauss(0, 1), 1.0, noise.gauss(5, 1)),
        **{"refuse": 0.03, **options},
    )
    if faults:
        _trouble(cluster, chance)
    return cluster


def _trouble(cluster: VirtualCluster, chance: random.Random) -> None:
    cluster.absent(5)
    cluster.at(chance.uniform(1, 30), "join", worker=5)
    cluster.at(chance.uniform(5, 50), "work", worker=2, value=12)
    for worker in range(6):
        time = chance.uniform(0, 20)
        for _ in range(4):
            time += chance.uniform(1, 25)
            cluster.at(time, chance.choice(["crash", "leave", "timeout", "done"]), worker)
            time += chance.choice([0.0, 0.1, 5.0, 20.0])
            cluster.at(time, "join", worker)


def resumed_every(decisions: int, spec: str, seed: int) -> Callable[[VirtualCluster, Decision], None]:
    """Replaces the strategy by one that was restored from its snapshot, through JSON as a checkpoint does."""

    def after(cluster: VirtualCluster, decision: Decision) -> None:
        if len(cluster.decisions) % decisions == 0:
            data = msgspec.json.decode(msgspec.json.encode(cluster.strategy.snapshot()))
            cluster.strategy = strategies.build(spec, seed + 1).restore(data)

    return after


class Leads:
    """Counts clocks on its own, from events and grants alone, to check what a strategy says of them."""

    def __init__(self) -> None:
        self.completed: dict[int, int] = {}
        self.granted: dict[int, int] = {}
        self.min = 0
        self.longest_computing = 0

    def __call__(self, cluster: VirtualCluster, decision: Decision) -> None:
        match decision.event:
            case Joined(worker=worker) if worker not in self.completed:
                self.completed[worker] = self.min
            case Left(worker=worker):
                self.completed.pop(worker, None)
                self.granted.pop(worker, None)
            case Pushed(worker=worker, clock=clock):
                assert clock == self.completed[worker] + 1, decision
                self.completed[worker] = clock
                self.granted.pop(worker, None)
        least = min(self.completed.values(), default=self.min)
        assert least >= self.min, "min never falls"
        self.min = least
        for action in decision.actions:
            if isinstance(action, Grant):
                assert action.through == self.completed[action.worker] + 1, decision
                self.granted[action.worker] = action.through
                self.longest_computing = max(self.longest_computing, action.through - 1 - self.min)

    def parked(self) -> dict[int, int]:
        """Lead of every worker that has no grant."""
        return {w: clock - self.min for w, clock in self.completed.items() if w not in self.granted}
