"""Runs whose workers join: `paceline serve` and `paceline join` as real commands on this host.

A machine that joins is near, and shares memory with the server, or far: it is told that it runs on another kernel, and
everything goes over TCP of the loopback.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

_FAR = """
import sys
from paceline.engines.hosts import agent
agent.kernel_and_namespace = lambda: "another kernel"
from paceline.cli.app import run_app
sys.exit(run_app(sys.argv[1:]))
"""
_NEAR = "import sys\nfrom paceline.cli.app import run_app\nsys.exit(run_app(sys.argv[1:]))"
PATIENCE_S = 90.0

SCRIPT = """
import sys, time
import torch
import paceline
from torch.utils.data import TensorDataset

session = paceline.init()
torch.manual_seed(1)
x = torch.randn(400, 6)
data = TensorDataset(x, x @ torch.randn(6, 1))
model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
session.prepare(model, optimizer)
for x, y in session.batches(data, batch_size=5, epochs={epochs}):
    time.sleep({pause})
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    session.report(loss=loss)
    optimizer.step()
print("worker", session.worker, "done", flush=True)
"""


def free_ports():
    """A port of the loopback that is free, and so is the next."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError):
                second.bind(("127.0.0.1", port + 1))
                return port


class Command:
    """A command under way; its output goes to a file."""

    def __init__(self, name, folder, *arguments, far=False, environment=None):
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _FAR if far else _NEAR, *map(str, arguments)],
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            )  # fmt: skip

    @property
    def said(self):
        return self.log.read_text()

    def wait_for(self, text, count=1):
        """Wait until it has said this."""
        until = time.monotonic() + PATIENCE_S
        while self.said.count(text) < count:
            assert self.process.poll() is None, f"it has ended: {self.said}"
            assert time.monotonic() < until, f"it does not say {text!r}: {self.said}"
            time.sleep(0.02)

    def end(self):
        """Wait for its end; return its exit code."""
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it does not end: {self.said}") from None


class Site:
    """One run and the machines that join it, in one folder."""

    def __init__(self, folder, script=SCRIPT, epochs=2, pause=0.0):
        self.folder = Path(folder)
        self.port = free_ports()
        self.address = f"127.0.0.1:{self.port}"
        (self.folder / "train.py").write_text(script.replace("{epochs}", str(epochs)).replace("{pause}", str(pause)))
        self.commands = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for command in self.commands:
            if command.process.poll() is None:
                command.process.kill()
                command.process.wait()

    def _command(self, name, *arguments, **how):
        command = Command(name, self.folder, *arguments, **how)
        self.commands.append(command)
        return command

    def serve(self, *options, what=("train.py",)):
        given = ("--listen", self.address, "--threads", "1", "--evaluate-every", "off", "--log-level", "info")
        return self._command("serve", "serve", *given, *options, *what)

    def join(self, *options, far=False, what=("train.py",), **how):
        name = f"join{len(self.commands)}"
        return self._command(name, "join", *options, self.address, *what, far=far, **how)

    @property
    def run(self):
        """The folder of the only run."""
        (found,) = (self.folder / "runs").iterdir()
        return found

    @property
    def report(self):
        return json.loads((self.run / "report.json").read_text())


def processes_of(command, name):
    """The processes with this title under a command, by the titles that they show."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            pid = int(status.parent.name)
            title = (status.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if name in title and _descends(pid, command.process.pid):
                found.append(pid)
    return found


def _descends(pid, ancestor):
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        if pid == ancestor:
            return True
    return False
