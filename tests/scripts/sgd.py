"""Digits with plain SGD."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
session = paceline.init()
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
train_set = TensorDataset(x[:1280], y[:1280])
test_x, test_y = x[1280:], y[1280:]
loader = DataLoader(train_set, batch_size=32, shuffle=True)

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
model, optimizer = session.prepare(model, optimizer)

for inputs, targets in session.batches(loader, epochs=6):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()

accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
print(f"test accuracy {accuracy:.3f}")
if session.is_main:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "score": accuracy}, sys.argv[1])
