"""Runs whose workers join: `paceline serve` and `paceline join` as real commands on this host.

A machine that joins is near, and shares memory with the server, or far: it is told that it runs on another kernel, and
everything goes over TCP of the loopback. On a lab (tests/netlab) machines are hosts of their own.
"""

import contextlib
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import warm_python
from safetensors.torch import load_file

from paceline.engines.hosts import agent, tokens

PATIENCE_S = 90.0
LAB_PORT = 7000  # free on every host of a lab

SCRIPT = """
import os, sys, time
import torch
import paceline
from torch.utils.data import TensorDataset

session = paceline.init()
torch.manual_seed(1)
x = torch.randn(400, 6)
data = TensorDataset(x, x @ torch.randn(6, 1))
model = torch.nn.Sequential(torch.nn.Linear(6, 300), torch.nn.Linear(300, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
session.prepare(model, optimizer)
for x, y in session.batches(data, batch_size=5, epochs={epochs}):
    time.sleep(0.0 if os.path.exists("hurry") else {pause})
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    session.report(loss=loss)
    optimizer.step()
print("worker", session.worker, "done", flush=True)
"""


def free_ports():
    """A port of the loopback that is free, and so are the next three: for tensors, and for those of two shards."""
    while True:
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
            port = random.randrange(20_000, 30_000)  # below those that the system gives to connections
            for each in range(port, port + 4):
                opened.enter_context(socket.socket()).bind(("127.0.0.1", each))
            return port


class Command:
    """A command of paceline as a fork of a warm interpreter (`warm_python.kept`); its output goes to a file."""

    def __init__(self, name, folder, *arguments, far=False, environment=None, host=None):
        """`host`: of a lab, on which it runs."""
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as output:
            self._process = warm_python.Popen(
                [sys.executable, "-m", "paceline", *map(str, arguments)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
                preexec_fn=functools.partial(_move, far, None if host is None else host.entry()),
            )  # fmt: skip
        self.pid = self._process.pid

    def poll(self):
        """Its exit code; None while it runs."""
        return self._process.poll()

    def signal(self, number):
        """Send it a signal, and no other process."""
        if self.poll() is None:
            os.kill(self.pid, number)

    @property
    def said(self):
        return self.log.read_text()

    def wait_for(self, text, count=1):
        """Wait until it has said this."""
        until = time.monotonic() + PATIENCE_S
        while self.said.count(text) < count:
            assert self.poll() is None, f"it has ended: {self.said}"
            assert time.monotonic() < until, f"it does not say {text!r}: {self.said}"
            time.sleep(0.02)

    def end(self):
        """Wait for its end; return its exit code."""
        until = time.monotonic() + PATIENCE_S
        while self.poll() is None:
            assert time.monotonic() < until, f"it does not end: {self.said}"
            time.sleep(0.02)
        return self.poll()


def _move(far, entry):
    """In the process, before it becomes the command: be on another machine, or pass for one."""
    if entry is not None:
        entry()
    if far:
        agent.kernel_and_namespace = lambda: "another kernel"


class Site:
    """One run and the machines that join it, in one folder. `lab`: its first host serves."""

    def __init__(self, folder, script=SCRIPT, epochs=2, pause=0.0, lab=None):
        self.folder = Path(folder)
        self.host = None if lab is None else lab.hosts[0]
        self.address = f"127.0.0.1:{free_ports()}" if self.host is None else f"{self.host.address}:{LAB_PORT}"
        (self.folder / "train.py").write_text(script.replace("{epochs}", str(epochs)).replace("{pause}", str(pause)))
        self.commands = []
        self.token = self.folder / "token"
        tokens.write_new(self.token)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for command in self.commands:
            command.signal(signal.SIGKILL)
            command.end()

    def command(self, name, *arguments, **how):
        command = Command(name, self.folder, *arguments, **how)
        self.commands.append(command)
        return command

    def serve(self, *options, what=("train.py",)):
        given = (
            "--listen", self.address, "--threads", "1", "--evaluate-every", "off", "--log-level", "info",
            "--token-file", self.token,
        )  # fmt: skip
        return self.command("serve", "serve", *given, *options, *what, host=self.host)

    def join(self, *options, far=False, what=("train.py",), **how):
        """Join from this host, or from one of a lab (`host=`)."""
        name = f"join{len(self.commands)}"
        return self.command(name, "join", "--token-file", self.token, *options, self.address, *what, far=far, **how)

    def hold(self, *options, **how):
        """Hold a shard from this host, or from one of a lab."""
        return self.join("--shard", *options, what=(), **how)

    def run_here(self, *options):
        """The same script on processes of this machine alone."""
        given = ("--threads", "1", "--evaluate-every", "off")
        return self.command("local", "run", *given, *options, "train.py")

    def hurry(self):
        """Let the scripts make no more pauses."""
        (self.folder / "hurry").touch()

    @property
    def run(self):
        """The folder of the only run."""
        (found,) = (self.folder / "runs").iterdir()
        return found

    @property
    def model(self):
        """The trained parameters."""
        return load_file(self.run / "model.safetensors")

    @property
    def report(self):
        return json.loads((self.run / "report.json").read_text())


def wait_until(happened):
    """Wait until something has happened."""
    until = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.02)


def processes_of(command, name):
    """The processes with this title under a command, by the titles that they show."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            pid = int(status.parent.name)
            title = (status.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if f"paceline: {name}" in title and _descends(pid, command.pid):
                found.append(pid)
    return found


def _descends(pid, ancestor):
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        if pid == ancestor:
            return True
    return False
