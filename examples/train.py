"""A plain PyTorch script with paceline's five lines: alone it is ordinary training, under `paceline run` one worker.

python examples/train.py
paceline run --workers 4 --strategy balanced examples/train.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import paceline

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
train_set, held_out = TensorDataset(x[:1500], y[:1500]), (x[1500:], y[1500:])


def evaluate(model: nn.Module) -> dict[str, float]:
    """Accuracy on images that were never trained on."""
    return {"accuracy": float((model(held_out[0]).argmax(1) == held_out[1]).float().mean())}


session = paceline.init()
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
lr, momentum = session.option("lr", 0.1), session.option("momentum", 0.9)  # `--set lr=0.2`
optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
model, optimizer = session.prepare(model, optimizer, evaluate=evaluate)
for inputs, targets in session.batches(train_set, batch_size=16, epochs=10):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    session.report(loss=loss)
    optimizer.step()
if session.worker == 0:
    print(f"held-out accuracy {evaluate(model)['accuracy']:.3f}")
