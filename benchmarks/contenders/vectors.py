"""The flat model of the exchange questions: every contender has the same start, gradients and result."""

import torch

SEED = 11


class Flat(torch.nn.Module):
    """A model that is one vector of parameters."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.values = torch.nn.Parameter(_uniform(parameters, SEED))


class Gradients:
    """Gradients whose values differ in every round, made in one pass over memory."""

    def __init__(self, parameters: int) -> None:
        self._base = _uniform(parameters, SEED + 1)

    def to(self, device: torch.device | str) -> "Gradients":
        """The same ones, made on a device."""
        self._base = self._base.to(device)
        return self

    def write(self, number: int, out: torch.Tensor) -> torch.Tensor:
        """The gradient of a round, written to `out`."""
        return torch.mul(self._base, 1.0 + (number * 37 % 101) / 101, out=out)


def sgd(parameters: list[torch.nn.Parameter], lr: float) -> torch.optim.SGD:
    """Plain SGD as every contender applies it."""
    return torch.optim.SGD(parameters, lr=lr, fused=True)


def worst_error(result: torch.Tensor, rounds: int, lr: float) -> float:
    """The largest difference from what torch's SGD makes of the same gradients."""
    return error_from(Flat(result.numel()).values.detach(), Gradients(result.numel()), result, rounds, lr)


def error_from(start: torch.Tensor, gradients: Gradients, result: torch.Tensor, rounds: int, lr: float) -> float:
    """The same where the start and the gradients are at hand, which are then used up."""
    values = torch.nn.Parameter(start)
    optimizer = sgd([values], lr)
    values.grad = torch.empty_like(values)
    for number in range(rounds):
        gradients.write(number, values.grad)
        optimizer.step()
    return float((values.detach() - result).abs().max())


def _uniform(count: int, seed: int) -> torch.Tensor:
    return torch.empty(count).uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))


class Counted(torch.utils.data.Dataset[int]):
    """As many samples as wanted, none of which has to be fetched."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices
