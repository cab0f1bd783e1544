"""Stop one process of a run and kill another, at any moment and in every ordered pair: what is left?

A run of two workers with `DataLoader` processes has a command (which is the launcher), a nursery, a server, two
workers and their loaders. In each attempt one of them gets SIGSTOP and, some random time later, another SIGKILL. If
the command was killed, everything must go by itself, whoever is stopped. Otherwise the command is resumed if it was
the stopped one and gets one Ctrl-C, after which it must end within ten seconds. Further attacks kill the command at
any moment from its start on, with few or many processes born, press Ctrl-C once while some or all of the others are
stopped, and close the terminal of a run: the latter two must end it with its report in the run's folder, and the
terminal's end must close the journal, too.

Left is what a listing finds afterwards: a process with the environment variable that this attempt gave its run, an
entry of the run's temporary folder, or named shared memory of one of its processes.
"""

import contextlib
import fcntl
import functools
import itertools
import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from attacks.harness import Attack, Target, Trial

BEFORE = "3b17ec6"

TAG = "PACELESS_LEFTOVER_TAG"  # not of paceline's own variables, which it would look at
ROLES = ("command", "server", "worker 0", "loader", "nursery", "worker 1")
# The first of them is one that the commit before the mend does not survive.
PAIRS = sorted(itertools.permutations(ROLES, 2), key=lambda pair: pair != ("server", "command"))
CROWDS = (("server",), ("worker 1",), ("nursery",), ("loader",), ("server", "worker 0"), ROLES[1:])
STRATEGIES = ("bsp", "gossip", "asp")
TRANSPORTS = ("shm", "zeromq")
START_S = 60.0  # for a run to be under way on a busy host
MOST = 7  # processes that a run has: those with a role, and another loader
ENDS_S = 10.0  # from one Ctrl-C to the command's end
GONE_S = 10.0  # for everything else to be gone

SCRIPT = """
import pathlib, time, torch, paceline
session = paceline.init()
data = torch.utils.data.TensorDataset(torch.ones(64, 2))
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
session.prepare(model, optimizer)
for number, (x,) in enumerate(session.batches(data, batch_size=4, epochs=10**6, num_workers=1)):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    time.sleep(0.002)
    if number == 5:
        pathlib.Path(f"under-way-{session.worker}").touch()
"""


class Victim(msgspec.Struct):
    """A run, and how to recognize everything that belongs to it."""

    command: subprocess.Popen[str]
    tag: str
    folder: Path
    seen: set[int] = set()  # processes that it has had

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    def processes(self) -> list[int]:
        """All living processes with its tag, zombies excluded."""
        found = tagged(self.tag)
        self.seen.update(found)
        return found

    def roles(self) -> dict[str, int]:
        """Its processes by what they are."""
        found = {"command": self.command.pid}
        for process in self.processes():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                if "nursery import main" in line:
                    found["nursery"] = process
                elif line.startswith("paceline: "):
                    name = line.removeprefix("paceline: ").strip()
                    leads = os.getpgid(process) == process
                    found[name if leads else "loader"] = process
        return found

    def left(self) -> list[str]:
        """What is left of it, in words."""
        found = [f"process {process}" for process in self.processes()]
        found += [f"temporary {path.name}" for path in self.temporary.glob("*")]
        for block in Path("/dev/shm").iterdir():
            owner = re.match(r"torch_(\d+)_|sem\.(?:pymp-)?paceline-(?:\w+-)?(\d+)-", block.name)
            if owner is not None and int(owner[1] or owner[2]) in self.seen:
                found.append(f"shared memory {block.name}")
        return found

    def report(self) -> bool:
        """Whether the run's folder has the report."""
        return any(json.loads(path.read_text())["versions"] > 0 for path in self.folder.glob("runs/*/report.json"))

    def close(self) -> None:
        """Remove what an attempt may have left."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self.command.kill()
        self.command.communicate()
        for what in self.left():
            if what.startswith("shared memory"):
                Path("/dev/shm", what.split()[-1]).unlink(missing_ok=True)
        shutil.rmtree(self.temporary, ignore_errors=True)


def tagged(tag: str) -> list[int]:
    """The living processes whose environment has the tag."""
    found, wanted = [], f"{TAG}={tag}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


@contextlib.contextmanager
def started(target: Target, seed: int, terminal: int | None = None) -> Iterator[Victim]:
    """A run that has just been started, with what may be left of it removed in the end."""
    (target.folder / "train.py").write_text(SCRIPT)
    tag = uuid.uuid4().hex
    (target.folder / "tmp").mkdir()
    arguments = [
        "run", "--workers", "2", "--threads", "1", "--evaluate-every", "off",
        "--strategy", STRATEGIES[seed % 3], "--transport", TRANSPORTS[seed // 3 % 2], "train.py",
    ]  # fmt: skip
    environment = {TAG: tag, "TMPDIR": str(target.folder / "tmp")}
    if terminal is None:
        command = target.start(*arguments, environment=environment, before=_ready)
    else:
        command = subprocess.Popen(
            [sys.executable, "-m", "paceline", *arguments], cwd=target.folder, env=target.environment(**environment),
            stdin=terminal, stdout=terminal, stderr=terminal, text=True, start_new_session=True,
            preexec_fn=functools.partial(_at_terminal, terminal),
        )  # fmt: skip
    victim = Victim(command, tag, target.folder)
    try:
        yield victim
    finally:
        victim.close()


@contextlib.contextmanager
def running(target: Target, seed: int, terminal: int | None = None) -> Iterator[Victim]:
    """A run that trains, with all of its processes."""
    with started(target, seed, terminal) as victim:
        if not _wait_for(lambda: _under_way(victim), START_S):
            raise RuntimeError(f"the run is not under way after {START_S:g} s: {victim.roles()}")
        yield victim


def _under_way(victim: Victim) -> bool:
    return len(list(victim.folder.glob("under-way-*"))) == 2 and len(victim.roles()) == len(ROLES)


def _ready() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it


def _at_terminal(terminal: int) -> None:
    _ready()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def _wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _ended(victim: Victim, seconds: float) -> float | None:
    """Wait for the command's end; return how long that took, or None if it did not come."""
    began = time.monotonic()
    try:
        victim.command.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    return time.monotonic() - began


def stop_and_kill(target: Target, seed: int) -> Trial:
    stopped, killed = PAIRS[seed % len(PAIRS)]
    chance = random.Random(seed)
    with running(target, seed) as victim:
        roles = victim.roles()
        time.sleep(chance.uniform(0.0, 0.5))
        os.kill(roles[stopped], signal.SIGSTOP)
        time.sleep(chance.uniform(0.0, 0.5))
        os.kill(roles[killed], signal.SIGKILL)
        what = f"{stopped} stopped, {killed} killed"
        if killed != "command":
            time.sleep(chance.uniform(0.0, 1.0))
            if stopped == "command":
                os.kill(roles[stopped], signal.SIGCONT)
            if victim.command.poll() is None:
                victim.command.send_signal(signal.SIGINT)
                if _ended(victim, ENDS_S) is None:
                    return Trial(False, f"{what}: one Ctrl-C does not end it within {ENDS_S:g} s")
        _wait_for(lambda: not victim.left(), GONE_S)
        left = victim.left()
        return Trial(not left, f"{what}: " + (", ".join(left[:4]) if left else "nothing is left"))


def kill_at_any_time(target: Target, seed: int) -> Trial:
    chance = random.Random(seed)
    with started(target, seed) as victim:
        _wait_for(lambda: len(victim.processes()) >= MOST - seed % MOST, START_S)
        time.sleep(chance.choice([0.0, chance.uniform(0.0, 0.05), chance.uniform(0.0, 1.0)]))
        count = len(victim.processes())
        victim.command.kill()
        victim.command.communicate()
        _wait_for(lambda: not victim.left(), START_S)  # an interpreter that imports torch does not look up before
        left = victim.left()
        what = f"command killed when there were {count} processes: "
        return Trial(not left, what + (", ".join(left[:4]) if left else "nothing is left"))


def stop_and_interrupt(target: Target, seed: int) -> Trial:
    crowd = CROWDS[seed % len(CROWDS)]
    with running(target, seed) as victim:
        roles = victim.roles()
        for role in crowd:
            os.kill(roles[role], signal.SIGSTOP)
        victim.command.send_signal(signal.SIGINT)
        took = _ended(victim, ENDS_S)
        what = f"{' and '.join(crowd)} stopped"
        if took is None:
            return Trial(False, f"{what}: one Ctrl-C does not end it within {ENDS_S:g} s")
        _wait_for(lambda: not victim.left(), GONE_S)
        left = [*victim.left(), *([] if victim.report() else ["no report"])]
        return Trial(not left, f"{what}: ended after {took:.1f} s" + "".join(f", {each}" for each in left[:4]))


def close_terminal(target: Target, seed: int) -> Trial:
    ours, theirs = pty.openpty()
    with contextlib.ExitStack() as opened:
        opened.callback(os.close, theirs)
        with running(target, seed, theirs) as victim:
            os.close(ours)
            took = _ended(victim, ENDS_S)
            if took is None:
                return Trial(False, f"a closed terminal does not end it within {ENDS_S:g} s")
            _wait_for(lambda: not victim.left(), GONE_S)
            left = [*victim.left(), *([] if victim.report() else ["no report"])]
            (journal,) = target.folder.glob("runs/*/journal.jsonl")
            if '"interrupted"' not in journal.read_text().splitlines()[-1]:
                left.append("a journal without an end")
            return Trial(not left, f"ended after {took:.1f} s" + "".join(f", {each}" for each in left[:4]))


ATTACKS = [
    Attack("stop and kill", "stops one process of a run and kills another", stop_and_kill, len(PAIRS)),
    Attack("kill at any time", "kills the command while the run starts or trains", kill_at_any_time, 4 * MOST, 0),
    Attack("stop and Ctrl-C", "stops processes of a run before one Ctrl-C", stop_and_interrupt, len(CROWDS)),
    Attack("closed terminal", "closes the terminal that a run was started in", close_terminal, 3),
]
