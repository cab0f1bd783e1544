"""A script that once ran under DDP: a DistributedSampler is left, and set_epoch is called."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import paceline

torch.manual_seed(0)
session = paceline.init()
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
train_set = TensorDataset(x[:1280], y[:1280])
sampler = DistributedSampler(train_set, num_replicas=1, rank=0, shuffle=True)
loader = DataLoader(train_set, batch_size=32, sampler=sampler)

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = session.prepare(model, optimizer)

for epoch in range(4):
    sampler.set_epoch(epoch)
    for inputs, targets in session.batches(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

accuracy = (model(x[1280:]).argmax(1) == y[1280:]).float().mean().item()
if session.is_main:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "score": accuracy}, sys.argv[1])
