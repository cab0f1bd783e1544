"""A parameter server over torch.distributed.rpc: one remote call takes the gradient and returns the weights.

https://docs.pytorch.org/tutorials/intermediate/rpc_param_server_tutorial.html
"""

import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed import rpc

from contenders import ranks, vectors
from contenders.questions import Exchange, Exchanged

SERVER = "server"
COPIES = "gradient through TensorPipe, parameters through TensorPipe and 1 (to the model)"
_held: dict[str, Any] = {}  # the server's model: remote functions find it by their module


def exchange(task: Exchange) -> Exchanged:
    answers = ranks.gather(_run, 2, task)
    return Exchanged(*answers[1], copies=COPIES)


def push_and_pull(gradient: torch.Tensor) -> torch.Tensor:
    """Runs on the server."""
    model = _held["model"]
    model.values.grad = gradient
    _held["optimizer"].step()
    weights: torch.Tensor = model.values.detach()
    return weights


def _run(rank: int, folder: Path, task: Exchange) -> tuple[list[float], float] | None:
    torch.set_num_threads(task.threads)
    if rank == 0:
        _held["model"] = model = vectors.Flat(task.parameters)
        _held["optimizer"] = vectors.sgd(list(model.parameters()), task.lr)
    options = rpc.TensorPipeRpcBackendOptions(init_method=ranks.meeting(folder))
    rpc.init_rpc(SERVER if rank == 0 else "worker", rank=rank, world_size=2, rpc_backend_options=options)
    answer = _push(task) if rank else None
    rpc.shutdown()
    return answer


def _push(task: Exchange) -> tuple[list[float], float]:
    model, gradients = vectors.Flat(task.parameters), vectors.Gradients(task.parameters)
    gradient, round_s = torch.empty(task.parameters), []
    for number in range(task.warmup + task.rounds):
        gradients.write(number, gradient)
        began = time.perf_counter()
        weights = rpc.rpc_sync(SERVER, push_and_pull, args=(gradient,))
        with torch.no_grad():
            model.values.copy_(weights)
        round_s.append(time.perf_counter() - began)
    error = vectors.worst_error(model.values.detach(), task.warmup + task.rounds, task.lr)
    return round_s[task.warmup :], error
