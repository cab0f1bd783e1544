"""Random runs for the foreign checker: clusters as TOML text, strategies with random options, and small jobs.

As a program it makes runs in virtual time, many in one process, and prints one JSON line for each:

    python benchmarks/attacks/foreign_runs.py FOLDER FIRST COUNT
"""

import json
import logging
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

Draw = random.Random
TABLE_STRATEGIES = ("bsp", "asp", "ssp", "dssp", "adaptive_sync")
PEER_STRATEGIES = ("gossip", "elastic", "local_sgd", "adaptive_gossip", "adaptive_elastic")
TWICE = 10  # every so manieth run is made twice and compared


def strategy(draw: Draw, kind: str, workers: int) -> str:
    """A strategy for this kind of job, with random options."""
    made: dict[str, Callable[[], str]] = {
        "bsp": lambda: "bsp",
        "asp": lambda: f"asp:whole_steps={draw.choice(['true', 'false'])}",
        "ssp": lambda: f"ssp:staleness={draw.choice([0, 1, 2, 5])}",
        "dssp": lambda: f"dssp:lower={(low := draw.randrange(3))},upper={low + draw.randrange(5)}",
        "adaptive_sync": lambda: f"adaptive_sync:cap={draw.randrange(5)},delta={draw.choice([0.0, 0.15, 1.0])}",
        "dasp": lambda: f"dasp:fit={draw.choice(['join', 'merge'])},theta={draw.choice(['none', 0, 3])}",
        "fastest_k": lambda: f"fastest_k:k={draw.randint(1, workers)}",
        "k_async": lambda: f"k_async:k={draw.randint(1, workers)}",
        "adaptive_k": lambda: f"adaptive_k:threshold={draw.randrange(3)},burn_in={draw.randrange(4)}",
        "adaptive_k_load": lambda: f"adaptive_k_load:window={draw.randint(2, 4)},burn_in={draw.randrange(4)}",
        "balanced": lambda: f"balanced:pieces={draw.choice(['guided', 'one'])}",
        "gossip": lambda: (
            f"gossip:form={draw.choice(['push', 'pull', 'weighted'])},peers="
            f"{draw.choice(['random', 'ring', 'exponential'])},period={draw.randint(1, 3)}"
        ),
        "elastic": lambda: f"elastic:period={draw.randint(1, 4)}",
        "local_sgd": lambda: f"local_sgd:period={draw.randint(1, 5)}",
        "adaptive_gossip": lambda: f"adaptive_gossip:warmup={draw.randrange(4)},max_interval={draw.randint(1, 9)}",
        "adaptive_elastic": lambda: f"adaptive_elastic:warmup={draw.randrange(4)},threshold={draw.choice([0.0, 0.3])}",
    }
    names = {"tables": TABLE_STRATEGIES, "peers": PEER_STRATEGIES}.get(kind)
    return made[draw.choice(names or [name for name in made if name not in PEER_STRATEGIES])]()


def scenario(draw: Draw, kind: str) -> tuple[str, int]:
    """A cluster as TOML, and how many workers it starts with. Worker 0 always stays."""
    workers = draw.randint(1 if kind == "gradients" else 2, 6)
    jitter = draw.choice(["none", "lognormal:0.3", "exponential", "shifted_exponential:0.5,1.0"])
    parts = [
        f"seed = {draw.randrange(1000)}",
        f'[compute]\nseconds_per_sample = {draw.choice([0.001, 0.01])}\njitter = "{jitter}"',
        f"[network]\nlatency_ms = {draw.choice([0, 1, 20])}\n{draw.choice(['', 'bandwidth_mbps = 1'])}",
    ]
    parts += [f"[[workers]]\nspeed = {draw.choice([1.0, 1.0, 0.5, 0.2])}" for _ in range(workers)]
    at, gone, joined = 0.0, set[int](), workers
    for _ in range(draw.choice([0, 0, 1, 2, 4, 8])):
        at = round(at + draw.random() * 0.1, 4)
        there = [worker for worker in range(1, joined) if worker not in gone]
        what = draw.choice(["crash", "leave", "pause", "slow", "partition", "rejoin", "join", "duplicate", "reorder"])
        lines = [f'kind = "{what}"', f"at = {at}"]
        if what in ("duplicate", "reorder"):
            lines += [f"share = {draw.choice([0.3, 1.0])}", f"for = {round(0.01 + draw.random(), 3)}"]
        elif what == "join":
            if joined >= 9:
                continue
            joined += 1
        elif what == "rejoin":
            if not gone:
                continue
            lines.append(f"worker = {(back := draw.choice(sorted(gone)))}")
            gone.discard(back)
        elif not there:
            continue
        else:
            lines.append(f"worker = {(hit := draw.choice(there))}")
            if what in ("crash", "leave"):
                gone.add(hit)
            else:
                lines.append(f"for = {round(0.01 + draw.random() * 0.2, 3)}")
            if what == "slow":
                lines.append(f"factor = {draw.choice([0.5, 4.0, 20.0])}")
        parts.append("\n".join(["[[events]]", *lines]))
    return "\n\n".join(parts) + "\n", workers


def gradients(rows: int, batch: int, epochs: int, sampling: str) -> Callable[[], None]:
    """A job in which every sample has a weight of its own, at first 0, that its gradient moves; a pass is one push."""

    def train() -> None:
        import torch

        import paceline

        session = paceline.init()
        torch.manual_seed(0)
        model = torch.nn.Embedding(rows, 1)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = session.prepare(model, optimizer)
        data = torch.utils.data.TensorDataset(torch.arange(rows))
        for (which,) in session.batches(data, batch_size=batch, epochs=epochs, sampling=sampling):
            optimizer.zero_grad()
            loss = model(which).mean()
            session.report(loss=1 + loss.item())
            loss.backward()
            optimizer.step()

    return train


def tables(clocks: int, staleness: int | None, *, eager: bool, barrier: bool) -> Callable[[], None]:
    """A job that counts in tables and checks what it reads."""

    def train() -> None:
        import numpy as np

        import paceline

        session = paceline.init()
        table = session.table("t", 12, 1, dtype="int64", staleness=staleness, eager=eager)
        while session.clocks < clocks:
            table.get([session.worker])
            table.inc([session.worker], np.ones((1, 1), dtype=np.int64))
            if not session.clock(work=2):
                return
        if barrier:
            session.barrier()

    return train


def job(draw: Draw, kind: str) -> tuple[Callable[[], None], bool]:
    """A job of this kind, and whether it uses every sample exactly once."""
    if kind == "tables":
        staleness = draw.choice([None, 0, 2])
        return tables(draw.randint(1, 15), staleness, eager=draw.random() < 0.3, barrier=draw.random() < 0.3), False
    sampling = "shard" if kind == "gradients" and draw.random() < 0.1 else "epoch"
    least = 12 if sampling == "shard" else 5  # a row for every worker that may come
    epochs = draw.randint(1, 2)
    once = kind == "gradients" and epochs == 1 and sampling == "epoch"
    return gradients(draw.randint(least, 90), draw.randint(1, 5), epochs, sampling), once


def virtual_run(seed: int, folder: Path) -> dict[str, object]:
    """Make one run in virtual time; return what it was and where its journal is."""
    import paceline

    draw = Draw(seed)
    kind = draw.choice(["gradients", "gradients", "gradients", "tables", "peers"])
    text, workers = scenario(draw, kind)
    place = folder / f"{seed}.toml"
    place.write_text(text)
    spec, (train, once), number = strategy(draw, kind, workers), job(draw, kind), draw.randrange(100)
    limit = draw.choice([None, None, None, draw.randint(1, 20)])
    journals = []
    told: dict[str, object] = {"seed": seed, "strategy": spec, "kind": kind, "error": None, "same": True, "unused": 0}
    for copy in range(2 if seed % TWICE == 0 else 1):
        journal = folder / f"{seed}-{copy}.jsonl"
        journals.append(journal)
        try:
            run = paceline.launch(
                train, engine="sim", scenario=place, strategy=spec, seed=number, max_versions=limit,
                evaluate_every="off", journal=journal,
            )  # fmt: skip
            if once and run.ended == "done":  # as many are used as there are: none twice if none is left out
                told["unused"] = int((run.model_state["weight"] == 0).sum())
        except Exception as error:  # noqa: BLE001 - the judge says what it means
            told["error"] = f"{type(error).__name__}: {error}"
    if len(journals) == 2:
        told["same"] = journals[0].read_bytes() == journals[1].read_bytes()
    return {**told, "journal": str(journals[0])}


def main() -> None:
    """Make the runs that the command line names."""
    folder, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    for seed in range(first, first + count):
        print(json.dumps(virtual_run(seed, folder)), flush=True)


if __name__ == "__main__":
    main()
