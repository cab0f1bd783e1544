"""Plain PyTorch in one process: what a worker is compared with."""

import time

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from contenders import workloads
from contenders.questions import Train, Trained
from contenders.windows import trained


def train(task: Train) -> Trained:
    torch.set_num_threads(task.threads)
    model = workloads.build(task.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
    loader = DataLoader(workloads.dataset(task.model, workloads.SAMPLES), task.batch_size, shuffle=True, drop_last=True)
    ends: list[float] = []
    while len(ends) < task.warmup + task.steps:
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            ends.append(time.monotonic())
            if len(ends) == task.warmup + task.steps:
                break
    return trained([ends], task)
