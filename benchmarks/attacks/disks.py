"""Disks that are full, read-only or damaged, and a server that is killed too early.

A run trains on a small disk (a tmpfs that root mounts) which is filled so far that it fails at another point each time:
the run's folder, its journal, a checkpoint, a log, the report, the model. It must end without a traceback, print its
report if it trained, and name a file with the model that can be read; what is left of the journal must be readable up
to the cut and replay to the same decisions. A read-only disk must be refused before the script is run. Checkpoints are
damaged at random (cut, bits turned, emptied, parts missing, of another version): the run must go on from the newest
whole one and name both, and where none is whole say so in one line. A server that is killed before training begins
must not cost the run. Of two runs on one journal the second must be refused and the journal stay as it was.
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from attacks.harness import Attack, Ended, Target, Trial, finish, kill

BEFORE = "3b17ec6"
LEVELS = 20
DISK = 4 << 20  # bytes
SAVING, PLAIN = 420 << 10, 90 << 10  # bytes that the run below needs on its disk, with checkpoints and without
SCRIPT = """
import os, pathlib, signal, sys, time
import torch
import paceline

torch.manual_seed(0)
session = paceline.init()


def kill_the_server(moment):
    mark = pathlib.Path("killed")
    if moment != os.environ.get("KILL_AT") or session.worker != 0 or mark.exists():
        return
    mark.touch()
    mine = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1]
    for each in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            title, parent = (each / "cmdline").read_bytes(), (each / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if title.startswith(b"paceline: server") and parent == mine:
            os.kill(int(each.name), signal.SIGKILL)


kill_the_server("start")
pathlib.Path("ran" if not os.environ.get("WAIT") else "first").touch()
x = torch.randn(600, 64)
y = x @ torch.randn(64, 1)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.prepare(model, optimizer)
kill_the_server("prepared")
for n, (a, b) in enumerate(session.batches(torch.utils.data.TensorDataset(x, y), batch_size=10, epochs=1)):
    if n == 0:
        kill_the_server("loop")
    while os.environ.get("WAIT") and not pathlib.Path("go").exists():
        pathlib.Path("waits").touch()
        time.sleep(0.02)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(a), b).backward()
    optimizer.step()
"""
TRAIN = ("run", "--workers", "2", "--threads", "1", "--evaluate-every", "off", "--json")
UPDATES = 30  # of the script


def command(*options: str) -> tuple[str, ...]:
    """The command that trains."""
    return (*TRAIN, *options, "train.py")


@contextlib.contextmanager
def small_disk(place: Path, options: str = "") -> Iterator[Path]:
    """A disk of its own, as only root can make one."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}{options}", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def prepared(target: Target) -> None:
    """Put the script there."""
    (target.folder / "train.py").write_text(SCRIPT)


def faults_of(ended: Ended, *, codes: tuple[int, ...]) -> list[str]:
    """What no end of a run may show."""
    found = []
    if "Traceback" in ended.said or "Exception ignored" in ended.said:
        found.append("a traceback: " + ended.err.strip().splitlines()[-1][:200])
    if ended.code not in codes:
        found.append(f"exit code {ended.code}: {ended.err.strip()[-200:]}")
    return found


def report_of(ended: Ended) -> dict | None:
    """The report on standard output."""
    try:
        return json.loads(ended.out)
    except ValueError:
        return None


def faults_of_model(target: Target, report: dict, ended: Ended) -> list[str]:
    """The report names a file with the model, wherever it is."""
    from safetensors.torch import load_file

    place = report["model"]
    if place is None:
        return [] if "the trained model is lost" in ended.err and ended.code else ["no model, and nobody says so"]
    try:
        names = sorted(load_file(target.folder / place))
    except Exception as error:  # noqa: BLE001 - whatever is wrong with it
        return [f"the model in {place} cannot be read: {error}"]
    return [] if names == ["0.bias", "0.weight", "2.bias", "2.weight"] else [f"the model in {place} has {names}"]


def faults_of_journal(target: Target, journal: Path) -> list[str]:
    """What is left of a journal is its beginning."""
    if not journal.exists():
        return []
    replayed = target.run("replay", str(journal))
    if "Traceback" in replayed.said or replayed.code not in (0, 2):
        return [f"the journal cannot be replayed ({replayed.code}): {replayed.said.strip()[-200:]}"]
    return [] if len(replayed.said.strip().splitlines()) == 1 else ["replay says more than one line"]


def fill(disk: Path, left: int) -> None:
    """Leave so many bytes on the disk."""
    with (disk / "filler").open("wb") as file:
        room = os.statvfs(disk)
        file.write(b"\0" * max(0, room.f_bavail * room.f_frsize - left))


def full(target: Target, seed: int) -> Trial:
    """The disk of the run's folder is full at a level of its own."""
    prepared(target)
    faults: list[str] = []
    level = (7 + 7 * seed) % LEVELS
    saves = level % 2 == 0
    left = (SAVING if saves else PLAIN) * level // LEVELS
    with small_disk(target.folder / "disk") as disk:
        fill(disk, left)
        options = ("--checkpoint-every", "5v") if saves else ()
        options += ("--journal", "disk/journal.jsonl.gz") if level % 5 == 3 else ()
        ended = target.run(*command("--runs-dir", "disk/runs", *options))
        faults += faults_of(ended, codes=(0, 2))
        trained = (target.folder / "ran").exists()
        report = report_of(ended)
        if report is None and trained:
            faults.append("no report")
        model = None
        if report is not None:
            model = report["model"]
            faults += faults_of_model(target, report, ended)
        journals = [*disk.glob("runs/*/journal.jsonl"), disk / "journal.jsonl.gz"]
        faults += [fault for journal in journals for fault in faults_of_journal(target, journal)]
        if model is not None and "/disk/" not in model and not model.startswith("disk/"):
            shutil.rmtree(Path(model).parent)
    what = f"{left:,} bytes left: exit code {ended.code}, report {report is not None}, model {model}"
    return Trial(not faults, "; ".join([*faults, what]))


def read_only(target: Target, seed: int) -> Trial:
    """The run's folder, or the journal's, cannot be written to."""
    prepared(target)
    option = ("--runs-dir", "disk/runs") if seed % 2 == 0 else ("--runs-dir", "runs", "--journal", "disk/j.jsonl")
    with small_disk(target.folder / "disk", ",ro"):
        ended = target.run(*command(*option))
    lines = ended.err.strip().splitlines()
    faults = faults_of(ended, codes=(2,))
    if "disk/" not in lines[-1]:
        faults.append(f"the folder is not named: {lines[-1]}")
    if (target.folder / "ran").exists():
        faults.append("refused after the script had been run")
    return Trial(not faults, "; ".join([*faults, lines[-1]]))


def _damage(place: Path, chance: random.Random) -> str:
    """Damage a checkpoint in one of many ways; return which."""
    file = chance.choice(sorted(place.iterdir()))
    data = bytearray(file.read_bytes())
    match chance.choice(["cut", "bits", "empty", "missing", "version", "bytes"]):
        case "cut":
            file.write_bytes(data[: chance.randrange(len(data))])
            return f"{file.name} cut"
        case "bits":
            for _ in range(chance.randrange(1, 9)):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            file.write_bytes(data)
            return f"bits of {file.name} turned"
        case "empty":
            file.write_bytes(b"")
            return f"{file.name} emptied"
        case "missing":
            file.unlink()
            return f"{file.name} removed"
        case "version":
            head = json.loads((place / "checkpoint.json").read_text())
            (place / "checkpoint.json").write_text(json.dumps({**head, "format": 99}))
            return "of another version"
        case _:
            begin = chance.randrange(len(data))
            data[begin : begin + 64] = chance.randbytes(64)
            file.write_bytes(data)
            return f"64 bytes of {file.name} overwritten"


def damaged(target: Target, seed: int) -> Trial:
    """The newest one or two checkpoints are damaged; with every fifth seed all of them."""
    prepared(target)
    chance = random.Random(seed)
    first = target.run(*command("--runs-dir", "runs", "--checkpoint-every", "5v", "--max-versions", "20"))
    (run,) = (target.folder / "runs").iterdir()
    checkpoints = sorted((run / "checkpoints").iterdir())
    all_of_them = seed % 5 == 4
    victims = checkpoints if all_of_them else checkpoints[-chance.randrange(1, len(checkpoints)) :]
    how = [_damage(each, chance) for each in victims]
    ended = target.run("resume", "--json", str(run), "--max-versions", str(UPDATES))
    faults = [] if first.code == 0 and len(checkpoints) == 3 else [f"the first run failed: {first.err[-300:]}"]
    if all_of_them:
        faults += faults_of(ended, codes=(2,))
        faults += [] if "damaged" in ended.err.strip().splitlines()[-1] else ["nobody says that all are damaged"]
    else:
        faults += faults_of(ended, codes=(0,))
        older, newest = checkpoints[-len(victims) - 1].name, checkpoints[-1].name
        warnings = [line for line in ended.err.splitlines() if older in line]
        if not any(newest in line for line in warnings):
            faults.append(f"no warning names {newest} and {older}: {ended.err[-300:]}")
        report = report_of(ended)
        if report is None or report["samples_used"] != 600:
            faults.append(f"samples used: {report and report['samples_used']} of 600")
    return Trial(not faults, "; ".join([*faults, f"exit code {ended.code}: {', '.join(how)}"]))


MOMENTS = ("start", "prepared", "loop")
OPTIONS = ((), ("--respawn",), ("--checkpoint-every", "5v"), ("--respawn", "--checkpoint-every", "5v"))
EARLY = [each for each in itertools.product(MOMENTS, OPTIONS) if each[0] != "loop" or "--checkpoint-every" in each[1]]


def killed_early(target: Target, seed: int) -> Trial:
    """The server is killed when a script begins, when it has prepared its model, or in its first batch."""
    prepared(target)
    moment, options = EARLY[seed % len(EARLY)]
    transport = ("--transport", "zeromq") if seed // len(EARLY) % 2 else ()
    ended = target.run(*command("--runs-dir", "runs", *options, *transport), environment={"KILL_AT": moment})
    faults = faults_of(ended, codes=(0,))
    if not (target.folder / "killed").exists():
        faults.append("the server was not killed")
    report = report_of(ended)
    if report is None or report["samples_used"] != 600:
        faults.append(f"samples used: {report and report['samples_used']} of 600")
    else:
        faults += faults_of_journal(target, target.folder / report["journal"])
    return Trial(not faults, "; ".join([*faults, f"killed at {moment} with {' '.join(options) or 'no option'}"]))


def one_journal(target: Target, seed: int) -> Trial:
    """A second run is given the journal of the first; with odd seeds the first is then killed, and a third starts."""
    prepared(target)
    name = "j.jsonl.gz" if seed % 4 > 1 else "j.jsonl"
    given = ("--journal", name)
    first = target.start(*command("--runs-dir", "one", *given), environment={"WAIT": "1"})
    faults: list[str] = []
    try:
        while not (target.folder / "waits").exists() and first.poll() is None:
            time.sleep(0.05)
        second = target.run(*command("--runs-dir", "two", *given))  # the first waits in its first batch
        faults += faults_of(second, codes=(2,))
        if (target.folder / "ran").exists():
            faults.append("the second run was not refused")
        elif name not in second.err.strip().splitlines()[-1]:
            faults.append(f"the journal is not named: {second.err.strip()[-200:]}")
        (target.folder / "go").touch(exist_ok=True)
        if seed % 2:
            kill(first)
            first.communicate()
            _wait_for_children(target)
            third = target.run(*command("--runs-dir", "three", *given))
            faults += faults_of(third, codes=(0,))
        else:
            ended = finish(first)
            faults += faults_of(ended, codes=(0,))
    finally:
        kill(first)
        with contextlib.suppress(ValueError):
            first.communicate()
    replayed = target.run("replay", name)
    if replayed.code != 0:
        faults.append(f"the journal does not replay: {replayed.said[-300:]}")
    return Trial(not faults, "; ".join([*faults, second.err.strip().splitlines()[-1]]))


def _wait_for_children(target: Target) -> None:
    """Wait until the server of a killed launcher, which lives in a session of its own, has noticed and gone."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        places = []
        for each in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):
                places.append((each.readlink(), int(each.parent.name)))
        if not any(place == target.folder for place, _ in places):
            return
        time.sleep(0.05)
    for place, process in places:
        if place == target.folder:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


ATTACKS = [
    Attack("full disk", "the disk of the run's folder is full at one of 20 levels", full, LEVELS, before=2, root=True),
    Attack("read-only disk", "the disk of the run's folder is read-only", read_only, 4, before=0, root=True),
    Attack("damaged checkpoints", "the newest checkpoints are damaged at random", damaged, 20, before=3),
    Attack("early death of the server", "the server is killed before training begins", killed_early, 20, before=2),
    Attack("two runs on one journal", "a second run is given the journal of the first", one_journal, 4, before=1),
]
