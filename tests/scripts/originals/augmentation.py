"""A data set that shifts each image by a random amount when it is read, and a network with dropout and BatchNorm."""

import random
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    def __init__(self, images, labels, augment):
        self.images, self.labels, self.augment = images, labels, augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = self.images[i]
        if self.augment:
            image = torch.roll(image, random.randint(-1, 1), dims=2) + 0.05 * torch.randn(1, 8, 8)
        return image, self.labels[i]


random.seed(0)
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
loader = DataLoader(Digits(x[:1024], y[:1024], augment=True), batch_size=64, shuffle=True)

model = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(72, 10)
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for _ in range(4):
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

model.eval()
accuracy = (model(x[1280:]).argmax(1) == y[1280:]).float().mean().item()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "score": accuracy}, sys.argv[1])
