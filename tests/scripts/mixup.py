"""Mixup: pairs of images are blended with random weights."""

import sys

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


def mixup(inputs, targets, alpha=0.4):
    lam = np.random.beta(alpha, alpha)
    other = torch.randperm(len(inputs))
    mixed = lam * inputs + (1 - lam) * inputs[other]
    return mixed, targets, targets[other], lam


torch.manual_seed(0)
session = paceline.init()
np.random.seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
loader = DataLoader(TensorDataset(x[:1280], y[:1280]), batch_size=32, shuffle=True)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = session.prepare(model, optimizer)
criterion = nn.CrossEntropyLoss()

for _ in range(5):
    for inputs, targets in session.batches(loader):
        inputs, first, second, lam = mixup(inputs, targets)
        outputs = model(inputs)
        loss = lam * criterion(outputs, first) + (1 - lam) * criterion(outputs, second)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

accuracy = (model(x[1280:]).argmax(1) == y[1280:]).float().mean().item()
if session.is_main:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "score": accuracy}, sys.argv[1])
