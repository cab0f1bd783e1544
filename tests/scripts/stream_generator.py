"""Batches from a generator."""

import sys

import torch
from torch import nn

import paceline


def batches(seed, count):
    """Yield points of a curve, with noise."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.rand(32, 1, generator=generator) * 4 - 2
        yield x, torch.sin(2 * x) + 0.1 * torch.randn(32, 1, generator=generator)


torch.manual_seed(0)
session = paceline.init()
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
model, optimizer = session.prepare(model, optimizer)
for x, y in session.batches(batches(seed=session.worker, count=250)):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()

x = torch.linspace(-2, 2, 100)[:, None]
with torch.no_grad():
    score = nn.functional.mse_loss(model(x), torch.sin(2 * x)).item()
if session.is_main:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "score": score}, sys.argv[1])
