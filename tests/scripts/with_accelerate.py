"""Digits with Hugging Face Accelerate."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


def main():
    torch.manual_seed(0)
    session = paceline.init()
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    loader = DataLoader(TensorDataset(x[:1280], y[:1280]), batch_size=32, shuffle=True)
    test_x, test_y = x[1280:], y[1280:]

    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    model, optimizer = session.prepare(model, optimizer)

    for epoch in range(4):
        for inputs, targets in session.batches(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        scheduler.step()
        if session.is_main:
            print(f"epoch {epoch}: {loss.item():.4f}")

    accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    if session.is_main:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "score": accuracy}, sys.argv[1])


if __name__ == "__main__":
    main()
