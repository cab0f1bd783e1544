"""Two ranks that all-reduce their gradients with Gloo and each step their own copy: DDP's exchange, without DDP."""

import time
from pathlib import Path

import torch
from torch import distributed

from contenders import ranks, vectors
from contenders.questions import Exchange, Exchanged

RANKS = 2
COPIES = "gradient 1 in and 1 out of TCP sockets, in halves"


def exchange(task: Exchange) -> Exchanged:
    return Exchanged(*ranks.gather(_run, RANKS, task)[0], copies=COPIES)


def _run(rank: int, folder: Path, task: Exchange) -> tuple[list[float], float]:
    torch.set_num_threads(task.threads)
    distributed.init_process_group("gloo", init_method=ranks.meeting(folder), rank=rank, world_size=RANKS)
    model, gradients = vectors.Flat(task.parameters), vectors.Gradients(task.parameters)
    # Both ranks bring the same gradient: half the rate times their sum is one gradient, to the last bit.
    optimizer = vectors.sgd(list(model.parameters()), task.lr / RANKS)
    gradient = model.values.grad = torch.empty_like(model.values)
    round_s = []
    for number in range(task.warmup + task.rounds):
        gradients.write(number, gradient)
        distributed.barrier()  # a round is what the exchange takes, not the wait for the other rank's gradient
        began = time.perf_counter()
        distributed.all_reduce(gradient)
        optimizer.step()
        round_s.append(time.perf_counter() - began)
    distributed.destroy_process_group()
    error = vectors.worst_error(model.values.detach(), task.warmup + task.rounds, task.lr)
    return round_s[task.warmup :], error
