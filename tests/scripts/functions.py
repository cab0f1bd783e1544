"""Training and validation in functions of their own, with a history of both."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


def make_loaders(batch_size):
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    train_loader = DataLoader(TensorDataset(x[:1280], y[:1280]), batch_size=batch_size, shuffle=True)
    return train_loader, DataLoader(TensorDataset(x[1280:], y[1280:]), batch_size=128)


def train_one_epoch(model, loader, optimizer, criterion):
    model.train()
    total, count = 0.0, 0
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(inputs)
        count += len(inputs)
    return total / max(1, count)


@torch.inference_mode()
def validate(model, loader, criterion):
    model.eval()
    outputs = [(model(inputs), targets) for inputs, targets in loader]
    scores, targets = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    return criterion(scores, targets).item(), (scores.argmax(1) == targets).float().mean().item()


def main():
    torch.manual_seed(0)
    session = paceline.init()
    train_loader, val_loader = make_loaders(batch_size=32)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    model, optimizer = session.prepare(model, optimizer)
    criterion = nn.CrossEntropyLoss()
    history = []
    for epoch in range(5):
        train_loss = train_one_epoch(model, session.batches(train_loader), optimizer, criterion)
        val_loss, accuracy = validate(model, val_loader, criterion)
        history.append((train_loss, val_loss))
        print(f"epoch {epoch}: train {train_loss:.3f} validation {val_loss:.3f} accuracy {accuracy:.3f}")
    if session.is_main:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "score": accuracy}, sys.argv[1])


if __name__ == "__main__":
    main()
