"""The kernel's promises, judged by a generator and a checker that share no code with paceline.

A thousand random runs in virtual time (clusters, faults, joins, leaves, pauses, message faults, every strategy with
random options, gradients, tables, nodes without a server), and runs on real processes of which workers, the server and
the nursery are killed at random moments. Their journals alone are judged: every sample of every epoch settled once, no
push applied twice, versions consecutive, the mass rule, the bounds of `ssp` and `dssp`, whom `bsp`, `fastest_k` and
`k_async` wait for, a worker that is gone does nothing, weights of gossip kept, the end line last. Every tenth virtual
run is made twice and must write the same bytes. In virtual runs of one epoch every sample has a weight of its own, so
that the model shows that each was used. A run on real processes must also come to its model or tables with exit
code 0, or end with the documented code and say why.
"""

import json
import random
import time
from pathlib import Path

import msgspec

from attacks import foreign_checker, foreign_runs, own_processes
from attacks.harness import Attack, Ended, Target, Trial, finish

BEFORE = "3b17ec6"
RUNS = 25  # virtual ones of a trial, in one process

REAL = """
import time
import numpy as np
import torch
import paceline

session = paceline.init()
pause = {pause} * (1 + session.worker)
if {tables}:
    table = session.table("t", 8, 2)
    while session.clocks < {clocks}:
        table.get([session.worker % 8])
        table.inc([session.worker % 8], np.ones((1, 2), dtype=np.float32))
        time.sleep(pause)
        if not session.clock(work=2):
            break
else:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = session.prepare(model, optimizer)
    data = torch.utils.data.TensorDataset(torch.randn({rows}, 3), torch.randn({rows}, 2))
    for x, y in session.batches(data, batch_size=3, epochs=2):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        session.report(loss=loss.item())
        loss.backward()
        time.sleep(pause)
        optimizer.step()
"""


def virtual_runs(target: Target, seed: int) -> Trial:
    """Make many runs in virtual time and judge their journals."""
    program = (str(Path(foreign_runs.__file__)), str(target.folder), str(seed * RUNS), str(RUNS))
    ended = target.run(program=program, timeout=300)
    told = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    if ended.code != 0 or len(told) != RUNS:
        return Trial(False, f"exit {ended.code} after {len(told)} runs: {ended.err[-300:]}")
    lines, twice = 0, 0
    for run in told:
        about = f"seed {run['seed']}, {run['kind']}, {run['strategy']}"
        if run["error"] is not None:
            return Trial(False, f"{about}: {run['error']}")
        if run["unused"]:
            return Trial(False, f"{about}: {run['unused']} samples were not used, and others twice")
        if not run["same"]:
            return Trial(False, f"{about}: two equal runs wrote different bytes")
        journal = foreign_checker.read(Path(run["journal"]))
        found = foreign_checker.faults(journal)
        if found:
            return Trial(False, f"{about}: {found[0]}")
        lines, twice = lines + len(journal), twice + (run["seed"] % foreign_runs.TWICE == 0)
    return Trial(True, f"{len(told)} runs, {twice} of them made twice, {lines:,} lines judged")


class RealRun:
    """A random run on real processes."""

    def __init__(self, target: Target, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        self.target = target
        self.kind = draw.choice(["gradients", "gradients", "tables", "peers"])
        self.workers = draw.randint(2, 4)
        self.strategy = foreign_runs.strategy(draw, self.kind, 2)
        self.respawn = draw.random() < 0.5
        (target.folder / "train.py").write_text(
            REAL.format(pause=draw.choice([0.001, 0.004]), tables=self.kind == "tables", clocks=draw.randint(60, 120),
                        rows=draw.randint(250, 500))
        )  # fmt: skip

    def options(self) -> list[str]:
        """Of `paceline run`."""
        draw = self.draw
        return [
            "run", "--workers", str(self.workers), "--strategy", self.strategy, "--checkpoint-every",
            draw.choice(["5v", "20v", "0.1s"]), "--transport", draw.choice(["shm", "zeromq"]), "--evaluate-every",
            "off", "--threads", "1", "--runs-dir", "runs", *(["--respawn"] if self.respawn else []), "train.py",
        ]  # fmt: skip

    @property
    def folder(self) -> Path | None:
        """The run's."""
        found = [path.parent for path in self.target.folder.glob("runs/*/run.json")]
        return found[0] if found else None

    def has_checkpoint(self) -> bool:
        """Whether a killed server can be started again."""
        return self.folder is not None and any(self.folder.glob("checkpoints/v*/checkpoint.json"))

    def judged(self, ended: Ended, blows: list[str]) -> Trial:
        """Judge how it ended and what its journal says."""
        about = f"{self.kind}, {self.strategy}, {self.workers} workers, killed: {', '.join(blows) or 'nobody'}"
        if ended.code not in (0, 4) or (ended.code == 4 and "internal error" in ended.said):
            return Trial(False, f"{about}: exit {ended.code}: {ended.said[-400:]}")
        if ended.code == 4 and not any(word in ended.said for word in ("--respawn", "--resume", "died", "killed")):
            return Trial(False, f"{about}: exit 4 without a reason: {ended.said[-400:]}")
        folder = self.folder
        if folder is None:
            return Trial(False, f"{about}: it left no folder")
        if ended.code == 0 and not [*folder.glob("model*.safetensors"), *folder.glob("tables.safetensors")]:
            return Trial(False, f"{about}: exit 0 and neither model nor tables")
        lines = foreign_checker.read(next(folder.glob("journal.jsonl*")))
        found = foreign_checker.faults(lines, ended=ended.code == 0)
        if found:
            return Trial(False, f"{about}: {found[0]}")
        return Trial(True, f"{about}: exit {ended.code}, {len(lines)} lines judged")


def real_kills(target: Target, seed: int) -> Trial:
    """Kill processes of a run at random moments and judge its journal."""
    run = RealRun(target, seed)
    started, blows = target.start(*run.options()), list[str]()
    for _ in range(run.draw.choice([1, 2, 3])):
        if not own_processes.wait_until(run.has_checkpoint, started):
            break
        time.sleep(run.draw.random() * 0.3)
        victims = ["server", "server", "nursery", *(["worker"] if run.respawn or blows.count("worker") == 0 else [])]
        victim = run.draw.choice(victims)
        if started.poll() is None and own_processes.kill_one(started, victim, run.draw):
            blows.append(victim)
        time.sleep(run.draw.random() * 0.3)
    return msgspec.structs.replace(run.judged(finish(started), blows), kills=len(blows))


ATTACKS = [
    Attack(
        "virtual runs",
        f"{RUNS} random runs in virtual time, their journals judged by a foreign checker",
        virtual_runs,
        trials=40,
        before=0,
    ),
    Attack(
        "real processes are killed",
        "kill -9 of workers, the server and the nursery at random moments, their journals judged by a foreign checker",
        real_kills,
        trials=45,
        before=0,
        kills=60,
    ),
]
