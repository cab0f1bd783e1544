"""Two parameter groups: no weight decay for biases, and a lower rate for the first layer."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
loader = DataLoader(TensorDataset(x[:1280], y[:1280]), batch_size=32, shuffle=True)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
groups = [
    {"params": [model[0].weight], "lr": 0.05, "weight_decay": 1e-3},
    {"params": [model[2].weight], "weight_decay": 1e-3},
    {"params": [model[0].bias, model[2].bias], "lr": 0.2},
]
optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)

for epoch in range(5):
    if epoch == 3:
        for group in optimizer.param_groups:
            group["lr"] *= 0.1
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

accuracy = (model(x[1280:]).argmax(1) == y[1280:]).float().mean().item()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "score": accuracy}, sys.argv[1])
