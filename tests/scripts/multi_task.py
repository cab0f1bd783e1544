"""One trunk and two heads: which digit it is, and how much ink it has. The task losses are weighted by hand."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.digit = nn.Linear(64, 10)
        self.ink = nn.Linear(64, 1)

    def forward(self, x):
        features = self.trunk(x)
        return {"digit": self.digit(features), "ink": self.ink(features).squeeze(1)}


torch.manual_seed(0)
session = paceline.init()
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
loader = DataLoader(TensorDataset(x[:1280], y[:1280], x[:1280].mean(1)), batch_size=32, shuffle=True)

model = TwoHeads()
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
model, optimizer = session.prepare(model, optimizer)

for epoch in range(5):
    for inputs, digits, ink in session.batches(loader):
        out = model(inputs)
        losses = {"digit": nn.functional.cross_entropy(out["digit"], digits)}
        if epoch > 0:  # the second task joins later
            losses["ink"] = 3.0 * nn.functional.mse_loss(out["ink"], ink)
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()

accuracy = (model(x[1280:])["digit"].argmax(1) == y[1280:]).float().mean().item()
if session.is_main:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "score": accuracy}, sys.argv[1])
