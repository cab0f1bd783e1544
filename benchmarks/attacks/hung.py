"""Workers that hang: stopped by a signal, asleep in a batch, or asleep after their loop.

Three workers train a small model; worker 1 hangs in the middle. `PACELINE_WORKER_TIMEOUT` allows 2 s of silence (30 s
is the default), which the commit before does not know. A run holds if it ends within 5 s of that time, with every
sample used exactly once and the worker named in its report, before and when it is taken out. A worker that is continued
must train again. The last attack is none: healthy workers, one of whose batches takes 20 times as long as usual, must
all be kept: 200 random runs in virtual time with the default timeout, whose batches take up to 5 s, every second one
with such a batch, and a handful on processes.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from attacks.harness import Attack, Ended, Target, Trial

BEFORE = "3b17ec6"
TIMEOUT_S = 2.0
ALLOWANCE_S = 5.0  # beyond the timeout
HUNG_S = 40.0  # after which a run has not ended: a healthy one takes about five, and more on a busy machine
SAMPLES = 1200

SCRIPT = (
    f"SAMPLES = {SAMPLES}"
    + """
import os, signal, sys, time
import torch
import paceline

session = paceline.init()
how, at = session.option("how", "none"), session.option("at", 9)
x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True), torch.arange(len(x)))
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
trained = open(f"trained-{session.worker}", "a")
for number, (x, y, row) in enumerate(session.batches(rows, batch_size=8, epochs=1)):
    time.sleep(0.1 if how == "pause" else 0.02)
    if session.worker == 1 and number == at:
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "sleep":
            time.sleep(1e9)
        elif how == "pause":
            if not os.fork():
                time.sleep(4)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "long":
            time.sleep(0.4)
    optimizer.zero_grad()
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
    print(number, file=trained, flush=True)
if how == "after" and session.worker == 1:
    time.sleep(1e9)
"""
)


HEALTHY_RUNS = 20  # in one process
HEALTHY = r"""
import json, random, sys
from pathlib import Path
import torch
import paceline

BATCH, SAMPLES = 4, 240

def train():
    session = paceline.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for (x,) in session.batches(torch.utils.data.TensorDataset(torch.ones(SAMPLES, 4)), batch_size=BATCH, epochs=2):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()

for seed in range(int(sys.argv[1]), int(sys.argv[2])):
    draw = random.Random(seed)
    speeds = [draw.choice([1.0, 1.0, 0.7, 0.4]) for _ in range(draw.randint(2, 6))]
    batch_s = draw.choice([0.05, 0.5, 2.0, 5.0])
    # Where a batch is to take 20 times the usual, it must not by chance take 60 times as long.
    jitter = draw.choice(["none", "lognormal:0.05"] if seed % 2 else ["none", "lognormal:0.3", "exponential"])
    lines = [f"seed = {seed}", f"[compute]\nseconds_per_sample = {batch_s / BATCH}\njitter = '{jitter}'"]
    lines += [f"[[workers]]\nspeed = {speed}" for speed in speeds]
    if seed % 2:
        worker = draw.randrange(len(speeds))
        took = 20 * batch_s / speeds[worker]
        at = draw.uniform(8, 20) * batch_s
        lines.append(f"[[events]]\nkind = 'slow'\nat = {at}\nworker = {worker}\nfor = {took}\nfactor = 20.0")
    place = Path(f"{seed}.toml")
    place.write_text("\n".join(lines))
    strategy = draw.choice(["bsp", "asp", "ssp:staleness=2", "dasp", "balanced", "local_sgd:period=3", "gossip"])
    run = paceline.launch(train, engine="sim", scenario=place, strategy=strategy, seed=seed, evaluate_every="off")
    faults, used = run.summary.faults, run.summary.samples_used
    print(json.dumps([seed, strategy, batch_s, faults.timeouts, used == 2 * SAMPLES]), flush=True)
"""


class Seen(msgspec.Struct, frozen=True):
    """What came of a run."""

    ended: Ended
    report: dict[str, Any]
    steps: int  # of worker 1
    model: bool  # there is a trained model

    @property
    def used(self) -> int:
        return int(self.report.get("samples_used", 0))

    @property
    def timeouts(self) -> int:
        return int(self.report.get("faults", {}).get("timeouts", 0))

    @property
    def named(self) -> bool:
        return any("worker 1" in text for text in self.report.get("warnings", ()))

    @property
    def announced(self) -> bool:
        """Whether worker 1 was named as silent before it was taken out."""
        said = [text for text in self.report.get("warnings", ()) if text.startswith("worker 1 has sent nothing for ")]
        return len(said) > 1 and "the others go on without it in " in said[0]


def hung(target: Target, how: str, at: int, strategy: str = "bsp", patience: str = f"{TIMEOUT_S:g}..8") -> Seen:
    """Train with a worker that hangs in this way at that batch."""
    (target.folder / "train.py").write_text(SCRIPT)
    options = ["--workers", "3", "--strategy", strategy, "--evaluate-every", "off", "--seed", "0", "--json"]
    ended = target.run(
        "run", *options, "--set", f"how={how}", "--set", f"at={at}", "train.py",
        environment={"PACELINE_WORKER_TIMEOUT": patience}, timeout=HUNG_S,
    )  # fmt: skip
    folders = sorted((target.folder / "runs").glob("*"))
    saved = folders[-1] / "report.json" if folders else Path("none")
    report = json.loads(saved.read_text()) if saved.exists() else {}
    trained = target.folder / "trained-1"
    steps = len(trained.read_text().splitlines()) if trained.exists() else 0
    return Seen(ended, report, steps, bool(folders) and (folders[-1] / "model.safetensors").exists())


def judge_hung(seen: Seen, step_s: float = 0.03) -> Trial:
    """Hold if the run ended by itself, soon, with all samples, and says who hung; a step takes so long in it."""
    if seen.ended.code == -9:
        return Trial(False, f"the run had not ended after {HUNG_S:g} s")
    faults = [
        (seen.ended.code == 0, f"exit code {seen.ended.code}: {seen.ended.err[-300:]}"),
        (seen.used == SAMPLES, f"{seen.used} of {SAMPLES} samples were used"),
        (seen.timeouts == 1, f"{seen.timeouts} workers were taken out"),
        (seen.named, "the report does not name worker 1"),
        (seen.announced, "worker 1 was not named before it was taken out"),
        (seen.steps < SAMPLES // 8, "worker 1 did not hang at all"),
        (float(seen.report.get("seconds", 1e9)) < step_s * SAMPLES / 8 + TIMEOUT_S + ALLOWANCE_S, "it took too long"),
    ]
    return _first(faults, f"ended after {seen.ended.seconds:.1f} s, {seen.report.get('seconds', 0):.1f} s of training")


def judge_back(seen: Seen, at: int) -> Trial:
    """Hold if a worker that was stopped for a while trained on, and each sample was used once."""
    trial = judge_hung(seen, step_s=0.15)
    if not trial.held:
        return trial
    return _first(
        [(seen.steps > at + 1, "worker 1 made no step after it came back")], f"{trial.what}; worker 1 came back"
    )


def judge_after(seen: Seen) -> Trial:
    """Hold if the run ended with an error that says so, and with its model."""
    if seen.ended.code == -9:
        return Trial(False, f"the run had not ended after {HUNG_S:g} s")
    said = "did not end after the run" in seen.ended.said and seen.named
    faults = [
        (seen.ended.code == 1, f"exit code {seen.ended.code}"),
        (said, "nobody says which script did not end"),
        (seen.model and seen.used == SAMPLES, "the model is not there, or not trained"),
    ]
    return _first(faults, f"ended with exit code 1 after {seen.ended.seconds:.1f} s; the model is there")


def judge_healthy(seen: Seen) -> Trial:
    """Hold if nobody was taken out."""
    faults = [
        (seen.ended.code == 0, f"exit code {seen.ended.code}: {seen.ended.err[-300:]}"),
        (seen.used == SAMPLES, f"{seen.used} of {SAMPLES} samples were used"),
        (seen.timeouts == 0, f"{seen.timeouts} healthy workers were taken out"),
    ]
    return _first(faults, "all workers were kept")


def healthy_runs(target: Target, seed: int) -> Trial:
    """Make many runs of healthy workers in virtual time; hold if nobody was taken out of any."""
    (target.folder / "healthy.py").write_text(HEALTHY)
    numbers = (str(seed * HEALTHY_RUNS), str((seed + 1) * HEALTHY_RUNS))
    return judge_runs(target.run(*numbers, program=("healthy.py",), timeout=300))


def judge_runs(ended: Ended) -> Trial:
    """Hold if every run is told of, and all workers were kept."""
    told = [json.loads(line) for line in ended.out.splitlines() if line.startswith("[")]
    faults = [
        (ended.code == 0, f"exit code {ended.code}: {ended.err[-300:]}"),
        (len(told) == HEALTHY_RUNS, f"{len(told)} of {HEALTHY_RUNS} runs"),
    ]
    for seed, strategy, batch_s, timeouts, whole in told:
        about = f"seed {seed}, {strategy}, batches of {batch_s} s"
        faults.append((timeouts == 0, f"{about}: {timeouts} healthy workers were taken out"))
        faults.append((whole, f"{about}: not all samples were used"))
    return _first(faults, f"{len(told)} runs, all workers were kept")


def _first(faults: list[tuple[bool, str]], else_: str) -> Trial:
    return next((Trial(False, what) for good, what in faults if not good), Trial(True, else_))


def _at(seed: int) -> int:
    return 5 + 3 * (seed % 7)


ATTACKS = [
    Attack(
        "stopped", "stop a worker's process in a batch (SIGSTOP), under bsp",
        lambda target, seed: judge_hung(hung(target, "stop", _at(seed))), trials=8,
    ),
    Attack(
        "asleep", "let a worker sleep for ever in a batch, under bsp and ssp",
        lambda target, seed: judge_hung(hung(target, "sleep", _at(seed), ["bsp", "ssp:staleness=2"][seed % 2])),
        trials=8,
    ),
    Attack(
        "node", "stop a node of a run without a server, which the average of all others waits for",
        lambda target, seed: judge_hung(hung(target, "stop", _at(seed), f"local_sgd:period={4 + seed % 2}")), trials=8,
    ),
    Attack(
        "back", "stop a worker for 4 s and let it go on: its late push must not count",
        lambda target, seed: judge_back(hung(target, "pause", _at(seed)), _at(seed)), trials=6,
    ),
    Attack(
        "after", "let a script sleep for ever after its loop",
        lambda target, seed: judge_after(hung(target, "after", seed, patience=f"{TIMEOUT_S:g}..4")), trials=4,
    ),
    Attack(
        "healthy", "a batch that takes 20 times as long as usual, on a healthy worker (no attack: nobody may be lost)",
        lambda target, seed: judge_healthy(hung(target, "long", _at(seed), ["bsp", "asp", "gossip"][seed % 3])),
        trials=6, before=0,
    ),
    Attack(
        "healthy in virtual time",
        f"{HEALTHY_RUNS} runs of healthy workers, in half of which a batch takes 20 times as long",
        healthy_runs, trials=10, before=0,
    ),
]  # fmt: skip
