"""An IterableDataset that makes its samples as it goes."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import paceline

STEPS = 150


class Stream(IterableDataset):
    """Points of two rings without an end."""

    def __init__(self, seed):
        self.seed = seed

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            label = int(torch.randint(2, (), generator=generator))
            angle = torch.rand((), generator=generator) * 6.2832
            radius = 1.0 + label + 0.2 * torch.randn((), generator=generator)
            yield radius * torch.stack([angle.cos(), angle.sin()]), label


torch.manual_seed(0)
session = paceline.init()
stream = Stream(seed=1 + session.worker)
loader = DataLoader(stream, batch_size=16)

model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
model, optimizer = session.prepare(model, optimizer)
for points, labels in session.batches(loader, steps=STEPS):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(points), labels).backward()
    optimizer.step()

points, labels = next(iter(DataLoader(Stream(seed=99), batch_size=500)))
accuracy = (model(points).argmax(1) == labels).float().mean().item()
if session.is_main:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "score": accuracy}, sys.argv[1])
