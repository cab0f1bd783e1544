"""Digits with Lightning Fabric."""

import sys

import torch
from lightning_fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
fabric.seed_everything(0, verbose=False)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x[:1280], y[:1280]), batch_size=32, shuffle=True))

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = fabric.setup(model, optimizer)

for epoch in range(4):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
    fabric.print(f"epoch {epoch}: {loss.item():.4f}")

accuracy = (model(x[1280:]).argmax(1) == y[1280:]).float().mean().item()
fabric.save(sys.argv[1], {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "score": accuracy})
