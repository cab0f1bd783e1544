"""A whole `paceline serve` as the victim of attacks: launcher, server and honest workers over TCP, and its memory.

The honest workers are `paceline join` on this machine that say that they run on another kernel, so that all they send
goes through the sockets under attack. They make a fixed number of steps under bsp, with a pause in each until `relent`
is called: whatever the attack takes, the steps and their order are the same, and so must the trained bits be.
"""

import contextlib
import hashlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paceline.engines.hosts import tokens
from paceline.transport.join_token import JoinToken, read_token

PATIENCE_S = 60.0
JOIN = (
    "import sys; from paceline.engines.hosts import agent; agent.kernel_and_namespace = lambda: 'another kernel'; "
    "from paceline.cli.app import run_app; sys.exit(run_app(sys.argv[1:]))"
)
SCRIPT = """
import os, sys, time
import torch
import paceline
from torch.utils.data import TensorDataset

session = paceline.init()
torch.manual_seed(1)
x = torch.randn({samples}, 20)
data = TensorDataset(x, x @ torch.randn(20, 1))
model = torch.nn.Sequential(torch.nn.Linear(20, {width}), torch.nn.Tanh(), torch.nn.Linear({width}, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
session.prepare(model, optimizer)
folder, steps, began = os.path.dirname(os.path.abspath(__file__)), 0, time.monotonic()
progress = open(os.path.join(folder, f"steps{{session.worker}}"), "w")
relented = False
for x, y in session.batches(data, batch_size=5, epochs={epochs}):
    relented = relented or os.path.exists(os.path.join(folder, "relent"))
    if relented and {endless}:
        session.stop("the attack is over")
    elif not relented and {pause}:
        time.sleep({pause})
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    steps += 1
    progress.seek(0)
    progress.write(f"{{steps:9}}")
    progress.flush()
"""


class Serve:
    """One run of `paceline serve` with honest workers, in a temporary folder."""

    def __init__(
        self, *options: str, steps: int | None, pause_s: float = 0.02, width: int = 32, workers: int = 2,
        descriptors: int | None = None, environment: dict[str, str] | None = None, servers: int = 1,
    ) -> None:  # fmt: skip
        """`steps` of each worker; None: until `relent`. `descriptors`: the limit that serve starts with."""
        self._temporary = tempfile.TemporaryDirectory(prefix="hostile-")
        self.folder = Path(self._temporary.name)
        script = SCRIPT.format(
            samples=5 * workers * (steps or 1_000), epochs=1 if steps else 10_000, endless=steps is None, width=width,
            pause=pause_s,
        )  # fmt: skip
        (self.folder / "train.py").write_text(script)
        self.token_file = self.folder / "token"
        tokens.write_new(self.token_file)
        self.token: JoinToken = read_token(self.token_file.read_text())
        self.ports = 2 + (servers if servers > 1 else 0)  # it listens at this many, one after the other
        self.port = free_ports(self.ports)
        self._workers, self._processes = workers, {}
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        given = (
            "--listen", f"127.0.0.1:{self.port}", "--workers", f"{workers}..", "--threads", "1", "--evaluate-every",
            "off", "--strategy", "bsp", "--token-file", self.token_file, "--servers", str(servers),
        )  # fmt: skip
        start = ["-m", "paceline", "serve"]
        limit = [] if descriptors is None else ["prlimit", f"--nofile={descriptors}:{descriptors}"]
        self._start("serve", [*limit, sys.executable, *start, *given, *options, "train.py"])
        for number in range(workers):
            words = ("join", "--token-file", self.token_file, f"127.0.0.1:{self.port}", "train.py")
            self._start(f"join{number}", [sys.executable, "-c", JOIN, *words])

    def _start(self, name: str, command: list[str | os.PathLike[str]]) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment,
                start_new_session=True,
            )  # fmt: skip

    @property
    def steps(self) -> int:
        """How many steps all honest workers have made."""
        found = [0]
        for number in range(self._workers):
            with contextlib.suppress(OSError, ValueError):
                found.append(int((self.folder / f"steps{number}").read_text()))
        return min(found[1:], default=0)

    def await_steps(self, count: int) -> None:
        """Wait until the honest workers have made so many steps."""
        until = time.monotonic() + PATIENCE_S
        while self.steps < count:
            if not self.runs or time.monotonic() > until:
                raise RuntimeError(f"the run does not come to step {count}:\n{self.said()}")
            time.sleep(0.02)

    @property
    def runs(self) -> bool:
        return self._processes["serve"].poll() is None

    def pids(self) -> dict[str, int]:
        """The launcher, and the server and its shards, by the titles that they show."""
        launcher = self._processes["serve"].pid
        found = {"launcher": launcher}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                title = re.match(rb"paceline: (server|shard \d+)", (folder / "cmdline").read_bytes())
                if title and _descends(int(folder.name), launcher):
                    found[title[1].decode()] = int(folder.name)
        return found

    def memory(self) -> dict[str, tuple[int, int]]:
        """Bytes in memory of launcher, server and shards, and the most that there have been."""
        return {name: memory_of(pid) for name, pid in self.pids().items()}

    def relent(self) -> None:
        """Let the honest workers go on without pauses."""
        (self.folder / "relent").touch()

    def said(self, name: str = "serve") -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def end(self) -> dict[str, int]:
        """Wait for the run's end; return the exit codes of all commands (-9: it did not end)."""
        until = time.monotonic() + PATIENCE_S
        codes = {}
        for name, process in self._processes.items():
            try:
                codes[name] = process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                codes[name] = self._kill(process)
        return codes

    def digest(self) -> str:
        """The digest of the trained model; empty if there is none."""
        found = list(self.folder.glob("runs/*/model.safetensors"))
        return hashlib.sha256(found[0].read_bytes()).hexdigest() if found else ""

    @staticmethod
    def _kill(process: "subprocess.Popen[bytes]") -> int:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()

    def close(self) -> None:
        """End what is left, and remove the folder."""
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                self._kill(process)
        self._temporary.cleanup()

    def __enter__(self) -> "Serve":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def undisturbed_digest(steps: int, **how: int) -> str:
    """The bits that the same run comes to when nobody attacks it."""
    with Serve(steps=steps, **how) as run:
        run.relent()
        codes = run.end()
        if any(codes.values()):
            raise RuntimeError(f"the undisturbed run ended with {codes}:\n{run.said()}")
        return run.digest()


def memory_of(pid: int) -> tuple[int, int]:
    """Bytes of a process in memory, and the most that there have been; zero if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0, 0
    found = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith("Vm")}
    return int(found.get("VmRSS", 0)) * 1024, int(found.get("VmHWM", 0)) * 1024


def free_ports(count: int) -> int:
    """A port of the loopback that is free, and so are the next ones."""
    while True:
        port = random.randrange(20_000, 30_000)  # below those that the system gives to connections
        with contextlib.ExitStack() as until, contextlib.suppress(OSError):
            for each in range(port, port + count):
                until.enter_context(socket.socket()).bind(("127.0.0.1", each))
            return port


def _descends(pid: int, ancestor: int) -> bool:
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        if pid == ancestor:
            return True
    return False
