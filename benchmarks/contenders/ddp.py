"""DistributedDataParallel over Gloo, set up as its documentation advises for a model whose graph does not change.

In a race each rank sleeps between forward and backward: gradients are exchanged while backward runs, so a slow rank
must be slow before it. What backward takes by itself is measured beforehand, without an exchange, and left out of the
sleep.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from contenders import digits, ranks, workloads
from contenders.questions import Race, Raced, Train, Trained
from contenders.racing import Watch, sleep_until
from contenders.windows import trained

STOP = "stop_at"


def train(task: Train) -> Trained:
    return trained(ranks.gather(_train, task.workers, task), task)


def _train(rank: int, folder: Path, task: Train) -> list[float]:
    torch.set_num_threads(task.threads)
    distributed.init_process_group("gloo", init_method=ranks.meeting(folder), rank=rank, world_size=task.workers)
    model = _wrapped(workloads.build(task.model))
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
    batches = _batches(workloads.dataset(task.model, workloads.SAMPLES), task.batch_size, workloads.SEED)
    ends = []
    for _ in range(task.warmup + task.steps):
        x, y = next(batches)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        ends.append(time.monotonic())
    distributed.barrier()
    distributed.destroy_process_group()
    return ends


def race(task: Race) -> Raced:
    return Raced(**ranks.gather(_race, task.workers, task)[0])


def _race(rank: int, folder: Path, task: Race) -> dict[str, Any]:
    torch.set_num_threads(task.threads)
    distributed.init_process_group("gloo", init_method=ranks.meeting(folder), rank=rank, world_size=task.workers)
    train_set, held_out = digits.load(task.data)
    torch.manual_seed(task.seed)
    model = _wrapped(digits.build())
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=task.momentum)
    backward_s = _backward_s(task.batch_size)
    batches, watch = _batches(train_set, task.batch_size, task.seed), Watch(task.target)
    store = distributed.distributed_c10d._get_default_store()
    stop_at, step, used, overruns = None, 0, 0, 0
    distributed.barrier()
    origin = time.monotonic()
    while stop_at is None or step < stop_at:
        began = time.monotonic()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        if rank == 0:
            over = watch.look(began - origin, digits.loss(model.module, held_out)) if step else False
            if stop_at is None and (over or began - origin > task.max_s):
                # All ranks learn of it before their next step: its exchange needs rank 0, which has told by then.
                store.set(STOP, str(step + 1))
        step_s = task.step_s[rank][step % len(task.step_s[rank])] * len(y) / task.batch_size  # an epoch's rest is less
        overruns += not sleep_until(began + step_s - backward_s)
        loss.backward()
        optimizer.step()
        step, used = step + 1, used + len(y) * task.workers
        if stop_at is None and store.check([STOP]):
            stop_at = int(store.get(STOP))
    seconds = time.monotonic() - origin
    distributed.barrier()
    distributed.destroy_process_group()
    facts = {"overruns": overruns / step}
    return {"reached_s": watch.reached_s, "samples_per_s": used / seconds, "seconds": seconds, "updates": step,
            "facts": facts}  # fmt: skip


def _wrapped(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)


def _batches(data: TensorDataset, batch_size: int, seed: int) -> Iterator[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, batch_size, sampler=sampler)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def _backward_s(batch_size: int, tries: int = 20) -> float:
    """What one backward takes without an exchange."""
    model, x = digits.build(), torch.rand(batch_size, digits.PIXELS)
    took = []
    for _ in range(tries):
        loss = functional.cross_entropy(model(x), torch.zeros(batch_size, dtype=torch.int64))
        began = time.monotonic()
        loss.backward()
        took.append(time.monotonic() - began)
    return sorted(took)[tries // 2]
