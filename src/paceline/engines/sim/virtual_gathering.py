"""All virtual nodes' models in one place, to be averaged: to be measured, or because a phase is over."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from paceline.peers.messages import Model
from paceline.peers.models import as_stored, distance, mean_of, shares

if TYPE_CHECKING:
    from paceline.engines.sim.engine import ScriptCluster


def put_average(cluster: "ScriptCluster", models: Mapping[int, Model], used: Mapping[int, int]) -> None:
    """Put the average, weighted by samples, where it is measured and kept."""
    conduct = cluster.conduct
    if conduct.store_or_none is None or not models:
        return  # between phases everybody has that average already
    tensors = [model.tensors() for model in models.values()]
    counters = [model.counters() for model in models.values()]
    mean = mean_of(tensors, shares([used.get(node, 0) for node in models]))
    conduct.store.overwrite(*as_stored(conduct.store.spec, mean, counters))
    cluster.coordinator.now = cluster.kernel.now
    nbytes = sum(tensor.nbytes for each in (*tensors, *counters) for tensor in each)
    data = {"distance": distance(tensors), "nodes": len(models), "bytes": nbytes}
    cluster.coordinator.observe("consensus", data)


def keep(cluster: "ScriptCluster", models: Mapping[int, Model]) -> None:
    """As they are before everybody is given the average; of a phase without a node nothing is kept."""
    conduct = cluster.conduct
    if not models:
        return
    with torch.no_grad():
        conduct.node_models = {
            node: as_stored(
                conduct.store.spec, [t.clone() for t in model.tensors()], [[c.clone() for c in model.counters()]]
            )
            for node, model in models.items()
        }
