"""Regression with a validation after each epoch, by which ReduceLROnPlateau lowers the learning rate."""

import sys

import torch
from sklearn.datasets import make_regression
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
session = paceline.init()
features, values = make_regression(1280, 20, noise=5.0, random_state=0)
x = torch.tensor(features, dtype=torch.float32)
y = torch.tensor(values / values.std(), dtype=torch.float32)[:, None]
train_loader = DataLoader(TensorDataset(x[:1024], y[:1024]), batch_size=32, shuffle=True)
val_loader = DataLoader(TensorDataset(x[1024:], y[1024:]), batch_size=64)

model = nn.Linear(20, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer = session.prepare(model, optimizer)
scheduler = ReduceLROnPlateau(optimizer, factor=0.3, patience=0)

for epoch in range(8):
    model.train()
    for inputs, targets in session.batches(train_loader):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val_loss = sum(nn.functional.mse_loss(model(a), b).item() * len(a) for a, b in val_loader) / 256
    scheduler.step(val_loss)
    print(f"epoch {epoch} validation {val_loss:.5f} rate {optimizer.param_groups[0]['lr']:.4f}")

if session.is_main:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "score": val_loss}, sys.argv[1])
