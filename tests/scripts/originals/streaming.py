"""Predict a daily load from its hour and temperature, on readings that come as a stream."""

import math
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Readings(IterableDataset):
    """Meter readings, one after the other; a shard has every `shards`-th of them."""

    def __init__(self, count, shard=0, shards=1):
        self.numbers = range(shard, count, shards)

    def __iter__(self):
        for number in self.numbers:
            chance = random.Random(number)
            hour, temperature = chance.uniform(0, 24), chance.gauss(15, 8)
            load = 2 + math.sin(math.pi * hour / 12) + 0.05 * abs(temperature - 18)
            yield torch.tensor([hour / 24, temperature / 30]), torch.tensor([load])


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

loader = DataLoader(Readings(12_800), batch_size=32)
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")

torch.save(model.state_dict(), "streaming.pt")
