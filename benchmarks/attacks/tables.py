"""Increments of tables, counted while servers and whole runs are killed.

Workers add to several tables: each counts its own iterations, all count together in shared rows, and an object given to
`session.keep` counts along. Strategies, tables (staleness, eager, small caches, barriers), transports and the intervals
of checkpoints are drawn at random, and so are the moments at which the server is killed and started again, or the whole
run is killed or interrupted and then resumed. A trial holds if every count at the end is exact: not one increment is
missing, and not one is there twice.
"""

import contextlib
import random
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

from safetensors.numpy import load_file

from attacks import own_processes
from attacks.harness import Attack, Ended, Target, Trial, finish

BEFORE = "3b17ec6"

SCRIPT = """
import os, random, time
import numpy as np
import paceline

class Count:
    n = 0
    def state_dict(self):
        return {{"n": self.n}}
    def load_state_dict(self, state):
        self.n = state["n"]

session = paceline.init()
me, chance = session.worker, random.Random({seed} + session.worker)
own = session.table("own", {workers}, 2, dtype="int64"{own})
shared = session.table("shared", 5, 3, dtype="int64"{shared})
floats = session.table("floats", {workers}, 1, dtype="float64"{floats})
kept = Count()
session.keep("kept", kept)

def iteration(i):
    if {reads}:
        shared.get([chance.randrange(5)])
        seen = int(own.get([me])[0, 0])
        if seen != i:
            print(f"WRONG worker {{me}} at clock {{i}} reads {{seen}} of its own increments", flush=True)
    own.inc([me], np.array([[1, i]]))
    rows = [chance.randrange(5) for _ in range(3)]
    shared.inc(rows, np.ones((3, 3), dtype=np.int64))
    if i % 3 == me % 3:
        floats.inc([me], np.ones((1, 1)))
    time.sleep({pause} * chance.random() * (1 + me))
    kept.n += 1
    return session.clock(work=1 + me)

{loop}
print(f"DONE worker {{me}}", flush=True)
"""
BY_CLOCKS = """
while session.clocks < {clocks}:
    if kept.n != session.clocks:
        print(f"WRONG worker {{me}} at clock {{session.clocks}} has kept {{kept.n}}", flush=True)
    if {barrier} and session.clocks % {barrier} == 0 and session.clocks:
        session.barrier()
    if not iteration(session.clocks):
        break
"""
BY_RANGE = """
for i in range({clocks}):
    iteration(i)
    if {barrier} and (i + 1) % {barrier} == 0:
        session.barrier()
"""
STRATEGIES = [
    "bsp", "asp", "ssp:staleness=0", "ssp:staleness=1", "ssp:staleness=3", "dssp:lower=1,upper=4", "adaptive_sync",
]  # fmt: skip
KINDS = ["", ", staleness=0", ", staleness=2", ", eager=True", ", cache_rows=2", ", eager=True, cache_rows=1"]


def _began(folder: Path) -> int:
    return (folder / "run.json").stat().st_mtime_ns


class Job:
    """One random run."""

    def __init__(self, target: Target, seed: int, *, resumed: bool) -> None:
        chance = self.chance = random.Random(seed)
        self.target = target
        self.workers = chance.choice([2, 3, 4])
        self.clocks = chance.randrange(60, 120)
        loop = BY_CLOCKS if resumed else chance.choice([BY_CLOCKS, BY_RANGE])
        barrier = chance.choice([0, 0, 0, 7, 20])
        self.what = {
            "seed": seed,
            "workers": self.workers,
            "own": chance.choice(KINDS),
            "shared": chance.choice(KINDS),
            "floats": chance.choice(KINDS),
            "reads": chance.random() < 0.7,
            "pause": chance.choice([0.0, 0.002, 0.006]) if seed else 0.006,
            "loop": loop.format(clocks=self.clocks, barrier=barrier),
        }
        (target.folder / "train.py").write_text(SCRIPT.format(**self.what))
        self.strategy = chance.choice(STRATEGIES) if seed else "ssp:staleness=3"
        self.every = chance.choice(["2v", "5v", "17v", "0.05s", "0.2s"]) if seed else "17v"
        self.transport = chance.choice(["shm", "shm", "zeromq"])

    def start(self) -> subprocess.Popen[str]:
        """Start it."""
        return self._started(
            "run", "--workers", str(self.workers), "--strategy", self.strategy, "--checkpoint-every", self.every,
            "--transport", self.transport, "--evaluate-every", "off", "--threads", "1", "--runs-dir", "runs",
            "train.py",
        )  # fmt: skip

    def resume(self, run: int) -> subprocess.Popen[str]:
        """Go on with this run of it, counted from 1."""
        return self._started("resume", str(self.folders[run - 1]))

    def _started(self, *arguments: str) -> subprocess.Popen[str]:
        # Where every process is killed at once nobody is left to remove temporary files: the attempt's folder has them.
        temporary = self.target.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        return self.target.start(*arguments, environment={"TMPDIR": str(temporary)})

    @property
    def folders(self) -> list[Path]:
        """Of its runs, the latest last."""
        return sorted((path.parent for path in self.target.folder.glob("runs/*/run.json")), key=_began)

    def has_checkpoint(self, run: int = 1) -> bool:
        """Whether this run of it, counted from 1, can be gone on with."""
        folders = self.folders
        return len(folders) >= run and any(folders[run - 1].glob("checkpoints/v*/checkpoint.json"))

    def judged(self, ended: Ended, blows: int) -> Trial:
        """Count what is in the tables at the end."""
        about = f"{self.strategy}, {self.workers} workers, {self.clocks} clocks, every {self.every}, {blows} blows"
        if ended.code != 0:
            return Trial(False, f"{about}: exit {ended.code}: {ended.said[-300:]}")
        if "WRONG" in ended.said:
            return Trial(False, f"{about}: {ended.said[ended.said.index('WRONG') :].splitlines()[0]}")
        path = max(self.target.folder.glob("runs/*/tables.safetensors"), key=lambda path: path.stat().st_mtime_ns)
        tables = load_file(path)
        wrong = []
        for worker in range(self.workers):
            expected = (self.clocks, sum(range(self.clocks)))
            if tuple(tables["own"][worker]) != expected:
                wrong.append(f"worker {worker} counts {tables['own'][worker].tolist()} instead of {list(expected)}")
            thirds = sum(i % 3 == worker % 3 for i in range(self.clocks))
            if tables["floats"][worker, 0] != thirds:
                wrong.append(f"worker {worker} counts {tables['floats'][worker, 0]} thirds instead of {thirds}")
        together = 3 * self.workers * self.clocks
        if (tables["shared"].sum(axis=0) != together).any():
            wrong.append(f"all count {tables['shared'].sum(axis=0).tolist()} instead of {together}")
        return Trial(not wrong, f"{about}: " + ("; ".join(wrong) or f"{together} shared increments, all exact"))


def kill_servers(target: Target, seed: int) -> Trial:
    """Kill the server once or several times while its workers live on."""
    job = Job(target, seed, resumed=False)
    started, blows = job.start(), 0
    for _ in range(job.chance.choice([1, 2, 3])):
        if not own_processes.wait_until(job.has_checkpoint, started):
            break
        time.sleep(job.chance.random() * 0.4)
        blows += own_processes.kill_one(started, "server", job.chance)
        own_processes.wait_until(lambda: bool(own_processes.named(started.pid, "server")), started)
    return job.judged(finish(started), blows)


def kill_runs(target: Target, seed: int) -> Trial:
    """Kill or interrupt the whole run, and go on with it, once or several times; now and then the server, too."""
    job = Job(target, seed, resumed=True)
    started, blows = job.start(), 0
    for run in range(1, job.chance.choice([2, 2, 3])):
        if not own_processes.wait_until(partial(job.has_checkpoint, run), started):
            break
        time.sleep(job.chance.random() * 0.4)
        if job.chance.random() < 0.3:
            blows += own_processes.kill_one(started, "server", job.chance)
            time.sleep(job.chance.random() * 0.3)
        if started.poll() is not None:
            break
        if job.chance.random() < 0.3:
            with contextlib.suppress(ProcessLookupError):
                started.send_signal(signal.SIGINT)
        else:
            own_processes.kill_all(started)
        blows += 1
        ended = finish(started)
        if ended.code == 0:
            return job.judged(ended, blows)
        if ended.code not in (-signal.SIGKILL, 130) or not job.has_checkpoint(run):
            return Trial(False, f"exit {ended.code} after {blows} blows: {ended.said[-300:]}")
        started = job.resume(run)
    return job.judged(finish(started), blows)


ATTACKS = [
    Attack(
        "a server is killed",
        "kill -9 of the server process, one to three times in a run whose workers live on",
        kill_servers,
        trials=30,
        before=4,
    ),
    Attack(
        "a run is killed and resumed",
        "kill -9 of all processes of a run, or Ctrl-C, then `paceline resume`, once or twice",
        kill_runs,
        trials=30,
        before=4,
    ),
]
