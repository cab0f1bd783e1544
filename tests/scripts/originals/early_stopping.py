"""Training ends when the validation has not improved for two epochs; the best weights are kept."""

import copy
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
loader = DataLoader(TensorDataset(x[:960], y[:960]), batch_size=32, shuffle=True)
val_x, val_y = x[960:1280], y[960:1280]

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
best, best_state, bad_epochs = float("inf"), None, 0

for epoch in range(20):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    with torch.no_grad():
        val_loss = nn.functional.cross_entropy(model(val_x), val_y).item()
    if val_loss < best:
        best, best_state, bad_epochs = val_loss, copy.deepcopy(model.state_dict()), 0
    else:
        bad_epochs += 1
        if bad_epochs == 2:
            print(f"stopped after epoch {epoch}")
            break

last = {"last": model.state_dict(), "optimizer": optimizer.state_dict()}
model.load_state_dict(best_state)
accuracy = (model(x[1280:]).argmax(1) == y[1280:]).float().mean().item()
torch.save({"model": model.state_dict(), **last, "score": accuracy}, sys.argv[1])
