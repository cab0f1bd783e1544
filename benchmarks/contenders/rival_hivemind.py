"""hivemind's Optimizer on the hosts of a lab, set up as in hivemind_peers.py.

    python contenders/rival_hivemind.py FOLDER RANK ADDRESS

With `local_updates` peers step by themselves and average their parameters once per target batch.
"""

import dataclasses
import multiprocessing
import sys
from pathlib import Path

from contenders import hivemind_peers, lab_mnist


def main() -> None:
    folder, rank, address = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    multiprocessing.set_start_method("fork", force=True)  # hivemind's averagers are objects that cannot be pickled
    place = lab_mnist.RankPlace(folder, rank)
    task, data = place.task, lab_mnist.load(place.task.data, "train")
    model = lab_mnist.build(task.seed)
    target = int(task.options["target_batch"])
    dht = hivemind_peers.join_dht(rank, folder, [f"/ip4/{address}/tcp/0"])
    local = bool(task.options["local_updates"])
    optimizer = hivemind_peers.start_optimizer(model, dht, task, target, use_local_updates=local)
    own = dataclasses.replace(task, sizes=[task.sizes[rank]], seed=100 * task.seed + rank)  # shuffles of its own
    place.wait()
    for x, y in lab_mnist.batches(data, own, 0):
        optimizer.zero_grad()
        lab_mnist.loss(model, x, y).backward()
        optimizer.step()
        place.show(model, optimizer.local_epoch * target)


if __name__ == "__main__":
    main()
