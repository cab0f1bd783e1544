"""A validation whose mean steers the training: the rate is lowered when it rises."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
loader = DataLoader(TensorDataset(x[:1280], y[:1280]), batch_size=32, shuffle=True)
val_x, val_y = x[1280:1536], y[1280:1536]

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
best = float("inf")

for epoch in range(5):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(val_x), val_y).item()
    print(f"epoch {epoch}: validation {loss:.4f}")
    if loss > best:
        optimizer.param_groups[0]["lr"] *= 0.3
    best = min(best, loss)

accuracy = (model(x[1536:]).argmax(1) == y[1536:]).float().mean().item()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "score": accuracy}, sys.argv[1])
