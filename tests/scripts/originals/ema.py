"""A moving average of the weights is what is evaluated and saved."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
loader = DataLoader(TensorDataset(x[:1280], y[:1280]), batch_size=32, shuffle=True)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))

for _ in range(5):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        ema.update_parameters(model)

accuracy = (ema(x[1280:]).argmax(1) == y[1280:]).float().mean().item()
state = {"model": model.state_dict(), "ema": ema.state_dict(), "optimizer": optimizer.state_dict(), "score": accuracy}
torch.save(state, sys.argv[1])
