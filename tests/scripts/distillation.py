"""A small student learns from a frozen teacher."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

TEMPERATURE = 2.0

torch.manual_seed(0)
session = paceline.init()
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
loader = DataLoader(TensorDataset(x[:1280], y[:1280]), batch_size=32, shuffle=True)

teacher = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
teacher_optimizer = torch.optim.Adam(teacher.parameters(), lr=0.01)
for _ in range(40):
    teacher_optimizer.zero_grad()
    nn.functional.cross_entropy(teacher(x[:1280]), y[:1280]).backward()
    teacher_optimizer.step()
teacher.eval().requires_grad_(False)

student = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
student, optimizer = session.prepare(student, optimizer)

for _ in range(5):
    for inputs, targets in session.batches(loader):
        with torch.no_grad():
            soft = (teacher(inputs) / TEMPERATURE).softmax(1)
        out = student(inputs)
        distilled = nn.functional.kl_div((out / TEMPERATURE).log_softmax(1), soft, reduction="batchmean")
        loss = 0.5 * nn.functional.cross_entropy(out, targets) + 0.5 * TEMPERATURE**2 * distilled
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

accuracy = (student(x[1280:]).argmax(1) == y[1280:]).float().mean().item()
if session.is_main:
    torch.save({"model": student.state_dict(), "optimizer": optimizer.state_dict(), "score": accuracy}, sys.argv[1])
