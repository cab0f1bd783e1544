"""A convolutional network on digits: Adam, and a learning rate that is halved every two epochs."""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.dropout = nn.Dropout(0.1)
        self.fc = nn.Linear(72, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return F.log_softmax(self.fc(self.dropout(torch.flatten(x, 1))), dim=1)


def train(model, loader, optimizer, epoch):
    model.train()
    for batch, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch % 20 == 0:
            print(f"epoch {epoch} batch {batch} loss {loss.item():.4f}")


@torch.no_grad()
def test(model, loader):
    model.eval()
    correct = sum((model(data).argmax(1) == target).sum().item() for data, target in loader)
    return correct / len(loader.dataset)


def main():
    torch.manual_seed(1)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    train_loader = DataLoader(TensorDataset(x[:1280], y[:1280]), batch_size=32, shuffle=True)
    test_loader = DataLoader(TensorDataset(x[1280:], y[1280:]), batch_size=256)
    model = Net()
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.5)
    for epoch in range(1, 6):
        train(model, train_loader, optimizer, epoch)
        accuracy = test(model, test_loader)
        scheduler.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "score": accuracy}, sys.argv[1])


if __name__ == "__main__":
    main()
