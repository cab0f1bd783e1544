"""Operations on several nodes' models: their average, their distance from each other, and the centre."""

import math
from collections.abc import Sequence

import torch

from paceline.model.spec import ModelSpec
from paceline.model.store import Store

Tensors = Sequence[torch.Tensor]


def mean_of(models: Sequence[Tensors], weights: Sequence[float]) -> list[torch.Tensor]:
    """Return the weighted mean of each tensor; the weights must add up to 1."""
    means = []
    with torch.no_grad():
        for tensors in zip(*models, strict=True):
            mean = sum((tensor.double() * w for tensor, w in zip(tensors, weights, strict=True)), torch.zeros(()))
            means.append(mean.to(tensors[0].dtype))
    return means


def mix_in(tensors: Tensors, named: tuple[int, ...] | None, values: Tensors, weight: float) -> None:
    """Set `x <- (1 - weight) x + weight value` for the tensors at these places; None: all."""
    places = range(len(tensors)) if named is None else named
    with torch.no_grad():
        for place, value in zip(places, values, strict=True):
            own = tensors[place]
            own.lerp_(value.to(own.device, own.dtype), weight)


def shares(used: Sequence[int]) -> list[float]:
    """Return weights in proportion to samples; equal weights if no node has used any."""
    total = sum(used)
    return [count / total if total else 1 / len(used) for count in used]


def distance(models: Sequence[Tensors]) -> float:
    """Return the root mean square distance of the models to their unweighted mean."""
    squares = 0.0
    with torch.no_grad():
        for tensors in zip(*models, strict=True):
            stacked = torch.stack([tensor.double() for tensor in tensors])
            squares += float(((stacked - stacked.mean(dim=0)) ** 2).sum())
    return math.sqrt(squares / len(models))


def is_finite(tensors: Tensors) -> bool:
    """Return whether no value is NaN or infinite. Where none is, that takes one pass: their sum is finite, too."""
    with torch.no_grad():
        sums = [tensor.sum() if tensor.dtype.itemsize >= 4 else tensor.sum(dtype=torch.float32) for tensor in tensors]
        if sums and sums[0].is_cuda:  # one wait for the device, not one for each tensor
            sums = [torch.stack([each.to(sums[0].device, torch.complex128) for each in sums]).sum()]
        if all(math.isfinite(abs(each.item())) for each in sums):
            return True
        return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)  # the sum alone may overflow


def is_averaged(dtype: str) -> bool:
    """Whether buffers of that dtype are exchanged; integer counters are not."""
    return dtype.startswith(("torch.float", "torch.bfloat"))


def as_stored(
    spec: ModelSpec, tensors: Tensors, counters: Sequence[Tensors]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return parameters and buffers in the store's order, from averaged tensors and the maximum of nodes' counters."""
    counts = [torch.stack(list(of_nodes)).amax(dim=0) for of_nodes in zip(*counters, strict=True)]
    floats, whole = iter(tensors[len(spec.parameters) :]), iter(counts)
    buffers = [next(floats) if is_averaged(dtype) else next(whole) for _, _, dtype in spec.buffers]
    return list(tensors[: len(spec.parameters)]), buffers


class Centre:
    """The centre that elastic averaging pulls nodes towards."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = [tensor.detach().clone() for tensor in tensors]

    @staticmethod
    def of(store: Store) -> "Centre":
        """Start at the store's model: the first model, or the average that the last phase ended with."""
        start = store.read()
        kinds = [dtype for _, _, dtype in store.spec.buffers]
        buffers = [b for b, kind in zip(start.buffers, kinds, strict=True) if is_averaged(kind)]
        return Centre([*store.layout.views(start.flat), *buffers])

    def pull(self, alpha: float, named: tuple[int, ...] | None, values: Tensors) -> list[torch.Tensor]:
        """Move the centre by `e = alpha (x - centre)` and return e, by which the node moves the other way."""
        places = range(len(self.tensors)) if named is None else named
        pulls = []
        with torch.no_grad():
            for place, value in zip(places, values, strict=True):
                centre = self.tensors[place]
                # Round to the wire's dtype, so that both sides move by the same amount.
                pull = ((value.to(centre.dtype) - centre) * alpha).to(value.dtype)
                centre.add_(pull)
                pulls.append(pull)
        return pulls
