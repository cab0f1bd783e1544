"""A script that saves after each epoch and goes on from there when it is started again, two epochs at a time."""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
session = paceline.init()
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
loader = DataLoader(TensorDataset(x[:1280], y[:1280]), batch_size=32, shuffle=True)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
model, optimizer = session.prepare(model, optimizer)

checkpoint = Path(sys.argv[1]).with_suffix(".checkpoint")
start = 0
if checkpoint.exists():
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["epoch"] + 1
    print(f"resumed at epoch {start}")

for epoch in range(start, start + 2):
    for inputs, targets in session.batches(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    if session.is_main:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, checkpoint)

accuracy = (model(x[1280:]).argmax(1) == y[1280:]).float().mean().item()
if session.is_main:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "score": accuracy}, sys.argv[1])
