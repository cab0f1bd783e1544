"""DistributedDataParallel over Gloo by torchrun, one rank on each host of a lab.

    python -m torch.distributed.run ... contenders/rival_ddp.py FOLDER

Ranks may have batches of different sizes: then each loss is weighted so that DDP's mean is that of all samples.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from contenders import lab_mnist


def train(folder: Path, rank: int, wrapped: Callable[[nn.Module], Any]) -> None:
    """Train until the process is ended."""
    place = lab_mnist.RankPlace(folder, rank)
    task, data = place.task, lab_mnist.load(place.task.data, "train")
    model = wrapped(lab_mnist.build(task.seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=task.momentum)
    weight = task.sizes[rank] * task.workers / sum(task.sizes)
    place.wait()
    for step, (x, y) in enumerate(lab_mnist.batches(data, task, rank), 1):
        optimizer.zero_grad()
        (weight * lab_mnist.loss(model, x, y)).backward()
        optimizer.step()
        place.show(model.module, step * sum(task.sizes))


SETTINGS = {"gradient_as_bucket_view": True, "static_graph": True}  # as advised for a graph that does not change


def main() -> None:
    distributed.init_process_group("gloo")
    train(Path(sys.argv[1]), distributed.get_rank(), lambda model: DistributedDataParallel(model, **SETTINGS))


if __name__ == "__main__":
    main()
