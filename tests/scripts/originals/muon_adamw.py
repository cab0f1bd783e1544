"""Muon for the matrices of a model and AdamW for the rest."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
loader = DataLoader(TensorDataset(x[:1280], y[:1280]), batch_size=32, shuffle=True)

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
matrices = [p for p in model.parameters() if p.ndim == 2]
rest = [p for p in model.parameters() if p.ndim != 2]
muon = torch.optim.Muon(matrices, lr=0.02, momentum=0.95)
adamw = torch.optim.AdamW(rest, lr=0.005)

for _ in range(3):
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()

accuracy = (model(x[1280:]).argmax(1) == y[1280:]).float().mean().item()
optimizers = {"muon": muon.state_dict(), "adamw": adamw.state_dict()}
torch.save({"model": model.state_dict(), "optimizer": optimizers, "score": accuracy}, sys.argv[1])
