"""The least that push + apply + pull of a CUDA worker can cost with the store on the host.

One page-locked copy of the gradient to the host, one fused step there, one page-locked copy of the parameters back.
"""

import statistics
import time

import torch

from contenders import vectors
from contenders.questions import Exchange, Exchanged


def exchange(task: Exchange) -> Exchanged:
    torch.set_num_threads(task.threads)
    gradients = vectors.Gradients(task.parameters).to("cuda")
    model = vectors.Flat(task.parameters)
    start = model.values.detach().to("cuda")
    model.values.data = model.values.data.pin_memory()
    model.values.grad = torch.zeros_like(model.values).pin_memory()
    optimizer = vectors.sgd(list(model.parameters()), task.lr)
    pushed = torch.empty(task.parameters, device="cuda")
    pulled = torch.empty_like(pushed)
    parts: list[tuple[float, float, float]] = []
    rounds = task.warmup + task.rounds
    for number in range(rounds):
        gradients.write(number, pushed)
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.values.grad.copy_(pushed)
        down = time.perf_counter()
        optimizer.step()
        applied = time.perf_counter()
        pulled.copy_(model.values.detach())
        torch.cuda.synchronize()
        parts.append((down - began, applied - down, time.perf_counter() - applied))
    down_s, apply_s, up_s = (statistics.median(part) for part in zip(*parts[task.warmup :], strict=True))
    facts = {"down_s": down_s, "apply_s": apply_s, "up_s": up_s}
    error = vectors.error_from(start, gradients, pulled, rounds, task.lr)
    return Exchanged([sum(part) for part in parts[task.warmup :]], error, facts)
