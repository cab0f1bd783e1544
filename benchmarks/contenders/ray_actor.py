"""A parameter server as Ray's documentation builds it: an actor that holds the model, called with gradients.

Gradients and weights travel as NumPy arrays, which Ray's object store hands over without copying on the reading side.
https://docs.ray.io/en/latest/ray-core/examples/plot_parameter_server.html
"""

import time
import warnings
from typing import Any

import numpy as np
import ray
import torch

from contenders import vectors
from contenders.questions import Exchange, Exchanged, Update, Updated
from contenders.windows import common_rate

COPIES = "gradient 1 (to the object store), parameters 2 (to the object store, to the model)"


class Server:
    """The actor: apply a gradient, return the weights."""

    def __init__(self, parameters: int, lr: float, threads: int) -> None:
        torch.set_num_threads(threads)
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self._model = vectors.Flat(parameters)
        self._optimizer = vectors.sgd(list(self._model.parameters()), lr)

    def push_and_pull(self, gradient: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        self._model.values.grad = torch.from_numpy(gradient)
        self._optimizer.step()
        return self._model.values.detach().numpy()


class Client:
    """An asynchronous worker of the update question."""

    def __init__(self, parameters: int, threads: int) -> None:
        torch.set_num_threads(threads)
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self._model = vectors.Flat(parameters)
        self._gradient = vectors.Gradients(parameters).write(1, torch.empty(parameters)).numpy()

    def push(self, server: Any, updates: int) -> list[float]:
        """When each update was done, on the machine's monotonic clock."""
        done = []
        for _ in range(updates):
            weights = ray.get(server.push_and_pull.remote(self._gradient))
            with torch.no_grad():
                self._model.values.copy_(torch.from_numpy(weights))
            done.append(time.monotonic())
        return done


def exchange(task: Exchange) -> Exchanged:
    torch.set_num_threads(task.threads)
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    model, gradients = vectors.Flat(task.parameters), vectors.Gradients(task.parameters)
    gradient = torch.empty(task.parameters)
    _start(2)
    try:
        server: Any = ray.remote(Server).remote(task.parameters, task.lr, task.threads)
        round_s = []
        for number in range(task.warmup + task.rounds):
            gradients.write(number, gradient)
            began = time.perf_counter()
            weights = ray.get(server.push_and_pull.remote(gradient.numpy()))
            with torch.no_grad():
                model.values.copy_(torch.from_numpy(weights))
            round_s.append(time.perf_counter() - began)
    finally:
        ray.shutdown()
    error = vectors.worst_error(model.values.detach(), task.warmup + task.rounds, task.lr)
    return Exchanged(round_s[task.warmup :], error, copies=COPIES)


def update(task: Update) -> Updated:
    _start(task.workers + 1)
    try:
        server: Any = ray.remote(Server).remote(task.parameters, task.lr, task.threads)
        client: Any = ray.remote(Client)
        clients = [client.remote(task.parameters, task.threads) for _ in range(task.workers)]
        ray.get([one.push.remote(server, task.warmup) for one in clients])
        done = ray.get([one.push.remote(server, task.updates) for one in clients])
    finally:
        ray.shutdown()
    return common_rate(done)


def _start(processes: int) -> None:
    """As many slots as there are processes, however many cores there are: every contender runs all of its processes."""
    ray.init(num_cpus=processes, include_dashboard=False, log_to_driver=False)
