"""Samples that kill the process which computes them, and workers whose numbers are not finite.

With `--respawn` the samples of a dead process are issued again; if one of them killed it, it kills the next process,
and so on until none is left. A run on 800 samples, one or three of which kill (by a signal, a segmentation fault or
`os._exit`), holds if it ends with exit code 0, loses at most 8 samples, the killers among them, and names them in its
report. Processes that are killed at random must cost no sample at all. Without a server one node of three writes NaN or
infinities into its model: the models of the others, and that of the run, must be finite under every strategy, and the
node named. With a server one worker's gradients are always NaN: it must be set aside and named. A process that ends
with exit code 0 in the middle of its loop must be reported as a crash.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch

from attacks.harness import Attack, Ended, Target, Trial

BEFORE = "3b17ec6"
SAMPLES = 800
MOST_LOST = 8
SERVERLESS = [
    "gossip",
    "elastic:period=3",
    "local_sgd:period=4",
    "adaptive_gossip:warmup=3",
    "adaptive_elastic:warmup=3",
]

SCRIPT = (
    f"SAMPLES = {SAMPLES}"
    + """
import ctypes, os, pathlib, random, signal, time
import torch
import paceline

session = paceline.init()
how, seed = session.option("how", "none"), session.option("seed", 0)
killers = set(map(int, session.option("killers", "").split("+"))) if session.option("killers", "") else set()
x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True), torch.arange(len(x)))
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
chance = random.Random(os.getpid())
for number, (x, y, row) in enumerate(session.batches(rows, batch_size=16, epochs=1)):
    if killers & set(row.tolist()):
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "segfault":
            ctypes.string_at(0)
        else:
            os._exit(0)
    if how == "random" and chance.random() < 0.08 and len(list(pathlib.Path(".").glob("died-*"))) < 6:
        pathlib.Path(f"died-{os.getpid()}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "quit" and session.worker == 1 and number == 3:
        os._exit(0)
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    if how == "gradients" and session.worker == 1:
        loss = loss * float("nan")
    loss.backward()
    optimizer.step()
    if how == "models" and session.worker == 1 and number >= 4 + seed % 3:
        with torch.no_grad():
            model.weight.fill_(float("nan") if seed % 2 else float("inf"))
    time.sleep(0.01)
"""
)


class Seen(msgspec.Struct, frozen=True):
    """What came of a run."""

    ended: Ended
    report: dict[str, Any]
    folder: Path | None

    @property
    def faults(self) -> dict[str, Any]:
        found: dict[str, Any] = self.report.get("faults", {})
        return found

    @property
    def used(self) -> int:
        return int(self.report.get("samples_used", 0))

    def says(self, text: str) -> bool:
        """Whether the report does."""
        return any(text in warning for warning in self.report.get("warnings", ()))


def trained(target: Target, how: str, seed: int, *options: str, killers: str = "") -> Seen:
    """Train with this fault."""
    (target.folder / "train.py").write_text(SCRIPT)
    given = ["--workers", "3", "--evaluate-every", "off", "--set", f"how={how}", "--set", f"seed={seed}"]
    if killers:
        given += ["--set", f"killers={killers}"]
    ended = target.run("run", *given, "--seed", str(seed), *options, "train.py", timeout=90)
    folders = sorted((target.folder / "runs").glob("*"))
    folder = folders[-1] if folders else None
    saved = None if folder is None else folder / "report.json"
    report = json.loads(saved.read_text()) if saved is not None and saved.exists() else {}
    return Seen(ended, report, folder)


def judge_killers(seen: Seen, killers: str) -> Trial:
    """Hold if few samples were lost, with the killers among them, and named."""
    expected = sorted(map(int, killers.split("+")))
    lost = SAMPLES - seen.used
    faults = [
        (seen.ended.code == 0, f"exit code {seen.ended.code}: {seen.ended.err[-300:]}"),
        (len(expected) <= lost <= MOST_LOST, f"{lost} samples were lost to {len(expected)} that kill"),
        (seen.faults.get("killers") == expected, f"the report names {seen.faults.get('killers')}, not {expected}"),
    ]
    return _first(faults, f"exit code 0, {lost} lost and named, {seen.ended.seconds:.1f} s")


def judge_random(seen: Seen, deaths: int) -> Trial:
    """Hold if processes died, and no sample was lost."""
    faults = [
        (deaths > 0, "nobody died"),
        (seen.ended.code == 0, f"exit code {seen.ended.code}: {seen.ended.err[-300:]}"),
        (seen.used == SAMPLES, f"{SAMPLES - seen.used} samples were lost to {deaths} deaths"),
    ]
    return _first(faults, f"{deaths} processes died, and no sample was lost")


def judge_models(seen: Seen) -> Trial:
    """Hold if the run's model and those of the other nodes are finite, and the bad one is named."""
    models = {} if seen.folder is None else {p.stem: p for p in seen.folder.rglob("*.safetensors") if p.stem != "1"}
    broken = [name for name, path in models.items() if not is_finite(path)]
    faults = [
        (seen.ended.code == 0, f"exit code {seen.ended.code}: {seen.ended.err[-300:]}"),
        ({"model", "0", "2"} <= models.keys(), f"only the models {sorted(models)} are there"),
        (not broken, f"not finite: {', '.join(sorted(broken))}"),
        (seen.says("the model of worker 1 is not finite"), "the report does not name worker 1"),
    ]
    return _first(
        faults, f"the others' models are finite; worker 1 is named (set aside: {seen.faults.get('set_aside')})"
    )


def is_finite(path: Path) -> bool:
    """Whether a saved model has neither NaN nor infinities."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in safetensors.torch.load_file(path).values())


def judge_gradients(seen: Seen) -> Trial:
    """Hold if the worker was set aside and named, and the model is finite."""
    saved = None if seen.folder is None else seen.folder / "model.safetensors"
    faults = [
        (seen.ended.code == 0, f"exit code {seen.ended.code}: {seen.ended.err[-300:]}"),
        (saved is not None and saved.exists() and is_finite(saved), "the model is not finite"),
        (seen.faults.get("set_aside") == [1] and seen.says("worker 1 is set aside"), "worker 1 was not set aside"),
    ]
    return _first(faults, f"worker 1 was set aside; {seen.used} samples were used")


def judge_quit(seen: Seen) -> Trial:
    """Hold if the end in the middle is said, and the others used all samples."""
    faults = [
        (seen.ended.code == 0, f"exit code {seen.ended.code}: {seen.ended.err[-300:]}"),
        (seen.says("worker 1 ended in the middle of its loop (exit code 0)"), "the report does not say it"),
        (seen.used == SAMPLES, f"{seen.used} samples were used"),
    ]
    return _first(faults, "it is said, and all samples were used")


def _first(faults: list[tuple[bool, str]], else_: str) -> Trial:
    return next((Trial(False, what) for good, what in faults if not good), Trial(True, else_))


def _one(target: Target, seed: int, how: str) -> Trial:
    killers = str(17 + 97 * seed % SAMPLES)
    strategy = ["bsp", "asp", "gossip"][seed % 3]
    return judge_killers(trained(target, how, seed, "--respawn", "--strategy", strategy, killers=killers), killers)


def _several(target: Target, seed: int) -> Trial:
    killers = f"{5 + seed}+{6 + seed}+{700 + seed}"
    return judge_killers(trained(target, "signal", seed, "--respawn", killers=killers), killers)


def _random(target: Target, seed: int) -> Trial:
    seen = trained(target, "random", seed, "--respawn", "--strategy", ["bsp", "asp"][seed % 2])
    return judge_random(seen, len(list(target.folder.glob("died-*"))))


ATTACKS = [
    Attack("signal", "one sample of 800 kills its process (SIGKILL)", lambda t, s: _one(t, s, "signal"), trials=6),
    Attack("segfault", "one sample of 800 makes a segmentation fault", lambda t, s: _one(t, s, "segfault"), trials=4),
    Attack("exit", "one sample of 800 ends its process with os._exit(0)", lambda t, s: _one(t, s, "exit"), trials=4),
    Attack("several", "three samples of 800 kill, two of them in a row", _several, trials=4),
    Attack("random", "kill processes at random (no attack: nothing may be lost)", _random, trials=6, before=0),
    Attack(
        "models", "one node of three writes NaN or infinities into its model, under all five serverless strategies",
        lambda t, s: judge_models(trained(t, "models", s, "--strategy", SERVERLESS[s % 5])), trials=10, before=5,
    ),
    Attack(
        "gradients", "all gradients of one worker of three are NaN",
        lambda t, s: judge_gradients(trained(t, "gradients", s, "--strategy", "asp", "--epochs", "5")), trials=3,
    ),
    Attack(
        "quit", "a process ends with exit code 0 in the middle of its loop",
        lambda t, s: judge_quit(trained(t, "quit", s)), trials=3,
    ),
]  # fmt: skip
