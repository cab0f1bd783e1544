"""What is done with several nodes' models together: their average, how far apart they are, and the centre."""

import math
from collections.abc import Sequence

import torch

from paceline.model.spec import ModelSpec
from paceline.model.store import Store

Tensors = Sequence[torch.Tensor]


def mean_of(models: Sequence[Tensors], weights: Sequence[float]) -> list[torch.Tensor]:
    """The weighted mean of each tensor; the weights' sum is 1."""
    means = []
    with torch.no_grad():
        for tensors in zip(*models, strict=True):
            mean = sum((tensor.double() * w for tensor, w in zip(tensors, weights, strict=True)), torch.zeros(()))
            means.append(mean.to(tensors[0].dtype))
    return means


def mix_in(tensors: Tensors, named: tuple[int, ...] | None, values: Tensors, weight: float) -> None:
    """`x <- (1 - weight) x + weight value` for the tensors named; None: all."""
    places = range(len(tensors)) if named is None else named
    with torch.no_grad():
        for place, value in zip(places, values, strict=True):
            own = tensors[place]
            own.lerp_(value.to(own.device, own.dtype), weight)


def shares(used: Sequence[int]) -> list[float]:
    """Weights in proportion to samples; equal ones where nobody has used any."""
    total = sum(used)
    return [count / total if total else 1 / len(used) for count in used]


def distance(models: Sequence[Tensors]) -> float:
    """Root mean square distance of the models to their plain mean."""
    squares = 0.0
    with torch.no_grad():
        for tensors in zip(*models, strict=True):
            stacked = torch.stack([tensor.double() for tensor in tensors])
            squares += float(((stacked - stacked.mean(dim=0)) ** 2).sum())
    return math.sqrt(squares / len(models))


def is_averaged(dtype: str) -> bool:
    """Whether buffers of that dtype are exchanged; counters are not."""
    return dtype.startswith(("torch.float", "torch.bfloat"))


def as_stored(
    spec: ModelSpec, tensors: Tensors, counters: Sequence[Tensors]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters and buffers in the order of a store, from what is averaged and from each node's counters."""
    counts = [torch.stack(list(of_nodes)).amax(dim=0) for of_nodes in zip(*counters, strict=True)]
    floats, whole = iter(tensors[len(spec.parameters) :]), iter(counts)
    buffers = [next(floats) if is_averaged(dtype) else next(whole) for _, _, dtype in spec.buffers]
    return list(tensors[: len(spec.parameters)]), buffers


class Centre:
    """What the nodes of elastic averaging are tied to."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = [tensor.detach().clone() for tensor in tensors]

    @staticmethod
    def of(store: Store) -> "Centre":
        """As the model is in the store: everybody's first one, and later what the last loop ended with."""
        start = store.read()
        kinds = [dtype for _, _, dtype in store.spec.buffers]
        buffers = [b for b, kind in zip(start.buffers, kinds, strict=True) if is_averaged(kind)]
        return Centre([*store.layout.views(start.flat), *buffers])

    def pull(self, alpha: float, named: tuple[int, ...] | None, values: Tensors) -> list[torch.Tensor]:
        """`e = alpha (x - centre)`; the centre moves by e, and the node by as much the other way."""
        places = range(len(self.tensors)) if named is None else named
        pulls = []
        with torch.no_grad():
            for place, value in zip(places, values, strict=True):
                centre = self.tensors[place]
                # Rounded to what it travels as, so that both sides move by the same.
                pull = ((value.to(centre.dtype) - centre) * alpha).to(value.dtype)
                centre.add_(pull)
                pulls.append(pull)
        return pulls
