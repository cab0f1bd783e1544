"""The least that push + apply + pull can cost: one fused step and one copy of the parameters, in one process."""

import statistics
import time

import torch

from contenders import vectors
from contenders.questions import Exchange, Exchanged


def exchange(task: Exchange) -> Exchanged:
    torch.set_num_threads(task.threads)
    model, gradients = vectors.Flat(task.parameters), vectors.Gradients(task.parameters)
    optimizer = vectors.sgd(list(model.parameters()), task.lr)
    model.values.grad = torch.empty_like(model.values)
    pulled = torch.empty_like(model.values)
    apply_s, copy_s = [], []
    rounds = task.warmup + task.rounds
    for number in range(rounds):
        gradients.write(number, model.values.grad)
        began = time.perf_counter()
        optimizer.step()
        applied = time.perf_counter()
        pulled.copy_(model.values.detach())
        ended = time.perf_counter()
        apply_s.append(applied - began)
        copy_s.append(ended - applied)
    round_s = [a + c for a, c in zip(apply_s, copy_s, strict=True)][task.warmup :]
    parts = {"apply_s": apply_s, "copy_s": copy_s}
    facts = {part: statistics.median(seconds[task.warmup :]) for part, seconds in parts.items()}
    return Exchanged(round_s, vectors.worst_error(pulled, rounds, task.lr), facts, "parameters 1")
