"""torchft's LocalSGD over Gloo: one replica group on each host of a lab, started by torchrun as its README advises.

    TORCHFT_LIGHTHOUSE=http://HOST:PORT REPLICA_GROUP_ID=1 python -m torch.distributed.run ... rival_torchft.py FOLDER

Replicas train by themselves for `sync_every` steps, then the mean of their parameters is everybody's.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import LocalSGD

from contenders import lab_mnist

TIMEOUT = timedelta(seconds=60)


def main() -> None:
    rank = int(os.environ["REPLICA_GROUP_ID"])
    place = lab_mnist.RankPlace(Path(sys.argv[1]), rank)
    task, data = place.task, lab_mnist.load(place.task.data, "train")
    model = lab_mnist.build(task.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=task.momentum)

    def load_state(state: dict[str, dict[str, torch.Tensor]]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load_state,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=task.workers,
        use_async_quorum=False,  # as LocalSGD's documentation asks
        timeout=TIMEOUT,
        replica_id=f"host{rank}",
        hostname=os.environ["OWN_ADDRESS"],  # a lab's hosts have no names that others know
        init_sync=False,  # all replicas begin with the same values
    )
    every = int(task.options["sync_every"])
    with LocalSGD(manager, model, optimizer, sync_every=every):
        place.wait()
        for step, (x, y) in enumerate(lab_mnist.batches(data, task, rank), 1):
            optimizer.zero_grad()
            lab_mnist.loss(model, x, y).backward()
            optimizer.step()
            if step % every == 0:
                place.show(model, step * sum(task.sizes))


if __name__ == "__main__":
    main()
