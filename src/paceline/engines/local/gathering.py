"""All nodes' models in one place, for as long as it takes to average them: to be measured, or because a phase is over.

Every node sends its model between two steps; one that goes away meanwhile is not waited for. Models of nodes that have
left the loop of their own accord are kept until the phase's end, and count.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.engines.local.members import Member
from paceline.model.regions import dtype_of
from paceline.model.store import gradient_norm
from paceline.peers.messages import Collect, Snapshot
from paceline.peers.models import as_stored, distance, is_averaged, mean_of, shares
from paceline.transport.mail import from_bytes
from paceline.transport.messages import Push

if TYPE_CHECKING:
    from paceline.engines.local.process_cluster import LocalCluster

Model = tuple[list[torch.Tensor], list[torch.Tensor]]  # what is averaged, and counters


@dataclass
class _Round:
    """One collection of all models."""

    last: bool  # of the phase: nobody steps after it
    then: list[Callable[[], None]]


class Gathering:
    """Collects models, one round at a time."""

    def __init__(self, cluster: "LocalCluster") -> None:
        self._cluster = cluster
        self._number = 0
        self._waiting: set[int] = set()
        self._found: dict[int, Model] = {}
        self._parted: dict[int, Model] = {}  # of nodes that left the loop
        self._queue: list[_Round] = []  # the one under way, and at most one that follows it
        self.averaged = False  # whether the store has what the nodes have made of their first model
        self._dismissed: dict[int, Callable[[], None]] = {}  # what follows when they have taken their leave
        self._bytes = 0
        self.used: dict[int, int] = {}  # samples of each node, in this phase

    @property
    def busy(self) -> bool:
        return bool(self._queue)

    def count(self, node: int, push: Push) -> None:
        """A node has made a step on so many samples; one whose gradient is not finite was none."""
        if push.gradient is not None and math.isfinite(gradient_norm(push.gradient)):
            self.used[node] = self.used.get(node, 0) + push.samples

    def begin(self, then: Callable[[], None], *, last: bool) -> None:
        """Put the average into the store, and then go on with that.

        Who asks while another one waits shares it, and nothing follows the last one of a phase: nodes are asked as fast
        as they answer, however often somebody wants to know.
        """
        if self._queue and (len(self._queue) > 1 or self._queue[0].last):
            waiting = self._queue[-1]
            waiting.last |= last
            waiting.then.append(then)
            return
        self._queue.append(_Round(last, [then]))
        if len(self._queue) == 1:
            self._ask()

    def _ask(self) -> None:
        members = self._cluster.members
        self._number += 1
        self._found, self._bytes = {}, 0
        self._waiting = {n for n in self._cluster.phases.members if n in members and not members[n].gone}
        for node in sorted(self._waiting):
            members[node].link.deliver(Collect(self._number, self._queue[0].last))  # type: ignore[arg-type]
        self._look()

    def take(self, node: int, snapshot: Snapshot) -> None:
        """A node's model."""
        model = self._typed(snapshot)
        if snapshot.number == 0:
            self._parted[node] = model
            self._dismissed.pop(node, _nothing)()
        elif snapshot.number == self._number and node in self._waiting:
            self._waiting.discard(node)
            self._found[node] = model
            self._bytes += snapshot.nbytes
            self._look()

    def dismiss(self, member: Member, then: Callable[[], None]) -> None:
        """Let a node take its leave, and then go on."""
        self._dismissed[member.worker] = then
        member.link.deliver(Collect(0, last=True))  # type: ignore[arg-type]

    def gone(self, node: int, *, crashed: bool) -> None:
        """It will not send any more."""
        self._dismissed.pop(node, None)
        if crashed:
            self._parted.pop(node, None)
            self.used.pop(node, None)
        if node in self._waiting:
            self._waiting.discard(node)
            self._look()

    def phase_over(self) -> None:
        """What anybody had in that phase is in the average."""
        self._parted.clear()
        self.used.clear()

    def _look(self) -> None:
        if self._waiting or not self._queue:
            return
        self._average({**self._parted, **self._found})
        for then in self._queue.pop(0).then:
            then()
        if self._queue:
            self._ask()

    def _average(self, models: dict[int, Model]) -> None:
        if not models:
            return
        cluster, nodes = self._cluster, sorted(models)
        tensors = [models[node][0] for node in nodes]
        mean = mean_of(tensors, shares([self.used.get(node, 0) for node in nodes]))
        store = cluster.conduct.store
        store.overwrite(*as_stored(store.spec, mean, [models[node][1] for node in nodes]))
        cluster.coordinator.now = cluster.moment()
        data = {"distance": distance(tensors), "nodes": len(nodes), "bytes": self._bytes}
        cluster.coordinator.observe("consensus", data)
        self.averaged = True
        if self._queue[0].last:
            cluster.conduct.node_models = {
                node: as_stored(store.spec, *_one(model)) for node, model in sorted(models.items())
            }

    def _typed(self, snapshot: Snapshot) -> Model:
        spec = self._cluster.conduct.store.spec
        floats = [b for b in spec.buffers if is_averaged(b[2])]
        counters = [b for b in spec.buffers if not is_averaged(b[2])]

        def typed(entries: list[tuple[str, tuple[int, ...], str]], values: list[object]) -> list[torch.Tensor]:
            pairs = zip(entries, values, strict=True)
            return [from_bytes(torch.from_numpy(v), dtype_of(dtype), shape) for (_, shape, dtype), v in pairs]

        return typed([*spec.parameters, *floats], snapshot.values), typed(counters, snapshot.counters)


def _one(model: Model) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    return model[0], [model[1]]


def _nothing() -> None:
    """It left by itself."""
