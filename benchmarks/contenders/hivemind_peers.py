"""hivemind's Optimizer: peers accumulate gradients towards a common target batch, then find one another and average.

Runs in an environment of its own (`pip install hivemind`). Set up as its configuration guide advises; what the guide
leaves to the user is chosen in favour of small, fast, local runs: the progress of the others is looked up as often as
an update may be due, and the request timeout stays below the matchmaking time, as its documentation asks.
https://learning-at-home.readthedocs.io/en/latest/modules/optim.html
"""

import functools
import multiprocessing
import time
from pathlib import Path
from typing import Any

import hivemind
import torch
from hivemind.utils.crypto import RSAPrivateKey
from torch.nn import functional

from contenders import digits, ranks
from contenders.questions import Race, Raced
from contenders.racing import Watch, sleep_until

HOST = ["/ip4/127.0.0.1/tcp/0"]
REFRESH_S = 0.1  # how old a peer's picture of the others may be; hivemind's own default is 0.5 at least
TIMEOUT_S = 10.0


def race(task: Race) -> Raced:
    found = ranks.gather(_peer, task.workers, task)
    used = sum(answer["used"] for answer in found)
    seconds = max(answer["seconds"] for answer in found)
    updates = found[0]["updates"]
    facts = {"batch_per_update": used / max(1, updates)}
    return Raced(found[0]["reached_s"], used / seconds, seconds, updates, facts)


def _peer(rank: int, folder: Path, task: Race) -> dict[str, Any]:
    multiprocessing.set_start_method("fork", force=True)  # hivemind's averagers are objects that cannot be pickled
    torch.set_num_threads(task.threads)
    train_set, held_out = digits.load(task.data)
    torch.manual_seed(task.seed)
    model = digits.build()
    optimizer = start_optimizer(model, join_dht(rank, folder, HOST), task, task.workers * task.batch_size)
    order = torch.Generator().manual_seed(task.seed * 1000 + rank)
    x, y = train_set.tensors
    watch, stop = Watch(task.target), folder / "stop"
    evaluated, used, step = 0, 0, 0
    _wait_for_all(rank, folder, task.workers)
    origin = time.monotonic()
    while not stop.exists() and time.monotonic() - origin < task.max_s:
        began = time.monotonic()
        rows = torch.randint(len(y), (task.batch_size,), generator=order)
        optimizer.zero_grad()
        functional.cross_entropy(model(x[rows]), y[rows]).backward()
        if rank == 0 and optimizer.local_epoch > evaluated:
            evaluated = optimizer.local_epoch
            if watch.look(began - origin, digits.loss(model, held_out)):
                stop.touch()
        sleep_until(began + task.step_s[rank][step % len(task.step_s[rank])])
        optimizer.step()
        step, used = step + 1, used + task.batch_size
    seconds, updates = time.monotonic() - origin, optimizer.local_epoch
    optimizer.shutdown()
    return {"reached_s": watch.reached_s, "used": used, "seconds": seconds, "updates": updates}


def join_dht(rank: int, folder: Path, listen: list[str]) -> Any:
    """The first peer's DHT is where the others begin."""
    first = folder / "first_peer"
    if rank == 0:
        dht = hivemind.DHT(start=True, host_maddrs=listen)
        draft = folder / "draft"
        draft.write_text("\n".join(str(address) for address in dht.get_visible_maddrs()))
        draft.rename(first)
        return dht
    while not first.exists():
        time.sleep(0.05)
    return hivemind.DHT(initial_peers=first.read_text().splitlines(), start=True, host_maddrs=listen)


def _wait_for_all(rank: int, folder: Path, workers: int) -> None:
    (folder / f"ready-{rank}").touch()
    while not all((folder / f"ready-{one}").exists() for one in range(workers)):
        time.sleep(0.01)


def start_optimizer(model: torch.nn.Module, dht: Any, task: Any, target_batch: int, **more: Any) -> Any:
    """Of a race that has `lr`, `momentum`, `batch_size` and `options`; `more` are hivemind's own."""
    matchmaking_s = float(task.options["matchmaking_s"])
    return hivemind.Optimizer(
        dht=dht,
        run_id="race",
        target_batch_size=target_batch,
        batch_size_per_step=task.batch_size,
        params=model.parameters(),
        optimizer=functools.partial(torch.optim.SGD, lr=task.lr, momentum=task.momentum),
        matchmaking_time=matchmaking_s,
        averaging_timeout=TIMEOUT_S,
        tracker_opts={
            "private_key": RSAPrivateKey(),
            "min_refresh_period": REFRESH_S,
            "default_refresh_period": REFRESH_S,
            "max_refresh_period": 1.0,
        },
        averager_opts={"request_timeout": matchmaking_s / 2},
        verbose=False,
        **more,
    )
