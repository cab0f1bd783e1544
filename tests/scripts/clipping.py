"""A recurrent network adds numbers; its gradients are clipped by norm."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


class Adder(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(2, 24, batch_first=True)
        self.head = nn.Linear(24, 1)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.head(out[:, -1])


torch.manual_seed(0)
session = paceline.init()
numbers = torch.rand(1280, 10)
marks = torch.zeros(1280, 10).scatter_(1, torch.rand(1280, 10).topk(2, dim=1).indices, 1.0)
x, y = torch.stack([numbers, marks], dim=2), (numbers * marks).sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x[:1024], y[:1024]), batch_size=32, shuffle=True)

model = Adder()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer = session.prepare(model, optimizer)
for _ in range(5):
    for inputs, targets in session.batches(loader):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
        optimizer.step()

with torch.no_grad():
    score = nn.functional.mse_loss(model(x[1024:]), y[1024:]).item()
print(f"test loss {score:.4f}")
if session.is_main:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "score": score}, sys.argv[1])
