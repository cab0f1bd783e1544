"""Batches from a generator."""

import sys

import torch
from torch import nn


def batches(seed, count):
    """Yield points of a curve, with noise."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.rand(32, 1, generator=generator) * 4 - 2
        yield x, torch.sin(2 * x) + 0.1 * torch.randn(32, 1, generator=generator)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for x, y in batches(seed=0, count=250):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()

x = torch.linspace(-2, 2, 100)[:, None]
with torch.no_grad():
    score = nn.functional.mse_loss(model(x), torch.sin(2 * x)).item()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "score": score}, sys.argv[1])
