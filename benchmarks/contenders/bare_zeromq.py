"""The same bytes there and back over a bare ZeroMQ socket on loopback, in chunks, into memory that is there already."""

import time
from pathlib import Path

import torch
import zmq

from contenders import ranks, vectors
from contenders.questions import Exchange, Exchanged

CHUNK = 2**20


def exchange(task: Exchange) -> Exchanged:
    return Exchanged(ranks.gather(_run, 2, task)[1], None, copies="gradient and parameters each through a TCP socket")


def _run(rank: int, folder: Path, task: Exchange) -> list[float]:
    torch.set_num_threads(task.threads)
    torch.distributed.init_process_group("gloo", init_method=ranks.meeting(folder), rank=rank, world_size=2)
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set(zmq.LINGER, -1)
    address: list[str | None] = [None]
    if rank == 0:
        address[0] = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
    torch.distributed.broadcast_object_list(address)
    if rank == 1:
        socket.connect(str(address[0]))
    round_s = _ask(socket, task) if rank else _echo(socket, task)
    socket.close()
    context.term()
    torch.distributed.destroy_process_group()
    return round_s


def _ask(socket: zmq.Socket[bytes], task: Exchange) -> list[float]:
    gradients = vectors.Gradients(task.parameters)
    gradient, weights = torch.empty(task.parameters), torch.empty(task.parameters)
    round_s = []
    for number in range(task.warmup + task.rounds):
        gradients.write(number, gradient)
        began = time.perf_counter()
        _send(socket, gradient)
        _receive(socket, weights)
        round_s.append(time.perf_counter() - began)
    return round_s[task.warmup :]


def _echo(socket: zmq.Socket[bytes], task: Exchange) -> list[float]:
    received, weights = torch.empty(task.parameters), torch.empty(task.parameters).fill_(1)
    for _ in range(task.warmup + task.rounds):
        _receive(socket, received)
        _send(socket, weights)
    return []


def _send(socket: zmq.Socket[bytes], tensor: torch.Tensor) -> None:
    view = tensor.numpy().data.cast("B")
    for start in range(0, len(view), CHUNK):
        socket.send(view[start : start + CHUNK], copy=False)


def _receive(socket: zmq.Socket[bytes], tensor: torch.Tensor) -> None:
    view = tensor.numpy().data.cast("B")
    for start in range(0, len(view), CHUNK):
        frame = socket.recv(copy=False)
        view[start : start + len(frame)] = frame.buffer
