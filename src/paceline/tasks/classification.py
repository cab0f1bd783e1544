"""Shared by the image tasks: bytes as pixels, one loop with momentum, and a score on held-out data."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from paceline.session import Session

__all__ = ["Pixels", "fit", "score"]

CHUNK = 1000  # samples per forward pass of an evaluation; bounds the memory of activations


class Pixels(nn.Module):
    """The first layer of an image model: bytes to floats of about zero mean and unit deviation.

    Images stay bytes until the model sees them, so that a data set takes a quarter of the memory in every process.
    """

    def __init__(self, mean: float, deviation: float) -> None:
        super().__init__()
        self.mean = 255 * mean
        self.deviation = 255 * deviation

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (images.float() - self.mean) / self.deviation


@torch.no_grad()
def score(model: nn.Module, held_out: TensorDataset) -> dict[str, float]:
    """Return the share of right answers and the mean cross-entropy in nats."""
    device = next(model.parameters()).device
    inputs, labels = held_out.tensors
    right, loss = 0, 0.0
    for x, y in zip(torch.split(inputs, CHUNK), torch.split(labels.to(device), CHUNK), strict=True):
        output = model(x.to(device))
        right += int((output.argmax(dim=1) == y).sum())
        loss += float(functional.cross_entropy(output, y, reduction="sum"))
    return {"accuracy": right / len(labels), "loss": loss / len(labels)}


def fit(
    session: Session, model: nn.Module, train_set: TensorDataset, held_out: TensorDataset,
    lr: float, momentum: float, batch_size: int, epochs: float,
) -> None:  # fmt: skip
    """Train with SGD on cross-entropy, scored on the held-out data."""
    model = model.to(session.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    session.prepare(model, optimizer, evaluate=lambda copy: score(copy, held_out))
    for x, y in session.batches(train_set, batch_size=batch_size, epochs=epochs):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x.to(session.device)), y.to(session.device))
        loss.backward()
        session.report(loss=loss)
        optimizer.step()
