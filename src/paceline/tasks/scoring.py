"""How the classification tasks judge a model on held-out data."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

__all__ = ["score"]

CHUNK = 1000  # samples per forward pass; bounds the memory of activations


@torch.no_grad()
def score(model: nn.Module, held_out: TensorDataset) -> dict[str, float]:
    """Share of right answers, and mean cross-entropy in nats."""
    device = next(model.parameters()).device
    inputs, labels = held_out.tensors
    right, loss = 0, 0.0
    for x, y in zip(torch.split(inputs, CHUNK), torch.split(labels.to(device), CHUNK), strict=True):
        output = model(x.to(device))
        right += int((output.argmax(dim=1) == y).sum())
        loss += float(functional.cross_entropy(output, y, reduction="sum"))
    return {"accuracy": right / len(labels), "loss": loss / len(labels)}
