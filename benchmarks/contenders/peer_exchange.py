"""A model from one process to another through shared memory, against a copy and a mix in place.

The reader is a process of its own. It mixes what it is sent into its model from where it lies and says so; the clock of
the sender counts from the decision to send until that word. In place, the same tensors are copied and mixed in the
sender's process: nothing that passes a model on can do with less.
"""

import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from paceline.peers.messages import Box
from paceline.transport.mail import PeerHeader
from paceline.transport.mail_shm import ShmMail

WAIT_S = 60.0
TENSORS = 20


def model(nbytes: int, seed: int) -> list[torch.Tensor]:
    """Tensors of so many bytes in all."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(nbytes // 4 // TENSORS, generator=generator) for _ in range(TENSORS)]


def mix(own: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    """Half and half."""
    with torch.no_grad():
        for tensor, value in zip(own, other, strict=True):
            tensor.lerp_(value, 0.5)


def read(nbytes: int, rounds: int, folder: str, line: Connection) -> None:
    """The other process."""
    torch.set_num_threads(1)
    mail, own = ShmMail(Path(folder)), model(nbytes, 2)
    line.send((mail.address, mail.key))
    mail.add_peer(Box(0, 0, *line.recv()))
    for _ in range(rounds):
        (delivered,) = mail.collect(WAIT_S)
        mix(own, [value.view(torch.float32) for value in delivered.values])
        mail.release()
        mail.post(0, PeerHeader("", 1, 0, "asked"), [])
    mail.close()


def measure(nbytes: int, rounds: int, warmup: int) -> dict[str, float]:
    """Median seconds of an exchange, and of a copy and a mix in place, in turns."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        reader = context.Process(target=read, args=(nbytes, warmup + rounds, other, theirs))
        reader.start()
        mail = ShmMail(Path(one))
        mail.add_peer(Box(1, 0, *ours.recv()))
        ours.send((mail.address, mail.key))
        own = model(nbytes, 1)
        mail.reserve([tensor.nbytes for tensor in own])
        target, home = model(nbytes, 3), model(nbytes, 4)
        exchanged, in_place = [], []
        for number in range(warmup + rounds):
            began = time.perf_counter()
            mail.post(1, PeerHeader("", 0, 0, "model"), own)
            mail.collect(WAIT_S)
            between = time.perf_counter()
            with torch.no_grad():
                for copy, tensor in zip(target, own, strict=True):
                    copy.copy_(tensor)
            mix(home, target)
            if number >= warmup:
                exchanged.append(between - began)
                in_place.append(time.perf_counter() - between)
        reader.join(WAIT_S)
        mail.close()
    return {"exchange_s": statistics.median(exchanged), "in_place_s": statistics.median(in_place)}
